"""Rows and predictions of answers that a test makes, as an evaluation writes them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.results.compare import as_json, match
from pipelines.store import Store
from ray_jobs.evaluation.rows import ROWS, Row, Truth, scored, write_predictions, write_table


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


def put_scores(folder: Path, found: Iterable[tuple[Row, pa.Table]]) -> None:
    """Write both tables."""
    rows, predictions = zip(*found, strict=True)
    folder.mkdir(exist_ok=True)
    write_table(folder / "rows.parquet", list(rows), ROWS)
    write_predictions(folder / "predictions.parquet", list(predictions))


def compare(store: Store, a: str, b: str, metric: str = "accuracy") -> dict[str, Any]:
    """Compare two results, as `report compare --json` prints it."""
    return as_json(match(store, a, b, metric))
