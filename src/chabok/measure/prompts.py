"""Prompts of exact token lengths: so that no cache can answer for the model, or on purpose so that it can.

A prompt is a row of words, each one token for the model at hand. Which words are one token, and how many
tokens the chat template adds, is found out by asking the endpoint for one-token answers and reading the usage
that it reports.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any

import msgspec

from chabok.measure.endpoint import Target
from chabok.measure.failures import MeasureError
from chabok.measure.timeline import Timeline

_NOUNS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point home
    water room mother area money story fact month lot right study book eye job word business issue side kind
    head house service friend father power hour game line end member law car city name team minute idea body
    back parent face level office door health person art war history party result change morning reason
    research girl guy moment air teacher force education foot boy age policy music market sense nation plan
    college interest death experience effect use class control field development role rate heart drug show
    leader light voice wife police mind price report decision son view town road form value action model
    season society tax director position player record paper space ground event official matter center couple
    site project activity star table need court produce oil situation cost industry figure street image phone
    data picture practice piece land product doctor wall worker news test movie north love step economy
    public film tree source hair window culture chance brother energy period course summer plant opportunity
    term letter condition choice rule daughter south husband floor campaign material population call hospital
    church risk fire future bank west sport board subject officer rest behavior performance top goal second
    bed order author blood agency nature color store sound movement page race concern series language response
    animal factor decade article east artist scene stock career treatment approach size dog fund media sign
    thought list individual quality pressure answer resource meeting disease success cup amount ability staff
    character growth loss degree attack region television box training trade deal election feeling standard
    bill message analysis benefit sex lawyer section glass skill sister professor operation crime stage
    authority design sort knowledge gun station strategy truth song example environment leg dark memory
"""
WORDS = tuple(dict.fromkeys(_NOUNS.split()))
"""Common English nouns: in nearly every vocabulary each is one token, with or without a space before it."""

ENOUGH = 32
"""Fewer one-token words than this do not make prompts that differ enough."""
GOLDEN = (5**0.5 - 1) / 2
PROBES = 48
"""Most requests that finding out the lengths may take."""
PATIENCE_S = 10.0
"""And about the longest time."""


@dataclass(frozen=True, slots=True)
class Ruler:
    """How long prompts are, in tokens of the model at hand.

    words: those that are one token each. overhead: tokens that the chat template adds. source: ``usage``, or
    ``assumed`` where the endpoint tells nothing or no words are one token; then lengths are only meant, not
    exact. per_word: tokens of a word, where they are not one.
    """

    words: tuple[str, ...] = WORDS
    overhead: int = 0
    source: str = "assumed"
    per_word: float = 1.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens: fixed where ``low`` equals ``high``, else evenly distributed between them.

    mix: several of these, each with its weight; ``low`` and ``high`` are then the least and the most of all.
    """

    low: int
    high: int
    mix: tuple[tuple[Lengths, float], ...] = ()

    @classmethod
    def of(cls, text: str | int) -> Lengths:
        """From ``128``, ``100-200``, or a mix, ``64:0.8,2000:0.2``; MeasureError if it is none."""
        parts = [cls._weighed(part) for part in str(text).split(",")]
        if len(parts) == 1:
            return parts[0][0]
        low, high = min(part.low for part, _ in parts), max(part.high for part, _ in parts)
        return cls(low, high, tuple(parts))

    @classmethod
    def _weighed(cls, text: str) -> tuple[Lengths, float]:
        length, colon, share = text.partition(":")
        low, dash, high = length.partition("-")
        try:
            found, weight = cls(int(low), int(high if dash else low)), float(share if colon else 1)
        except ValueError:
            raise MeasureError(
                f"{text!r} is no length in tokens; 128, 100-200, or a mix with weights as 64:0.8,2000:0.2 are"
            ) from None
        if not 1 <= found.low <= found.high:
            raise MeasureError(f"{text!r} is no length in tokens: from 1 up, the smaller first")
        if not 0 < weight < math.inf:
            raise MeasureError(f"{text!r}: a weight must be more than 0")
        return found, weight

    def draw(self, chance: random.Random, place: float | None = None) -> int:
        """A length; ``place``: from 0 to 1, which of a mix it is (default: by chance)."""
        if self.mix:
            left = chance.random() if place is None else place
            left *= sum(weight for _, weight in self.mix)
            for part, weight in self.mix:
                left -= weight
                if left < 0:
                    return part.draw(chance)
            return self.mix[-1][0].draw(chance)
        return self.low if self.low == self.high else chance.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.mix:
            total = sum(weight for _, weight in self.mix)
            return ", ".join(f"{part} ({weight / total:.0%})" for part, weight in self.mix)
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and the tokens it is meant to be long (template included; None: any) and to be answered
    with."""

    text: str
    tokens: int | None
    output_tokens: int


