"""A conversation, typed at a terminal."""

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.processes import COMMAND, ROOT, environment

pexpect = pytest.importorskip("pexpect")


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, home: Path, *arguments: str, **env: str) -> None:
        self.child = pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], "run", "--temperature", "0", *arguments],
            cwd=str(ROOT),
            env=environment(CHABOK_HISTORY=str(home / "history"), TERM="dumb", **env),
            timeout=30,
            encoding="utf-8",
            dimensions=(40, 200),
        )
        self.ready()

    def ready(self) -> str:
        self.child.expect("\r?\n> |^> ")
        return str(self.child.before)

    def say(self, line: str) -> str:
        self.child.sendline(line)
        return self.ready()

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path, "--model", "endless", "--max-tokens", "8")
    yield terminal
    terminal.child.close(force=True)


def test_a_turn_is_answered_and_timed_and_ctrl_d_leaves(chat: Terminal) -> None:
    assert "8 tokens · band" in chat.say("hello")
    chat.child.sendeof()
    assert chat.end() == 0


def test_the_conversation_is_saved_and_taken_up_again(chat: Terminal, tmp_path: Path) -> None:
    chat.say("/system be brief")
    chat.say("one")
    chat.say("two")
    assert "4 messages" in chat.say(f"/save {tmp_path}/talk.json")
    found = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"] * 2
    assert found["system"] == "be brief"
    assert "forgotten" in chat.say("/clear")
    assert "4 messages" in chat.say(f"/load {tmp_path}/talk.json")
    assert "is no conversation" in chat.say(f"/load {ROOT}/pyproject.toml")
    assert "cannot read" in chat.say("/load /nowhere/at/all")
    assert "cannot write" in chat.say("/save /nowhere/at/all")
    chat.child.sendline("/quit")
    assert chat.end() == 0


def test_commands_explain_themselves(chat: Terminal) -> None:
    text = chat.say("/help")
    assert all(name in text for name in ("/clear", "/set NAME VALUE", "/save FILE", "/stats", "/quit"))
    assert "did you mean /stats?" in chat.say("/stat")
    assert "no answer yet" in chat.say("/stats")
    chat.say("hello")
    assert "prompt_tokens_per_s" in chat.say("/stats")
    assert "temperature must be a number" in chat.say("/set temperature hot")
    assert "max_tokens is 3 from" in chat.say("/set max-tokens 3")
    assert "3 tokens · band" in chat.say("hello")
    assert "max_tokens         3" in chat.say("/set")
    assert "needs a value" in chat.say("/set top_k")
    assert "/clear" in chat.say("/?")
    chat.child.sendline("/bye")
    assert chat.end() == 0


def test_several_lines_make_one_text(chat: Terminal, tmp_path: Path) -> None:
    chat.child.sendline("first \\")
    chat.child.expect(r"\. ")
    chat.say("second")
    chat.child.sendline('"""quoted')
    chat.child.expect(r"\. ")
    chat.child.sendline("")
    chat.child.expect(r"\. ")
    chat.say('end"""')
    chat.say(f"/save {tmp_path}/talk.json")
    said = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [said[0]["content"], said[2]["content"]] == ["first \nsecond", "quoted\n\nend"]


def test_ctrl_c_stops_the_answer_not_the_program(tmp_path: Path) -> None:
    chat = Terminal(tmp_path, "--model", "slow")
    chat.child.sendline("talk for ever")
    chat.child.expect("talk for ever\r?\n...")
    time.sleep(0.1)
    chat.child.sendintr()
    assert "stopped" in chat.ready()
    chat.child.sendintr()
    assert "/quit leaves" in chat.ready()
    assert "no command" in chat.say("/x")
    chat.child.sendeof()
    assert chat.end() == 0


def test_too_long_a_turn_is_said_and_the_chat_goes_on(chat: Terminal) -> None:
    for _ in range(2):
        chat.say("x" * 700)
    assert "the context is 2048 tokens" in chat.say("x" * 700)
    assert "8 tokens" in chat.say("short")


def test_lines_are_remembered_privately_and_at_once(chat: Terminal, tmp_path: Path) -> None:
    chat.say("remember me")
    chat.child.kill(9)
    history = tmp_path / "history"
    assert "remember me" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_locale_without_the_characters_typed_is_no_obstacle(tmp_path: Path) -> None:
    chat = Terminal(tmp_path, "--model", "endless", "--max-tokens", "4", LC_ALL="C")
    assert "4 tokens" in chat.say("سلام 🙂")
    chat.child.sendeof()
    assert chat.end() == 0


def test_a_history_that_cannot_be_kept_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    chat = Terminal(tmp_path, "--model", "endless", "--max-tokens", "4")
    assert "4 tokens" in chat.say("hello")
    chat.child.sendeof()
    assert chat.end() == 0
