"""Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside pixels and untrained weights.

In: a dataset and a model. Supports are drawn from train, every image of test is scored, L2 is chosen by leave-one-out
on the support in the same way for every row. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.rows`.

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import Evaluate
from ray_jobs import rows as tables
from ray_jobs.linear_probe import few_shot
from ray_jobs.shards import Dataset, Split, open_dataset
from ray_jobs.stage import Context, Result, run_stage

PROTOCOL = "few-shot linear"
PIXELS_SIDE = (
    32  # pixels of larger images are taken from them at this size: a linear probe on more has too many inputs
)


def main(context: Context) -> Result:
    """Evaluate in one Ray task."""
    import ray

    from ray_jobs.devices import gpus_in_cluster

    gpus = 1 if gpus_in_cluster() else 0
    result: Result = ray.get(
        ray.remote(num_cpus=context.config.threads, num_gpus=gpus)(evaluate).remote(context)
    )
    return result


def evaluate(context: Context) -> Result:
    """Features of both splits once, then every (shots, draw) in closed form, for each kind of features."""
    config: Evaluate = context.config
    dataset = open_dataset(context.input("data"))
    labels = {split: dataset.labels(split) for split in ("train", "test")}
    ids = dataset.sample_ids("test")
    rows, predictions = [], []
    (backbone,) = context.inputs["backbone"]
    for method, (train, test), standardise in _features(
        dataset, context.folder(backbone), backbone.job, config
    ):
        found = few_shot(
            train,
            labels["train"],
            test,
            labels["test"],
            shots=config.shots,
            draws=config.draws,
            seed=config.seed,
            standardise=standardise,
        )
        for result in found:
            common = {
                "task": dataset.info.name,
                "protocol": PROTOCOL,
                "method": method,
                "labels_per_class": result.shots,
                "draw": result.draw,
            }
            settings = {"l2": result.l2, "standardised": standardise, "width": int(train.shape[1])}
            rows.append(
                common
                | {
                    "split": "test",
                    "metric": "accuracy",
                    "value": float(result.accuracy),
                    "num_images": len(ids),
                    "selected_on": result.selected_on,
                    "settings": json.dumps(settings, sort_keys=True),
                }
            )
            predictions += [
                common | {"sample_id": sample, "label": int(label), "prediction": int(predicted)}
                for sample, label, predicted in zip(ids, labels["test"], result.predictions, strict=True)
            ]
        for shots in config.shots:
            mean = np.mean([result.accuracy for result in found if result.shots == shots])
            print(f"{method}, {shots} shots: {mean:.3f}", flush=True)
    return save_evaluation(context, rows, predictions)


def save_evaluation(context: Context, rows: list[Any], predictions: list[Any]) -> Result:
    """Write the two tables of an evaluation; its accuracies, averaged over draws, become the artifact's metrics."""
    with context.staging() as staging:
        tables.write_table(staging.path / "rows.parquet", rows, tables.ROWS)
        tables.write_table(staging.path / "predictions.parquet", predictions, tables.PREDICTIONS)
    groups: dict[str, list[float]] = {}
    for row in rows:
        labels = "all" if row["labels_per_class"] is None else row["labels_per_class"]
        groups.setdefault(f"{row['method']} @ {labels}", []).append(row["value"])
    metrics: dict[str, float | int | str] = {name: float(np.mean(values)) for name, values in groups.items()}
    return Result(tables.digest_rows(rows, tables.ROWS), staging.files, metrics)


Pair = tuple[NDArray[Any], NDArray[Any]]


def _features(
    dataset: Dataset, model_folder: Path, job: str, config: Evaluate
) -> list[tuple[str, Pair, bool]]:
    """(method, (train [n, d], test [n, d]), whether they are standardised on the support) of each row."""
    from vit_model.model import ViT
    from vit_model.weights import load_model

    model, contract = load_model(model_folder)
    untrained = ViT(contract.architecture)
    untrained.initialise(config.seed)
    small = contract.preprocessing
    if small.resolution > PIXELS_SIDE:
        small = small.model_copy(update={"resolution": PIXELS_SIDE})
    pixels = _pair(
        dataset, lambda split: dataset.images(split, small).reshape(dataset.info.splits[split], -1) / 255.0
    )
    return [
        (
            "ViT, pretrained",
            _pair(dataset, lambda split: _embed(model, contract, dataset, split, config)),
            True,
        ),
        (
            "ViT, untrained",
            _pair(dataset, lambda split: _embed(untrained, contract, dataset, split, config)),
            True,
        ),
        ("pixels", pixels, False),
        ("pixels, standardised", pixels, True),
    ]


def _pair(dataset: Dataset, of: Any) -> Pair:
    return of("train"), of("test")


def _embed(model: Any, contract: Any, dataset: Dataset, split: Split, config: Evaluate) -> NDArray[Any]:
    """The frozen representation [n, width] of a split, in float32."""
    import torch

    from ray_jobs.devices import device, set_threads
    from vit_model.preprocessing import normalise

    set_threads(config.threads)
    where = device()
    model = model.to(where).eval()
    images = dataset.images(split, contract.preprocessing)
    with torch.inference_mode():
        parts = [
            model.forward_features(normalise(batch.to(where), contract.preprocessing, torch.float32))[1].cpu()
            for batch in torch.from_numpy(images).split(256)
        ]
    return torch.cat(parts).numpy()


if __name__ == "__main__":
    run_stage("evaluate")
