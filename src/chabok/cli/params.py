"""Sampling parameters as flags and as text, both made from ``SamplingParams`` itself."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from chabok.engine.request import SamplingParams
from chabok.errors import RequestError

DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""What ``chabok run`` does where nothing is said: varied, but no token that the model finds unlikely."""

_LISTS = ("stop", "stop_token_ids", "logit_bias")
_METAVARS = {"stop": "TEXT", "stop_token_ids": "ID", "logit_bias": "ID=NUMBER"}


def positive(text: str) -> float:
    """A number above 0, from the command line."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return value


def is_address(target: str) -> bool:
    """Whether a target is meant as ``host:port``, not as a model."""
    host, colon, port = target.partition("/")[0].rpartition(":")
    return bool(colon and host and port.isdigit() and not Path(target).exists())


def add_prices(made: argparse.ArgumentParser) -> None:
    """Add what costs are computed from."""
    price = made.add_argument_group("cost")
    price.add_argument("--per-hour", type=positive, metavar="PRICE", help="of the machine")
    price.add_argument("--watts", type=positive, help="the machine draws under load, with --per-kwh")
    price.add_argument("--per-kwh", type=positive, metavar="PRICE", help="the tariff of electricity")
    price.add_argument("--price", metavar="NAME", help="an entry of a price list")
    price.add_argument("--prices", type=Path, metavar="FILE", help="a price list of one's own, as TOML")


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line that names the remedy, as everything else here does."""

    hints: Mapping[str, str] = {}
    """What to do instead of an option that there is not, by its name."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        import difflib
        import sys

        words = message.split() if "unrecognized" in message else []
        unknown = [word for word in words if word.startswith("--")]
        told = [self.hints[name] for word in words if (name := word.split("=")[0]) in self.hints]
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = [n for word in unknown for n in difflib.get_close_matches(word.split("=")[0], flags, 1)]
        meant = told or [f"did you mean {name}?" for name in near]
        hint = meant[0] if meant else f"`{self.prog} --help` lists the options."
        print(f"chabok: {message}; {hint}", file=sys.stderr)
        raise SystemExit(2)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every sampling parameter."""
    group = parser.add_argument_group("how tokens are chosen, and when to stop")
    for item in fields(SamplingParams):
        name, text = item.name, item.metadata["help"]
        flag = "--" + name.replace("_", "-")
        if item.type == "bool":
            group.add_argument(flag, action="store_true", default=None, help=text)
        elif name in _LISTS:
            group.add_argument(
                flag, action="append", metavar=_METAVARS[name], help=f"{text}; may be repeated"
            )
        else:
            default = DEFAULTS.get(name, item.default)
            shown = "" if default is None or ": all" in text else f" (default {default:g})"
            kind = whole if str(item.type).startswith("int") else _decimal
            group.add_argument(flag, type=kind, metavar="N", help=text + shown)


def whole(text: str) -> int:
    """An integer that was typed."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, not {text!r}") from None


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def from_flags(found: argparse.Namespace) -> SamplingParams:
    """The sampling parameters that flags ask for."""
    values = dict(DEFAULTS)
    for item in fields(SamplingParams):
        value = getattr(found, item.name)
        if value is not None:
            values[item.name] = _listed(item.name, value) if item.name in _LISTS else value
    return SamplingParams.of(values)


def changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """The parameters with one of them set from text, as in ``/set top_k 40``; "none" takes it back."""
    name = name.replace("-", "_")
    values: dict[str, Any] = {item.name: getattr(params, item.name) for item in fields(SamplingParams)}
    kinds = {item.name: str(item.type) for item in fields(SamplingParams)}
    kind = kinds.get(name, "")
    if text.lower() in ("none", "default"):
        values.pop(name, None)
        values |= {name: DEFAULTS[name]} if name in DEFAULTS else {}
    elif name in _LISTS:
        values[name] = _listed(name, [text])
    elif kind == "bool":
        if text.lower() not in ("true", "false", "on", "off", "1", "0"):
            raise RequestError(f"{name} must be true or false, not {text!r}")
        values[name] = text.lower() in ("true", "on", "1")
    elif kind:
        try:
            values[name] = int(text) if kind.startswith("int") else float(text)
        except ValueError:
            what = "an integer" if kind.startswith("int") else "a number"
            raise RequestError(f"{name} must be {what}, not {text!r}") from None
    else:
        values[name] = text  # unknown: SamplingParams says so, and what it may have meant
    return SamplingParams.of(values)


def _listed(name: str, texts: list[str]) -> Any:
    if name == "stop":
        return texts
    try:
        if name == "stop_token_ids":
            return [int(text) for text in texts]
        pairs = (text.split("=", 1) for text in texts)
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise RequestError(f"{name} takes {_METAVARS[name]}, not {' '.join(texts)!r}") from None
