"""Classifiers on pixels, given the same labels and folds as a fine-tuning: what a ViT must beat.

In: a dataset. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.rows`. Test is scored once for each draw.

    python -m ray_jobs.baselines --spec ATTEMPT.json
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import Baselines
from ray_jobs.draws import draw_labels, stratified_folds
from ray_jobs.evaluate import save_evaluation
from ray_jobs.pixel_baselines import choose, fit_predict
from ray_jobs.shards import Dataset, Split, open_dataset
from ray_jobs.stage import Context, Result, run_stage
from vit_model.config import Preprocessing

PROTOCOL = "baseline"


def main(context: Context) -> Result:
    """Fit and score every method, each in a Ray task of one core."""
    import ray

    one = ray.remote(num_cpus=1)(run_method)
    found = ray.get([one.remote(context, method) for method in context.config.methods])
    rows = [row for method_rows, _ in found for row in method_rows]
    predictions = [row for _, method_predictions in found for row in method_predictions]
    return save_evaluation(context, rows, predictions)


def run_method(context: Context, method: str) -> tuple[list[Any], list[Any]]:
    """Rows and predictions of one method, whose settings are chosen inside draw 0's labels, or on dev."""
    config: Baselines = context.config
    dataset = open_dataset(context.input("data"))
    x, y = _pixels(dataset, "train", config), dataset.labels("train")
    x_test, y_test, ids = _pixels(dataset, "test", config), dataset.labels("test"), dataset.sample_ids("test")
    labels = config.labels
    if labels.per_class is None:
        x, y, folds = _train_and_dev(dataset, x, y, config)
        supports, chosen = [np.arange(len(y))], choose(method, x, y, folds)
        selected_on = (
            "dev" if dataset.info.splits["dev"] else f"{labels.folds}-fold cross-validation in train"
        )
    else:
        supports = [draw_labels(y, labels.per_class, labels.seed, draw) for draw in range(labels.draws)]
        first = supports[0]
        chosen = choose(method, x[first], y[first], stratified_folds(y[first], labels.folds, labels.seed))
        selected_on = f"{labels.folds}-fold cross-validation in draw 0"
    rows, predictions = [], []
    for draw, support in enumerate(supports):
        predicted = fit_predict(method, chosen, x[support], y[support], x_test)
        common = {
            "task": dataset.info.name,
            "protocol": PROTOCOL,
            "method": method,
            "labels_per_class": labels.per_class,
            "draw": draw,
        }
        rows.append(
            common
            | {
                "split": "test",
                "metric": "accuracy",
                "value": float(np.mean(predicted == y_test)),
                "num_images": len(ids),
                "selected_on": selected_on,
                "settings": json.dumps(chosen, sort_keys=True),
            }
        )
        predictions += [
            common | {"sample_id": sample, "label": int(label), "prediction": int(guess)}
            for sample, label, guess in zip(ids, y_test, predicted, strict=True)
        ]
    print(f"{method}: {np.mean([row['value'] for row in rows]):.3f} with {chosen}", flush=True)
    return rows, predictions


def _train_and_dev(
    dataset: Dataset, x: NDArray[Any], y: NDArray[Any], config: Baselines
) -> tuple[Any, Any, Any]:
    """Train (at most `max_images`) and dev together, and the folds: dev is the one, where there is a dev."""
    keep = np.sort(
        np.random.default_rng([config.labels.seed, len(y)]).permutation(len(y))[: config.max_images]
    )
    x, y = x[keep], y[keep]
    if not dataset.info.splits["dev"]:
        return x, y, stratified_folds(y, config.labels.folds, config.labels.seed)
    x_dev, y_dev = _pixels(dataset, "dev", config), dataset.labels("dev")
    fold = (np.arange(len(y)), len(y) + np.arange(len(y_dev)))
    return np.concatenate([x, x_dev]), np.concatenate([y, y_dev]), [fold]


def _pixels(dataset: Dataset, split: Split, config: Baselines) -> NDArray[Any]:
    """Flattened pixels [n, d] in [0, 1], of a thumbnail where images are larger than that."""
    size, channels = config.thumbnail, 3
    if dataset.info.image is not None:
        size, channels = min(size, dataset.info.image.height), dataset.info.image.channels
    half = (0.5,) * channels
    preprocessing = Preprocessing(mean=half, std=half, resolution=size, channels=channels)
    images = dataset.images(split, preprocessing)
    return images.reshape(len(images), -1) / 255.0


if __name__ == "__main__":
    run_stage("baselines")
