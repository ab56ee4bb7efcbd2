"""One sequence in the engine: its tokens, its pages, and what is still to be computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chabok.engine.kv import Key, next_key
from chabok.engine.request import Matcher, Request
from chabok.engine.sampler import Choice, Sampler
from chabok.engine.scores import PromptScores
from chabok.engine.stops import Text
from chabok.engine.timings import Timeline, Timings
from chabok.models.batch import PAGE_TOKENS, Segment

if TYPE_CHECKING:
    from chabok.engine.handle import Handle
    from chabok.engine.prefixes import Load


class Sequence:
    """A prompt and the answer to it so far.

    tokens: prompt and answer; computed: how many of them have keys and values in the pages.
    work: tokens it is expected to take, prompt and answer.
    order: who goes first, the smallest (priority, when it is due, deadline, arrival); see ``set_due``.
    """

    __slots__ = (
        "cached", "cached_disk", "choices", "chunk", "computed", "end_ids", "forces", "handle", "keys",
        "limit", "load", "mask", "matcher", "n_forced", "n_kept", "n_pages", "n_prompt", "opening", "order",
        "request", "root", "sampler", "scores", "segment", "text", "timeline", "tokens", "work",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        handle: Handle,
        *,
        number: int,
        limit: int,
        end_ids: frozenset[int],
        root: Key,
        sampler: Sampler,
        text: Text,
        timeline: Timeline,
        work: float = 0.0,
        matcher: Matcher | None = None,
    ) -> None:
        self.request = request
        self.handle = handle
        self.tokens: list[int] = list(request.prompt)
        self.n_prompt = len(self.tokens)
        self.limit = limit  # most tokens it may come to, prompt included
        self.end_ids = end_ids
        self.root = root
        self.sampler = sampler
        self.text = text
        self.timeline = timeline
        self.work = work
        self.matcher = matcher
        # Asked for log probabilities, the model is asked about every token, those that are dictated included.
        self.forces = matcher is not None and request.params.logprobs is None
        self.opening = matcher.forced() if matcher is not None and self.forces else []
        self.n_forced = 0  # tokens at the end that were dictated, after the last that was chosen
        self.mask: NDArray[np.uint32] | None = None  # of the tokens that may be chosen in this step
        deadline = float("inf") if request.deadline is None else request.deadline
        self.order = (-request.priority, 0.0, deadline, number)
        wanted = request.prompt_logprobs
        self.scores = None if wanted is None else PromptScores(wanted)
        self.choices: list[Choice] = []  # kept where log probabilities are asked for
        self.computed = 0
        self.cached = 0  # prompt tokens that came from the prefix cache
        self.cached_disk = 0  # of them, those that came from its disk tier
        self.keys: list[Key] = []  # of its full pages, as far as they were asked for
        self.load: Load | None = None  # pages that come from disk, before which it cannot go on
        self.n_kept = 0  # leading pages that the pool knows by their keys
        self.n_pages = 0
        self.chunk = 0  # rows in the step that is being made
        plain = self.scores is None and matcher is None
        scale = sampler.scale if plain else 1.0
        self.segment = Segment(np.zeros(-(-limit // PAGE_TOKENS), np.int32), 0, [], 1, scale)

    @property
    def all_rows(self) -> bool:
        """Whether the logits of every prompt position are still wanted."""
        return self.timeline.prefilled is None and (self.request.prompt_logits or self.scores is not None)

    def set_due(self, due: float) -> None:
        """Put it into the order by its client's share, in which it is due at this instant (``Shares``)."""
        priority, _, deadline, number = self.order
        self.order = (priority, due, deadline, number)

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet; 1 while it is generating."""
        return len(self.tokens) - self.computed

    @property
    def reusable_tokens(self) -> int:
        """Leading tokens that could come from the cache: at least one token must be computed."""
        return 0 if self.all_rows else len(self.tokens) - 1

    @property
    def reading(self) -> bool:
        """Whether it has more to compute than one chosen token and what was dictated after it."""
        return len(self.tokens) - self.computed > 1 + self.n_forced

    @property
    def reusable_pages(self) -> int:
        """Full pages of those tokens."""
        return self.reusable_tokens // PAGE_TOKENS

    def key(self, page: int) -> Key:
        """Key of one of its full pages."""
        keys = self.keys
        while len(keys) <= page:
            at = len(keys) * PAGE_TOKENS
            keys.append(next_key(keys[-1] if keys else self.root, self.tokens[at : at + PAGE_TOKENS]))
        return keys[page]

    def key_before(self, page: int) -> Key:
        """What comes before one of its pages: the key of the page before, or the root."""
        return self.key(page - 1) if page else self.root

    def add_page(self, page: int) -> None:
        """Append a page to its table."""
        self.segment.pages[self.n_pages] = page
        self.n_pages += 1

    def page_table(self) -> list[int]:
        """Its pages in order."""
        table: list[int] = self.segment.pages[: self.n_pages].tolist()
        return table

    def timings(self) -> Timings:
        """How long its stages took so far."""
        n_out = len(self.tokens) - self.n_prompt
        return self.timeline.timings(self.n_prompt, self.cached, n_out, self.cached_disk)

    def place(self, n: int) -> Segment:
        """Its next n rows as a segment of the coming step."""
        segment = self.segment
        start = self.computed
        self.chunk = n
        segment.start = start
        segment.tokens = self.tokens[start : start + n]
        if self.all_rows:
            segment.outputs = n
        else:
            segment.outputs = 1 if start + n == len(self.tokens) else 0
        return segment
