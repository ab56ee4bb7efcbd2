"""The stopwatch against real servers: what it sees agrees with what they say of themselves."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.models import model_path

from chabok.cli.main import main
from chabok.measure import DIALECTS, Endpoint, Request, Timeline, detect, measure

pytestmark = pytest.mark.wide

OUTPUT, TRIES = 24, 5
SEA = "Tell me of the sea, of ships, of the wind, and of those who sail far from home and come back late."


@pytest.fixture(scope="module")
def chabok() -> Iterator[str]:
    command = [sys.executable, "-m", "chabok", "serve", f"smollm2={model_path('smollm2')}", "--port", "0"]
    command += ["--no-prefix-disk", "--no-installed", "--no-log-requests"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        yield found[0]
        process.terminate()


@pytest.fixture(scope="module")
def llamacpp() -> Iterator[str]:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp, which carries llama.cpp's server, is not installed")
    script = Path(__file__).with_name("llamacpp.py")
    command = [
        sys.executable,
        str(script),
        str(model_path("smollm2")),
        "1",
    ]  # two that wait for each other are slow beside other work
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("http"):
            pytest.fail(f"llama.cpp's server did not start: {line!r}")
        yield line
        process.kill()


def ask(url: str, dialect: str, *prompts: str, output: int = OUTPUT) -> list[Request]:
    """Requests one after the other on a warm connection."""
    endpoint = Endpoint.at(url, dialect=dialect, model="smollm2")

    async def go() -> list[Request]:
        found = []
        async with endpoint.client() as client:
            await client.warm(1)
            loop = asyncio.get_running_loop()
            for number, prompt in enumerate(prompts):
                timeline = Timeline(number, 0.0, asked_output=output)
                await endpoint.time(client, endpoint.ask(prompt, output), timeline, loop.time())
                assert timeline.failure is None, timeline.failure
                found.append(measure(timeline))
        return found

    return asyncio.run(go())


def prompts(dialect: str) -> list[str]:
    """Prompts that no cache knows."""
    return [f"{number} {dialect}: {SEA}" for number in range(TRIES)]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_chabok_says_of_itself_what_the_stopwatch_sees_in_every_dialect(chabok: str, dialect: str) -> None:
    beyond_first, beyond_total = [], []
    for one in ask(chabok, dialect, *prompts(dialect)):
        told, usage = one.timeline.server, one.timeline.usage
        assert told is not None
        assert told.first_token_ms is not None
        assert told.total_ms is not None
        assert told.prefill_ms is not None
        assert one.ttft_s is not None
        assert one.e2e_s is not None
        assert told.prefill_ms <= told.first_token_ms <= told.total_ms
        assert usage.output_tokens == one.output_tokens
        assert 1 <= one.output_tokens <= OUTPUT
        assert usage.prompt_tokens is not None
        assert usage.prompt_tokens > len(SEA.split())
        assert one.source == "usage"
        beyond_first.append(one.ttft_s * 1000 - told.first_token_ms)
        beyond_total.append(one.e2e_s * 1000 - told.total_ms)
    # What lies between is the way there and back; a busy machine may delay some requests, but not all.
    assert min(beyond_first) > -0.5
    assert min(beyond_first) < 5
    assert min(beyond_total) > -0.5
    assert min(beyond_total) < 10


@pytest.mark.parametrize("dialect", ["openai-chat", "openai-completions", "openai-responses", "anthropic"])
def test_cached_tokens_are_seen(chabok: str, dialect: str) -> None:
    first, again = ask(chabok, dialect, f"cached {dialect}: {SEA}", f"cached {dialect}: {SEA}", output=16)
    cached, prompt = again.timeline.usage.cached_tokens, again.timeline.usage.prompt_tokens
    assert cached is not None
    assert prompt is not None
    assert prompt - 16 <= cached < prompt
    assert (first.timeline.usage.cached_tokens or 0) < cached


@pytest.mark.parametrize("dialect", ["openai-chat", "openai-completions"])
def test_llama_cpp_says_of_itself_what_the_stopwatch_sees(llamacpp: str, dialect: str) -> None:
    beyond, decode = [], []
    for one in ask(llamacpp, dialect, *prompts(dialect)):
        told = one.timeline.server
        assert told is not None
        assert told.source == "llama.cpp"
        assert told.prefill_ms is not None
        assert told.decode_ms is not None
        assert one.ttft_s is not None
        assert one.tpot_s is not None
        assert one.output_tokens == OUTPUT  # ignore_eos is kept
        assert one.timeline.usage.prompt_tokens is not None
        beyond.append(one.ttft_s * 1000 - told.prefill_ms)
        decode.append(one.tpot_s * (OUTPUT - 1) * 1000 / told.decode_ms)
    assert min(beyond) > -2
    assert min(beyond) < 25
    assert any(share == pytest.approx(1, abs=0.1) for share in decode)


@pytest.mark.parametrize("which", ["chabok", "llamacpp"])
def test_a_server_is_found_out_and_measured_to_a_verdict(
    which: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    url = request.getfixturevalue(which)
    endpoint = asyncio.run(detect(url))
    assert endpoint.dialect.name == "openai-chat"
    assert endpoint.model
    words = ["bench", url, "--seconds", "8", "--most-users", "2", "--output-tokens", "16", "-q"]
    assert main([*words, "--prompt-tokens", "64", "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for word in ("One user:", "Capacity:", "Bottleneck:", "prompts of 64 tokens, answers of 16"):
        assert word in out
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    # A busy machine may have no time left for two users.
    assert [level["users"] for level in report["levels"]] in ([1], [1, 2])
    assert not any(level["summary"]["failed"] for level in report["levels"])
