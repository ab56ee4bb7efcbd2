import argparse
import json
import os
import signal
import subprocess
import time
from dataclasses import fields

import pytest
from tests.cli.processes import COMMAND, ROOT, chabok_run, environment
from tests.engine.test_llm import mock_llm

from chabok import bands
from chabok.cli import params, speed
from chabok.cli.run import _parser
from chabok.cli.terminal import harmless
from chabok.engine.request import SamplingParams
from chabok.engine.timings import Timings
from chabok.errors import RequestError

GREEDY = ("--temperature", "0")


def answer(prompt: str, n: int = 16) -> str:
    with mock_llm() as llm:
        return llm.generate(prompt, SamplingParams(max_tokens=n)).text


def test_the_answer_alone_goes_to_standard_output_and_its_speed_to_standard_error() -> None:
    done = chabok_run("run", "hi", "--model", "endless", "--max-tokens", "16", *GREEDY)
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == answer("<user>hi\n<assistant>").rstrip("\n")
    line = done.stderr.strip()
    assert line.startswith("first token ")
    assert "(prompt 20 tokens, " in line
    assert " · 16 tokens · band: " in line
    assert "\x1b" not in line


def test_raw_leaves_the_template_out_and_quiet_the_line() -> None:
    done = chabok_run("run", "hi", "--model", "endless", "--max-tokens", "16", "--raw", "--quiet", *GREEDY)
    assert done.stdout.rstrip("\n") == answer("hi").rstrip("\n")
    assert done.stderr == ""


def test_piped_text_comes_below_the_prompt() -> None:
    options = ("--model", "endless", "--max-tokens", "16", "--raw", "-q", *GREEDY)
    assert chabok_run("run", *options, stdin="piped\n").stdout.rstrip("\n") == answer("piped").rstrip("\n")
    both = chabok_run("run", "Explain", *options, stdin="piped\n").stdout
    assert both.rstrip("\n") == answer("Explain\n\npiped").rstrip("\n")


def test_bytes_that_are_no_text_are_taken_as_well_as_possible() -> None:
    done = chabok_run("run", "--raw", "-q", "--max-tokens", "4", stdin=b"\xff\xfe\x00caf\xc3\xa9")
    assert done.returncode == 0


