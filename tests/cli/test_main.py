import subprocess
import sys
import time

import pytest
from tests.cli.processes import COMMAND, ROOT, chabok_run, environment

from chabok import __version__
from chabok.cli import main as cli
from chabok.cli.main import COMMANDS, Command, main
from chabok.errors import ChabokError


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())


def test_nothing_at_all_is_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: chabok" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = chabok_run(name, "--help")
    assert done.returncode == 0
    assert done.stdout.lower().startswith(f"usage: chabok {name}")
    assert done.stderr == ""


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chabok {__version__}\n"


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rnu", "hello"]) == 2
    assert "did you mean `chabok run`?" in capsys.readouterr().err
    assert main(["--frobnicate"]) == 2
    assert "`chabok --help` lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["show"], "chabok: missing argument 'model'; `chabok show --help` lists the options.\n"),
        (["list", "--jason"], "chabok: no such option: --jason"),
        (["rm", "a", "b"], "chabok: got unexpected extra argument"),
        (["doctor", "x"], "chabok: unrecognized arguments: x; `chabok doctor --help` lists the options.\n"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words: list[str], says: str) -> None:
    done = chabok_run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ChabokError("the file is damaged"), 1, "chabok: the file is damaged\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (OSError(28, "No space left on device"), 1, "chabok: No space left on device\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "chabok: /x: Permission denied\n"),
        (ValueError("odd"), 70, "CHABOK_DEBUG=1 shows where"),
    ],
)
def test_whatever_goes_wrong_ends_in_a_line_and_a_code(
    error: BaseException,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(arguments: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "fail", fail, raising=False)
    monkeypatch.setitem(COMMANDS, "fail", Command("chabok.cli.main", "fail", "", typer=False))
    monkeypatch.delenv("CHABOK_DEBUG", raising=False)
    assert main(["fail"]) == code
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    if code in (1, 70):
        monkeypatch.setenv("CHABOK_DEBUG", "1")
        with pytest.raises(type(error)):
            main(["fail"])


def test_help_is_instant_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from chabok.cli.main import main; main(['--help']); "
        "heavy = {'numpy', 'llvmlite', 'typer', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), cwd=ROOT, capture_output=True)
    assert time.perf_counter() - started < 2, "0.3 s is the aim; this machine may be busy"


def test_run_imports_nothing_it_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['chabok', 'run', 'hi', '--raw', '--max-tokens', '1', '--quiet']; "
        "import tests.cli.mocked; from chabok.cli.main import main; main(); "
        "heavy = {'typer', 'rich', 'jinja2', 'asyncio', 'pydantic', 'http'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, input=b"", check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = (
        " ".join(COMMAND) + " run --model endless --max-tokens 1500 hi | head -c 5; echo ${PIPESTATUS[0]}"
    )
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert done.stderr == b""
    assert done.stdout.decode().splitlines()[-1].endswith("141")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_closed_are_done_without(closed: str) -> None:
    command = " ".join([*COMMAND, "run", "hello", closed])
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, env=environment(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert bool(done.stdout) != (">&- " in f"{closed} ".replace("2>&-", ""))
    assert b"Traceback" not in done.stderr
