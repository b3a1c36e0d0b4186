"""Progress lines of a stage on stdout, at most one per second. The driver shows the latest; the log keeps all."""

from __future__ import annotations

import time

from pipelines.store import ProgressLine

_SECONDS = 1.0  # at least between two lines


class Progress:
    """When a line of progress is due, how long the steps still take, and the line (`pipelines.store.ProgressLine`)."""

    def __init__(self, total: int) -> None:
        """Start the clock of so many steps."""
        self.total = total
        self.began = self.reached = time.monotonic()
        self.step = 0
        self.first: int | None = None

    def due(self, step: int) -> bool:
        """Return whether `step` should be shown. Ask first: reading a loss from a device synchronises with it."""
        return step == self.total or time.monotonic() - self.reached >= _SECONDS

    def reach(self, step: int) -> None:
        """Take note that `step` steps are done and will be shown."""
        self.reached, self.step = time.monotonic(), step
        if self.first is None:  # the time left is estimated from here on: the steps before it include warm-up
            self.first, self.began = step, self.reached

    def left(self, step: int) -> float | None:
        """Return the seconds until the last step, by the steps reached so far; None before two of them."""
        seconds = self.reached - self.began
        if self.first is None or seconds <= 0 or self.step <= self.first:
            return None
        return (self.total - step) * seconds / (self.step - self.first)

    def show(self, step: int, unit: str) -> None:
        """Reach a step and print the line; `unit` is what is counted."""
        self.reach(step)
        show(ProgressLine(done=step, total=self.total, unit=unit, seconds_left=self.left(step)))


def show(line: ProgressLine) -> None:
    """Print a line of progress."""
    print(line.encode(), flush=True)
