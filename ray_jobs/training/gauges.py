"""Gauges of a training in Ray's metrics, which every node exports to Prometheus. In: `LogLine`s."""

from __future__ import annotations

from ray.util.metrics import Gauge

from pipelines.store import Attempt, LogLine

_GAUGES = {
    "step": "Steps done",
    "epoch": "Images seen, divided by the number of training images",
    "loss": "Mean training loss since the previous log line",
    "learning_rate": "Learning rate of the last step",
    "gradient_norm": "Norm of the last step's gradients before clipping",
    "images_per_second": "Training images per second of all workers",
    "data_wait": "Share of the time that the first worker waited for images",
    "mfu": "Model FLOPs utilisation, a share of the GPUs' peak",
    "seconds_left": "Estimated seconds until the last step",
    "dev_loss": "Last measured loss on dev",
    "dev_accuracy": "Last measured accuracy on dev",
}
"""A field of `LogLine` -> the description of its gauge, which Prometheus shows as ray_vitflow_<field>."""


class Gauges:
    """The gauges of one training, or of one fit of a fine-tuning."""

    def __init__(self, attempt: Attempt, fit: str | None = None) -> None:
        tags = {
            "run": attempt.run,
            "stage": attempt.stage,
            "key": attempt.key[:12],
            "attempt": str(attempt.number),
            "fit": fit or "",
        }
        self._gauges = {
            name: Gauge(f"vitflow_{name}", description, tuple(tags)) for name, description in _GAUGES.items()
        }
        for gauge in self._gauges.values():
            gauge.set_default_tags(tags)

    def show(self, line: LogLine) -> None:
        """Show the values of a line; a gauge without a value in it does not change."""
        for name, gauge in self._gauges.items():
            if (value := getattr(line, name)) is not None:
                gauge.set(value)
