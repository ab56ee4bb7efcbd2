"""What tokens cost: on a machine by the hour, on one's own by watts, or by a price list.

A machine is paid by time, whatever it computes. Its cost is divided between prompt and output tokens by the
time that requests spent in prefill and in decode, where the server tells; else all of it is put on the output
tokens. ``Cost.split`` says which.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chabok.measure.failures import MeasureError

if TYPE_CHECKING:
    from chabok.measure.metrics import Request, Summary

PRICES = Path(__file__).with_name("prices.toml")
"""A few prices, each with its source and the date on which it was true."""
TEXTS = frozenset({"currency", "noted", "source"})


@dataclass(frozen=True, slots=True)
class Price:
    """Either of a machine (per_hour), or of tokens (per million) and requests; all in one currency.

    cached: per million prompt tokens that came from the cache. None: not known, and never taken for 0.
    noted: the date it was true. source: where it is from.
    """

    name: str
    currency: str = "$"
    per_hour: float | None = None
    prompt: float | None = None
    cached: float | None = None
    output: float | None = None
    request: float | None = None
    noted: str = ""
    source: str = ""

    @classmethod
    def own(cls, watts: float, per_kwh: float, currency: str = "$") -> Price:
        """A machine of one's own: watts drawn under load and the tariff of a kilowatt hour."""
        _positive("watts", watts)
        _positive("the price of a kWh", per_kwh)
        return cls(f"{watts:g} W at {currency}{per_kwh:g}/kWh", currency, per_hour=watts / 1000 * per_kwh)

    @classmethod
    def machine(cls, per_hour: float, currency: str = "$") -> Price:
        """A machine that costs so much an hour."""
        _positive("the price of an hour", per_hour)
        return cls(f"{currency}{per_hour:g}/hour machine", currency, per_hour=per_hour)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a load cost; None: cannot be told.

    per_million_output, per_million_prompt: per million tokens. per_request. per_minute: of one answer being
    given. split: how a machine's cost was divided. missing: what would have to be known for the rest.
    """

    price: Price
    users: int
    per_million_output: float | None
    per_million_prompt: float | None
    per_request: float | None
    per_minute: float | None
    split: str = ""
    missing: list[str] = field(default_factory=list)


def cost(price: Price, summary: Summary, users: int, prefill_share: float | None = None) -> Cost:
    """The cost of a load by what was measured of it.

    users: requests at once; 0: not fixed. prefill_share: of the requests' time, see ``prefill_share_of``.
    """
    if price.per_hour is not None:
        return _of_machine(price.per_hour / 3600, price, summary, users, prefill_share)
    return _of_tokens(price, summary, users)


def prefill_share_of(requests: Iterable[Request]) -> float | None:
    """Share of prefill in the time that requests spent in prefill and decode; None: the server is silent."""
    prefill = decode = 0.0
    for request in requests:
        told = request.timeline.server
        if request.ok and told is not None and told.prefill_ms is not None and told.decode_ms is not None:
            prefill += max(told.prefill_ms, 0.0)
            decode += max(told.decode_ms, 0.0)
    return prefill / (prefill + decode) if prefill + decode > 0 else None


def _of_machine(second: float, price: Price, summary: Summary, users: int, prefill: float | None) -> Cost:
    missing = []
    prompts = summary.prompt_throughput
    if prefill is None or not prompts:
        split = "all of the machine's cost is put on output tokens"
        if prefill is None:
            missing.append("the server's time for prefill and decode, to price prompt tokens on their own")
        prefill = 0.0
    else:
        split = (
            f"{prefill * 100:.0f} % of the machine's cost is put on prompt tokens and the rest on output "
            "tokens, as requests spent their time in prefill and decode"
        )
    output = second * (1 - prefill) / summary.throughput * 1e6 if summary.throughput else None
    prompt = second * prefill / prompts * 1e6 if prompts and prefill else None
    request = second / summary.request_rate if summary.request_rate else None
    # Little's law: how many were being answered at once, where the load does not fix it.
    rate, length = summary.request_rate, summary.e2e.mean if summary.e2e is not None else 0.0
    at_once = float(users) if users else (rate or 0.0) * length
    minute = second * 60 / at_once if at_once else None
    return Cost(price, users, output, prompt, request, minute, split, missing)


def _of_tokens(price: Price, summary: Summary, users: int) -> Cost:
    good = summary.requests - summary.failed
    if not good:
        return Cost(
            price, users, price.output, price.prompt, None, None, missing=["a request that succeeded"]
        )
    missing = []
    cached = summary.cached_tokens or 0
    new = None if summary.prompt_tokens is None else summary.prompt_tokens - cached
    paid = (price.request or 0.0) * good
    by_request = price.request is not None and price.prompt is None and price.output is None
    parts = (
        ("prompt tokens", new, price.prompt),
        ("cached prompt tokens", cached, price.cached),
        ("output tokens", summary.output_tokens, price.output),
    )
    for name, count, rate in () if by_request else parts:
        if count is None:
            missing.append(f"the number of {name}")
        elif count and rate is None:
            missing.append(f"the price of {name}")
        else:
            paid += count * (rate or 0.0) / 1e6
    request = None if missing else paid / good
    length = summary.e2e.mean if summary.e2e is not None else 0.0
    minute = request * 60 / length if request is not None and length else None
    return Cost(price, users, price.output, price.prompt, request, minute, missing=missing)


def read_prices(path: Path = PRICES) -> dict[str, Price]:
    """A price list: a TOML table per name with the fields of ``Price``, or ``watts`` and ``per_kwh`` in place
    of ``per_hour``; MeasureError names what is wrong."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeasureError(f"{path}: {error.strerror or error}; a price list is a TOML file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MeasureError(f"{path} is no TOML: {error}") from None
    return {name: _price(path, name, entry) for name, entry in found.items()}


def find_price(name: str, path: Path = PRICES) -> Price:
    """A price by its name in a list; MeasureError names those that are there."""
    prices = read_prices(path)
    if name not in prices:
        raise MeasureError(
            f"{path.name}: there is no price {name!r}; there are {', '.join(map(repr, prices))}"
        )
    return prices[name]


def _price(path: Path, name: str, entry: Any) -> Price:
    known = (set(Price.__dataclass_fields__) - {"name"}) | {"watts", "per_kwh"}
    if not isinstance(entry, dict):
        raise MeasureError(f"{path}: {name} must be a table of {', '.join(sorted(known))}")
    if unknown := set(entry) - known:
        raise MeasureError(
            f"{path}: {name} has no field {min(unknown)!r}; the fields are {', '.join(sorted(known))}"
        )
    for key, value in entry.items():
        if key in TEXTS:
            entry[key] = str(value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise MeasureError(f"{path}: {name}.{key} must be a number from 0 up, not {value!r}")
    watts, per_kwh = entry.pop("watts", None), entry.pop("per_kwh", None)
    if (watts is None) != (per_kwh is None):
        raise MeasureError(f"{path}: {name} needs both of watts and per_kwh")
    if watts is not None:
        entry["per_hour"] = watts / 1000 * per_kwh
    tokens = {"prompt", "cached", "output", "request"} & set(entry)
    if ("per_hour" in entry) == bool(tokens):
        raise MeasureError(
            f"{path}: {name} must be either of a machine (per_hour, or watts and per_kwh) or of tokens and "
            "requests (prompt, cached, output, request)"
        )
    return Price(name, **entry)


def _positive(what: str, value: float) -> None:
    if not 0 < value < 1e9:
        raise MeasureError(f"{what} must be more than 0, not {value:g}")
