"""The filters that chat templates may use, each paying for what it makes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, pass_environment
from jinja2 import filters as jinja
from jinja2.filters import make_attrgetter
from markupsafe import escape

from chabok.errors import TemplateError
from chabok.text.budget import current

# Jinja's own filters that are safe once their input and output are paid for. Left out: those that only pad,
# wrap or mark up (center, wordwrap, urlize, xmlattr ...), those that print Python (pprint), chance (random).
_JINJA = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse",
    "round", "select", "selectattr", "sort", "title", "trim", "truncate", "unique", "upper", "urlencode",
    "wordcount",
)  # fmt: skip
_Attribute = str | int | None
_MAX_ARGUMENT = 10_000
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\d{3}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{3}|\{)")
_MAX_WIDTH = 100  # a format's width or precision has two digits at most


def format_percent(text: str, values: Any) -> str:
    """``text % values``, without widths that make much of little."""
    if _WIDE_PERCENT.search(text):
        raise TemplateError("the chat template formats a value too wide")
    return _pay_format(text, values, lambda: text % values)


def format_braces(text: str, function: Callable[..., str]) -> Callable[..., str]:
    """``text.format``, without widths that make much of little; ``function``: the method to call."""

    def checked(*args: Any, **kwargs: Any) -> str:
        if _WIDE_BRACES.search(text):
            raise TemplateError("the chat template formats a value too wide")
        return _pay_format(text, [args, kwargs], lambda: function(*args, **kwargs))

    return checked


def _pay_format(text: str, values: Any, function: Callable[[], str]) -> str:
    fields = text.count("%") + text.count("{")
    current().spend(len(text) + fields * _MAX_WIDTH)
    current().whole(values, times=max(fields, 1))  # a field may name any value, so each may be written again
    return function()


def _paid(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that pays for its arguments and its result."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        for position, arg in enumerate((*args, *kwargs.values())):
            current().surface(arg)
            # 5|round(-10**9) computes 10 ** 10**9. The value itself comes first and may be any number.
            if position and isinstance(arg, int) and abs(arg) > _MAX_ARGUMENT:
                raise TemplateError(f"the chat template uses {arg} where {_MAX_ARGUMENT} is the most")
        result = function(*args, **kwargs)
        current().surface(result)
        return result

    return filtered


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON for a prompt: unlike Jinja's own, without HTML escapes, keys in their order."""
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateError(f"the chat template indents JSON by {indent}; 16 is the most")
    separators = options.get("separators")
    if separators is not None:
        options["separators"] = tuple(str(separator)[:16] for separator in separators)
    current().whole(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
    current().spend(len(text))
    return text


def _string(value: Any) -> str:
    current().whole(value)
    return str(value)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: _Attribute = None) -> str:
    parts = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    current().whole(parts)
    current().spend(len(parts) * len(d))
    return d.join(map(str, parts))


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = _string(value)
    current().spend(text.count(old) * len(new))
    return text.replace(old, new, count)


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _string(value)
    margin = width if isinstance(width, str) else " " * min(width, _MAX_WIDTH)
    current().spend(len(margin) * (text.count("\n") + 1))
    return jinja.do_indent(text, margin, first, blank)


@pass_environment
def _sum(environment: Environment, value: Iterable[Any], attribute: _Attribute = None, start: Any = 0) -> Any:
    numbers = list(value if attribute is None else map(make_attrgetter(environment, attribute), value))
    if not all(isinstance(number, int | float) for number in [*numbers, start]):
        raise TemplateError("the chat template sums values that are no numbers")
    current().surface(numbers)
    return sum(numbers, start)


def _escape(value: Any) -> str:
    # A plain string: nothing here is HTML, and Markup has methods that do not pay.
    current().whole(value, times=5)
    return str(escape(value))


FILTERS: Mapping[str, Callable[..., Any]] = {
    **{name: _paid(jinja.FILTERS[name]) for name in _JINJA},
    "e": _escape,
    "escape": _escape,
    "format": lambda text, *args, **kwargs: format_percent(text, kwargs or args),
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "safe": _string,
    "string": _string,
    "sum": _sum,
    "tojson": _tojson,
}
