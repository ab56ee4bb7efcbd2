"""Bodies of requests: read within a limit, parsed strictly, and named where they are wrong."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from chabok.checkpoints.storage import format_bytes
from chabok.errors import RequestError
from chabok.server import permitted
from chabok.server.errors import RefusedError

T = TypeVar("T", bound=Struct)

INLINE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop, in well under a millisecond; others in a thread."""

MAX_VALUES = 300_000
"""Most commas in a body. Parsers let no other thread run, and a million numbers would hold up every stream.
No prompt has as many commas and fits into a context.
"""

MAX_DEPTH = 100
"""Deepest nesting of a body, in brackets."""

_PLACE = re.compile(r" - at `(?:key in )?\$?\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


class Body(Generic[T]):
    """The parser of one kind of body. Unknown fields, fields given twice and NaN are errors."""

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._names = [field.encode_name for field in msgspec.structs.fields(kind)]

    def parse(self, data: bytes) -> T:
        """A body as a struct. Raises RequestError naming the field that is wrong, by its path."""
        if data.count(b",") > MAX_VALUES:
            raise RefusedError(
                413, f"the body has more than {MAX_VALUES} commas; send less at a time", "request_too_large"
            )
        try:
            body = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise explained(error, self.kind, names=self._names) from None
        except msgspec.DecodeError as error:
            raise _malformed(data, error) from None
        except RecursionError:
            raise RequestError("the body is nested too deep") from None
        _check(data)
        return body


def explained(
    error: msgspec.ValidationError, kind: Any, where: str = "", names: Sequence[str] = ()
) -> RequestError:
    """What is wrong with a body, by the path of the field. kind: the type of what was read; where: its path;
    names: of its fields, to suggest one.
    """
    text = str(error)
    place = _PLACE.search(text)
    path = place[1] if place else ""
    what = text[: place.start()] if place else text
    inner = path
    path = ".".join(filter(None, (where, path))).replace(".[", "[")
    if unknown := _UNKNOWN.search(what):
        near = difflib.get_close_matches(unknown[1], names, 1) if path == where else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        field = f"{path}.{unknown[1]}" if path else unknown[1]
        return RequestError(f"there is no parameter {field!r:.200}{hint}", field[:200])
    if missing := _MISSING.search(what):
        field = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{field} is missing; it is required", field)
    if what.startswith("Expected `null`"):
        return RequestError(f"{path} is not supported here; leave it out", path or None)
    if sentence := permitted.told(kind, inner, path or "the body", what):
        return RequestError(sentence, path or None)
    what = what[:1].lower() + what[1:].replace("`", "")
    return RequestError(f"{path or 'the body'}: {what:.400}", path or None)


async def read_bytes(chunks: AsyncIterator[bytes], length: str | None, limit: int) -> bytes:
    """A body of ``limit`` bytes at most; length: its Content-Length header. One that says it is longer is
    refused unread.
    """
    if length is not None and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RefusedError:
    message = f"the body is larger than {format_bytes(limit)}, the most this server takes (--max-body)"
    return RefusedError(413, message, "request_too_large", {"Connection": "close"})


class _TwiceError(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _TwiceError(name)
            seen.add(name)
    return found


_pairs = json.JSONDecoder(object_pairs_hook=_once)


def _check(data: bytes) -> None:
    """Raise RequestError for what the parser of structs lets pass: names given twice, and deep nesting."""
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        depth = deepest = 0
        for match in _BRACKETS.finditer(data):
            token = match[0]
            if token in b"{[":
                depth += 1
                deepest = max(deepest, depth)
            elif token in b"}]":
                depth -= 1
        if deepest > MAX_DEPTH:
            raise RequestError(
                f"the body is nested {deepest} deep; {MAX_DEPTH} is the most this server takes"
            )
    try:
        _pairs.decode(data.decode())
    except _TwiceError as error:
        name = str(error)
        raise RequestError(f"{name} is given twice", name) from None


# Strings are skipped, as they may hold brackets.
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)


def _malformed(data: bytes, error: msgspec.DecodeError) -> RequestError:
    if not data.strip():
        return RequestError("the body is empty; it must be a JSON object")
    try:
        text = data.decode()
        _pairs.decode(text)
    except UnicodeDecodeError as wrong:
        return RequestError(f"the body is not UTF-8 (byte {wrong.start})")
    except json.JSONDecodeError as wrong:
        return RequestError(f"the body is not JSON: {wrong}")
    except (RecursionError, ValueError, _TwiceError):
        pass
    else:
        if "\\u" in text:
            return RequestError("the body holds half a surrogate pair (\\ud800 to \\udfff), which is no text")
    return RequestError(f"the body is not JSON: {error}")
