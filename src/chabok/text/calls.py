"""Reading one tool call, a JSON object, while it is still being written."""

from __future__ import annotations

import json
from typing import Final

_SPACE: Final = " \t\r\n"
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LITERALS: Final = {"t": "true", "f": "false", "n": "null"}
# A number (RFC 8259, section 6) as a machine: state -> character -> next state; those in _ENDS may end it.
_DIGITS: Final = "0123456789"
_NUMBER: Final[dict[str, dict[str, str]]] = {
    "-": {"0": "zero", **dict.fromkeys("123456789", "int")},
    "zero": {".": ".", "e": "e", "E": "e"},
    "int": {**dict.fromkeys(_DIGITS, "int"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys(_DIGITS, "frac"),
    "frac": {**dict.fromkeys(_DIGITS, "frac"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys(_DIGITS, "exp"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "exp"),
    "exp": dict.fromkeys(_DIGITS, "exp"),
}
_ENDS: Final = ("zero", "int", "frac", "exp")


class MalformedJSONError(ValueError):
    """A character that no JSON text (RFC 8259) can have at this place."""


class JSONScanner:
    """Checks a JSON value character by character; any depth, no recursion.

    ``mode``: what is going on: "value", "item" (a value or the end of an empty array), "member" (a key or the
    end of an empty object), "key", "colon", "after" (a value ended), "string", "escape", "unicode",
    "literal", or "number". ``depth``: how many arrays and objects are open.
    """

    __slots__ = ("_hex", "_is_key", "_literal", "_number", "_open", "mode")

    def __init__(self) -> None:
        self._open: list[str] = []
        self.mode = "value"
        self._is_key = False
        self._literal = ""  # what is left of it
        self._number = ""
        self._hex = 0

    @property
    def depth(self) -> int:
        """Arrays and objects that are open."""
        return len(self._open)

    @property
    def done(self) -> bool:
        """Whether the value is complete (a number could still go on)."""
        return not self._open and (self.mode == "after" or (self.mode == "number" and self._number in _ENDS))

    def continues_number(self, char: str) -> bool:
        """Whether a number is being read and ``char`` belongs to it."""
        return self.mode == "number" and char in _NUMBER[self._number]

    def push(self, char: str) -> None:
        """Take one character. Raises MalformedJSONError if it cannot be there; nothing may follow then."""
        mode = self.mode
        if mode == "string":
            self._in_string(char)
        elif mode == "escape":
            if char not in '"\\/bfnrtu':
                raise MalformedJSONError(char)
            self.mode, self._hex = ("unicode", 4) if char == "u" else ("string", 0)
        elif mode == "unicode":
            if char not in _HEX:
                raise MalformedJSONError(char)
            self._hex -= 1
            if not self._hex:
                self.mode = "string"
        elif mode == "literal":
            if char != self._literal[0]:
                raise MalformedJSONError(char)
            self._literal = self._literal[1:]
            if not self._literal:
                self.mode = "after"
        elif mode == "number" and char in _NUMBER[self._number]:
            self._number = _NUMBER[self._number][char]
        else:
            if mode == "number":
                if self._number not in _ENDS:
                    raise MalformedJSONError(char)
                self.mode = "after"
            if char not in _SPACE:
                self._structure(char)

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self.mode = "escape"
        elif char == '"':
            self.mode = "colon" if self._is_key else "after"
        elif char < " ":
            raise MalformedJSONError(char)

    def _structure(self, char: str) -> None:
        mode = self.mode
        if mode in ("value", "item") and self._begin(char):
            return
        top = self._open[-1] if self._open else ""
        if mode in ("key", "member") and char == '"':
            self.mode, self._is_key = "string", True
        elif mode == "colon" and char == ":":
            self.mode = "value"
        elif mode == "after" and char == "," and top:
            self.mode = "key" if top == "{" else "value"
        elif (mode in ("after", "member") and char == "}" and top == "{") or (
            mode in ("after", "item") and char == "]" and top == "["
        ):
            self._open.pop()
            self.mode = "after"
        else:
            raise MalformedJSONError(char)

    def _begin(self, char: str) -> bool:
        """Begin a value; False if none begins like this."""
        if char in "{[":
            self._open.append(char)
            self.mode = "member" if char == "{" else "item"
        elif char == '"':
            self.mode, self._is_key = "string", False
        elif char in _LITERALS:
            self.mode, self._literal = "literal", _LITERALS[char][1:]
        elif char == "-" or char in _DIGITS:
            self.mode = "number"
            self._number = "zero" if char == "0" else "-" if char == "-" else "int"
        else:
            return False
        return True


class CallReader:
    """Reads ``{"name": "f", "arguments": {...}}`` as it is written; "parameters" is the same as "arguments".

    ``name``: of the function, once it is known. ``done``: the object is complete and is a call. The arguments
    may also be a JSON text within a string, null, or missing; what ``take`` gives is an object in any case.

    Given a ``name`` from elsewhere, the whole text is the object of arguments.
    """

    def __init__(self, name: str | None = None, *, needs_arguments: bool = False) -> None:
        """``needs_arguments``: without any, the object is no call."""
        self.name = name
        self._needs_arguments = needs_arguments
        self.done = False
        self._bare = name is not None
        self._scanner = JSONScanner()
        self._key = ""
        self._value: list[str] | None = None  # of the member being read, if it is one that matters
        self._seen: set[str] = set()
        self._fresh: list[str] = []  # of the arguments, not taken yet

    def push(self, char: str) -> None:
        """Take one character. Raises MalformedJSONError if the text can be no call."""
        scanner = self._scanner
        if self.done:
            raise MalformedJSONError(char)
        if scanner.depth == 0 and char not in "{" + _SPACE:
            raise MalformedJSONError(char)  # no object
        if self._bare:
            scanner.push(char)
            if scanner.depth or scanner.done:
                self._fresh.append(char)
            self.done = scanner.done
            return
        depth, mode = scanner.depth, scanner.mode
        if depth == 1 and mode == "number" and not scanner.continues_number(char):
            scanner.push(char)
            self._end_member()
        else:
            scanner.push(char)
            if depth == 1 and scanner.mode == "string" and mode in ("key", "member"):
                self._value = []
            if depth == 1 and mode == "value" and char not in _SPACE:
                self._begin_member(char)
            if self._value is not None:
                self._add(char)
            if scanner.depth == 1 and mode == "string" and scanner.mode == "colon":
                self._end_key()
            elif scanner.depth == 1 and scanner.mode == "after" and (depth > 1 or mode != "after"):
                self._end_member()
        if scanner.done:
            self._end()

    def take(self) -> str:
        """The text of the arguments that came since the last call."""
        if self.name is None:
            return ""
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def _add(self, char: str) -> None:
        assert self._value is not None
        self._value.append(char)
        if self._key == "arguments" and self._value[0] == "{":
            self._fresh.append(char)

    def _begin_member(self, char: str) -> None:
        matters = {"name": '"', "arguments": '{"n'}.get(self._key)
        self._value = None
        if matters is not None:
            if self._key in self._seen or char not in matters:
                raise MalformedJSONError(char)
            self._seen.add(self._key)
            self._value = []

    def _end_key(self) -> None:
        assert self._value is not None
        key = json.loads("".join(self._value))
        self._key = "arguments" if key == "parameters" else key
        self._value = None

    def _end_member(self) -> None:
        if self._value is None:
            return
        text = "".join(self._value)
        self._value = None
        if self._key == "name":
            self.name = json.loads(text)
            if not self.name or not self.name.isprintable():
                raise MalformedJSONError(text)
        elif text[0] == '"':
            self._fresh.append(_object_in(json.loads(text)))
        elif text == "null":
            self._fresh.append("{}")
        self._key = ""

    def _end(self) -> None:
        if "name" not in self._seen or (self._needs_arguments and "arguments" not in self._seen):
            raise MalformedJSONError("}")
        if "arguments" not in self._seen:
            self._fresh.append("{}")
        self.done = True


def _object_in(text: str) -> str:
    """A JSON object that some models write as a string within JSON."""
    reader = JSONScanner()
    for char in text.strip() or "{}":
        if reader.depth == 0 and char != "{":
            raise MalformedJSONError(char)
        reader.push(char)
    if not reader.done:
        raise MalformedJSONError(text[-1:])
    return text.strip() or "{}"
