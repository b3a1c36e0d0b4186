"""The baselines stage: classifiers on pixels, with the same labels and folds as a fine-tuning.

In: a dataset. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`; with several labels per
image also `scores.parquet`, see `ray_jobs.evaluation.multi_label`. Each draw is scored on test once.

    python -m ray_jobs.baselines --spec ATTEMPT.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Baselines
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.evaluation import multi_label
from ray_jobs.evaluation.artifact import save_evaluation
from ray_jobs.evaluation.leakage import check_leakage
from ray_jobs.evaluation.rows import (
    ACCURACY,
    CLASS_FREQUENCIES,
    MEAN_AP,
    MOST_FREQUENT,
    Row,
    scored,
    truth_of,
    write_parquet,
)
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from vit_model.contract import Preprocessing

PROTOCOL = "baseline"


def main(context: Context[Baselines]) -> Result:
    """Fit and score every method, each in a Ray task on one core."""
    import ray

    dataset = context.dataset()
    dataset.require("train", "test")
    supports = _supports(dataset, context.config)
    overlap = check_leakage(context, dataset, supports.pool.take(supports.rows))
    task = ray.remote(num_cpus=1)(run_method)
    results = ray.get([task.remote(context, method) for method in context.config.methods])
    rows = [row for method_rows, _ in results for row in method_rows]
    tables = [table for _, method_tables in results for table in method_tables]
    if not dataset.info.multi_label:
        return save_evaluation(context, rows, tables, overlap)
    with context.staging() as staging:
        write_parquet(staging.path / multi_label.FILE, pa.concat_tables(tables))
    return save_evaluation(context, rows, [], overlap, staging.files)


def run_method(context: Context[Baselines], method: str) -> tuple[list[Row], list[pa.Table]]:
    """Return a method's rows and tables of predictions or scores.

    Its settings are selected on draw 0's labels or on dev.
    """
    from ray_jobs.evaluation.pixel_baselines import choose, fit_predict, thresholds

    config = context.config
    dataset = context.dataset()
    supports = _supports(dataset, config)
    labelled = supports.pool.take(supports.rows)
    x, y = _pixels(dataset, labelled, config), Images(dataset, labelled).labels
    x_test, is_several = _pixels(dataset, dataset.index("test"), config), dataset.info.multi_label
    draws = [np.searchsorted(supports.rows, rows) for rows in supports.draws]
    first = draws[0]
    chosen = choose(method, x[first], y[first], supports.folds)
    total = dataset.info.splits["train"] + dataset.info.splits["dev"]
    is_reduced = config.labels.per_class is None and len(first) < total
    name = (CLASS_FREQUENCIES if is_several else MOST_FREQUENT) if method == "majority" else method
    limits = thresholds(method, chosen, x[first], y[first], supports.folds) if is_several else ()
    selected_on = supports.selected_on + is_several * f", by {MEAN_AP}"
    rows: list[Row] = []
    tables: list[pa.Table] = []
    for draw, support in enumerate(draws):
        predicted = fit_predict(method, chosen, x[support], y[support], x_test)
        common = {
            "protocol": PROTOCOL,
            # Other methods use all labels here, so the name says that this one does not.
            "method": f"{name} on {len(support):,} images" if is_reduced else name,
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        settings = {**chosen, "labelled_images": len(support)}
        more, images = _scored(dataset, common, predicted, limits, selected_on, settings)
        rows += more
        tables += images
    shown = " with " * bool(chosen) + ", ".join(f"{field} {value}" for field, value in chosen.items())
    measured = [row["value"] for row in rows if row["metric"] in (ACCURACY, MEAN_AP)]
    print(f"{method}: {np.mean(measured):.3f}{shown}", flush=True)
    return rows, tables


def _scored(
    dataset: Dataset,
    common: Row,
    predicted: NDArray[Any],
    thresholds: Sequence[float],
    selected_on: str,
    settings: dict[str, Any],
) -> tuple[Sequence[Row], Sequence[pa.Table]]:
    """Return the rows and tables of a draw."""
    if not dataset.info.multi_label:
        pairs = scored(common, truth_of(dataset), predicted, selected_on, settings)
        rows, tables = zip(*pairs, strict=True)
        return rows, tables
    truth = Images(dataset, dataset.index("test")).labels
    results = multi_label.Scored(truth, predicted, multi_label.reaches(predicted, thresholds))
    common, settings = common | {"task": dataset.info.name}, settings | {"thresholds": selected_on}
    return multi_label.scored(common, dataset.sample_ids("test"), results, None, selected_on, settings)


def _supports(dataset: Dataset, config: Baselines) -> Supports:
    return Supports(dataset.index("train"), dataset.index("dev"), config.labels, config.max_images)


def _pixels(dataset: Dataset, rows: pa.Table, config: Baselines) -> NDArray[Any]:
    """Return flattened pixels [n, d] in [0, 1]; larger images are downsized to a thumbnail."""
    size, channels = config.thumbnail, 3
    if dataset.info.image is not None:
        size, channels = min(size, dataset.info.image.height), dataset.info.image.channels
    half = (0.5,) * channels
    preprocessing = Preprocessing(mean=half, std=half, resolution=size, channels=channels)
    images = dataset.load(rows, preprocessing)
    return images.reshape(len(images), -1) / 255.0


if __name__ == "__main__":
    run_stage("baselines")
