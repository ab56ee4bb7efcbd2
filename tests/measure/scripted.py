"""A server that plays back scripts: these bytes, after just so many milliseconds, and nothing else.

Runs in a process of its own (``python scripted.py``), one thread per connection; sleeps until the last
millisecond of a wait and spins through that. It writes down when it really sent what: on Linux perf_counter
is one clock for all processes, so a test compares what the stopwatch saw with what happened, not the plan.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from typing import Any

SPIN_S = 0.001


@dataclass
class Step:
    """One write to the socket after a wait, counted from the step before."""

    wait_ms: float
    data: bytes


@dataclass
class Script:
    """An answer: when its headers come, its steps, and how it ends.

    framing: chunked, length, or close. end: finish, hang (send nothing more), or reset (close in the middle).
    pieces: cut every step's bytes into network writes of so many bytes, all at the same time.
    """

    steps: list[Step]
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "text/event-stream"})
    head_ms: float = 0.0
    framing: str = "chunked"
    end: str = "finish"
    pieces: int = 0
    raw: bytes = b""

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["steps"] = [[step.wait_ms, base64.b64encode(step.data).decode()] for step in self.steps]
        found["raw"] = base64.b64encode(self.raw).decode()
        return found


@dataclass
class Played:
    """What really happened: perf_counter instants at which the request was read and each step was written."""

    received: float
    headed: float
    sent: list[float]
    body: dict[str, Any]
    headers: dict[str, str]
    path: str


class ScriptedServer:
    """Starts the process and talks to it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, *scripts: Script) -> str:
        """Have scripts played one per request, the last one again and again; the base URL that does so."""
        self._count += 1
        name = f"s{self._count}"
        self._call("PUT", f"/scripts/{name}", [script.to_json() for script in scripts])
        return f"{self.url}/{name}"

    def played(self, url: str) -> list[Played]:
        """What happened so far under a base URL."""
        return [Played(**each) for each in self._call("GET", f"/played/{url.rsplit('/', 1)[1]}", None)]

    def _call(self, method: str, path: str, body: object) -> Any:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path, json.dumps(body))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# -- the process


def until(instant: float) -> None:
    left = instant - time.perf_counter()
    if left > SPIN_S:
        time.sleep(left - SPIN_S)
    while time.perf_counter() < instant:
        pass


class Stage:
    """All scripts, and what was played of them."""

    def __init__(self) -> None:
        self.scripts: dict[str, list[dict[str, Any]]] = {}
        self.played: dict[str, list[dict[str, Any]]] = {}
        self.lock = threading.Lock()


def serve(connection: socket.socket, stage: Stage) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reading = connection.makefile("rb")
    try:
        while (first := reading.readline()).strip():
            method, path, _ = first.decode().split()
            headers = {}
            while line := reading.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = reading.read(int(headers.get("content-length", 0)))
            if not answer(connection, stage, method, path, headers, body):
                break
    except (OSError, ValueError):
        pass
    finally:
        reading.close()
        connection.close()


def answer(
    connection: socket.socket, stage: Stage, method: str, path: str, headers: dict[str, str], body: bytes
) -> bool:
    received = time.perf_counter()
    first, second = ([*path.split("/")[1:], ""])[:2]
    if first == "scripts":
        with stage.lock:
            stage.scripts[second], stage.played[second] = json.loads(body), []
        return reply(connection, {})
    if first == "played":
        time.sleep(0.02)  # let the last write be written down
        return reply(connection, stage.played[second])
    with stage.lock:
        played = stage.played[first]
        scripts = stage.scripts[first]
        script = scripts[min(len(played), len(scripts) - 1)]
        record: dict[str, Any] = {
            "received": received,
            "headed": 0.0,
            "sent": [],
            "body": json.loads(body or b"null"),
            "headers": headers,
            "path": path,
        }
        played.append(record)
    return play(connection, script, record, received)


def play(connection: socket.socket, script: dict[str, Any], record: dict[str, Any], now: float) -> bool:
    if raw := base64.b64decode(script["raw"]):
        connection.sendall(raw)
        return script["end"] != "reset"
    steps = [(wait, base64.b64decode(data)) for wait, data in script["steps"]]
    head = [f"HTTP/1.1 {script['status']} Scripted"]
    head += [f"{name}: {value}" for name, value in script["headers"].items()]
    if script["framing"] == "chunked":
        head.append("Transfer-Encoding: chunked")
    elif script["framing"] == "length":
        head.append(f"Content-Length: {sum(len(data) for _, data in steps)}")
    now += script["head_ms"] / 1000
    until(now)
    record["headed"] = time.perf_counter()
    connection.sendall("\r\n".join([*head, "\r\n"]).encode())
    for wait, data in steps:
        now = max(now + wait / 1000, record["headed"])
        until(now)
        size = script["pieces"] or len(data) or 1
        record["sent"].append(time.perf_counter())
        for place in range(0, len(data), size):
            piece = data[place : place + size]
            if script["framing"] == "chunked":
                piece = b"%x\r\n%s\r\n" % (len(piece), piece)
            connection.sendall(piece)
    if script["end"] == "hang":
        connection.recv(1)  # until the other side gives up
        return False
    if script["end"] == "reset":
        return False
    if script["framing"] == "chunked":
        connection.sendall(b"0\r\n\r\n")
    return bool(script["framing"] != "close")


def reply(connection: socket.socket, found: object) -> bool:
    body = json.dumps(found).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return True


def main() -> None:
    sys.setswitchinterval(0.0005)
    stage = Stage()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, stage), daemon=True).start()


if __name__ == "__main__":
    main()
