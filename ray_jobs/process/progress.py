"""Progress lines of a stage on stdout, at most one per second. The driver shows the latest; the log keeps all."""

from __future__ import annotations

import time
from datetime import timedelta

PREFIX = "progress "


class Progress:
    """A printer of lines such as `progress step 120/1781 · 5,812 images/s · loss 4.21 · 0:00:58 left`."""

    def __init__(
        self, total: int, noun: str = "step", seconds: float = 1.0, after: int = 0, is_limit: bool = False
    ) -> None:
        """Start the clock.

        Args:
            total: the number of steps.
            noun: the name of a step.
            seconds: the minimum time between two lines.
            after: steps that the stage will take after these; the time left includes them.
            is_limit: whether there may be fewer steps.
        """
        self.total, self.noun, self.seconds, self.after, self.is_limit = total, noun, seconds, after, is_limit
        self.began = self.shown = time.monotonic()
        self.shown_step = 0
        self.first: tuple[int, int] | None = None

    def due(self, step: int) -> bool:
        """Return whether `step` should be shown. Ask first: reading a loss from a device synchronises with it."""
        return step == self.total or time.monotonic() - self.shown >= self.seconds

    def show(self, step: int, images: int = 0, **values: float) -> None:
        """Print a line: `step` steps are done and, for image rates, `images` were processed since the start."""
        self.shown, self.shown_step = time.monotonic(), step
        if self.first is None:  # rates start here, because the steps before it include warm-up
            self.first, self.began = (step, images), self.shown
        seconds = self.shown - self.began
        parts = [f"{self.noun} {step}/{self.total}"]
        if seconds > 0 and images > self.first[1]:
            parts.append(f"{(images - self.first[1]) / seconds:,.0f} images/s")
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()]
        if (left := self.left(step)) is not None:
            parts.append(f"{'at most ' * self.is_limit}{timedelta(seconds=round(left))} left")
        print(PREFIX + " · ".join(parts), flush=True)

    def left(self, step: int) -> float | None:
        """Return the seconds until the last step of the stage, by the steps shown so far; None before two of them."""
        shown, seconds = self.shown_step, self.shown - self.began
        if self.first is None or seconds <= 0 or shown <= self.first[0]:
            return None
        return (self.total + self.after - step) * seconds / (shown - self.first[0])
