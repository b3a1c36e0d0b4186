"""The artifact of an evaluation: rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), and its metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipelines.spec import AnyStage
from pipelines.store import FileEntry
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.leakage import Overlap
from ray_jobs.process.context import Context, Result

_UNNAMED = ("few-shot linear", "linear probe", "baseline")  # protocols that the names of metrics leave out


def save_evaluation(
    context: Context[AnyStage],
    rows: list[Any],
    predictions: list[Any],
    overlap: Overlap,
    others: tuple[FileEntry, ...] = (),
) -> Result:
    """Write the two tables of an evaluation; `others` are files that it has already written.

    The artifact's metrics are the rows' values, averaged over draws, and the overlap of training and test images.
    """
    with context.staging() as staging:
        tables.write_table(staging.path / "rows.parquet", rows, tables.ROWS)
        tables.write_predictions(staging.path / "predictions.parquet", predictions)
    files = (*staging.files, *others)
    return Result(tables.digest_rows(rows, tables.ROWS), files, mean_values(rows) | overlap.metrics)


def mean_values(rows: list[Any]) -> dict[str, float | int | str]:
    """Return the mean over draws, by method, metric unless it is accuracy, number of labels and protocol."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        labels = "all" if row["labels_per_class"] is None else row["labels_per_class"]
        real = tables.REAL if row["task"].endswith(tables.REAL) else ""
        protocol = "" if row["protocol"] in _UNNAMED else f", {row['protocol'].removeprefix('few-shot ')}"
        metric = "" if row["metric"] == tables.ACCURACY else f", {row['metric']}"
        groups.setdefault(f"{row['method']}{metric} @ {labels}{real}{protocol}", []).append(row["value"])
    return {name: float(np.mean(values)) for name, values in groups.items()}
