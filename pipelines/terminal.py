"""Untrusted text on a terminal, which may contain sequences that clear it or type into it; and its closing.

A file or a pipe gets data unchanged, and logs without these sequences (`engine.display.readable`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

TOGETHER = 1.0  # seconds within which several signals are one wish to end
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# C0 except tab and newline, DEL and C1; and the characters that switch to right-to-left text
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


def harmless(text: str) -> str:
    """Return the text without colours and control characters; tab and newline stay."""
    return _COLOUR.sub("", text).translate(_CONTROL)


def escape_invalid_text() -> None:
    """Make stdout and stderr print characters that they cannot encode, such as parts of non-UTF-8 names, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str, end: str = "\n", flush: bool = False) -> None:
    """Print a line to stdout, without control characters if that is a terminal."""
    print(harmless(text) if sys.stdout.isatty() else text, end=end, flush=flush)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that sends no control sequences except its own colours; `width` None: the terminal's."""
    safe_console = Console(stderr=stderr, width=width, highlight=False)
    safe_console.push_render_hook(_Hook(safe_console))
    return safe_console


@dataclass(frozen=True)
class _Hook(RenderHook):
    """Removes control characters from everything that a console prints."""

    console: Console

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Harmless(each) for each in renderables] if self.console.is_terminal else renderables


@dataclass(frozen=True)
class _Harmless:
    """A renderable without its control characters; rich counts these as zero wide, so tables keep their shape."""

    shown: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.shown, options):
            yield segment if segment.is_control else Segment(harmless(segment.text), segment.style)


@contextmanager
def ends_once() -> Iterator[None]:
    """Raise KeyboardInterrupt in this block at Ctrl-C, SIGTERM or the closing of the terminal, once for all of them.

    A shell and the kernel may send several, and who presses Ctrl-C twice means one end. A Ctrl-C more than `TOGETHER`
    seconds later raises it again. Signals that are ignored, as SIGHUP under nohup, stay ignored.
    """
    usual: dict[signal.Signals, Any] = {
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    caught = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread():
        caught = []
    began: list[float] = []

    # a stream no longer is a terminal when that is closed, and writing to it is an error
    terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
        if not began or (number == signal.SIGINT and time.monotonic() - began[0] > TOGETHER):
            began.append(time.monotonic())
            raise KeyboardInterrupt

    for number in caught:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, usual[number])
