"""Progress lines of a stage on stdout, at most one per second. The driver shows the latest; the log keeps all."""

from __future__ import annotations

import time

from pipelines.store import ProgressLine

_SECONDS = 1.0  # at least between two lines


class Progress:
    """Decides when a progress line is due, and estimates the time left (`pipelines.store.ProgressLine`)."""

    def __init__(self, total: int) -> None:
        """Start the clock of `total` steps."""
        self.total = total
        self.began = self.reached = time.monotonic()
        self.step = 0
        self.first: int | None = None

    def due(self, step: int) -> bool:
        """Return whether `step` should be shown. Ask first: reading a loss from a device synchronises with it."""
        return step == self.total or time.monotonic() - self.reached >= _SECONDS

    def reach(self, step: int) -> None:
        """Note that `step` steps are done and will be shown."""
        self.reached, self.step = time.monotonic(), step
        if self.first is None:  # the time left is estimated from here on: the steps before it include warm-up
            self.first, self.began = step, self.reached

    def left(self, step: int) -> float | None:
        """Return the estimated seconds until the last step; None before two steps were reached."""
        seconds = self.reached - self.began
        if self.first is None or seconds <= 0 or self.step <= self.first:
            return None
        return (self.total - step) * seconds / (self.step - self.first)

    def show(self, step: int, unit: str) -> None:
        """Reach a step and print its line; `unit` names what is counted."""
        self.reach(step)
        show(ProgressLine(done=step, total=self.total, unit=unit, seconds_left=self.left(step)))


def show(line: ProgressLine) -> None:
    """Print a line of progress."""
    print(line.encode(), flush=True)
