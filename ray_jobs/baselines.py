"""The baselines stage: classifiers on pixels, with the same labels and folds as a fine-tuning.

In: a dataset. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`. Each draw is scored on
test once.

    python -m ray_jobs.baselines --spec ATTEMPT.json
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Baselines
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.artifact import save_evaluation
from ray_jobs.evaluation.leakage import check_leakage
from ray_jobs.evaluation.rows import MOST_FREQUENT, scored, truth_of
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
    predictions = [table for _, method_predictions in results for table in method_predictions]
    return save_evaluation(context, rows, predictions, overlap)


def run_method(context: Context[Baselines], method: str) -> tuple[list[Any], list[Any]]:
    """Return a method's rows and tables of predictions. Its settings are selected on draw 0's labels or on dev."""
    from ray_jobs.evaluation.pixel_baselines import choose, fit_predict

    config = context.config
    dataset = context.dataset()
    supports = _supports(dataset, config)
    labelled = supports.pool.take(supports.rows)
    x, y = _pixels(dataset, labelled, config), labelled["label"].to_numpy().astype(np.int64)
    x_test, truth = _pixels(dataset, dataset.index("test"), config), truth_of(dataset)
    draws = [np.searchsorted(supports.rows, rows) for rows in supports.draws]
    first = draws[0]
    chosen = choose(method, x[first], y[first], supports.folds)
    total = dataset.info.splits["train"] + dataset.info.splits["dev"]
    is_reduced = config.labels.per_class is None and len(first) < total
    name = MOST_FREQUENT if method == "majority" else method
    rows, predictions = [], []
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
        for row, images in scored(common, truth, predicted, supports.selected_on, settings):
            rows.append(row)
            predictions.append(images)
    shown = " with " * bool(chosen) + ", ".join(f"{field} {value}" for field, value in chosen.items())
    print(f"{method}: {np.mean([row['value'] for row in rows]):.3f}{shown}", flush=True)
    return rows, predictions


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
