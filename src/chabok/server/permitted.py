"""What a field of a body may hold, to say so where something else was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_EXPECTED = re.compile(r"Expected `([a-z |]+)`, got `(\w+)`")
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)

_WORDS = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip

_MEDIA = {
    "image_url": "images", "input_image": "images", "image": "images", "input_audio": "sound",
    "audio": "sound", "video_url": "videos", "file": "files", "input_file": "files",
}  # fmt: skip


def told(kind: Any, path: str, where: str, what: str) -> str | None:
    """A sentence for what msgspec says of a value; None where it says something else.

    kind: the type that was parsed; path: of the value within it, as msgspec writes it; where: what to call
    the value; what: msgspec's words.
    """
    if match := _EXPECTED.fullmatch(what):
        names = [name for name in match[1].split(" | ") if name != "null"]
        if not all(name in _WORDS for name in names):
            return None
        got = "a boolean" if match[2] == "bool" else _WORDS.get(match[2], match[2])
        return f"{where} must be {' or '.join(_WORDS[name] for name in names)}, not {got}"
    if match := _VALUE.fullmatch(what):
        value = match[1]
        media = _MEDIA.get(value.strip("'"))
        if media and "content" in path:
            return f"{where}: {media} are not supported; the models here read text only"
        values = [_json(value) for value in _values(kind, path)]
        said = {"True": "true", "False": "false"}.get(value, value)
        return f"{where} must be {' or '.join(values)}, not {said:.200}" if values else None
    return None


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _values(kind: Any, path: str) -> list[object]:
    """The values that are permitted at a path, where there are only a few; without a path, at the root."""
    here = list(_flat(_info(kind)))
    found: list[object] = []
    for step in _STEP.findall(path):
        found = [each.tag for each in here if isinstance(each, inspect.StructType) and each.tag_field == step]
        here = [part for each in here for part in _inside(each, step)]
    found += [value for each in here if isinstance(each, inspect.LiteralType) for value in each.values]
    return list(dict.fromkeys(found))


def _flat(kind: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _flat(each)
    else:
        yield kind


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """What is found in a value one step further."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                if field.encode_name == step:
                    yield from _flat(field.type)
        case inspect.ListType() if step.startswith("["):
            yield from _flat(kind.item_type)
        case inspect.DictType() if step == "[...]":
            yield from _flat(kind.value_type)
