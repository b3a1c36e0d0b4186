"""Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside pixels and untrained weights.

In: a dataset and a model. Supports are drawn from train, every image of test is scored, L2 is chosen by leave-one-out
on the support in the same way for every row. Out: `rows.parquet` and `predictions.parquet`, see `ray_jobs.rows`.

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.spec import Evaluate
from ray_jobs import rows as tables
from ray_jobs.draws import draw_labels
from ray_jobs.linear_probe import few_shot
from ray_jobs.shards import Dataset, open_dataset
from ray_jobs.stage import Context, Result, run_stage
from vit_model.config import ModelContract, Preprocessing
from vit_model.variants import FAMILIES

if TYPE_CHECKING:
    from vit_model.build import Network

PROTOCOL = "few-shot linear"
# A linear probe on more inputs than this has too many: pixels of larger images are taken from them at this size.
PIXELS_SIDE = 32
PRETRAINED, SEEN, UNTRAINED = "pretrained", "trained on these images", "untrained"


def main(context: Context) -> Result:
    """Evaluate in one Ray task."""
    import ray

    from ray_jobs.devices import fit_resources

    resources, _ = fit_resources(context.config.threads)
    task = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(evaluate)
    result: Result = ray.get(task.remote(context))
    return result


def evaluate(context: Context) -> Result:
    """Features once, then every (shots, draw) in closed form, for each kind of features."""
    config: Evaluate = context.config
    dataset = open_dataset(context.input("data"))
    dataset.require("train", "test")
    labels, labels_test, ids = dataset.labels("train"), dataset.labels("test"), dataset.sample_ids("test")
    rows, predictions = [], []
    for method, train, test, standardise in _features(dataset, context.input("backbone"), config):
        found = few_shot(
            train,
            labels,
            test,
            labels_test,
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
            row, images = tables.scored(
                common, ids, labels_test, result.predictions, result.selected_on, settings
            )
            rows.append(row)
            predictions += images
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


def _features(
    dataset: Dataset, model_folder: Path, config: Evaluate
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], bool]]:
    """(method, features of train [n, d], of test [m, d], whether they are standardised on the support) of each row.

    Of train only the images of some support are read; the features of the others are zero, and nobody looks at them.
    """
    from vit_model.build import build
    from vit_model.weights import load_model

    model, contract = load_model(model_folder)
    labels = dataset.labels("train")
    draws = range(config.draws)
    supports = [draw_labels(labels, max(config.shots), config.seed, draw) for draw in draws]
    needed = np.unique(np.concatenate(supports))

    def both(
        preprocessing: Preprocessing, embed: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> list[NDArray[Any]]:
        test = embed(dataset.images("test", preprocessing))
        train = np.zeros((len(labels), test.shape[1]), test.dtype)
        train[needed] = embed(dataset.images("train", preprocessing, needed))
        return [train, test]

    # a backbone that has seen these labels in training is no few-shot learner, whatever its numbers
    seen = contract.training_data == dataset.info.content_digest
    untrained = build(contract.architecture)
    untrained.initialise(config.seed)
    for method, network in ((SEEN if seen else PRETRAINED, model), (UNTRAINED, untrained)):
        train, test = both(contract.preprocessing, partial(_embed, network, contract, config.threads))
        yield f"{FAMILIES[contract.architecture.family]}, {method}", train, test, True
    small = contract.preprocessing.model_copy(
        update={"resolution": min(contract.preprocessing.resolution, PIXELS_SIDE)}
    )
    train, test = both(small, lambda images: images.reshape(len(images), -1) / np.float32(255))
    yield "pixels", train, test, False
    yield "pixels, standardised", train, test, True


def _embed(model: Network, contract: ModelContract, threads: int, images: NDArray[Any]) -> NDArray[Any]:
    """The frozen representation [n, width] of images, in float32."""
    import torch

    from ray_jobs.devices import device, set_threads
    from vit_model.preprocessing import normalise

    set_threads(threads)
    where = device()
    model = model.to(where).eval()
    with torch.inference_mode():
        parts = [
            model.forward_features(normalise(batch.to(where), contract.preprocessing, torch.float32))[1].cpu()
            for batch in torch.from_numpy(images).split(256)
        ]
    return torch.cat(parts).numpy()


if __name__ == "__main__":
    run_stage("evaluate")
