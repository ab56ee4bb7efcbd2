"""``chabok``: finds the command and runs it; whatever goes wrong ends in one clear line.

The command line is answered before anything heavy is imported. ``run`` and ``doctor`` take their arguments
with argparse: ``run`` has to speak within half a second of being started, and typer takes a fifth of that to
import and to build its checks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

DEBUG = "CHABOK_DEBUG"


class Command(NamedTuple):
    """Where a command lives: its module, the function in it, and what it does in a few words."""

    module: str
    function: str
    summary: str
    typer: bool = True

    def run(self, name: str, arguments: list[str]) -> int:
        """Run with command-line arguments; the exit code."""
        from importlib import import_module

        function = getattr(import_module(self.module), self.function)
        if self.typer:
            return _run_typer(name, function, arguments)
        code: int = function(arguments)
        return code


COMMANDS = {
    "run": Command("chabok.cli.run", "main", "Answer a prompt, or chat", typer=False),
    "serve": Command("chabok.cli.serve", "main", "Serve models to the clients people have", typer=False),
    "bench": Command("chabok.cli.bench", "main", "Measure any server, or a model without one", typer=False),
    "report": Command(
        "chabok.cli.report", "main", "Show a saved measurement, as text, page or data", typer=False
    ),
    "diff": Command("chabok.cli.diff", "main", "Compare measurements, also to fail a build", typer=False),
    "turn": Command("chabok.cli.turn", "main", "What a faster model gives a whole turn of work", typer=False),
    "roofline": Command(
        "chabok.cli.roofline",
        "main",
        "What this machine can reach with a model, before fetching it",
        typer=False,
    ),
    "cold": Command(
        "chabok.cli.cold", "main", "What a first request costs, and what removes it", typer=False
    ),
    "compare": Command(
        "chabok.cli.compare", "main", "Speed, price and quality of several, side by side", typer=False
    ),
    "pull": Command("chabok.cli.pull", "pull", "Fetch a model before it is needed"),
    "list": Command("chabok.cli.list", "list_", "Show the models on this machine"),
    "show": Command("chabok.cli.show", "show", "Show what a model file holds"),
    "rm": Command("chabok.cli.rm", "rm", "Remove a model"),
    "doctor": Command("chabok.cli.doctor", "main", "Show what this machine offers", typer=False),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _open_missing_streams()
    try:
        return _guarded(lambda: _dispatch(words))
    finally:
        _flush()


def _open_missing_streams() -> None:
    """Stand in for what the caller closed (``>&-``): else the next file opened would be taken for it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            free = os.open(os.devnull, os.O_RDWR)
            if free != number:
                os.dup2(free, number)
                os.close(free)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(_help())
        return 0
    if words[0] in ("--version", "-V", "version"):
        from chabok import __version__

        print(f"chabok {__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is not None:
        return command.run(words[0], words[1:])
    import difflib

    near = difflib.get_close_matches(words[0], COMMANDS, 2)
    hint = (
        f"did you mean {' or '.join(f'`chabok {name}`' for name in near)}?"
        if near
        else "`chabok --help` lists the commands."
    )
    return _complain(f"there is no command or option {words[0]!r}; {hint}", 2)


def _help() -> str:
    rows = "\n".join(f"  {name:8} {command.summary}" for name, command in COMMANDS.items())
    return (
        "Usage: chabok COMMAND ...\n\nRuns open-weight language models on this machine, fast.\n\n"
        f"Commands:\n{rows}\n\nOptions:\n  --help     Show this, or a command's own help after its name\n"
        "  --version  Show the version\n\n"
        'Try: chabok run "Write a haiku about the ocean"'
    )


def _run_typer(name: str, function: Callable[..., object], arguments: list[str]) -> int:
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(function)
    try:
        code = app(arguments, prog_name=f"chabok {name}", standalone_mode=False)
    except typer.Abort:  # no answer to a question
        print(file=sys.stderr)
        return 1
    except Exception as error:
        # A mistake on the command line; its class is click's, or that of the copy of click in newer typers.
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        message = str(said()).rstrip(".")
        return _complain(f"{message[:1].lower()}{message[1:]}; `chabok {name} --help` lists the options.", 2)
    return code if isinstance(code, int) else 0


def _guarded(run: Callable[[], int]) -> int:
    """Run, and turn what is raised into a line on standard error and an exit code."""
    from chabok.errors import ChabokError

    try:
        return run()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141  # as the shell reports a program that SIGPIPE ended
    except ChabokError as error:
        if os.environ.get(DEBUG):
            raise
        return _complain(str(error), 1)
    except MemoryError:
        if os.environ.get(DEBUG):
            raise
        return _complain("there is not enough memory for this; a smaller model or context may fit", 1)
    except OSError as error:
        if os.environ.get(DEBUG):
            raise
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return _complain(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        return _complain(
            f"unexpected {type(error).__name__}: {error}\n"
            f"This is a fault of Chabok or of this machine; {DEBUG}=1 shows where it happened.",
            70,
        )


def _complain(message: str, code: int) -> int:
    from chabok.cli.terminal import harmless

    # Messages quote what files and people say.
    print(f"chabok: {harmless(message)}", file=sys.stderr)
    return code


def _flush() -> None:
    """Flush standard output; if it takes no more, do not let the interpreter complain about it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
