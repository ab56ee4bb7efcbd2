"""The page at /: what it is made of, and, where there is a browser, what it does."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from tests.server.conftest import Running

from chabok.bands import SPEED as BANDS
from chabok.server import page

HTML = {"Accept": "text/html,application/xhtml+xml"}
PAGES = Path(str(files("chabok.server").joinpath("pages")))
CHROMIUM = "/usr/bin/chromium"


def names() -> list[str]:
    return sorted(path.name for path in PAGES.iterdir() if path.is_file())


def test_a_browser_gets_the_page_and_a_program_a_sign_of_life(running: Running) -> None:
    page = httpx.get(running.url + "/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Chabok</title>" in page.text
    assert page.headers["vary"] == "Accept"
    assert httpx.get(running.url + "/").text == "Ollama is running"


@pytest.mark.parametrize("name", names())
def test_every_file_forbids_all_that_is_not_the_servers_own(running: Running, name: str) -> None:
    path = "/" if name == "index.html" else f"/page/{name}"
    response = httpx.get(running.url + path, headers=HTML)
    assert response.status_code == 200
    assert response.content == (PAGES / name).read_bytes()
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", names())
def test_no_file_names_another_place_or_makes_markup_of_text(name: str) -> None:
    text = (PAGES / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|['\"(]//|@import|url\(", text)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    text = (PAGES / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>", text) == ['<script type="module" src="page/app.js">']
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)


def test_every_control_has_a_label() -> None:
    text = (PAGES / "index.html").read_text(encoding="utf-8")
    controls = re.findall(r'<(?:input|select|textarea)[^>]*id="([^"]+)"', text)
    assert controls
    for control in controls:
        inside = re.search(rf'<label(?:(?!</label>).)*id="{control}"', text, re.DOTALL)
        assert f'for="{control}"' in text or inside, control


def test_what_the_page_loads_is_there() -> None:
    for path in PAGES.iterdir():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'(?:href|src)="page/([^"]+)"|from "\./([^"]+)"', text):
            assert (PAGES / "".join(name)).is_file(), name


def test_nothing_but_the_files_of_the_page_is_given_out(running: Running) -> None:
    for name in ("..%2Fpage.py", "../page.py", "%2e%2e/%2e%2e/page.py", "index.html", "none.js", "app.js%00"):
        assert httpx.get(f"{running.url}/page/{name}").status_code == 404, name


def test_a_file_that_is_known_is_not_sent_again(running: Running) -> None:
    first = httpx.get(running.url + "/page/app.js")
    again = httpx.get(running.url + "/page/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"


def test_the_page_calls_speeds_what_the_command_line_calls_them() -> None:
    text = (PAGES / "figures.js").read_text(encoding="utf-8")
    table = re.search(r"BANDS = (\[.*?\]);", text, re.DOTALL)
    assert table is not None
    found = json.loads(re.sub(r",(\s*\])", r"\1", table[1]))
    assert [tuple(row) for row in found] == list(BANDS)


def test_the_wheel_has_the_page() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["src/chabok"]  # and with it every file below
    ignored = subprocess.run(
        ["git", "check-ignore", *map(str, PAGES.iterdir())], cwd=root, capture_output=True, text=True
    )
    assert ignored.stdout == ""  # what git ignores, the build leaves out


# In a browser.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not shutil.which(CHROMIUM):
        pytest.skip(f"there is no {CHROMIUM}")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield chromium
        chromium.close()


class Visit:
    """A page that is open; complaints: what a visit must not have."""

    def __init__(self, browser: Any, url: str, *, expect_errors: bool = False, **options: Any) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request", lambda request: request.url.startswith(url) or self.complaints.append(request.url)
        )
        if not expect_errors:
            self.page.on(
                "console",
                lambda message: message.type in ("error", "warning") and self.complaints.append(message.text),
            )
        self.page.goto(url + "/")
        self.page.wait_for_selector("#model:enabled")

    def send(self, text: str) -> None:
        """By keyboard only: the field has the focus when the page opens."""
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def finish(self) -> None:
        self.page.wait_for_selector('.answer:last-child[aria-busy="false"]')

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def limit(self, tokens: int) -> None:
        self.page.click("#settings summary")
        self.page.fill("#max-tokens", str(tokens))
        self.page.click("#settings summary")
        self.page.focus("#prompt")


@pytest.mark.wide
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 360])
def test_a_message_is_sent_by_keyboard_and_answered(
    browser: Any, running: Running, scheme: str, width: int, tmp_path: Path
) -> None:
    from chabok import SamplingParams

    viewport = {"width": width, "height": 720}
    visit = Visit(browser, running.url, color_scheme=scheme, viewport=viewport)
    visit.limit(24)
    visit.send("Hello")
    visit.finish()
    figures = visit.text(".answer .figures")
    assert re.search(r"first token [\d.]+ m?s · [\d.]+ tok/s · 24 tokens · \w+", figures), figures
    expected = running.llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=24)).text
    shown = visit.page.text_content(".answer > .prose")
    letters = re.compile(r"[^\w]+")  # the layout is Markdown's
    assert letters.sub("", shown) == letters.sub("", expected)
    visit.page.click(".breakdown summary")
    assert "By the server's clock" in visit.text(".breakdown")
    wide = visit.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    picture = visit.page.screenshot(path=tmp_path / "page.png")
    assert picture[:4] == b"\x89PNG"
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.findall(r"\d+", paper)[0]) > 128) == (scheme == "light")
    assert visit.complaints == []
    visit.context.close()


def stream_of(*texts: str) -> str:
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


class Endless:
    """A server that answers without an end, a word at a time; left: whether the client went away."""

    def __init__(self) -> None:
        self.left = threading.Event()
        models = {"data": [{"id": "endless"}], "models": [{"name": "endless"}]}

        async def known(request: Request) -> JSONResponse:
            return JSONResponse(models)

        async def answer(request: Request) -> StreamingResponse:
            return StreamingResponse(self.words(), media_type="text/event-stream")

        self.app = Starlette(
            routes=[
                *page.routes(),
                *(Route(path, known) for path in ("/v1/models", "/api/ps", "/ready")),
                Route("/v1/chat/completions", answer, methods=["POST"]),
            ]
        )

    async def words(self) -> AsyncIterator[str]:
        try:
            while True:
                yield stream_of("word ").partition("\n\n")[0] + "\n\n"
                await asyncio.sleep(0.02)
        finally:
            self.left.set()


def run(app: Starlette) -> tuple[uvicorn.Server, threading.Thread, str]:
    """Serve an application in a thread, on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    return server, thread, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.wide
