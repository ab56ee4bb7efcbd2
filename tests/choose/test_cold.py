"""What a first request costs: stages of starts, and of endpoints that load when they are asked."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from chabok.choose.cold import Start, _report, _Times, endpoint, local
from chabok.cli.cold import main
from chabok.errors import ChabokError, RequestError
from chabok.measure.failures import MeasureError

FIXTURES = Path(__file__).parents[1] / "fixtures"


class Sleeper(BaseHTTPRequestHandler):
    """Answers as Ollama does; has to load for 80 ms whenever it was left alone for 200 ms."""

    protocol_version = "HTTP/1.1"
    last = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"models": [{"name": "sleeper"}]}
        self._say(json.dumps(models if "tags" in self.path else {"models": []}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        cold = time.monotonic() - Sleeper.last > 0.2
        if cold:
            time.sleep(0.08)
        time.sleep(0.01)
        Sleeper.last = time.monotonic()
        token = {"model": "sleeper", "message": {"role": "assistant", "content": "Rhine"}, "done": False}
        end = {"model": "sleeper", "message": {"role": "assistant", "content": ""}, "done": True,
               "done_reason": "stop", "load_duration": 80_000_000 if cold else 0, "prompt_eval_count": 9,
               "prompt_eval_duration": 8_000_000, "eval_count": 1, "eval_duration": 1_000_000}  # fmt: skip
        self._say(json.dumps(token).encode() + b"\n" + json.dumps(end).encode() + b"\n")

    def _say(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def sleeper() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Sleeper)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Sleeper.last = 0.0
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_endpoint_that_loads_when_asked_shows_it(sleeper: str) -> None:
    report = asyncio.run(endpoint(sleeper, dialect="ollama-chat", idle_s=0.3, rounds=2))
    cold, warm = report.starts
    assert cold.stages["load (server says)"] == pytest.approx(0.08)
    assert cold.seconds >= 0.09
    assert warm.seconds < cold.seconds
    assert report.remedies[0].name == "keep-alive"
    assert report.remedies[0].saved_s == pytest.approx(cold.seconds - warm.seconds)
    assert report.prompt_tokens == 9
    assert not report.notes


def test_an_endpoint_that_was_warm_is_said_to_be(sleeper: str) -> None:
    Sleeper.last = time.monotonic() + 1000
    report = asyncio.run(endpoint(sleeper, dialect="ollama-chat"))
    assert any("--idle" in note for note in report.notes)


def test_an_endpoint_that_is_not_there_is_an_error_for_people() -> None:
    with pytest.raises(MeasureError):
        asyncio.run(endpoint("http://127.0.0.1:9", dialect="ollama-chat"))
    with pytest.raises(RequestError):
        asyncio.run(endpoint("http://127.0.0.1:9", rounds=0))


def test_stages_of_starts_are_differences_between_them(tmp_path: Path) -> None:
    def times(load: float, *answers: float) -> list[_Times]:
        return [_Times(0.01, 0.1, load, tuple((each, 10, 0) for each in answers))]

    kinds = {
        "never before": times(2.5, 0.05),
        "kernels kept": times(0.9, 0.05),
        "weights packed": times(1.7, 0.05),
        "warm": times(0.2, 0.05, 0.04),
    }
    report = _report("m.gguf", kinds, times(0.2, 0.3), times(0.2, 0.1), 1, tmp_path)
    by_name = {each.name: each for each in report.starts}
    first = by_name["never before"].stages
    assert by_name["weights packed"].stages["compile kernels"] == pytest.approx(1.5)
    assert by_name["kernels kept"].stages["pack weights"] == pytest.approx(0.7)
    assert first["compile kernels"] + first["pack weights"] == pytest.approx(2.3)
    assert by_name["never before"].seconds == pytest.approx(0.01 + 0.1 + 2.5 + 0.05)
    remedies = {each.name: each for each in report.remedies}
    assert remedies["preload"].after_s == pytest.approx(0.04)
    assert remedies["prefix cache on disk"].saved_s == pytest.approx(0.2)
    assert "nothing of the long prompt" in report.notes[0]
    assert json.loads(json.dumps(report.to_dict()))["schema"] == "chabok.cold/1"
    assert "<table>" in report._repr_html_()


def test_the_first_token_is_the_sum_of_its_stages() -> None:
    assert Start("warm", {"load": 0.25, "first prompt": 0.5}).seconds == 0.75


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChabokError):
        local(tmp_path / "none.gguf")
    with pytest.raises(RequestError, match="rounds"):
        local(FIXTURES / "llama.gguf", rounds=0)
    with pytest.raises(RequestError, match="--idle"):
        main(["smollm2", "--idle", "3"])


def test_a_model_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ChabokError, match="broken"):
        local(broken, rounds=1)


@pytest.mark.wide
def test_fresh_processes_compile_pack_and_find_prefixes_on_disk() -> None:
    report = local(FIXTURES / "llama.gguf", rounds=1)
    assert [each.name for each in report.starts] == [
        "never before", "kernels kept", "weights packed", "warm", "hot (preloaded)"
    ]  # fmt: skip
    assert report.starts[0].stages["compile kernels"] > 0
    assert report.long_prompt_tokens > 64
    assert not report.notes
