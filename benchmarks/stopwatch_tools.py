"""Three tools that put load on an endpoint, run in the same way: Chabok's stopwatch, guidellm, and AIPerf.

Each is a process of its own (with whatever processes that starts), given the same prompts, streams and number
of requests; what it says of each request is read from the file of records that it writes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LONGEST_S = 400


@dataclass(frozen=True)
class Work:
    """What to do: an endpoint's base URL, how many at once, how many in all; a folder to write to."""

    url: str
    streams: int
    requests: int
    folder: Path
    core: int | None = None

    @property
    def prompts(self) -> Path:
        """One prompt per request, as JSON lines that all three read."""
        path = self.folder / "prompts.jsonl"
        lines = [f"number{n:05} say something about the weather" for n in range(self.requests)]
        path.write_text("".join(json.dumps({"prompt": line, "text": line}) + "\n" for line in lines))
        return path


@dataclass
class Told:
    """What a tool says of one request: first token and mean gap between tokens, seconds; start and end."""

    ttft_s: float
    itl_s: float
    began: float
    ended: float


@dataclass
class Ran:
    """One run of a tool: requests by the first word of their prompt, CPU seconds of all its processes, and
    what else it says (``more``)."""

    requests: dict[str, Told]
    cpu_s: float
    more: dict[str, float]

    @property
    def seconds(self) -> float:
        """From the first request to the end of the last."""
        told = self.requests.values()
        return max(each.ended for each in told) - min(each.began for each in told)


@dataclass(frozen=True)
class Tool:
    """name; command: what to run for a piece of work; read: the records it left there."""

    name: str
    command: Callable[[Work], list[str]]
    read: Callable[[Work], tuple[dict[str, Told], dict[str, float]]]

    def run(self, work: Work) -> Ran:
        """Run it; SystemExit with its last words if it fails."""
        shutil.rmtree(work.folder, ignore_errors=True)
        work.folder.mkdir(parents=True)
        command = self.command(work)
        if work.core is not None:
            command = ["taskset", "-c", str(work.core), *command]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"COLUMNS": "150", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
        if self.name != "chabok":
            environment.pop("PYTHONPATH")
        log = work.folder / "log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=work.folder,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(LONGEST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise SystemExit(f"{self.name} was not done after {LONGEST_S} s") from None
        _reap()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if code:
            last = log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"{self.name} ended with exit status {code}:\n{last}")
        requests, more = self.read(work)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Ran(requests, cpu, more)


def _reap() -> None:
    """Wait for processes that a tool left behind, so that their time is counted."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def word(prompt: str) -> str:
    """By which a request is known again."""
    return prompt.split(" ", 1)[0]


# -- Chabok


def chabok() -> Tool:
    """The stopwatch, as a process that keeps raw timelines and measures them at the end, like ``bench``."""
    worker = Path(__file__).with_name("stopwatch_worker.py")

    def command(work: Work) -> list[str]:
        numbers = [str(work.streams), str(work.requests)]
        return [sys.executable, str(worker), work.url, *numbers, str(work.prompts), str(work.folder)]

    def read(work: Work) -> tuple[dict[str, Told], dict[str, float]]:
        found = json.loads((work.folder / "told.json").read_text())
        return {key: Told(*value) for key, value in found["requests"].items()}, found["more"]

    return Tool("chabok", command, read)


# -- guidellm


def guidellm(program: str) -> Tool:
    """guidellm's own command; records are in its JSON report."""

    def command(work: Work) -> list[str]:
        backend = f"kind=openai_http,target={work.url},model=m,request_format=/v1/chat/completions"
        return [program, "run", "--backend", f"{backend},validate_backend=false",
                "--profile", f"kind=concurrent,streams=[{work.streams}]",
                "--constraint", f"kind=max_requests,count={work.requests}",
                "--tokenizer", f"kind=huggingface_auto,model={_tokenizer(work.folder)}",
                "--data", f"kind=json_file,path={work.prompts}",
                "--output", "kind=json,path=report.json", "--disable-console"]  # fmt: skip

    def read(work: Work) -> tuple[dict[str, Told], dict[str, float]]:
        report = json.loads((work.folder / "report.json").read_text())
        found = {}
        for each in report["benchmarks"][0]["requests"]["successful"]:
            content = json.loads(each["request_args"])["body"]["messages"][0]["content"]
            text = content if isinstance(content, str) else content[0]["text"]
            found[word(text)] = Told(
                each["time_to_first_token_ms"] / 1000,
                each["inter_token_latency_ms"] / 1000,
                each["request_start_time"],
                each["request_end_time"],
            )
        return found, {}

    return Tool("guidellm", command, read)


# -- AIPerf


def aiperf(program: str) -> Tool:
    """AIPerf's own command; records are in its JSON lines, prompts in its inputs.json."""

    def command(work: Work) -> list[str]:
        return [program, "profile", "-m", "m", "-u", work.url, "--endpoint-type", "chat", "--streaming",
                "--input-file", str(work.prompts), "--custom-dataset-type", "single_turn",
                "--concurrency", str(work.streams), "--request-count", str(work.requests),
                "--tokenizer", str(_tokenizer(work.folder)), "--use-server-token-count", "--ui", "none",
                "--artifact-dir", str(work.folder / "found"), "--no-gpu-telemetry",
                "--no-server-metrics"]  # fmt: skip

    def read(work: Work) -> tuple[dict[str, Told], dict[str, float]]:
        inputs = json.loads((work.folder / "found" / "inputs.json").read_text())
        words = {each["session_id"]: word(_content(each["payloads"][0])) for each in inputs["data"]}
        found = {}
        with open(work.folder / "found" / "profile_export.jsonl") as lines:
            for line in lines:
                record = json.loads(line)
                about, metrics = record["metadata"], record["metrics"]
                if record.get("error") or "inter_token_latency" not in metrics:
                    continue
                found[words[about["conversation_id"]]] = Told(
                    metrics["time_to_first_token"]["value"] / 1000,
                    metrics["inter_token_latency"]["value"] / 1000,
                    about["request_start_ns"] / 1e9,
                    about["request_end_ns"] / 1e9,
                )
        return found, {}

    return Tool("aiperf", command, read)


def _content(payload: dict[str, Any]) -> str:
    content = payload["messages"][0]["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


def _tokenizer(folder: Path) -> Path:
    """A tokenizer of whole words, which both ask for although the server counts."""
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    unknown = {"id": 0, "content": "[UNK]", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}  # fmt: skip
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "x": 1}, "unk_token": "[UNK]"}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [unknown],
             "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
             "decoder": None, "model": model}  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(whole))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
