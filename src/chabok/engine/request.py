"""What a caller asks for, and what comes back."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from chabok.engine.timings import Timings
from chabok.errors import RequestError

MOST_LOGPROBS = 1000
"""Of the best tokens at a position, how many can be asked for."""

MOST_BIAS = 1_000_000
"""Largest logit_bias: more would leave no difference between two such tokens, and soon no number at all."""

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
"""Why a sequence ended: an end token or stop string, a limit on its length, its caller, or its deadline."""


def check_names(what: str, values: Iterable[str], names: list[str]) -> None:
    """Raise RequestError for a name that is not among those there are, and suggest the nearest."""
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
            raise RequestError(f"there is no {what} {name!r}{hint}", name)


@dataclass(frozen=True, slots=True)
class Range:
    """Permitted values of a number: low <= value <= high, or low < value where ``above``."""

    low: float
    high: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low = f"{'greater than' if self.above else 'from'} {self.low:g}"
        if self.high == math.inf:
            return low if self.above else f"of at least {self.low:g}"
        return f"{low} {'and at most' if self.above else 'to'} {self.high:g}"


def _number(default: float | int | None, allowed: Range, text: str) -> Any:
    return field(default=default, metadata={"range": allowed, "help": text})


def _other(default: Any, text: str) -> Any:
    kind = {"default_factory": default} if callable(default) else {"default": default}
    return field(**kind, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    The defaults are greedy (the most likely token each time). With a temperature above 0, the steps are, in
    this order: logit_bias and penalties, top_k, typical_p, top_p, min_p, temperature; each cut looks at what
    the one before left, renormalised (the order of llama.cpp: a high temperature does not let in what the
    cuts left out).
    """

    max_tokens: int | None = _number(
        None, Range(0), "most tokens to generate (default: up to the context's end)"
    )
    temperature: float = _number(0.0, Range(0.0, 100.0), "0: always the best token; higher: more varied")
    top_k: int = _number(0, Range(0), "choose among the k most likely tokens; 0: all")
    top_p: float = _number(
        1.0, Range(0.0, 1.0, above=True), "choose among the fewest tokens that hold this much"
    )
    min_p: float = _number(
        0.0, Range(0.0, 1.0), "leave out tokens less likely than this share of the best one's"
    )
    typical_p: float = _number(
        1.0, Range(0.0, 1.0, above=True), "choose among the tokens closest to the expected surprise"
    )
    repetition_penalty: float = _number(
        1.0, Range(0.01, 100.0), "above 1: tokens of the prompt and the answer become less likely"
    )
    frequency_penalty: float = _number(
        0.0, Range(-100.0, 100.0), "taken off a token's logit for each time the answer has it"
    )
    presence_penalty: float = _number(
        0.0, Range(-100.0, 100.0), "taken off a token's logit once the answer has it"
    )
    logit_bias: Mapping[int, float] = _other(dict, "added to the logits of these token ids")
    stop: str | Sequence[str] = _other((), "end before this text appears")
    stop_token_ids: Sequence[int] = _other((), "end at this token id")
    seed: int | None = _number(
        None, Range(-(2**63), 2**64 - 1), "same seed, same text (default: another each time)"
    )
    ignore_eos: bool = _other(False, "go on past the model's end-of-text token")
    min_tokens: int = _number(0, Range(0), "no end-of-text token before this many tokens")
    logprobs: int | None = _number(
        None, Range(0, MOST_LOGPROBS), "report log probabilities, and those of the n best tokens"
    )

    def __new__(cls, *values: Any, **named: Any) -> SamplingParams:
        """Refuse an unknown name with the nearest one."""
        check_names("sampling parameter", named, [item.name for item in fields(cls)])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        try:
            set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
            set_(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
            set_(self, "logit_bias", dict(self.logit_bias or {}))
        except (TypeError, ValueError):
            raise RequestError(
                "stop must be strings, stop_token_ids a list of token ids, and logit_bias a mapping, not "
                f"{self.stop!r:.40}, {self.stop_token_ids!r:.40}, {self.logit_bias!r:.40}"
            ) from None
        for item in fields(self):
            if allowed := item.metadata.get("range"):
                self._check_number(item.name, str(item.type), allowed)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must be one or more non-empty strings, not {text!r}")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise RequestError(f"stop_token_ids must be token ids (integers from 0), not {token!r}")
        for token, bias in self.logit_bias.items():
            if not _is_int(token) or token < 0:
                raise RequestError(
                    f"logit_bias must map token ids (integers from 0) to numbers, not {token!r}"
                )
            if not _is_number(bias) or math.isnan(bias) or bias > MOST_BIAS:
                raise RequestError(
                    f"logit_bias of token {token} must be a number up to {MOST_BIAS}, not {bias!r}"
                )

    def _check_number(self, name: str, kind: str, allowed: Range) -> None:
        value = getattr(self, name)
        if value is None and "None" in kind:
            return
        whole = kind.startswith("int")
        if not (_is_int(value) if whole else _is_number(value)) or value not in allowed:
            what = "an integer" if whole else "a number"
            none = " (or None)" if "None" in kind else ""
            raise RequestError(f"{name} must be {what} {allowed}{none}, not {value!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from names and values; an unknown name is an error that suggests the nearest one."""
        return cls(**values)


if SamplingParams.__doc__:  # python -OO has none
    _meanings = (f"    {item.name}: {item.metadata['help']}.\n" for item in fields(SamplingParams))
    SamplingParams.__doc__ += "\n" + "".join(_meanings) + "    "


def _is_int(value: object) -> bool:
    # numpy's integers count; True and False do not.
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


class Matcher(Protocol):
    """Where one answer is in what constrains it."""

    def fill_mask(self, mask: NDArray[np.uint32], /) -> None:
        """Set the bits of the tokens that may come next and clear the others, uint32[ceil(vocab / 32)]."""

    def check(self) -> None:
        """Raise RequestError if what constrains it failed."""

    def accept(self, token: int, /) -> None:
        """Go on by a token."""

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says, possibly none; each is to be accepted."""

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end of the text."""


class Constraint(Protocol):
    """What an answer must look like, token by token."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""

    def fill_masks(self, matchers: Sequence[Any], masks: NDArray[np.uint32], /) -> None:
        """``Matcher.fill_mask`` of many matchers, also of other constraints of this class, row by row."""


@dataclass(slots=True)
class Request:
    """One prompt to continue.

    prompt: token ids.
    client: who asks; clients of equal priority get equal shares of the work, however much one of them asks.
    priority: higher goes first; equal ones of a client in order of their deadlines, then of arrival.
    deadline: instant of time.perf_counter() after which nobody wants the answer.
    arrived: instant the caller asked (before the prompt was tokenized); None: when it is submitted.
    tokenize_s: seconds spent on turning text into the prompt.
    salt: requests share cached prefixes only with those of the same salt.
    prompt_logprobs: also report the log probability of each prompt token and those of the n best there; None:
    do not. Such a prompt is computed in full, whatever the prefix cache holds.
    prompt_logits: also keep the logits of every prompt position (costs prompt x vocabulary x 4 bytes).
    constraint: what the answer must look like (``chabok.text.grammar``); None: anything. It is stronger than
    logit_bias, min_tokens, and ignore_eos: where it leaves nothing else, the answer ends.
    visible: control tokens whose text shows in the answer's, such as those that mark tool calls.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline: float | None = None
    arrived: float | None = None
    tokenize_s: float = 0.0
    salt: str = ""
    prompt_logits: bool = False
    client: str = ""
    constraint: Constraint | None = None
    prompt_logprobs: int | None = None
    visible: frozenset[int] = frozenset()


def check(request: Request, vocab_size: int, context: int) -> None:
    """Raise RequestError if an engine of so many tokens, known and at once, cannot serve a request."""
    prompt, vocab = request.prompt, vocab_size
    if len(prompt) == 0:
        raise RequestError("the prompt has no tokens; give it at least one")
    if min(prompt) < 0 or max(prompt) >= vocab:
        bad = next(token for token in prompt if not 0 <= token < vocab)
        raise RequestError(f"the prompt has token id {bad}, but this model's are 0 to {vocab - 1}")
    room = context if request.params.max_tokens == 0 else context - 1
    if len(prompt) > room:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the context is {context} tokens "
            "(prompt and answer together); shorten the prompt or open the model with a larger context"
        )
    wanted = request.prompt_logprobs
    if wanted is not None and not 0 <= wanted <= MOST_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs must be from 0 to {MOST_LOGPROBS}, not {wanted}", "prompt_logprobs"
        )
    bad_bias = [token for token in request.params.logit_bias if token >= vocab]
    if bad_bias:
        raise RequestError(
            f"logit_bias has token id {bad_bias[0]}, but this model's are 0 to {vocab - 1}",
            "logit_bias",
        )


class Token(NamedTuple):
    """One generated token as it is streamed.

    text: what became final with it; "" while a character or a possible stop string is incomplete.
    logprob: natural logarithm of its probability under the model, before penalties and temperature, where
    asked for.
    top: the most likely tokens there, (id, logprob), best first.
    """

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    tokens: every id that was generated, with the end token or stop string's tokens that ended it; text leaves
    those out.
    stopped_by: the stop string or token id that ended it, if one did.
    logprobs: of each token, where asked for; top_logprobs beside it: (id, logprob) of the most likely.
    prompt_logprobs, prompt_top_logprobs: the same of each prompt token, where asked for; the first token,
    which follows nothing, has None and ().
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    timings: Timings
    stopped_by: str | int | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
