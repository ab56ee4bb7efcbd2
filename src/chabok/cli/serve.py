"""``chabok serve``: models behind the interfaces that clients already speak."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chabok.cli.params import Parser
from chabok.server import settings as known
from chabok.server.settings import ModelSettings, Settings

if TYPE_CHECKING:
    import socket

    from chabok.server.roster import Roster

log = logging.getLogger("chabok.server")

MODEL_FLAGS = (
    "threads", "context", "max_batch", "max_queue", "kv_memory", "itl_budget_ms", "keep_alive", "pack",
)  # fmt: skip
"""Settings of models that the command line takes for all of them."""


def main(arguments: list[str]) -> int:
    """Run the command; the exit code."""
    found = vars(parser().parse_intermixed_args(arguments))
    if found["new_key"] is not None:
        return _new_key(found["new_key"], found["api_keys"])
    from chabok.server import config

    settings = config.settings(
        found["models"],
        server={name: found[name] for name in known.options(Settings) if found[name] is not None},
        models={name: found[name] for name in MODEL_FLAGS if found[name] is not None},
        config=found["config"],
    )
    if found["check"]:
        from chabok.server.checking import check

        return 0 if check(settings) else 1
    return _serve(settings)


def parser() -> argparse.ArgumentParser:
    """The command line, made of the settings."""
    made = Parser(
        "chabok serve",
        description="Serve models to OpenAI, Anthropic and Ollama clients. Settings come from the command "
        "line, else from the file given with --config, else from the defaults shown here.",
        allow_abbrev=False,
    )
    made.hints = dict.fromkeys(("-m", "--model", "--models"), "models go without: chabok serve smollm2")
    add = made.add_argument
    add(
        "models",
        nargs="*",
        metavar="MODEL",
        help="a name, a GGUF file, hf:owner/repo, or NAME=SOURCE; the first is the default one "
        "(default: smollm2, or those of the configuration)",
    )
    add("--config", type=Path, metavar="FILE", help="TOML file of settings")
    add("--check", action="store_true", help="check all settings, print what would be served, and end")
    add("--new-key", metavar="NAME", help="make an API key, print it once, and end; with --api-keys FILE")
    _add(made.add_argument_group("for every model"), ModelSettings, MODEL_FLAGS)
    _add(made.add_argument_group("the server"), Settings, tuple(known.options(Settings)))
    return made


def _add(group: Any, kind: type[Settings] | type[ModelSettings], names: tuple[str, ...]) -> None:
    from chabok.server.kinds import FLAG

    options = known.options(kind)
    for name in names:
        how, default, text = options[name]
        flag = "--" + name.replace("_", "-")
        text += shown(name, default)
        if how is FLAG:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif isinstance(default, tuple):
            text += "; may be repeated"
            group.add_argument(flag, action="append", metavar=how.metavar, help=text)
        else:
            group.add_argument(flag, metavar=how.metavar, help=text.replace("%", "%%"))


def shown(name: str, default: Any) -> str:
    """A default as help tells it, if it tells something."""
    if default is None or default == () or isinstance(default, bool):
        return ""
    return f" (default {told(default, name)})"


def told(default: Any, name: str) -> str:
    """A default for people."""
    if default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    if name in ("max_body", "max_headers"):
        return f"{default // 1024} KiB"
    if name.endswith(("_timeout", "keep_alive")):
        return known.seconds(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _new_key(name: str, path: str | None) -> int:
    from chabok.errors import RequestError

    if path is None:
        raise RequestError("--new-key needs --api-keys FILE, the file that keeps what keys are known by")
    from chabok.server.keyfile import new_key

    print(new_key(name, Path(path).expanduser()))
    print(f"chabok: this is the only time the key of {name} is shown; {path} holds its hash", file=sys.stderr)
    return 0


def _serve(settings: Settings) -> int:
    from chabok.server import logs
    from chabok.server.app import build
    from chabok.server.auth import Keys
    from chabok.server.listening import check_exposure, listen
    from chabok.server.roster import Roster
    from chabok.server.running import Server

    keys = Keys(settings.api_keys)
    check_exposure(settings, bool(keys))
    logs.configure(settings)
    roster = Roster(settings)
    if sys.stderr.isatty():
        _fetch(settings)
    sockets = listen(settings)
    banner = Banner(settings, roster, sockets)
    app = build(roster, settings, keys)
    server = Server(
        app,
        roster,
        settings,
        sockets,
        listening=banner.listening,
        ready=banner.ready,
        hangup=keys.reload if settings.api_keys else None,
    )
    server.run_to_end()
    return 0


def _fetch(settings: Settings) -> None:
    """Fetch what is not here while somebody watches, with bars; where nobody does, the log tells."""
    from chabok.checkpoints import sources
    from chabok.cli.progress import Bars

    for model in settings.models:
        with Bars() as bars:
            if sources.find(model.source) is None:
                sources.resolve(model.source, bars)


class Banner:
    """What somebody at a terminal wants to know: where it is, what is served, how to try it."""

    def __init__(self, settings: Settings, roster: Roster, sockets: list[socket.socket]) -> None:
        from chabok.server.listening import address_of, reach_of

        self._settings, self._roster = settings, roster
        self._address, self._reach = address_of(settings, sockets), reach_of(settings)

    def listening(self) -> None:
        """Say where the server is."""
        self._say(f"Chabok listens at {self._address}{self._reach}")

    def ready(self) -> None:
        """Say what is served and how to try it."""
        from chabok.checkpoints.storage import format_bytes

        for entry in self._roster.entries():
            state = "loaded" if entry.loaded else "on demand"
            size = f", {format_bytes(entry.size_bytes)}, {entry.context} tokens" if entry.size_bytes else ""
            self._say(f"  {entry.name} ({state}{size})")
        if not sys.stderr.isatty() or self._settings.log_format == "json":
            return
        name = self._settings.models[0].name
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        at = self._address
        if self._settings.socket is not None:
            at = f"--unix-socket {self._settings.socket} http://localhost"
        key = " -H 'Authorization: Bearer KEY'" if self._settings.api_keys else ""
        self._say(f"Try:  curl {at}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
        if self._settings.page and self._settings.socket is None:
            self._say(f"Chat: {self._address}/")
        self._say("Ctrl-C stops it.")

    def _say(self, line: str) -> None:
        """A line for people; who asks for a log in JSON gets nothing else."""
        if self._settings.log_format == "json":
            log.info(line.strip())
        else:
            print(line, file=sys.stderr, flush=True)
