"""A local stand-in for the hub's HTTP interface: model listing, file metadata, ranged downloads, failures."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the stand-in serves, and what was asked of it."""

    endpoint: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    fail_status: int | None = None
    stall_after: int | None = None  # bytes of a body after which nothing more comes
    wrong_hash: bool = False
    no_hash: bool = False
    gone: threading.Event = field(default_factory=threading.Event)  # lets stalled answers end
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    def downloads(self) -> list[tuple[str, str | None]]:
        return [
            (path, wanted)
            for method, path, wanted in self.requests
            if method == "GET" and "/resolve/" in path
        ]


def listing(hub: Hub, repo: str) -> bytes:
    siblings = []
    for name, content in hub.repos[repo].items():
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": "b" * 40}
        if name.endswith(".gguf") and not hub.no_hash:
            sha = "0" * 64 if hub.wrong_hash else hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
        siblings.append(entry)
    info = {
        "_id": "1",
        "id": repo,
        "modelId": repo,
        "sha": COMMIT,
        "private": False,
        "tags": [],
        "downloads": 0,
    }
    return json.dumps(
        {**info, "likes": 0, "siblings": siblings, "cardData": {"license": "apache-2.0"}}
    ).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def serve(self) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if hub.fail_status is not None:
            return self.answer(hub.fail_status, b"{}")
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        repo = match[1] if match else file[1] if file else ""
        if repo not in hub.repos:
            return self.refuse(401 if not token else 404, "RepoNotFound")
        if repo in hub.gated and token not in hub.tokens:
            return self.refuse(403 if token else 401, "GatedRepo")
        if match:
            return self.answer(200, listing(hub, repo), Content_Type="application/json")
        assert file is not None
        content = hub.repos[repo].get(file[2])
        if content is None:
            return self.refuse(404, "EntryNotFound")
        return self.send_file(content)

    def send_file(self, content: bytes) -> None:
        hub = self.hub
        start, status = 0, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, status = int(wanted[1]), 206
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if hub.stall_after is not None:
            self.wfile.write(content[start : start + hub.stall_after])
            self.wfile.flush()
            hub.gone.wait(30)
            self.close_connection = True
            return
        self.wfile.write(content[start:])


@contextmanager
def serving() -> Iterator[Hub]:
    """A running stand-in."""
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *args: None  # type: ignore[method-assign]
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gone.set()
        server.shutdown()
        server.server_close()
