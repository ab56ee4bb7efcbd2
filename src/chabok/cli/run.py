"""``chabok run``: a prompt in, its answer out as it is written."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from chabok.cli import params, speed
from chabok.cli.terminal import Answer, note
from chabok.engine.request import Completion, SamplingParams
from chabok.errors import RequestError

if TYPE_CHECKING:
    from chabok.engine.llm import LLM, Stream

PATIENCE_S = 2.0
"""How long standard input may be silent before a user is told what is being waited for."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    found = _parser().parse_intermixed_args(arguments)
    sampling = params.from_flags(found)
    prompt = " ".join(found.prompt)
    interactive = not prompt and sys.stdin is not None and sys.stdin.isatty()
    if interactive and found.json:
        raise RequestError("--json needs a prompt, as an argument or on standard input")
    text = prompt if interactive else _with_input(prompt)
    from chabok.cli.progress import Bars

    with Bars(quiet=found.quiet or found.json) as bars:
        from chabok.engine.llm import LLM

        llm = LLM(
            found.model,
            threads=found.threads,
            context=found.context,
            pack=not found.no_pack,
            progress=bars,
        )
    with llm:
        if found.threads and not found.quiet:
            _warn_of(found.threads)
        if interactive:
            from chabok.cli.chat import Chat

            return Chat(llm, sampling, system=found.system, quiet=found.quiet).run()
        if found.json:
            return _answer_json(llm, _ask(llm, text, sampling, found))
        return _answer(_ask(llm, text, sampling, found), found.quiet)


def _parser() -> argparse.ArgumentParser:
    parser = params.Parser(
        "chabok run",
        description="Answer a prompt. Standard input, where it is piped, is added to it; "
        "without either, start a chat.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT", help="what to answer")
    add("-m", "--model", default="smollm2", help="a GGUF file, a name, hf:owner/repo (default %(default)s)")
    add("-s", "--system", metavar="TEXT", help="how the model should behave")
    add("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add("--json", action="store_true", help="print one JSON object with text, tokens and timings")
    add("-q", "--quiet", action="store_true", help="print nothing but the answer")
    add("--threads", type=params.whole, metavar="N", help="threads to compute with (default: one a core)")
    add(
        "--context",
        type=params.whole,
        metavar="N",
        help="most tokens of prompt and answer together (default: the model's own, 8192 at most)",
    )
    add("--no-pack", action="store_true", help="keep the weights in memory, write nothing to disk")
    params.add_flags(parser)
    return parser


def _warn_of(threads: int) -> None:
    import os

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or threads
    if threads > cores:
        note(f"{threads} threads share {cores} cores and wait for each other; {cores} or fewer are faster")


def _with_input(prompt: str) -> str:
    """The prompt, and what is piped in below it."""
    piped = _read_input().strip("\n")
    text = f"{prompt}\n\n{piped}" if prompt and piped else prompt or piped
    if not text.strip():
        raise RequestError('there is nothing to answer; try: chabok run "Write a haiku about the ocean"')
    return text


def _read_input() -> str:
    """Everything on standard input, nothing if it is a terminal or closed."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    import select

    try:
        if not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
            note("waiting for standard input to end (add < /dev/null if there is none) ...")
    except (OSError, ValueError):
        pass  # not something that can be waited for; reading it decides
    return sys.stdin.buffer.read().decode("utf-8", errors="replace")


def _ask(llm: LLM, text: str, sampling: SamplingParams, found: argparse.Namespace) -> Stream:
    if found.raw:
        if found.system is not None:
            raise RequestError("--system belongs to the chat template, which --raw leaves out")
        return llm.stream(text, sampling)
    messages = [] if found.system is None else [{"role": "system", "content": found.system}]
    return llm.chat([*messages, {"role": "user", "content": text}], sampling, stream=True)


def _answer(stream: Stream, quiet: bool) -> int:
    answer = Answer()
    completion = written(stream, answer)
    answer.end()
    if not quiet:
        note(speed.summary(completion.timings))
    return 130 if completion.finish_reason == "cancelled" else 0


def written(stream: Stream, answer: Answer) -> Completion:
    """Write an answer as it comes; Ctrl-C ends it early."""
    try:
        with stream:
            for token in stream:
                answer.write(token.text)
    except KeyboardInterrupt:
        stream.close()
    return stream.completion


def _answer_json(llm: LLM, stream: Stream) -> int:
    import json

    try:
        completion = stream.completion
    except KeyboardInterrupt:
        stream.close()
        completion = stream.completion
    record: dict[str, Any] = {
        "model": llm.name,
        "text": completion.text,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        "stopped_by": completion.stopped_by,
        "load_s": llm.load_s,
        "timings": completion.timings.to_dict(),
    }
    if completion.logprobs is not None:
        record["logprobs"] = completion.logprobs
        record["top_logprobs"] = completion.top_logprobs
    # Escaped for a terminal, whose control characters JSON does not all escape by itself.
    print(json.dumps(record, ensure_ascii=sys.stdout.isatty() or not _utf8()))
    return 130 if completion.finish_reason == "cancelled" else 0


def _utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
