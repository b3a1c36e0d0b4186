"""The artifact of an evaluation: rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), and its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import AnyStage
from pipelines.store import FileEntry
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.leakage import Overlap
from ray_jobs.evaluation.metrics import mean_iou
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


CONFUSIONS = "confusion"
"""The column of a table of images [n]: the pixels of each label and prediction, flattened."""


class TestedPixels(NamedTuple):
    """The confusions [images, classes, classes] of a method on test, and how the method was fitted."""

    method: str
    draw: int
    counts: NDArray[np.int64]
    selected_on: str
    settings: dict[str, Any]
    seen: NDArray[np.bool_] | None
    """Which test images the backbone was trained on; None: the method does not use the backbone."""


def score_pixels(dataset: Dataset, protocol: str, tested: TestedPixels) -> Iterator[tuple[tables.Row, pa.Table]]:
    """Yield the rows of a method, each with its table of CONFUSION: one, or two if some test images were seen."""
    ids, names = pa.array(dataset.sample_ids("test")), pa.array(dataset.info.mask_classes)
    scoring = [(dataset.info.name, np.arange(len(tested.counts)), tested.counts)]
    for task, method, places, part in tables.split_by_seen(scoring, tested.method, tested.seen):
        common: tables.Row = {"task": task, "method": method, "protocol": protocol}
        common |= {"labels_per_class": None, "draw": tested.draw}
        total = part.sum(axis=0)
        settings = tested.settings | {"classes": int(np.count_nonzero(total.sum(axis=1)))}
        row = tables.measurement(common, tables.MEAN_IOU, mean_iou(total), len(places), tested.selected_on, settings)
        images, labels, predictions = np.nonzero(part)  # a row for each pair of label and prediction in an image
        columns = {
            "sample_id": ids.take(pa.array(places[images])),
            "label": names.take(pa.array(labels)),
            "prediction": names.take(pa.array(predictions)),
            "pixels": part[images, labels, predictions],
        }
        yield row, tables.filled(tables.CONFUSION, columns, common, len(images))
