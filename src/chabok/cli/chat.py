"""A conversation on a terminal."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from chabok.cli import params, speed
from chabok.cli.history import History
from chabok.cli.run import written
from chabok.cli.terminal import Answer, harmless, note
from chabok.engine.request import SamplingParams
from chabok.errors import ChabokError, RequestError

if TYPE_CHECKING:
    from chabok.engine.llm import LLM
    from chabok.engine.timings import Timings


_SYNONYMS = {"?": "help", "exit": "quit", "bye": "quit"}
"""What people type who come from other programs."""


class Leave(Exception):  # noqa: N818 - not an error
    """The user wants to go."""


class Chat:
    """Reads what the user says, answers, and obeys /commands; ``messages`` is the conversation so far."""

    def __init__(self, llm: LLM, sampling: SamplingParams, *, system: str | None, quiet: bool) -> None:
        self.llm = llm
        self.sampling = sampling
        self.system = system
        self.quiet = quiet
        self.messages: list[dict[str, str]] = []
        self.last: Timings | None = None
        self.commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "help": ("", "show this", self._help),
            "clear": ("", "forget the conversation", self._clear),
            "system": ("TEXT", "tell the model how to behave", self._system),
            "set": ("NAME VALUE", "change a sampling parameter; without NAME, show them", self._set),
            "save": ("FILE", "write the conversation to a JSON file", self._save),
            "load": ("FILE", "take up a conversation that was saved", self._load),
            "stats": ("", "show where the time of the last answer went", self._stats),
            "quit": ("", "leave (so does Ctrl-D)", self._quit),
        }

    def run(self) -> int:
        """Converse until the user leaves; the exit code."""
        if not self.quiet:
            note(
                f"{self.llm.name}, context {self.llm.context} tokens\n"
                "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
            )
        with History() as history:
            while True:
                try:
                    text = history.ask()
                except KeyboardInterrupt:
                    print()
                    note("Ctrl-D or /quit leaves.")
                    continue
                if text is None:
                    print()
                    return 0
                try:
                    self._take(text)
                except Leave:
                    return 0
                except ChabokError as error:
                    print(harmless(str(error)), file=sys.stderr)

    def _take(self, text: str) -> None:
        text = text.strip()
        if text.startswith("/"):
            self._command(text[1:])
        elif text:
            self._answer(text)

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        answer = Answer()
        completion = written(self.llm.chat([*head, *messages], self.sampling, stream=True), answer)
        answer.end()
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        self.last = completion.timings
        if not self.quiet:
            stopped = " · stopped" if completion.finish_reason == "cancelled" else ""
            note(speed.summary(completion.timings) + stopped)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        found = self.commands.get(_SYNONYMS.get(name, name))
        if found is None:
            near = difflib.get_close_matches(name, self.commands, 1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
            raise RequestError(f"there is no command /{name}; {hint}")
        found[2](rest.strip())

    def _help(self, _: str) -> None:
        for name, (argument, text, _call) in self.commands.items():
            print(f"  /{name + ' ' + argument:18} {text}")
        print('A line that ends with \\ goes on in the next; """ opens and closes a text of several lines.')

    def _clear(self, _: str) -> None:
        self.messages = []
        note("The conversation is forgotten.")

    def _system(self, text: str) -> None:
        if not text:
            note(f"The system text is: {self.system}" if self.system else "There is no system text.")
            return
        self.system = text
        note("From the next answer on.")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if name and value:
            self.sampling = params.changed(self.sampling, name, value.strip())
            name = name.replace("-", "_")
            note(f"{name} is {getattr(self.sampling, name)!r} from the next answer on.")
            return
        if name:
            raise RequestError(f"/set {name} needs a value, as in /set temperature 0.7")
        for item in fields(SamplingParams):
            print(f"  {item.name:18} {getattr(self.sampling, item.name)!r:10} {item.metadata['help']}")

    def _save(self, name: str) -> None:
        path = _path(name, "save")
        body = {"model": self.llm.name, "system": self.system, "messages": self.messages}
        # Under another name first: a full disk must not cost the file that was there.
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RequestError(f"cannot write {path}: {error.strerror}") from None
        note(f"{len(self.messages)} messages are in {path}.")

    def _load(self, name: str) -> None:
        path = _path(name, "load")
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RequestError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise RequestError(f"{path} is no conversation: {error}") from None
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise RequestError(f"{path} is no conversation: it needs messages with a role and a content")
        system = body.get("system")
        self.messages = messages
        self.system = system if isinstance(system, str) else self.system
        note(f"{len(messages)} messages of {path} are taken up.")

    def _stats(self, _: str) -> None:
        if self.last is None:
            note("There was no answer yet.")
            return
        for name, value in self.last.to_dict().items():
            shown = speed.milliseconds(value) if name.endswith("_s") and "per" not in name else f"{value:.6g}"
            print(f"  {name:20} {shown}")

    def _quit(self, _: str) -> None:
        raise Leave


def _path(name: str, command: str) -> Path:
    if not name:
        raise RequestError(f"/{command} needs the name of a file")
    return Path(name).expanduser()


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
