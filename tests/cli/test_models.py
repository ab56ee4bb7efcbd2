from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.checkpoints.writing import gguf_bytes, small_model
from typer.testing import CliRunner

from chabok.checkpoints.gguf import GGUF
from chabok.checkpoints.packed import PackedEntry, PackedStore
from chabok.cli.list import list_
from chabok.cli.pull import pull
from chabok.cli.rm import rm
from chabok.cli.show import show
from chabok.errors import SourceError

app = typer.Typer()
app.command("pull")(pull)
app.command("list")(list_)
app.command("show")(show)
app.command("rm")(rm)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHABOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "home" / "ollama"))
    return tmp_path / "cache"


@pytest.fixture
def fetched(cache: Path) -> Path:
    """A model as if fetched from the hub."""
    path = cache / "models" / "hub" / "owner" / "repo" / "m[bold]-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(small_model())
    return path


def run(*arguments: str, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, arguments, input=answer, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list_is_helpful_when_empty_and_knows_the_catalogue() -> None:
    assert "chabok pull smollm2" in run("list")
    assert json.loads(run("list", "--json")) == []
    rows = json.loads(run("list", "--all", "--json"))
    assert {"qwen3:30b-a3b", "llama3.3:70b", "gemma3:270m", "smollm2"} <= {row["name"] for row in rows}
    assert "not fetched" in run("list", "--all")


def test_names_stay_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("40", "60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert "qwen3-coder:30b-a3b " in run("list", "--all")


def test_what_reads_a_pipe_gets_whole_lines(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    path = cache / ("long" * 30) / "model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(small_model())
    assert str(path) in run("show", str(path))


def test_list_shows_what_is_here(fetched: Path) -> None:
    (row,) = json.loads(run("list", "--json"))
    assert row["name"] == "hf:owner/repo/m[bold]-Q4_0.gguf"
    assert (row["installed"], row["bytes"], row["path"]) == (True, len(small_model()), str(fetched))
    assert "[bold]" in run("list")  # a name is not markup


def test_show_tells_what_is_in_a_file(fetched: Path) -> None:
    facts = json.loads(run("show", str(fetched), "--json"))
    assert facts["architecture"] == "llama"
    assert facts["parameters"] == 64 * 4 + 16 + 512 + 48
    assert facts["tensors"]["Q4_K"] == {"count": 1, "bytes": 288}
    assert facts["vocabulary"] == 6
    assert facts["chat_template"] is False
    assert facts["fingerprint"] == GGUF.open(fetched).fingerprint
    text = run("show", str(fetched))
    assert "سلام 你好 🙂" in text
    assert "Q4_K 1 (288 bytes)" in text


def test_what_a_file_says_of_itself_does_not_act_on_the_terminal(tmp_path: Path) -> None:
    path, evil = tmp_path / "evil.gguf", "\x1b[31mred\x1b]0;title\x07 \x9b"
    path.write_bytes(
        gguf_bytes({"general.architecture": "llama", "general.name": evil, "general.license": evil})
    )
    shown = run("show", str(path))
    assert "red" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_a_licence_that_is_no_text_is_none(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama", "general.license": ["mit"]}))
    assert json.loads(run("show", "--json", str(path)))["licence"] is None


def test_show_tells_of_a_model_that_could_be_fetched() -> None:
    assert json.loads(run("show", "qwen3:8b", "--json"))["installed"] is False
    assert "chabok pull qwen3:8b" in run("show", "qwen3:8b")
    with pytest.raises(SourceError, match="chabok pull hf:a/b"):
        run("show", "hf:a/b")
    with pytest.raises(SourceError, match="did you mean qwen3:8b"):
        run("show", "qwen3-8b")


def test_rm_removes_the_model_and_its_packed_weights(fetched: Path) -> None:
    store = PackedStore()
    key = GGUF.open(fetched).fingerprint + "-avx2"
    store.create(key, [PackedEntry("w", 10_000, lambda array: array.fill(1))], {})
    assert json.loads(run("show", str(fetched), "--json"))["packed_bytes"] >= 10_000
    name = "hf:owner/repo/m[bold]-Q4_0.gguf"
    declined = CliRunner().invoke(app, ["rm", name], input="n\n")
    assert declined.exit_code == 1
    assert fetched.exists()
    assert "removed" in run("rm", name, "--yes")
    assert not fetched.exists()
    assert store.sizes() == {}


def test_rm_touches_nothing_of_others(tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(small_model())
    theirs = tmp_path / "home" / ".lmstudio" / "models" / "pub" / "repo" / "m.gguf"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(small_model())
    for name, words in [
        (str(mine), "not fetched by Chabok"),
        ("pub/repo", "belongs to LM Studio"),
        ("qwen3:8b", "not on"),
    ]:
        with pytest.raises(SourceError, match=words):
            run("rm", name, "--yes")
    assert mine.exists()
    assert theirs.exists()


def test_pull_of_what_is_here_prints_its_path(fetched: Path) -> None:
    output = run("pull", "hf:owner/repo")
    assert "already here" in output
    assert output.splitlines()[-1] == str(fetched)
    assert run("pull", "-q", "hf:owner/repo").strip() == str(fetched)


def test_the_commands_import_nothing_heavy() -> None:
    code = (
        "import chabok.cli.pull, chabok.cli.list, chabok.cli.show, chabok.cli.rm, sys;"
        "heavy = {'numpy', 'huggingface_hub', 'filelock', 'jinja2', 'tokenizers', 'llvmlite'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
