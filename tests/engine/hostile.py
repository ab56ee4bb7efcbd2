"""Runs model files one by one, each in a child of its own, and tells what became of it.

    python -m tests.engine.hostile FILE ...

One line of JSON per file: what was said, the signal that ended the child, seconds, peak of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import chabok.models.gemma
import chabok.models.llama
import chabok.models.qwen
import chabok.models.transformer
import chabok.text.chat  # noqa: F401 - imported once, for all children
from chabok import LLM, SamplingParams
from chabok.errors import ChabokError

SECONDS = 20
MEMORY = 6 << 30
"""Bytes of address space: what a fault may cost the machine that runs the tests."""

WAYS: list[dict[str, Any]] = [
    {"logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.5},
]


def use(path: str) -> str:
    """Do with a model what people do; "ran", or what it was refused with."""
    try:
        with LLM(path, pack=False, threads=1) as llm:
            llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
            for way in WAYS:
                llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=3, seed=1, **way))
            llm.logits([1, 2, 3])
            llm.generate("the theory in an answer", SamplingParams(max_tokens=4))
            llm.chat([{"role": "user", "content": "Hello <|im_end|>"}], SamplingParams(max_tokens=3))
        return "ran"
    except ChabokError as error:
        return f"refused: {error}"
    except BaseException:
        return traceback.format_exc()


def watched(path: str) -> dict[str, Any]:
    """``use`` in a child."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(SECONDS)
        warnings.simplefilter("error")
        with contextlib.suppress(BaseException):
            os.write(writer, use(path).encode(errors="replace")[-4000:])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    _, status, usage = os.wait4(child, 0)
    return {
        "path": path,
        "said": said.decode(errors="replace"),
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "seconds": time.monotonic() - started,
        "megabytes": usage.ru_maxrss / 1024,
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(watched(name)), flush=True)
