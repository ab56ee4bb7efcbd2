"""The load of serving.py in the Python API, without HTTP.

python engine_worker.py MODEL THREADS STREAMS WAVES    {"throughput": output tokens per second}
python engine_worker.py MODEL THREADS first TIMES      {"first_token_s": of a one-word prompt, median}
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from chabok import LLM, SamplingParams
from chabok.engine.handle import Handle
from chabok.measure import Ruler

PROMPT, ANSWER = 128, 128


def first_token(llm: LLM, times: int) -> float:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    found = []
    for _ in range(times):
        began = time.perf_counter()
        with llm.stream("Hello", params) as stream:
            next(stream)
            found.append(time.perf_counter() - began)
            for _ in stream:
                pass
    return median(found)


def throughput(llm: LLM, streams: int, waves: int) -> float:
    """Output tokens per second over the time in which all streams are busy."""
    words = Ruler().words
    ids = [
        token
        for word in words
        if len(found := llm.tokenize(" " + word, add_bos=False)) == 1
        for token in found
    ]
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    chance = random.Random(0)
    news = threading.Event()
    times: list[float] = []

    def ask() -> Handle:
        return llm.engine.submit(llm.request(chance.choices(ids, k=PROMPT), params), news.set)

    running = {ask(): waves - 1 for _ in range(streams)}
    first: set[Handle] = set(running)
    start = end = 0.0
    while running:
        news.wait()
        news.clear()
        now = time.perf_counter()
        for handle, left in tuple(running.items()):
            if handle.tokens and handle in first:
                first.discard(handle)
                start = now  # of the last stream to begin
            times += [now] * len(handle.tokens)
            handle.tokens.clear()
            if handle.done and not handle.tokens:
                del running[handle]
                handle.result()
                if left:
                    running[ask()] = left - 1
                elif not end:
                    end = now  # of the first stream to end
    return sum(start < at <= end for at in times) / (end - start)


def main() -> None:
    model, threads, what, count = sys.argv[1:]
    with LLM(model, threads=int(threads)) as llm:
        llm.engine.start()
        llm.generate("warm up", SamplingParams(max_tokens=8))
        if what == "first":
            print(json.dumps({"first_token_s": first_token(llm, int(count))}))
        else:
            print(json.dumps({"throughput": throughput(llm, int(what), int(count))}))


if __name__ == "__main__":
    main()
