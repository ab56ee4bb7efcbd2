"""Compiling grammars in bounded time and memory, and telling in words what is wrong with one."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

from chabok.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_STACK = 256 << 20
"""Address space for the stack: llguidance follows references recursively, and an overflow would end
the process. Sources are short enough (see grammar.py) that this is more than any of them takes."""

MOST_MULTIPLES = 20_000
"""Largest sum of the ``multipleOf`` in a schema, each without its decimal point."""

_at_once = threading.BoundedSemaphore(2)
_starting = threading.Lock()


def limits() -> LLParserLimits:
    """How much work a grammar may make: about 20 ms of a step, 50 MB of lexer states, a second to compile."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def compile_bounded(vocabulary: LLTokenizer, source: str, field: str, given: object) -> LLMatcher:
    """A matcher at the beginning of a grammar, its first mask computed.

    field, given: what the user calls the source, and wrote there, for the error. Raises RequestError. The
    work is done without the interpreter's lock, in a thread of its own with a large stack, two at a time.
    """
    from llguidance import LLMatcher

    found: list[LLMatcher | BaseException] = []

    def work() -> None:
        try:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits())
            if not matcher.is_error():
                matcher.compute_bitmask()  # a grammar that is too much work, or empty, shows at once
            found.append(matcher)
        except BaseException as error:
            found.append(error)

    with _at_once:
        with _starting:  # the size of the stack is a setting of all threads that are started meanwhile
            before = threading.stack_size(_STACK)
            try:
                thread = threading.Thread(target=work, name="chabok-grammar", daemon=True)
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
    result = found[0]
    if isinstance(result, BaseException):
        if isinstance(result, Exception):
            raise RequestError(explain(str(result), given), field) from None
        raise result
    if result.is_error():
        raise RequestError(explain(result.get_error(), given), field)
    return result


def check_multiples(schema: object, field: str) -> None:
    """Raise RequestError if the ``multipleOf`` in a schema are too large: each becomes an automaton with as
    many states as its value, which llguidance does not limit."""
    values: list[Decimal] = []
    joined = False  # some may hold for one number together
    pending = [schema]
    while pending:
        here = pending.pop()
        if isinstance(here, Mapping):
            joined = joined or any(key in here for key in ("allOf", "anyOf", "oneOf", "$ref"))
            pending += here.values()
            value = here.get("multipleOf")
            if isinstance(value, int | float) and 0 < value < math.inf:
                values.append(Decimal(str(value)).normalize())
        elif isinstance(here, list | tuple):
            pending += here
    work = sum(_states(value, 0) for value in values)
    if joined and work <= MOST_MULTIPLES:
        scale = max((_scale(value) for value in values), default=0)
        work = max(work, math.lcm(*(_states(value, scale) for value in set(values))))
    if work > MOST_MULTIPLES:
        where = _place(schema, "multipleOf")
        raise RequestError(
            f"the JSON schema has multipleOf {max(values)} (at {where}), and all of them together come to "
            f"{work:g}; at most {MOST_MULTIPLES} can be enforced, leave it out and check it afterwards",
            field,
        )


def _scale(value: Decimal) -> int:
    """Digits after the point."""
    return max(0, -int(value.as_tuple().exponent))


def _states(value: Decimal, scale: int) -> int:
    """A number without its point: as many states does an automaton for its multiples have."""
    scale = max(scale, _scale(value))
    # A power of ten beyond any limit need not be written out.
    return int(value.scaleb(scale)) if value.adjusted() + scale < 20 else 10**20


def schemas_in(source: str, field: str) -> Iterator[object]:
    """The JSON schemas within a Lark grammar."""
    for match in re.finditer(r"%json\s*(?=\{)", source):
        try:
            yield json.JSONDecoder().raw_decode(source, match.end())[0]
        except (ValueError, RecursionError):
            line = source.count("\n", 0, match.start()) + 1
            raise RequestError(
                f"the JSON after %json in line {line} of the grammar is not valid", field
            ) from None


_TOO_MUCH = (
    "too big", "too many", "too large", "fuel", "limit", "toocomplex", "too complex", "items; max",
    "too deeply",
)  # fmt: skip


def explain(error: str, given: object = None) -> str:
    """What llguidance says is wrong, as a sentence for the one who wrote the source."""
    error = error.replace("<non-verbose/>", "").strip()
    low = error.lower()
    if match := re.search(r"Unimplemented keys: (\[.*?\])", error):
        keys = json.loads(match[1])
        places = ", ".join(f"{key!r} (at {_place(given, key)})" for key in keys)
        return (
            f"the JSON schema uses {places}, which cannot be enforced; leave it out and check it afterwards"
        )
    if match := re.search(r"Unknown format: (\S+)", error):
        where = _place(given, "format", match[1])
        return (
            f"the JSON schema has the unknown format {match[1]!r} (at {where}); leave it out or use a pattern"
        )
    if "recursion limit" in low:
        return "it is nested too deep; at most about 100 levels are accepted"
    if "registry" in low or "retriev" in low:
        match = re.search(r"Resource '([^']*)'", error)
        where = f" to {match[1]!r:.200} (at {_place(given, '$ref', match[1])})" if match else ""
        return f"the JSON schema has a $ref{where} that leads out of it; copy what it means into $defs"
    if match := re.search(r"Pointer '([^']*)' does not exist", error):
        return f"the JSON schema has a $ref to '#{match[1]:.200}', which is not there; add or correct it"
    if "noextension" in low:
        return "no text can match it: it contradicts itself, or refers only to itself"
    if "regex parse error" in low or "invalid regex" in low:
        return _explain_regex(error)
    if any(words in low for words in _TOO_MUCH):
        return f"it is too complex ({_line(error)}); make it simpler: fewer alternatives, smaller repetitions"
    what = "the JSON schema" if isinstance(given, Mapping | list | bool) else "the grammar"
    return f"{what} is not valid: {_line(error)}"


def _explain_regex(error: str) -> str:
    reason = re.search(r"error: (.*)", error)
    said = reason[1].rstrip(" .") if reason else _line(error)
    caret = re.search(r"regex parse error:\n {4}(.*)\n {4}( *)\^", error)
    at = f" at character {len(caret[2]) + 1}" if caret else ""
    return f"the regular expression is not supported{at}: {said[:200]}"


def _line(error: str) -> str:
    return " ".join(error.split())[:200]


def _place(given: object, key: str, value: object = None) -> str:
    """JSON pointer of the first member ``key`` (of that value) in what the user wrote, else "#"."""
    pending: list[tuple[str, object]] = [("#", given)]
    while pending:
        path, here = pending.pop(0)
        if isinstance(here, Mapping):
            if key in here and (value is None or here[key] == value):
                return f"{path}/{key}"
            pending += [(f"{path}/{name}", item) for name, item in here.items()]
        elif isinstance(here, list | tuple):
            pending += [(f"{path}/{at}", item) for at, item in enumerate(here)]
    return "#"
