"""The page at ``/``: a chat with the served models, as plain files without a build step."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
"""Content-Security-Policy of the page: nothing but its own files, no script in the HTML, nobody's frame."""

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # a newer server's files are seen at once; the ETag makes asking cheap
}

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def _pages() -> dict[str, _File]:
    """All files of the page by name; a name from outside is only ever looked up here, never opened."""
    found: dict[str, _File] = {}
    for entry in files("chabok.server").joinpath("pages").iterdir():
        _, dot, ending = entry.name.rpartition(".")
        if dot + ending in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found[entry.name] = _File(content, _TYPES[dot + ending], etag)
    return found


def routes(*, served: bool = True) -> list[Route]:
    """``/`` and the files it needs, under ``/page/``; without the page, only what programs get at ``/``."""
    if not served:
        return [Route("/", _sign, methods=["GET"])]
    return [Route("/", _index, methods=["GET"]), Route("/page/{name}", _file, methods=["GET"])]


async def _sign(request: Request) -> Response:
    """The words by which clients of Ollama know that a server is there."""
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


async def _index(request: Request) -> Response:
    """The page for browsers, a sign of life for programs."""
    if "text/html" not in request.headers.get("accept", ""):
        return await _sign(request)
    response = _answer(request, _pages()["index.html"])
    response.headers["Vary"] = "Accept"
    return response


async def _file(request: Request) -> Response:
    file = _pages().get(request.path_params["name"])
    if file is None or file.media_type == _TYPES[".html"]:
        return PlainTextResponse("There is no such file.", status_code=404)
    return _answer(request, file)


def _answer(request: Request, file: _File) -> Response:
    headers = _HEADERS | {"ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
