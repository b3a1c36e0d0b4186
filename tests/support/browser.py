"""A tab of a headless Chromium, driven by its DevTools protocol over aiohttp's websocket."""

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse

CHROMIUM = shutil.which("chromium")

# What is wider than the window or than its own box, except in a region that scrolls.
OVERFLOW = """(() => {
  const all = [...document.querySelectorAll("body *")], aside = ".scroll, caption, svg, script";
  const wide = all.filter(each => !each.closest(aside)).filter(each =>
    each.getBoundingClientRect().right > innerWidth || each.clientWidth && each.scrollWidth > each.clientWidth + 1);
  return [document.documentElement.scrollWidth > innerWidth, wide.map(each => each.outerHTML.slice(0, 80))];
})()"""
# The texts with a contrast below 4.5 to the nearest background (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const parse = colour => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = each => {
    for (; each; each = each.parentElement) {
      const colour = parse(getComputedStyle(each).backgroundColor);
      if (colour.length && colour[3] !== 0) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter(each => !each.closest("script, .count, #tip, title") &&
    [...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
  return texts.map(each => {
    const style = getComputedStyle(each), front = light(parse(each instanceof SVGElement ? style.fill : style.color));
    const back = light(behind(each.parentElement && each));
    return [(Math.max(front, back) + .05) / (Math.min(front, back) + .05), each.textContent.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
})()"""


class Tab:
    """One page; `events` are what it reported so far: (method, parameters)."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (message := await self._receive()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return dict(message["result"])

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json(timeout=60)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    async def open(self, path: Path) -> None:
        """Load a file and wait until it is there, with its scripts run."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        self.events.clear()
        await self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in dict(self.events):
            await self._receive()

    async def show(self, width: int, scheme: str, height: int = 900) -> None:
        """Set the size of the window and the colour scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def pdf(self) -> bytes:
        """Print the page with the size and margins of its own style."""
        printed = await self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(printed["data"])

    async def picture(self, whole: bool = False) -> bytes:
        """Return a PNG of the window, or of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser with a profile folder of its own; end it afterwards."""
    assert CHROMIUM is not None
    arguments = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *arguments,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while not (port := profile / "DevToolsActivePort").exists() or "\n" not in port.read_text():
                await asyncio.sleep(0.05)
        async with ClientSession() as session:
            answer = await session.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json")
            (address,) = (tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        process.terminate()
        await process.wait()
