"""The status page in a real browser: headless Chromium, driven over its DevTools socket. Skipped without Chromium."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import LiveServer, Start

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian: apt install chromium)")

ANSWER = {"pieces": ["First ", "thought", "</think>", "The ", "<b>answer</b>", "."], "end": "user", "rate": 50}
SLOW = {"pieces": ["</think>", *["more "] * 6000], "end": "user", "rate": 20}


class Refused(AssertionError):
    """The browser did not do what it was told."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            entry = message.get("params", {}).get("entry", {})
            if message.get("method") == "Runtime.exceptionThrown" or entry.get("level") == "error":
                self.errors.append(json.dumps(message["params"]))
            if message.get("id") == number:
                if "error" in message:
                    raise Refused(message["error"])
                return message["result"]

    async def evaluate(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not await self._holds(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _holds(self, expression: str) -> bool:
        try:
            return bool(await self.evaluate(expression))
        except Refused:  # between two documents there is nothing to evaluate in
            return False

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def key(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            more = {"text": "\r"} if kind == "char" else {}
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    async def text(self, selector: str) -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


@asynccontextmanager
async def browser(profile: Path, width: int, height: int) -> AsyncIterator[Page]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command += [f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
    silent = asyncio.subprocess.DEVNULL
    environment = {**os.environ, "TMPDIR": str(profile.parent)}  # it makes a UNIX socket there
    process = await asyncio.create_subprocess_exec(*command, stdout=silent, stderr=silent, env=environment)
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not port_file.exists() or not port_file.read_text():
                assert process.returncode is None, f"Chromium ended with {process.returncode}"
                await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            tabs: list[dict[str, str]] = []
            async with asyncio.timeout(60):
                while not tabs:  # the port is there before the first tab
                    async with session.get(f"http://127.0.0.1:{port}/json") as reply:
                        tabs = [t for t in await reply.json() if t["type"] == "page"]
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


Visit = Callable[[Page], Coroutine[Any, Any, None]]


def visit(live: LiveServer, short_path: Path, steps: Visit, width: int = 1280, height: int = 800) -> None:
    """Open the page, wait until it shows the server's state, run `steps`; no script error may have happened."""

    async def body() -> None:
        async with browser(short_path / "profile", width, height) as page:
            await page.send("Page.navigate", url=live.url + "/")
            await page.until("document.querySelector('#what')?.dataset.phase === 'ready'")
            await steps(page)
            assert not page.errors

    asyncio.run(body())


def test_chat_by_keyboard_with_folded_reasoning_and_stop(start: Start, short_path: Path) -> None:
    live = start([ANSWER, SLOW])

    async def steps(page: Page) -> None:
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("What is it?")
        await page.key("Enter", 13)
        await page.until("document.querySelector('.turn .note')?.textContent.includes('tokens in')")
        assert "tokens/s" in await page.text(".turn .note")
        assert await page.text(".turn.user") == "What is it?"
        assert await page.text(".turn .text") == "The <b>answer</b>."
        assert await page.text(".turn details div") == "First thought"
        assert await page.evaluate("document.querySelector('.turn details').open") is False
        assert await page.evaluate("document.activeElement.id") == "prompt"

        await page.type("And then?")
        await page.key("Enter", 13)
        await page.until("document.querySelectorAll('.turn .text')[1].textContent.length > 20")
        assert await page.evaluate("document.querySelector('#stop').hidden") is False
        await page.until("document.querySelector('#streams').textContent.includes('tokens/s')")
        await page.until("parseFloat(document.querySelector('#rate').textContent) > 5")
        await page.key("Escape", 27)
        await page.until("document.querySelectorAll('.turn .note')[1].textContent === 'stopped'")
        assert await page.evaluate("document.querySelector('#send').hidden") is False

    visit(live, short_path, steps)
    live.until(lambda s: s["running"] == 0 and s["engine"]["cancelled"] == 1)


def test_status_side(start: Start, short_path: Path) -> None:
    live = start(ANSWER)
    live.chat()

    async def steps(page: Page) -> None:
        await page.until("document.querySelector('#warnings').textContent.includes('scripted')")
        loaded = await page.text("#loaded")
        assert "glm-5.3-flash" in loaded
        assert "131,072" in loaded
        assert "tokens written6" in await page.text("#queue")

    visit(live, short_path, steps)


def test_what_is_read_out_changes_only_with_the_state(start: Start, short_path: Path) -> None:
    live = start(ANSWER)

    async def steps(page: Page) -> None:
        await page.until("document.querySelector('#detail').textContent.startsWith('up ')")
        assert await page.text("#what") == "ready"
        watch = "new MutationObserver(() => { window.spoken = true; }).observe(what, {childList: true})"
        await page.evaluate(f"{watch}, window.since = document.querySelector('#detail').textContent")
        await page.until("document.querySelector('#detail').textContent !== window.since")
        assert await page.evaluate("window.spoken") is None
        loading = "{status: 'loading', loading: {stage: 'experts', progress: 0.25}}"
        shown = "[load.hidden, load.value, what.textContent, detail.textContent]"
        assert await page.evaluate(f"showStatus({loading}), {shown}") == [False, 0.25, "loading: experts", "25 %"]
        await page.until("load.hidden")

    visit(live, short_path, steps)


def test_a_server_that_went_away_shows_no_speed(start: Start, short_path: Path) -> None:
    live = start(SLOW)

    async def steps(page: Page) -> None:
        await page.evaluate("$('prompt').value = 'x', send(), 0")
        await page.until("parseFloat(rate.textContent) > 5")
        await page.evaluate("window.fetch = () => Promise.reject(new TypeError('gone')), 0")
        await page.until("what.textContent === 'not reachable'")
        assert await page.evaluate("[rate.textContent, streams.children.length]") == ["0.0", 0]

    visit(live, short_path, steps)


def test_an_error_is_shown_in_words(start: Start, short_path: Path) -> None:
    live = start(ANSWER, context=20)

    async def steps(page: Page) -> None:
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("word " * 50)
        await page.evaluate("document.querySelector('#send').click()")
        await page.until("document.querySelector('.turn .error')?.textContent.includes('maximum context length')")
        assert await page.evaluate("document.querySelector('#prompt').value") == ("word " * 50).strip()
        assert await page.evaluate("turns.length") == 0, "the next question would carry this one along"
        page.errors.clear()  # the browser logs every 400

    visit(live, short_path, steps)


def test_a_key_can_be_entered(start: Start, short_path: Path) -> None:
    live = start(ANSWER, api_keys=("open-sesame",))

    async def body() -> None:
        async with browser(short_path / "profile", 1280, 800) as page:
            await page.send("Page.navigate", url=live.url + "/")
            await page.until("document.querySelector('#what')?.textContent === 'needs an API key'")
            assert await page.text("#key-note") == "This server wants an API key."
            await page.evaluate("document.querySelector('#key').focus()")
            await page.type("open-barley")
            await page.key("Enter", 13)
            await page.until("document.querySelector('#key-note').textContent === 'The server refused this key.'")
            await page.type("open-sesame")
            await page.key("Enter", 13)
            await page.until("document.querySelector('#what').dataset.phase === 'ready'")
            assert await page.evaluate("document.querySelector('#key-box').hidden") is True

    asyncio.run(body())


def test_a_phone_has_no_sideways_scrolling(start: Start, short_path: Path) -> None:
    async def steps(page: Page) -> None:
        metrics = {"width": 375, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        await page.send("Emulation.setDeviceMetricsOverride", **metrics)
        await page.evaluate("document.querySelector('#prompt').focus()")
        await page.type("x" * 300)
        await page.key("Enter", 13)
        await page.until("document.querySelector('.turn .note')?.textContent.includes('tokens in')")
        assert await page.evaluate("document.documentElement.scrollWidth") <= 375
        box = await page.evaluate("JSON.stringify(document.querySelector('#send').getBoundingClientRect())")
        assert json.loads(box)["right"] <= 375
        assert json.loads(box)["bottom"] <= 740

    visit(start(ANSWER), short_path, steps)


def test_each_lane_has_its_share_and_its_colour(start: Start, short_path: Path) -> None:
    live = start([ANSWER])
    lanes = {"vram": 50, "pcie_admitted": 10, "pcie_in_place": 20, "pcie_prompts": 5, "cpu": 15}
    split = {"on": True, "workers": 14, "b_ms": 0.104}

    async def steps(page: Page) -> None:
        read = "fetch('stats').then(r => r.json()).then(s => { window.read = s; })"
        await page.evaluate(read)
        await page.until("window.read !== undefined")
        show = f"showCounters({{...window.read, engine: {{lanes: {json.dumps(lanes)}, split: {json.dumps(split)}}}}})"
        key = await page.evaluate(f"{show}, document.querySelector('#lanes-key').textContent")
        assert "cpu 15" in key.replace("\n", " ")
        widths = "[...document.querySelectorAll('#lanes i')].map(i => i.style.width)"
        assert await page.evaluate(widths) == ["50%", "10%", "20%", "5%", "15%"]
        colours = (
            "new Set([...document.querySelectorAll('#lanes i')].map(i => getComputedStyle(i).backgroundColor)).size"
        )
        assert await page.evaluate(colours) == 5
        assert "14 workers, 0.104 ms an expert" in await page.text("#cache")

    visit(live, short_path, steps)
