"""Jinja as chat templates use it, where no template can harm, hang, or fill the memory.

A template comes with a model file, so it may be anybody's. Jinja's sandbox keeps it from the file system and
from Python's insides but lets it count to 10^10 or make a terabyte of text. So here every operation whose
result may be larger than its operands pays for it from a budget first (``budget.py``): ``+ * ** % ~``, list
and dictionary displays, output, string methods, filters, ``range``. Turns of loops and calls of macros pay
too and look at the clock. Filters that no chat template needs are not there.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from types import BuiltinMethodType, ModuleType
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from chabok.errors import TemplateError
from chabok.text.budget import current, limited
from chabok.text.filters import FILTERS, format_braces, format_percent

_MAX_SOURCE = 1 << 20
_MAX_INTEGER_BITS = 4096
_STRING_METHODS = frozenset(
    (
        "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle",
        "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
        "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
        "strip", "swapcase", "title", "upper", "zfill",
    )
)  # fmt: skip
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_CONTAINER_METHODS = frozenset({"get", "items", "keys", "values", "copy", "index", "count"})


class Program:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """``source``: Jinja source; compiled here, so that a damaged template is told early."""
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; {_MAX_SOURCE} are the most")
        environment = _Environment()
        try:
            with limited(len(source)):
                tree = _Metering().visit(environment.parse(source))
                code = environment.compile(tree)
            self._template = Template.from_code(environment, code, environment.make_globals(None))
        except TemplateError:
            raise
        except (JinjaError, RecursionError, ValueError, SyntaxError) as error:
            raise TemplateError(f"the chat template of the file is damaged: {_told(error)}") from error

    def render(self, variables: Mapping[str, Any], now: datetime.datetime) -> str:
        """The text of the template; ``now`` is what ``strftime_now`` sees."""
        try:
            with limited(_length(variables)):
                return self._template.render(**variables, strftime_now=now.strftime)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program, which may fail in any way
            raise TemplateError(f"the chat template cannot render these messages: {_told(error)}") from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the settings all chat templates are written for, and with a meter."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters = {
            **FILTERS,
            "metered_turn": _turn,
            "metered_concat": _concat,
            "metered_display": _display,
        }
        self.globals.pop("lipsum")
        self.globals.update(range=_range, raise_exception=_raise_exception)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pay for the result of an arithmetic operator, then compute it."""
        if operator == "*":
            _pay_product(left, right)
        elif operator == "**":
            _pay_power(left, right)
        elif operator == "%" and isinstance(left, str):
            return format_percent(left, right)
        elif operator == "+" and not isinstance(left, int | float):
            current().whole(left)
            current().whole(right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Pay for a call of a builtin method or type, then make it."""
        if isinstance(function, BuiltinMethodType) and not isinstance(function.__self__, ModuleType):
            if function.__name__ == "join":
                args = tuple(list(arg) for arg in args)  # a generator can be counted only once it is a list
            _pay_method(function.__self__, function.__name__, args)
            result = super().call(context, function, *args, **kwargs)
            current().surface(result)
            return result
        if function is dict or function is Namespace:
            current().whole([*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it, paid for."""
        wrapped = super().wrap_str_format(value)
        return wrapped and format_braces(value.__self__, wrapped)


class _Generation(Extension):
    """``{% generation %}``, with which templates mark the answer for training; the body is what counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements up to ``{% endgeneration %}``."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Puts a meter into what Jinja's hooks do not reach: loops, macros, ``~``, lists and dictionaries."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Change the children, then the node itself."""
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            # An output whose text is "": unlike a statement it needs no extension, and every body may have
            # one.
            turn = _filtered(nodes.Const(text, lineno=node.lineno), "metered_turn")
            node.body.insert(0, nodes.Output([turn], lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "metered_concat")
        elif isinstance(node, nodes.List | nodes.Dict | nodes.Tuple) and not _constant(node):
            return _filtered(node, "metered_display")
        return node


def _constant(node: nodes.Node) -> bool:
    """Whether a display holds only constants; the target of an assignment is none to meter either."""
    if isinstance(node, nodes.Tuple) and node.ctx != "load":
        return True
    return isinstance(node, nodes.Const) or (
        isinstance(node, nodes.List | nodes.Dict | nodes.Tuple | nodes.Pair)
        and all(map(_constant, node.iter_child_nodes()))
    )


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _turn(context: Context, text: int) -> str:
    # It asks for the context only so that Jinja does not take it for a constant.
    current().turn(text)
    return ""


def _concat(parts: list[Any]) -> str:
    current().whole(parts)
    return "".join(map(str, parts))


def _display(value: Any) -> Any:
    current().whole(value)
    return value


def _finalize(value: Any) -> Any:
    current().whole(value)
    return value


def _range(*args: int) -> range:
    numbers = safe_range(*args)
    current().surface(numbers)
    return numbers


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(f"the chat template refuses these messages: {message}")


def _pay_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS:
            raise TemplateError("the chat template computes too large a number")
    elif isinstance(left, int) or isinstance(right, int):
        times, value = (left, right) if isinstance(left, int) else (right, left)
        current().whole(value, max(times, 0))


def _pay_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and max(base.bit_length(), 1) * abs(exponent) > _MAX_INTEGER_BITS:
        raise TemplateError("the chat template computes too large a number")


def _pay_method(owner: object, name: str, args: tuple[Any, ...]) -> None:
    """Pay for a method of a builtin value; those that no template needs are refused."""
    if isinstance(owner, str) and name in _STRING_METHODS:
        if name in _PADDING and args and isinstance(args[0], int):
            current().spend(max(args[0], 0))
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            current().spend(owner.count(args[0]) * len(args[1]))
        elif name == "join" and args:
            current().whole(args[0])
            current().spend(len(owner) * len(args[0]))
        current().spend(len(owner))
    elif not (isinstance(owner, list | tuple | dict) and name in _CONTAINER_METHODS) and name != "strftime":
        raise TemplateError(f"the chat template calls {type(owner).__name__}.{name}, which it may not")


def _told(error: BaseException) -> str:
    """An error in words, with the line of the template where it is known."""
    text = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        text = "it nests too deep"
    line = getattr(error, "lineno", None)
    return f"{text} (line {line} of the template)" if line else text


def _length(value: object) -> int:
    """Characters in all of what the caller gives."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _length(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    return 1