class Synthetic:
    """Prompts number 0, 1, 2, ... of given lengths; the same for the same seed.

    Each differs from every other from its first word on. shared: so many tokens at the beginning are the same
    for all instead, which is the way to measure a prefix cache.
    """

    def __init__(
        self,
        prompt_tokens: Lengths | int = 128,
        output_tokens: Lengths | int = 128,
        *,
        seed: int = 0,
        shared: int = 0,
        ruler: Ruler | None = None,
    ) -> None:
        """MeasureError: ``shared`` is longer than the shortest prompt, or the words do not suffice."""
        self.prompt_tokens = _lengths(prompt_tokens)
        self.output_tokens = _lengths(output_tokens)
        self.seed = seed
        self.shared = shared
        self.ruler = ruler or Ruler()
        if shared and shared >= self.prompt_tokens.low:
            raise MeasureError(
                f"a shared prefix of {shared} tokens leaves nothing of a prompt of {self.prompt_tokens.low}; "
                "a longer prompt or a shorter prefix does"
            )
        if len(self.ruler.words) < 2:
            raise MeasureError("prompts need two different words at least")

    def with_ruler(self, ruler: Ruler) -> Synthetic:
        """The same prompts for another model."""
        return Synthetic(
            self.prompt_tokens, self.output_tokens, seed=self.seed, shared=self.shared, ruler=ruler
        )

    def __call__(self, number: int) -> Prompt:
        """Prompt ``number``."""
        chance = random.Random(f"{self.seed}:{number}")
        # Multiples of the golden ratio fill the range evenly: also a few prompts have the shares of a mix.
        tokens = self.prompt_tokens.draw(chance, (number * GOLDEN + self.seed * GOLDEN**2) % 1)
        output = self.output_tokens.draw(chance)
        words = self.ruler.words
        per_word = self.ruler.per_word
        size = max(round((tokens - self.ruler.overhead) / per_word), 1)
        shared = round((self.shared - self.ruler.overhead) / per_word)
        common = min(max(shared, 0), size - 1) if self.shared else 0
        text = [] if not common else random.Random(f"{self.seed}:shared").choices(words, k=common)
        # The number in base len(words), lowest digit first, in an order of the seed's own: the first word
        # already differs between neighbours, the first few between any two.
        order = random.Random(f"{self.seed}:order").sample(words, len(words))
        left = number
        while len(text) < size:
            text.append(order[left % len(order)])
            left //= len(order)
            if not left:
                break
        text += chance.choices(words, k=size - len(text))
        return Prompt(" ".join(text), round(size * per_word) + self.ruler.overhead, output)


class FromFile:
    """Prompts of a file, one after the other and again from the beginning: a JSON object per line with
    ``prompt`` and, if it likes, ``output_tokens``; or any text, a prompt per line.

    Their lengths in tokens are whatever the model makes of them; a prompt that comes again may be answered
    from a cache.
    """

    def __init__(
        self, path: str | os.PathLike[str], output_tokens: Lengths | int = 128, seed: int = 0
    ) -> None:
        """MeasureError: the file cannot be read, or a line is not a prompt; says which."""
        self.path = os.fspath(path)
        self.output_tokens = _lengths(output_tokens)
        self.seed = seed
        try:
            with open(path, encoding="utf-8") as file:
                lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise MeasureError(f"{self.path}: prompts cannot be read: {why}") from None
        if not lines:
            raise MeasureError(f"{self.path}: there is no prompt; write one per line")
        jsonl = lines[0][1].startswith("{")
        self._prompts = [self._object(number, line) if jsonl else (line, None) for number, line in lines]

    def __len__(self) -> int:
        return len(self._prompts)

    def _object(self, number: int, line: str) -> tuple[str, int | None]:
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise MeasureError(f"{self.path}, line {number}: {error}") from None
        return found.prompt, found.output_tokens

    def __call__(self, number: int) -> Prompt:
        """Prompt ``number``."""
        text, output = self._prompts[number % len(self._prompts)]
        chance = random.Random(f"{self.seed}:{number}")
        return Prompt(text, None, output or self.output_tokens.draw(chance))


class _Line(msgspec.Struct):
    prompt: Annotated[str, msgspec.Meta(min_length=1)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def _lengths(value: Lengths | int) -> Lengths:
    return value if isinstance(value, Lengths) else Lengths.of(value)


Counter = Callable[[str], Awaitable[int | None]]


async def calibrate(endpoint: Target, client: Any) -> Ruler:
    """Find out by asking which words are one token, and what the template adds.

    Takes a few short requests; more where words are cut into several tokens. A ruler of source ``assumed``
    where the endpoint tells no counts.
    """
    count = _by_usage(endpoint, client)
    one = await count(WORDS[0])
    two = await count(f"{WORDS[0]} {WORDS[1]}")
    if one is None or two is None or two <= one:
        return Ruler()  # no counts, or none that grow with the prompt
    overhead = one - 1 if two - one == 1 else max(2 * one - two, 0)
    good: list[str] = []
    per_word = max(float(two - one), 1.0)
    waiting = [list(WORDS)]
    until = perf_counter() + PATIENCE_S
    for _ in range(PROBES):
        if not waiting or perf_counter() > until:
            break
        words = waiting.pop(0)
        try:
            found = await count(" ".join(words))
        except MeasureError:
            found = 0  # longer than the context, perhaps; the halves may fit
        if found is None:
            return Ruler()
        if found:
            per_word = max((found - overhead) / len(words), 1.0)
        if found - overhead == len(words):
            good += words
        elif len(words) > 1:
            half = len(words) // 2
            waiting += [words[:half], words[half:]]
    if len(good) < ENOUGH:
        return Ruler(overhead=overhead, per_word=per_word)
    return Ruler(tuple(good), overhead, "usage")


def _by_usage(endpoint: Target, client: Any) -> Counter:
    async def count(text: str) -> int | None:
        timeline = Timeline(0, 0.0, asked_output=1)
        await endpoint.time(client, endpoint.ask(text, 1), timeline, perf_counter())
        if timeline.failure is not None:
            raise MeasureError(f"{endpoint.url}: {timeline.failure.message}")
        return timeline.usage.prompt_tokens

    return count
