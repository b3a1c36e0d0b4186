"""The display of a run: a line for each stage that has ended, and on a terminal a live line for each that is running.

Logs are left out, except warnings and errors, unless they are wanted: `vitflow logs` has them.
"""

from __future__ import annotations

import re
import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from pipelines.engine.durations import in_hours
from pipelines.engine.status import Status
from pipelines.store import ProgressLine, read_progress
from pipelines.terminal import harmless

# between progress lines of a stage if there is no terminal, without logs and with them
QUIET_SECONDS, VERBOSE_SECONDS = 60.0, 10.0
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

_ALWAYS_SHOWN = ("error:", "warning:")  # the beginnings of lines of logs
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

    def __init__(self, console: Console, width: int, verbose: bool = False) -> None:
        """`width`: the length of the longest stage name; `verbose`: show the logs of the stages, too."""
        self.console, self.width, self.verbose = console, width, verbose
        self.running: dict[str, ProgressLine | str] = {}  # the last progress or line of the log
        self.began: dict[str, float] = {}
        self.took: dict[str, float] = {}
        """stage -> seconds from its first attempt in this run to its end"""
        self.printed: dict[str, float] = {}
        self.spinner = Spinner("dots")
        self.live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def stage(self, name: str, status: Status, detail: str = "") -> None:
        """Show a stage's new status."""
        took = ""
        if status == Status.RUNNING:
            self.began.setdefault(name, time.monotonic())
            self.running[name] = ""
            if not self.verbose:
                return
        elif name in self.running and status != Status.WAITING:
            del self.running[name]
            self.took[name] = time.monotonic() - self.began[name]
            took = f" {in_hours(self.took[name])}"
        colour = COLOURS.get(status, "default")
        line = f"{name:<{self.width}}  [{colour}]{status:<9}[/]{took:>8}  {escape(detail)}"
        self.console.print(line, soft_wrap=True)

    def line(self, name: str, text: str) -> None:
        """Show a line of a stage's log: in its live line until it has progress; if wanted or a warning, for good."""
        text = _WORKER.sub("", readable(text) or "")
        if not text:
            return
        progress = read_progress(text)
        if name in self.running and (progress is not None or isinstance(self.running[name], str)):
            self.running[name] = progress or text
        if progress is not None:
            self._print_progress(name, progress)
        elif self.verbose or text.startswith(_ALWAYS_SHOWN):
            self.console.print(f"[dim]{name:<{self.width}}  {escape(text)}[/]", soft_wrap=True)

    def _print_progress(self, name: str, progress: ProgressLine) -> None:
        """Print a stage's progress now and then, if there is no terminal."""
        pause = VERBOSE_SECONDS if self.verbose else QUIET_SECONDS
        last = self.printed.get(name, -pause if self.verbose else self.began.get(name, 0.0))
        if not self.console.is_terminal and time.monotonic() - last >= pause:
            self.printed[name] = time.monotonic()
            self.console.print(f"{name:<{self.width}}  {escape(progress.words())}", soft_wrap=True)

    def say(self, text: str) -> None:
        """Show a message."""
        self.console.print(escape(text), soft_wrap=True)

    def _table(self) -> Table | str:
        if not self.running:  # rich miscounts the lines of an empty table, so each refresh would scroll
            return ""
        table = Table.grid(padding=(0, 2), expand=True)
        for _ in range(4):
            table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, ratio=1)
        for name, last in list(self.running.items()):
            seconds = f"{time.monotonic() - self.began[name]:4.0f} s"
            bar: ProgressBar | str = ""
            if isinstance(last, ProgressLine):
                bar, last = ProgressBar(last.total, last.done, width=20), last.words()
            table.add_row(self.spinner, name, seconds, bar, escape(last))
        return table
