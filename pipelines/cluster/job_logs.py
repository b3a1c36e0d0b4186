"""Stream the log of a job from Ray's dashboard, line by line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from threading import Event

import aiohttp

CONNECT_SECONDS = 10.0  # timeout of a connection
ASK_SECONDS = 1.0  # between checks whether the job has ended, while its log is silent
STOP_SECONDS = 0.2  # between checks whether to stop following a log


def stream(
    url: str,
    headers: dict[str, str],
    trust_env: bool,
    lines: Lines,
    stop: Event,
    ended: Callable[[], bool],
) -> None:
    """Add a log to `lines` from its beginning; return when the stream ends or breaks, or `stop` is set."""

    async def receive() -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        lines.position = 0
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=trust_env) as session,
                session.ws_connect(url, headers=headers, max_msg_size=0, heartbeat=30.0) as socket,
            ):
                await _receive(socket, lines, stop, ended)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return

    asyncio.run(receive())


class Lines:
    """A writer of a stream's lines that writes each once, although every connection streams from the beginning."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.position = 0  # characters received from the current connection
        self.taken = 0  # characters received from any connection
        self.rest = ""

    def add(self, text: str) -> None:
        """Add the next part of the stream."""
        new = text[max(0, self.taken - self.position) :]
        self.position += len(text)
        self.taken = max(self.taken, self.position)
        *whole, self.rest = (self.rest + new).split("\n")
        for line in whole:
            self.write(line)

    def end(self) -> None:
        """Write a last line that has no newline."""
        if self.rest:
            self.write(self.rest)


async def _receive(
    socket: aiohttp.ClientWebSocketResponse, lines: Lines, stop: Event, ended: Callable[[], bool]
) -> None:
    """Receive until the stream ends or `stop` is set.

    Ray ends a job's stream 5 s late, so `ended` is asked, too: if the job has ended and nothing comes until the next
    time to ask, that was all. Ray reads the job's last lines later than it knows of the end.
    """
    receiving = asyncio.ensure_future(socket.receive())
    asked, has_ended = time.monotonic(), False
    while not stop.is_set():
        # not wait_for: cancelling a receive loses data that has just arrived
        done, _ = await asyncio.wait({receiving}, timeout=STOP_SECONDS)
        if done:
            message = receiving.result()
            if message.type is not aiohttp.WSMsgType.TEXT:
                return
            lines.add(message.data)
            has_ended = False
            receiving = asyncio.ensure_future(socket.receive())
        elif time.monotonic() - asked > ASK_SECONDS:
            if has_ended:
                break
            asked, has_ended = time.monotonic(), ended()
    receiving.cancel()
    await asyncio.wait({receiving})
