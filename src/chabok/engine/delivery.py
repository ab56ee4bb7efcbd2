"""What becomes of a step: logits to tokens, tokens to text, and both to those who asked."""

from __future__ import annotations

import os
from time import perf_counter

from chabok.engine.rate import Rate
from chabok.engine.request import Completion, FinishReason, Token
from chabok.engine.sampler import Choice
from chabok.engine.scheduler import Scheduler
from chabok.engine.sequence import Sequence
from chabok.engine.stats import Stats
from chabok.models.batch import Logits


class Delivery:
    """Chooses the next tokens of sequences and hands them out; keeps the books (``stats``, ``rate``).

    worst_gap: longest time between two tokens of a sequence that ended in this step, in seconds; whoever
    makes the steps sets it back.
    """

    def __init__(self, scheduler: Scheduler, stats: Stats, rate: Rate) -> None:
        self.stats = stats
        self.rate = rate
        self.worst_gap = 0.0
        self._scheduler = scheduler
        self._debug = bool(os.environ.get("CHABOK_DEBUG"))

    def begin(self, sequence: Sequence, now: float) -> None:
        """The first row of a sequence is about to be computed."""
        stats, timeline = self.stats, sequence.timeline
        timeline.started = now
        stats.queue_s.observe(now - timeline.submitted)
        stats.prompt_tokens += sequence.n_prompt
        stats.cached_tokens_memory += sequence.cached - sequence.cached_disk
        stats.cached_tokens_disk += sequence.cached_disk

    def take(self, sequence: Sequence, logits: Logits, row: int, now: float) -> float:
        """Choose a sequence's next token and hand it out; ``now`` and the result are instants."""
        try:
            return self._choose(sequence, logits, row, now)
        except Exception as error:
            self.fail(sequence, error)
            return perf_counter()

    def _choose(self, sequence: Sequence, logits: Logits, row: int, now: float) -> float:
        timeline, segment = sequence.timeline, sequence.segment
        if timeline.prefilled is None:
            if sequence.all_rows:
                self._look_at_prompt(sequence, logits, row)
            if sequence.computed < sequence.n_prompt:
                return now
            timeline.prefilled = now
            if timeline.started is not None:
                self.stats.prefill_s.observe(now - timeline.started)
            if sequence.limit == sequence.n_prompt:
                self.finish(sequence, "length")
                return now
        row += segment.outputs - 1
        matcher, forced = sequence.matcher, sequence.opening
        if matcher is None:
            return self._append(sequence, sequence.sampler.choose(logits, row), now)
        if forced:
            sequence.opening = []
        else:
            matcher.check()
            now = self._append(sequence, sequence.sampler.choose(logits, row, sequence.mask), now)
            forced = matcher.forced() if sequence.forces and not sequence.handle.done else []
        sequence.n_forced = len(forced)
        for token in forced:
            sequence.sampler.skip(token)
            now = self._append(sequence, Choice(token), now)
            if sequence.handle.done:
                break
        return now

    def _append(self, sequence: Sequence, choice: Choice, now: float) -> float:
        """Append a token that was chosen, or dictated, and hand it out."""
        timeline, tokens, token = sequence.timeline, sequence.tokens, choice.token
        chosen = perf_counter()
        tokens.append(token)
        reason: FinishReason | None = None
        stopped_by: str | int | None = None
        if token in sequence.end_ids:
            reason, stopped_by, piece = "stop", token, ""
        else:
            if sequence.matcher is not None:
                sequence.matcher.accept(token)
            piece = sequence.text.push(token)
            if sequence.text.stop is not None:
                reason, stopped_by = "stop", sequence.text.stop
            elif sequence.matcher is not None and sequence.matcher.finished:
                reason = "stop"  # nothing else may follow, so the model need not say so
            elif len(tokens) >= sequence.limit:
                reason = "length"
        if reason is not None:
            piece += sequence.text.finish()
            if stopped_by is None and sequence.text.stop is not None:
                reason, stopped_by = "stop", sequence.text.stop
        end = perf_counter()
        timeline.sample_s += chosen - now
        timeline.detokenize_s += end - chosen
        if timeline.last is None:
            timeline.first = end
            self.stats.ttft_s.observe(end - timeline.arrived)
        else:
            gap = end - timeline.last
            self.stats.itl_s.observe(gap)
            if gap > timeline.worst_gap:
                timeline.worst_gap = gap
            if gap > self.worst_gap:
                self.worst_gap = gap
        timeline.last = end
        self.stats.output_tokens += 1
        if choice.logprob is not None:
            sequence.choices.append(choice)
        handle = sequence.handle
        handle.tokens.append(Token(token, piece, choice.logprob, choice.top))
        if reason is not None:
            self.finish(sequence, reason, stopped_by)
        elif handle.wake is not None:
            handle.wake()
        return end

    def _look_at_prompt(self, sequence: Sequence, logits: Logits, row: int) -> None:
        """Keep what was asked about the prompt rows of the step."""
        start, n = sequence.segment.start, sequence.segment.outputs
        if sequence.scores is not None:
            sequence.scores.take(logits, row, start, n, sequence.request.prompt)
        if sequence.request.prompt_logits:
            kept = sequence.handle.prompt_logits
            known = sum(map(len, kept)) - start  # rows seen before it lost its pages
            if known < n:
                kept.append(logits.values[row + max(known, 0) : row + n].copy())

    def finish(self, sequence: Sequence, reason: FinishReason, stopped_by: str | int | None = None) -> None:
        """End a sequence; its caller gets the whole answer."""
        self._scheduler.remove(sequence)
        sequence.timeline.finished = perf_counter()
        self.stats.ended(reason, sequence.timeline)
        tokens = sequence.tokens[sequence.n_prompt :]
        if reason in ("stop", "length"):
            self.rate.ended(len(tokens))
        wanted = sequence.request.params.logprobs is not None
        handle, timings, scores = sequence.handle, sequence.timings(), sequence.scores
        handle.timings = lambda: timings  # and the sequence is free to go
        handle.completion = Completion(
            text=sequence.text.whole(),
            tokens=tokens,
            finish_reason=reason,
            timings=timings,
            stopped_by=stopped_by,
            logprobs=[choice.logprob or 0.0 for choice in sequence.choices] if wanted else None,
            top_logprobs=[choice.top for choice in sequence.choices] if wanted else None,
            prompt_logprobs=None if scores is None else scores.logprobs,
            prompt_top_logprobs=None if scores is None else scores.top,
        )
        if handle.wake is not None:
            handle.wake()
        if self._debug and not self._scheduler.active:
            self._scheduler.check_integrity()

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """End a sequence that cannot go on; its caller gets the error."""
        self._scheduler.remove(sequence)
        self.stats.finished["error"] += 1
        timings = sequence.timings()
        sequence.handle.timings = lambda: timings
        sequence.handle.error = error
        if sequence.handle.wake is not None:
            sequence.handle.wake()
