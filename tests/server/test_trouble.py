"""What goes wrong around a server: full disks, output that nobody reads, others on its port, signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.checkpoints.disks import disk, make_read_only
from tests.cli.processes import ROOT, environment
from tests.server.breaking import Alone, Process, greedy, serving, tiny
from tests.server.test_crowds import Streams

LONG = "A prompt that fills several pages of the cache, so that there is something to be written. " * 8


def ask(server: Process, prompt: str, alone: Alone) -> dict[str, object]:
    """The timings of an answer, which must be that computed alone."""
    body = greedy(prompt, 5)
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == alone(body)
    timings: dict[str, object] = answer.json()["timings"]
    return timings


def warnings(server: Process) -> list[str]:
    return [line for line in server.said.splitlines() if re.match(r"\S+ warning", line)]


def test_a_disk_that_is_full_is_warned_of_once_and_serving_goes_on(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    options = (f"tiny={path}", "--no-pack", "--prefix-disk-size", "1GB")
    with disk(tmp_path / "disk", 900) as small, serving(small / "cache", *options, logs=tmp_path) as server:
        for i in range(8):
            ask(server, f"{i} {LONG}", alone)
            if i % 2:
                ask(server, f"{i} {LONG}", alone)
        until = time.monotonic() + 10
        while not warnings(server) and time.monotonic() < until:
            time.sleep(0.05)
        ask(server, LONG, alone)
        (warning,) = warnings(server)
        assert "No space left on device" in warning
        assert "prefixes" in warning
        server.unharmed()
        assert server.stop() == 0
        assert len(warnings(server)) == 1


@pytest.mark.wide
def test_a_cache_that_cannot_be_written_is_warned_of_once_and_serving_goes_on(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    with disk(tmp_path / "disk", 4000) as small:
        with serving(small / "cache", f"tiny={path}", logs=tmp_path) as first:
            ask(first, LONG, alone)
            assert first.stop() == 0
        make_read_only(small)
        with serving(small / "cache", f"tiny={path}", logs=tmp_path) as server:
            assert ask(server, LONG, alone)["cached_tokens_disk"]  # reading is possible
            for i in range(4):
                ask(server, f"{i} {LONG}", alone)
            assert server.stop() == 0
            assert len(warnings(server)) <= 1
            assert "Traceback" not in server.said


def test_a_cache_that_is_deleted_while_it_is_used_is_made_again(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    cache = tmp_path / "cache"
    with serving(cache, f"tiny={path}") as server:
        for i in range(3):
            ask(server, f"{i} {LONG}", alone)
        (cache / "kernels").unlink()
        subprocess.run(["rm", "-rf", str(cache)], check=True)
        for i in range(6):
            ask(server, f"{i} {LONG}", alone)
        server.unharmed()
        assert server.stop() == 0
        assert warnings(server) == []
    assert list((cache / "prefixes").rglob("*")), "nothing was kept"


@pytest.mark.wide
def test_two_servers_on_one_cache_use_each_others_prefixes(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    cache = tmp_path / "cache"
    with serving(cache, f"tiny={path}") as one, serving(cache, f"tiny={path}") as two:
        for i in range(4):
            ask(one, f"{i} {LONG}", alone)
        until = time.monotonic() + 10
        found = False
        while not found and time.monotonic() < until:
            time.sleep(0.2)
            found = any(ask(two, f"{i} {LONG}", alone)["cached_tokens_disk"] for i in range(4))
        assert found
        one.kill()
        ask(two, f"1 {LONG}", alone)
        two.unharmed()


@pytest.mark.wide
def test_a_second_server_on_one_port_says_who_has_it_and_harms_nobody(tmp_path: Path) -> None:
    with serving(tmp_path / "cache") as server:
        streams = Streams(server, [greedy("calm", 300, ignore_eos=True)]).begun()
        other = Process(tmp_path / "cache", f"tiny={tiny(tmp_path)}", "--port", str(server.port))
        assert other.popen.wait(30) == 1
        assert f"port {server.port} is taken by another chabok serve (process {server.pid})" in other.said
        assert other.said.count("\n") == 1
        streams.join()


@pytest.mark.wide
@pytest.mark.parametrize("shutdown", ["20", "0.5"])
def test_32_streams_end_well_or_are_told_why_when_the_server_stops(tmp_path: Path, shutdown: str) -> None:
    tokens = 300 if shutdown == "20" else 4000
    path = tiny(tmp_path)
    with serving(tmp_path / "cache", f"tiny={path}", "--shutdown-timeout", shutdown) as server:
        bodies = [greedy(f"stream {i}", tokens, ignore_eos=True) for i in range(32)]
        streams = Streams(server, bodies).begun()
        port, started = server.port, time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < float(shutdown) + 10
        streams.join()
        if shutdown == "20":
            assert set(streams.ends) == {"[DONE]"}
        else:
            ends = [end for end in streams.ends if end != "[DONE]"]
            assert ends
            for end in ends:
                assert "was stopped 0.5 s after it was asked to" in json.loads(end)["error"]["message"]
        server.popen.wait()
        assert "Traceback" not in server.said
        # The port is free at once, and what was kept is used.
        again = Process(tmp_path / "cache", f"tiny={path}", "--port", str(port), "--no-installed").ready()
        assert again.stop() == 0


def test_a_second_signal_ends_a_server_under_load_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", "--shutdown-timeout", "60") as server:
        streams = Streams(server, [greedy(f"stream {i}", 4000, ignore_eos=True) for i in range(8)]).begun()
        started = time.monotonic()
        while server.popen.poll() is None:  # those that come with the first one are one with it
            server.popen.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert server.popen.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - started < 5
        for thread in streams._threads:
            thread.join(30)
        assert "stopped at once" in server.said
        assert "Traceback" not in server.said


@pytest.mark.wide
def test_sighup_reads_the_keys_again_and_streams_go_on(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    made = {name: new_key(keys, name) for name in ("alice", "bob")}
    head = {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}
    with serving(tmp_path / "cache", "--api-keys", str(keys)) as server:
        url = server.address + "/v1/completions"
        assert httpx.post(url, json=greedy("x", 1)).status_code == 401
        assert (
            httpx.post(url, json=greedy("x", 1), headers={"x-api-key": made["bob"][:-1]}).status_code == 401
        )
        got: list[str] = []

        begun = threading.Event()

        def read() -> None:
            body = greedy("x", 2000, ignore_eos=True, stream=True)
            with httpx.stream("POST", url, json=body, headers=head["bob"], timeout=60) as answer:
                for line in answer.iter_lines():
                    got.append(line)
                    begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(20)
        text = keys.read_text()
        new = tmp_path / "new.toml"
        new.write_text(text[: text.index("[bob]")])  # bob has to go, but may finish what he began
        new.replace(keys)
        server.popen.send_signal(signal.SIGHUP)
        until = time.monotonic() + 10
        while httpx.post(url, json=greedy("x", 1), headers=head["bob"]).status_code != 401:
            assert time.monotonic() < until
            time.sleep(0.02)
        keys.write_text("this is [no TOML")
        server.popen.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert httpx.post(url, json=greedy("x", 1), headers=head["alice"]).status_code == 200
        assert "the keys stay as they were" in server.said
        thread.join(60)
        assert "data: [DONE]" in got[-2:]
        assert "Traceback" not in server.said


def new_key(keys: Path, name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "chabok", "serve", "--new-key", name, "--api-keys", str(keys)],
        capture_output=True, text=True, check=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.wide
def test_keys_do_not_share_prefixes_and_do_not_go_over_their_limits(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    made = {name: {"x-api-key": new_key(keys, name)} for name in ("alice", "bob", "carol", "dan")}
    text = keys.read_text().replace("[carol]", '[carol]\nprefixes = "team"\nconcurrent = 3')
    keys.write_text(text.replace("[dan]", '[dan]\nprefixes = "team"\nrequests_per_minute = 5'))
    with serving(tmp_path / "cache", "--api-keys", str(keys), "--max-batch", "2") as server:
        url = server.address + "/v1/completions"

        def cached(name: str) -> int:
            answer = httpx.post(url, json=greedy(LONG, 2), headers=made[name], timeout=60).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("alice") == 0
        assert cached("alice") > 0
        time.sleep(1.5)  # what was used twice is on disk by now, where others must not find it either
        assert cached("bob") == 0
        assert cached("carol") == 0
        assert cached("dan") > 0
        statuses: list[int] = []
        lock = threading.Lock()

        def one(name: str, tokens: int) -> None:
            answer = httpx.post(
                url, json=greedy("y", tokens, ignore_eos=True), headers=made[name], timeout=60
            )
            with lock:
                statuses.append(answer.status_code)
            assert answer.status_code == 200 or int(answer.headers["retry-after"]) > 0

        def together(name: str, n: int, tokens: int) -> list[int]:
            statuses.clear()
            threads = [threading.Thread(target=one, args=(name, tokens)) for _ in range(n)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sorted(statuses)

        assert together("dan", 12, 1) == [200] * 4 + [429] * 8  # one of five was used above
        found = together("carol", 20, 1500)
        assert set(found) == {200, 429}
        assert found.count(200) < 10
        server.unharmed()


@pytest.mark.wide
def test_a_server_whose_output_is_closed_goes_on_serving(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-m", "chabok", "serve", f"tiny={path}", "--port", "0", "--no-installed"]
    running = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], cwd=ROOT, env=environment()
    )
    try:
        address = f"http://127.0.0.1:{port_of(running.pid)}"
        while httpx.get(address + "/ready").status_code != 200:
            time.sleep(0.02)
        for _ in range(3):
            assert httpx.post(address + "/v1/completions", json=greedy("x", 3)).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait()


@pytest.mark.wide
def test_a_terminal_that_goes_away_ends_the_server_or_not_but_breaks_no_answer(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        ["nohup", sys.executable, "-m", "chabok", "serve", f"tiny={path}", "--port", "0", "--no-installed"],
        stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True,
        env=environment(CHABOK_CACHE=str(tmp_path / "cache")),
    )  # fmt: skip
    os.close(theirs)
    try:
        address = f"http://127.0.0.1:{port_of(running.pid)}"
        while httpx.get(address + "/ready").status_code != 200:
            time.sleep(0.02)
        os.close(ours)  # from now on, writing fails
        for _ in range(3):
            assert httpx.post(address + "/v1/completions", json=greedy("x", 3)).status_code == 200
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait()


def port_of(pid: int) -> int:
    """The port a process listens at, once it does."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        inodes = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                return int(fields[1].rpartition(":")[2], 16)
        time.sleep(0.02)
    raise AssertionError("it does not listen")