def test_json_holds_text_tokens_and_timings() -> None:
    done = chabok_run(
        "run", "hi", "--model", "endless", "--max-tokens", "8", "--json", "--logprobs", "2", *GREEDY
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["finish_reason"] == "length"
    assert len(found["tokens"]) == len(found["logprobs"]) == len(found["top_logprobs"]) == 8
    assert found["text"] == answer("<user>hi\n<assistant>", 8)
    assert found["timings"]["output_tokens"] == 8
    assert found["timings"]["first_token_s"] > 0
    assert found["model"] == "endless"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["x", "--top-p", "3"], "top_p must be a number greater than 0 and at most 1, not 3.0"),
        (["x", "--context", "0"], "context must be an integer of at least 1"),
        (["x" * 3000], "the context is 2048 tokens"),
        ([], "there is nothing to answer"),
        (["x", "--raw", "--system", "y"], "--system belongs to the chat template"),
        (["x", "--logit-bias", "3"], "logit_bias takes ID=NUMBER"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], says: str) -> None:
    done = chabok_run("run", *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("chabok: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = chabok_run("run", "x", "--temprature", "1")
    assert done.returncode == 2
    assert "--temprature" in done.stderr


def test_a_value_of_the_wrong_kind_is_said_plainly() -> None:
    assert (
        "--temperature: must be a number, not 'hot'" in chabok_run("run", "x", "--temperature", "hot").stderr
    )
    assert "--threads: must be an integer, not '1.5'" in chabok_run("run", "x", "--threads", "1.5").stderr


def test_options_may_stand_between_the_words_of_a_prompt() -> None:
    done = chabok_run("run", "--raw", "a", "-q", "b", "--max-tokens", "4", *GREEDY, "--", "--c")
    assert done.stdout.rstrip("\n") == answer("a b --c", 4).rstrip("\n")


def test_more_threads_than_cores_are_pointed_out() -> None:
    assert "500 threads share" in chabok_run("run", "x", "--threads", "500").stderr
    assert "threads share" not in chabok_run("run", "x", "--threads", "1").stderr


def test_ctrl_c_ends_the_answer_and_tells_the_speed_so_far() -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "hi", "--model", "slow"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(3)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err.decode()
    assert "first token" in err.decode()


def test_input_that_does_not_end_is_pointed_out() -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "run", "hi", "--raw", "--max-tokens", "2"],
        stdin=reading,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stderr is not None
    assert b"waiting for standard input to end" in process.stderr.readline()
    os.close(writing)
    process.communicate(timeout=20)
    os.close(reading)
    assert process.returncode == 0


def test_every_sampling_parameter_is_a_flag_of_the_same_name() -> None:
    parser = _parser()
    values: dict[str, object] = {}
    words = ["hi"]
    for item in fields(SamplingParams):
        flag = "--" + item.name.replace("_", "-")
        if item.name == "ignore_eos":
            words.append(flag)
            values[item.name] = True
        elif item.name == "logit_bias":
            words += [flag, "3=-1.5", flag, "4=2"]
            values[item.name] = {3: -1.5, 4: 2.0}
        elif item.name == "stop":
            words += [flag, "a", flag, "b"]
            values[item.name] = ("a", "b")
        elif item.name == "stop_token_ids":
            words += [flag, "1", flag, "2"]
            values[item.name] = (1, 2)
        else:
            words += [flag, "1"]
            values[item.name] = 1
    assert params.from_flags(parser.parse_args(words)) == SamplingParams(**values)  # type: ignore[arg-type]
    assert params.from_flags(parser.parse_args([])) == SamplingParams(**params.DEFAULTS)


def test_parameters_are_set_from_text() -> None:
    start = SamplingParams(temperature=0.7)
    assert params.changed(start, "top_k", "40") == SamplingParams(temperature=0.7, top_k=40)
    assert params.changed(start, "ignore-eos", "on").ignore_eos
    assert params.changed(start, "stop", "END").stop == ("END",)
    assert params.changed(SamplingParams(temperature=2, top_k=5), "temperature", "default").temperature == 0.7
    assert params.changed(SamplingParams(temperature=2, top_k=5), "top_k", "default").top_k == 0
    assert params.changed(start, "max_tokens", "none").max_tokens is None
    for name, text, says in [
        ("tempo", "1", "there is no sampling parameter 'tempo'"),
        ("temperature", "warm", "temperature must be a number, not 'warm'"),
        ("top_k", "1.5", "top_k must be an integer"),
        ("ignore_eos", "maybe", "true or false"),
    ]:
        with pytest.raises(RequestError, match=says):
            params.changed(start, name, text)


def test_help_shows_the_defaults_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default 0.7)" in text
    assert "(default 0.95)" in text


def test_escape_sequences_cannot_reach_a_terminal() -> None:
    assert harmless("\x1b]0;owned\x07\x9b2J\r\x7f") == "␛]0;owned␇�2J␍␡"
    assert harmless("line\n\ttab é 漢 سلام\u200c") == "line\n\ttab é 漢 سلام\u200c"


def test_the_last_line_reads_as_documented() -> None:
    timings = Timings(
        first_token_s=0.031, prefill_s=0.0312, decode_s=127 / 312, prompt_tokens=24, output_tokens=128
    )
    assert speed.summary(timings) == (
        "first token 31 ms (prompt 24 tokens, 769 tok/s) · 312 tok/s · 128 tokens"
        " · band: faster than one can follow"
    )
    cached = Timings(first_token_s=1.5, prefill_s=0.01, prompt_tokens=100, cached_tokens=64, output_tokens=1)
    assert speed.summary(cached) == "first token 1.5 s (prompt 100 tokens, 64 cached, 3600 tok/s) · 1 token"
    assert speed.summary(Timings(prompt_tokens=3)) == "0 tokens"


@pytest.mark.parametrize(
    ("tokens_per_s", "word"),
    [
        (3, "slow"),
        (60, "fair"),
        (100, "keeps pace with a person"),
        (150, "very fast"),
        (250, "faster than one can follow"),
    ],
)
def test_speed_has_a_word(tokens_per_s: float, word: str) -> None:
    assert bands.speed(tokens_per_s) == word


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        _parser().parse_args(["hi", "--temp", "1"])
