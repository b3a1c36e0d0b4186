"""A stage's progress, one line a second at most, on stdout: the driver shows the latest, the log keeps them all."""

from __future__ import annotations

import time
from datetime import timedelta

PREFIX = "progress "


class Progress:
    """Prints `progress step 120/1781 · 5,812 images/s · loss 4.21 · 0:00:58 left`."""

    def __init__(self, total: int, noun: str = "step", seconds: float = 1.0, after: int = 0) -> None:
        """`after`: the stage's steps after these; the time left is that of the stage."""
        self.total, self.noun, self.seconds, self.after = total, noun, seconds, after
        self.began = self.shown = time.monotonic()
        self.first: tuple[int, int] | None = None

    def due(self, step: int) -> bool:
        """Whether it is time to show `step` (reading a loss from a device costs a synchronisation: ask first)."""
        return step == self.total or time.monotonic() - self.shown >= self.seconds

    def show(self, step: int, images: int = 0, **values: float) -> None:
        """Print a line for `step` done and, where images are what counts, `images` handled since the beginning."""
        self.shown = time.monotonic()
        if self.first is None:  # the first steps include warming up: rates count from here
            self.first, self.began = (step, images), self.shown
        seconds = self.shown - self.began
        parts = [f"{self.noun} {step}/{self.total}"]
        if seconds > 0 and images > self.first[1]:
            parts.append(f"{(images - self.first[1]) / seconds:,.0f} images/s")
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in values.items()]
        if seconds > 0 and step > self.first[0]:
            left = (self.total + self.after - step) * seconds / (step - self.first[0])
            parts.append(f"{timedelta(seconds=round(left))} left")
        print(PREFIX + " · ".join(parts), flush=True)