@pytest.mark.parametrize("how", ["Escape", "Enter on the button", "new chat"])
def test_an_answer_is_stopped_and_the_server_sees_it(browser: Any, how: str) -> None:
    endless = Endless()
    server, thread, url = run(endless.app)
    visit = Visit(browser, url)
    visit.send("Go on and on")
    visit.page.wait_for_selector(".answer > .prose > p")
    visit.page.wait_for_timeout(300)
    assert visit.text("#send-label") == "Stop"
    assert re.search(r"first token .* tok/s · \d+ tokens", visit.text(".answer .figures"))
    if how == "Escape":
        visit.page.keyboard.press("Escape")
    elif how == "new chat":
        visit.page.click("#new")
    else:
        visit.page.focus("#send")
        visit.page.keyboard.press("Enter")
    assert endless.left.wait(5)
    if how == "new chat":
        assert visit.page.query_selector(".answer") is None
    else:
        visit.finish()
        assert "stopped" in visit.text(".answer .figures")
        assert visit.page.text_content(".answer > .prose").startswith("word word")
    assert visit.text("#send-label") == "Send"
    assert visit.complaints == []
    visit.context.close()
    server.should_exit = server.force_exit = True
    thread.join(10)


@pytest.mark.wide
def test_a_new_chat_forgets_the_old_one(browser: Any, running: Running) -> None:
    visit = Visit(browser, running.url)
    sent: list[Any] = []
    visit.page.on(
        "request", lambda request: "completions" in request.url and sent.append(request.post_data_json)
    )
    visit.limit(4)
    for text in ("First", "Second"):
        visit.send(text)
        visit.finish()
    visit.page.click("#new")
    assert visit.page.query_selector(".answer") is None
    visit.send("Third")
    visit.finish()
    assert [[m["role"] for m in body["messages"]] for body in sent] == [
        ["user"],
        ["user", "assistant", "user"],
        ["user"],
    ]
    assert sent[2]["messages"][0]["content"] == "Third"
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.wide
def test_an_error_is_told_and_tried_again(browser: Any, running: Running) -> None:
    visit = Visit(browser, running.url, expect_errors=True)
    visit.limit(4)
    visit.page.fill("#prompt", "word " * 3000)
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_selector(".problem")
    assert "context" in visit.text(".problem")
    visit.page.unroute_all()
    visit.page.route("**/v1/chat/completions", lambda route: route.abort())
    visit.page.click("#new")
    visit.send("Hello")
    visit.page.wait_for_selector(".problem")
    assert "cannot be reached" in visit.text(".problem")
    visit.page.unroute_all()
    visit.page.click(".problem button")
    visit.finish()
    assert visit.page.query_selector(".problem") is None
    assert visit.page.text_content(".answer > .prose")
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.wide
def test_markdown_is_shown_and_markup_stays_text(browser: Any, running: Running) -> None:
    visit = Visit(browser, running.url)
    answer = (
        "Some **bold** and `code` <img src=x onerror=alert(1)>\n\n1. one\n   - within\n2. two\n\n"
        "```python\nprint('<b>')\n```\n\nسلام دنیا\n\n<script>alert(1)</script>"
    )
    visit.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            body=stream_of(*re.findall(r"(?s).{1,5}", answer)), headers={"Content-Type": "text/event-stream"}
        ),
    )
    visit.send("Show me")
    visit.finish()
    inside = ".answer > .prose "
    assert visit.page.query_selector(inside + "img, .prose script, .prose b") is None
    assert visit.text(inside + "strong") == "bold"
    assert visit.text(inside + "pre") == "print('<b>')"
    assert visit.text(inside + "ol > li > ul > li") == "within"
    assert visit.page.locator(inside + "ol > li").count() == 2
    direction = "getComputedStyle(e).direction"
    persian = visit.page.locator(inside + "> p", has_text="سلام")
    assert persian.evaluate(f"e => {direction}") == "rtl"
    assert visit.page.locator(inside + "> p").first.evaluate(f"e => {direction}") == "ltr"
    assert "<script>alert(1)</script>" in visit.text(inside)
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.wide
def test_a_key_is_asked_for_where_one_is_needed_and_kept_for_the_tab_only(
    browser: Any, running: Running
) -> None:
    context = browser.new_context()
    page = context.new_page()

    def locked(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no key"}})

    page.route("**/v1/**", locked)
    page.goto(running.url + "/")
    page.wait_for_selector("#key", state="visible")
    assert "API key" in page.inner_text("#notice")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model:enabled")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    context.close()


@pytest.mark.wide
def test_a_server_that_is_loading_says_so_and_the_page_waits(browser: Any, running: Running) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.route("**/ready", lambda route: route.fulfill(status=503, json={"status": "loading tiny"}))
    page.goto(running.url + "/")
    page.wait_for_selector("#notice:visible")
    assert "loading tiny" in page.inner_text("#notice")
    page.unroute_all()
    page.route("**/ready", lambda route: route.fulfill(status=200, body="ready"))
    page.wait_for_selector("#notice", state="hidden")
    context.close()
