"""Classifiers on pixels, given the same labels and folds as a fine-tuning: what a ViT must beat.

In: a dataset. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`. Test is scored once for
each draw.

    python -m ray_jobs.baselines --spec ATTEMPT.json
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Baselines
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluate import save_evaluation
from ray_jobs.evaluation.leakage import check_leakage
from ray_jobs.evaluation.rows import scored, truth_of
from ray_jobs.evaluation.supports import draw_labels, permutation, stratified_folds
from ray_jobs.process.stage import Context, Result, run_stage
from vit_model.config import Preprocessing

PROTOCOL = "baseline"
_KEEP = 2  # keeps the choice of max_images apart from other random numbers of the same seed


def main(context: Context[Baselines]) -> Result:
    """Fit and score every method, each in a Ray task of one core."""
    import ray

    dataset = context.dataset()
    dataset.require("train", "test")
    overlap = check_leakage(context, dataset, _fitted_on(dataset, context.config))
    one = ray.remote(num_cpus=1)(run_method)
    found = ray.get([one.remote(context, method) for method in context.config.methods])
    rows = [row for method_rows, _ in found for row in method_rows]
    predictions = [part for _, method_predictions in found for part in method_predictions]
    return save_evaluation(context, rows, predictions, overlap)


def run_method(context: Context[Baselines], method: str) -> tuple[list[Any], list[Any]]:
    """Rows and tables of predictions of one method, whose settings are chosen inside draw 0's labels, or on dev."""
    from ray_jobs.evaluation.pixel_baselines import (  # scikit-learn, for which the entrypoint need not wait
        choose,
        fit_predict,
    )

    config = context.config
    dataset = context.dataset()
    x, y, supports, folds, selected_on = _labelled(dataset, config)
    x_test, truth = _pixels(dataset, "test", config), truth_of(dataset)
    first = supports[0]
    chosen = choose(method, x[first], y[first], folds)
    total = dataset.info.splits["train"] + dataset.info.splits["dev"]
    few = config.labels.per_class is None and len(first) < total
    rows, predictions = [], []
    for draw, support in enumerate(supports):
        predicted = fit_predict(method, chosen, x[support], y[support], x_test)
        common = {
            "protocol": PROTOCOL,
            # where others saw all labels, a reader must not take this for their equal
            "method": f"{method} on {len(support):,} images" if few else method,
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        settings = {**chosen, "labelled_images": len(support)}
        for row, images in scored(common, truth, predicted, selected_on, settings):
            rows.append(row)
            predictions.append(images)
    print(f"{method}: {np.mean([row['value'] for row in rows]):.3f} with {chosen}", flush=True)
    return rows, predictions


def _labelled(
    dataset: Dataset, config: Baselines
) -> tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]], Any, str]:
    """(pixels, labels, supports as indices into them, folds of the first support, on what settings are selected)."""
    labels, y = config.labels, dataset.labels("train")
    drawn = _drawn(y, config)
    if labels.per_class is not None:
        needed = np.unique(np.concatenate(drawn))
        supports = [np.searchsorted(needed, support) for support in drawn]
        folds = stratified_folds(y[drawn[0]], labels.folds, labels.seed)
        selected_on = f"{labels.folds}-fold cross-validation in draw 0"
        return _pixels(dataset, "train", config, needed), y[needed], supports, folds, selected_on
    (keep,) = drawn
    x, y = _pixels(dataset, "train", config, keep), y[keep]
    if not dataset.info.splits["dev"]:
        folds = stratified_folds(y, labels.folds, labels.seed)
        return x, y, [np.arange(len(y))], folds, f"{labels.folds}-fold cross-validation in train"
    x_all = np.concatenate([x, _pixels(dataset, "dev", config)])
    y_all = np.concatenate([y, dataset.labels("dev")])
    fold = (np.arange(len(y)), np.arange(len(y), len(y_all)))
    return x_all, y_all, [np.arange(len(y_all))], [fold], "dev"


def _drawn(y: NDArray[Any], config: Baselines) -> list[NDArray[Any]]:
    """Places in train (labels `y`) of each draw's images; with all labels, of `max_images` images."""
    labels = config.labels
    if labels.per_class is not None:
        return [draw_labels(y, labels.per_class, labels.seed, draw) for draw in range(labels.draws)]
    return [np.sort(permutation(len(y), labels.seed, _KEEP)[: config.max_images])]


def _fitted_on(dataset: Dataset, config: Baselines) -> pa.Table:
    """The rows of the index that some draw is fitted on."""
    drawn = np.unique(np.concatenate(_drawn(dataset.labels("train"), config)))
    rows = dataset.index("train").take(drawn)
    return rows if config.labels.per_class is not None else pa.concat_tables([rows, dataset.index("dev")])


def _pixels(
    dataset: Dataset, split: Split, config: Baselines, indices: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Flattened pixels [n, d] in [0, 1], of a thumbnail where images are larger than that."""
    size, channels = config.thumbnail, 3
    if dataset.info.image is not None:
        size, channels = min(size, dataset.info.image.height), dataset.info.image.channels
    half = (0.5,) * channels
    preprocessing = Preprocessing(mean=half, std=half, resolution=size, channels=channels)
    images = dataset.images(split, preprocessing, indices)
    return images.reshape(len(images), -1) / 255.0


if __name__ == "__main__":
    run_stage("baselines")
