"""The display of a run: on a terminal a live line per stage, otherwise plain lines."""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from pipelines.engine.status import Status
from pipelines.store import ProgressLine, read_progress
from pipelines.terminal import harmless

PLAIN_SECONDS = 10.0  # between progress lines of a stage if there is no terminal
COLOURS = {
    Status.CACHED: "dim",
    Status.SUCCEEDED: "green",
    Status.RUNNING: "cyan",
    Status.FAILED: "red",
    Status.LOST: "yellow",
    Status.STOPPED: "yellow",
    Status.SKIPPED: "yellow",
    Status.WAITING: "yellow",
}

_WORKER = re.compile(r"^\(.*?pid=\d+[^)]*\)\s?")  # Ray's prefix of its workers' lines
# Lines that Ray and DeepSpeed print in every run, and that no setting turns off.
_CHATTER = re.compile(
    r"^(\S+ \S+\s+INFO job_manager\.py|Running entrypoint for job |.*INFO worker\.py"
    r"|DeepSpeed \S+ built successfully$)"
)


def readable(line: str) -> str | None:
    """Return a line of a log without colours and control characters; None if every run's log contains it."""
    line = harmless(line.rstrip())
    return None if _CHATTER.match(_WORKER.sub("", line)) else line


def in_words(line: str) -> str | None:
    """Return a line of a log as `readable` does, with progress in words."""
    text = readable(line)
    progress = read_progress(_WORKER.sub("", text or ""))
    return text if progress is None else progress.words()


class RunDisplay:
    """A context manager that displays a run; the driver's loop and the threads that follow logs call it."""

    def __init__(self, console: Console, width: int) -> None:
        """`width`: the length of the longest stage name."""
        self.console, self.width = console, width
        self.running: dict[str, ProgressLine | None] = {}
        self.began: dict[str, float] = {}
        self.printed: dict[str, float] = {}
        self.spinner = Spinner("dots")
        self.live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def stage(self, name: str, status: Status, detail: str = "") -> None:
        """Show a stage's new status."""
        took = ""
        if status == Status.RUNNING:
            self.began.setdefault(name, time.monotonic())
            self.running[name] = None
        elif name in self.running and status != Status.WAITING:
            del self.running[name]
            took = f" {time.monotonic() - self.began[name]:.1f} s"
        colour = COLOURS.get(status, "default")
        line = f"{name:<{self.width}}  [{colour}]{status:<9}[/]{took:>8}  {escape(detail)}"
        self.console.print(line, soft_wrap=True)

    def line(self, name: str, text: str) -> None:
        """Show a line of a stage's log; progress replaces the last progress, everything else stays."""
        text = _WORKER.sub("", readable(text) or "")
        if (progress := read_progress(text)) is None:
            if text:
                self.console.print(f"[dim]{name:<{self.width}}  {escape(text)}[/]", soft_wrap=True)
            return
        if name in self.running:
            self.running[name] = progress
        if not self.console.is_terminal and time.monotonic() - self.printed.get(name, 0.0) >= PLAIN_SECONDS:
            self.printed[name] = time.monotonic()
            words = escape(progress.words())
            self.console.print(f"{name:<{self.width}}  {words}", soft_wrap=True)

    def say(self, text: str) -> None:
        """Show a message."""
        self.console.print(escape(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, progress in list(self.running.items()):
            seconds = f"{time.monotonic() - self.began[name]:4.0f} s"
            bar = ProgressBar(progress.total, progress.done, width=20) if progress else ""
            table.add_row(self.spinner, name, seconds, bar, escape(progress.words()) if progress else "")
        return table
