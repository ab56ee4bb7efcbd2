"""Whether a JSON value is valid under a JSON schema: the keywords that describe answers, and no others.

Keywords of https://json-schema.org/draft/2020-12/json-schema-validation; those that are not known here are
refused when the schema is read, never passed over. References stay within the schema. Patterns are left out:
they could take forever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 64
"""Values and references nested deeper are not valid."""
SILENT = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "$defs", "definitions"}
)
_KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _number(test: Callable[[float, float], bool]) -> Callable[[Any, Any], bool]:
    return lambda value, limit: not _KINDS["number"](value) or test(value, limit)


def _size(kind: type[Any], test: Callable[[int, int], bool]) -> Callable[[Any, Any], bool]:
    return lambda value, limit: not isinstance(value, kind) or test(len(value), limit)


def _divides(value: float, step: float) -> bool:
    times = value / step
    return abs(times - round(times)) < 1e-9


_SIMPLE: dict[str, Callable[[Any, Any], bool]] = {
    "type": lambda value, kinds: any(
        _KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ),
    "enum": lambda value, allowed: any(_same(value, each) for each in allowed),
    "const": _same,
    "minimum": _number(lambda value, limit: value >= limit),
    "maximum": _number(lambda value, limit: value <= limit),
    "exclusiveMinimum": _number(lambda value, limit: value > limit),
    "exclusiveMaximum": _number(lambda value, limit: value < limit),
    "multipleOf": _number(_divides),
    "minLength": _size(str, lambda n, limit: n >= limit),
    "maxLength": _size(str, lambda n, limit: n <= limit),
    "minItems": _size(list, lambda n, limit: n >= limit),
    "maxItems": _size(list, lambda n, limit: n <= limit),
    "minProperties": _size(dict, lambda n, limit: n >= limit),
    "maxProperties": _size(dict, lambda n, limit: n <= limit),
    "uniqueItems": lambda value, on: (
        not on
        or not isinstance(value, list)
        or not any(_same(a, b) for place, a in enumerate(value) for b in value[:place])
    ),
    "required": lambda value, names: not isinstance(value, dict) or all(name in value for name in names),
}
_NESTED = frozenset(
    {"properties", "additionalProperties", "items", "prefixItems", "anyOf", "allOf", "oneOf", "not", "$ref"}
)


class Schema:
    """A schema that is fully understood."""

    def __init__(self, schema: Mapping[str, Any] | bool) -> None:
        """ValueError: a keyword is unknown, or has no value it can have; says which."""
        self._root = schema
        self._understand(schema, 0)

    def accepts(self, value: Any) -> bool:
        """Whether a value is valid under it."""
        return self._valid(value, self._root, 0)

    def _understand(self, schema: Any, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object, not {schema!r:.60}")
        if depth > DEEPEST:
            raise ValueError(f"the schema is nested deeper than {DEEPEST}")
        for key, content in schema.items():
            if key in ("properties", "$defs", "definitions"):
                inner = list(content.values()) if isinstance(content, Mapping) else [content]
            elif key in ("anyOf", "allOf", "oneOf", "prefixItems"):
                if not isinstance(content, list):
                    raise ValueError(f"{key} must be a list")
                inner = content
            elif key in ("items", "additionalProperties", "not"):
                inner = [content]
            else:
                self._check(key, content)
                inner = []
            for each in inner:
                self._understand(each, depth + 1)

    def _check(self, key: str, content: Any) -> None:
        if key == "$ref":
            self._resolve(content)
        elif key == "type":
            kinds = [content] if isinstance(content, str) else content
            if not isinstance(kinds, list) or not all(
                isinstance(kind, str) and kind in _KINDS for kind in kinds
            ):
                raise ValueError(f"there is no type {content!r:.60}")
        elif key in ("enum", "required"):
            if not isinstance(content, list):
                raise ValueError(f"{key} must be a list")
        elif key in _SIMPLE:
            if key not in ("const", "uniqueItems") and (
                not _KINDS["number"](content) or (key == "multipleOf" and content <= 0)
            ):
                raise ValueError(f"{key} must be a number it can be, not {content!r:.60}")
        elif key not in SILENT:
            raise ValueError(f"the schema's keyword {key!r} is not supported")

    def _resolve(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"a reference must stay within the schema (#/$defs/...), not {reference!r:.60}")
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise ValueError(f"there is no {reference} in the schema")
            found = found[name]
        return found

    def _valid(self, value: Any, schema: Any, depth: int) -> bool:
        if isinstance(schema, bool):
            return schema
        if depth > DEEPEST:
            return False
        for key, content in schema.items():
            if key in _SIMPLE and not _SIMPLE[key](value, content):
                return False
            if key in _NESTED and not self._nested(key, content, value, schema, depth + 1):
                return False
        return True

    def _nested(self, key: str, content: Any, value: Any, schema: Mapping[str, Any], depth: int) -> bool:
        if key == "$ref":
            return self._valid(value, self._resolve(content), depth)
        if key == "not":
            return not self._valid(value, content, depth)
        if key in ("anyOf", "allOf", "oneOf"):
            held = sum(self._valid(value, each, depth) for each in content)
            return {"anyOf": held > 0, "allOf": held == len(content), "oneOf": held == 1}[key]
        if key == "properties" and isinstance(value, dict):
            return all(
                self._valid(value[name], each, depth) for name, each in content.items() if name in value
            )
        if key == "additionalProperties" and isinstance(value, dict):
            known = schema.get("properties", {})
            return all(self._valid(each, content, depth) for name, each in value.items() if name not in known)
        if key == "prefixItems" and isinstance(value, list):
            return all(self._valid(each, inner, depth) for each, inner in zip(value, content))
        if key == "items" and isinstance(value, list):
            return all(
                self._valid(each, content, depth) for each in value[len(schema.get("prefixItems", ())) :]
            )
        return True
