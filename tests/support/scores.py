"""Rows and predictions of answers that a test makes, as an evaluation writes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.results.compare import as_json, match
from pipelines.store import Store
from ray_jobs.evaluation.rows import ROWS, Row, Truth, scored, write_predictions, write_table
from ray_jobs.reporting.measures import Entry


class Scores(NamedTuple):
    """The answers of a method in each draw: labels [draws, n]."""

    method: str
    protocol: str
    labels_per_class: int | None
    answers: np.ndarray
    truth: Truth

    def scored(
        self, selected_on: str = "dev", settings: Mapping[str, Any] | None = None, probabilities: Any = None
    ) -> list[tuple[Row, pa.Table]]:
        """Return the row and the predictions of each draw."""
        names = ("method", "protocol", "labels_per_class")
        common: Row = {name: getattr(self, name) for name in names}
        return [
            pair
            for draw, answers in enumerate(self.answers)
            for pair in scored(
                common | {"draw": draw}, self.truth, answers, selected_on, dict(settings or {}), probabilities
            )
        ]


def make_entry(correct: np.ndarray, stage: str = "s", **fields: Any) -> Entry:
    """The results of a method that has these answers right [draws, n], about images whose label is 0."""
    draws, images = correct.shape
    given: dict[str, Any] = {
        "artifact": stage,
        "stage": stage,
        "task": "photos",
        "protocol": "fine-tuning",
        "method": "ViT, pretrained",
        "labels_per_class": None,
        "draw_seed": 0,
        "draws": tuple(range(draws)),
        "sample_ids": tuple(f"{number:03d}" for number in range(images)),
        "labels": np.zeros(images, np.int64),
        "predictions": np.where(correct, 0, 1),
        "correct": correct,
        "probabilities": np.full(correct.shape, np.nan),
        "selected_on": ("dev",),
        "settings": ("{}",),
    }
    return Entry(**given | fields)


def put_scores(folder: Path, found: Iterable[tuple[Row, pa.Table]]) -> None:
    """Write both tables."""
    rows, predictions = zip(*found, strict=True)
    folder.mkdir(exist_ok=True)
    write_table(folder / "rows.parquet", list(rows), ROWS)
    write_predictions(folder / "predictions.parquet", list(predictions))


def compare(store: Store, a: str, b: str, metric: str = "accuracy") -> dict[str, Any]:
    """Compare two results, as `report compare --json` prints it."""
    return as_json(match(store, a, b, metric))
