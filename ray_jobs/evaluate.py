"""Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside pixels and untrained weights.

In: a dataset and a model. Supports are drawn from train (or from train and dev), every image of test is scored, L2 is
chosen by leave-one-out on the support in the same way for every row; so for all labels of the support at once, which
is a linear probe. A model that was trained on test images is refused first (`ray_jobs.evaluation.leakage`). Out:
`rows.parquet` and `predictions.parquet`, see `ray_jobs.evaluation.rows`.

    python -m ray_jobs.evaluate --spec ATTEMPT.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import AnyStage, Evaluate
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.leakage import COMPARED, PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.evaluation.linear_probe import few_shot
from ray_jobs.evaluation.supports import draw_labels
from ray_jobs.process.stage import Context, Result, run_stage
from vit_model.config import ModelContract, Preprocessing
from vit_model.variants import FAMILIES

if TYPE_CHECKING:
    from vit_model.build import Network

PROTOCOL, ALL_LABELS = "few-shot linear", "linear probe"
# A linear probe on more inputs than this has too many: pixels of larger images are taken from them at this size.
PIXELS_SIDE = 32
UNTRAINED = "untrained"
BATCH = 256  # images that a backbone is given at once
DECODED = 4 * BATCH  # images in memory at once: at 384 pixels a side 450 MB

Embed = Callable[[NDArray[Any]], NDArray[Any]]


def main(context: Context[Evaluate]) -> Result:
    """Evaluate in one Ray task."""
    import ray

    from ray_jobs.training.devices import fit_resources

    resources, _ = fit_resources(context.config.threads)
    task = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(evaluate)
    result: Result = ray.get(task.remote(context))
    return result


@dataclass(frozen=True)
class Support:
    """The images that labels may be drawn from: the split, the row there and the label of each, all [n].

    `needed` [m] are the places, ascending, of the images that some draw takes; with a linear probe, of all.
    """

    splits: NDArray[Any]
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    needed: NDArray[np.int64]


def evaluate(context: Context[Evaluate]) -> Result:
    """Features once, then every (shots, draw) in closed form, for each kind of features.

    Raises:
        ValueError: the backbone was trained on test images, see `check_leakage`.
    """
    config = context.config
    dataset = context.dataset()
    dataset.require("train", "test")
    support = support_of(dataset, config)
    overlap = check_leakage(context, dataset, _labelled(dataset, support))
    # a backbone that has seen these labels in training is not a few-shot learner
    backbone = SEEN if overlap.labels_seen else PRETRAINED
    truth, of_backbone = tables.truth_of(dataset), tables.truth_of(dataset, overlap.seen)
    unseen = np.setdiff1d(truth.labels, support.labels)
    if len(unseen):
        print(f"{len(unseen)} classes of test have no labelled image: what is theirs is wrong", flush=True)
    rows: list[tables.Row] = []
    predictions = []
    for method, train, test, standardise in _features(
        dataset, context.input("backbone"), support, config, backbone
    ):
        own = len(rows)
        found = few_shot(
            train,
            support.labels,
            test,
            truth.labels,
            shots=config.shots,
            draws=config.draws,
            seed=config.seed,
            standardise=standardise,
            linear_probe=config.linear_probe,
        )
        for result in found:
            common = {
                "protocol": ALL_LABELS if result.shots is None else PROTOCOL,
                "method": method,
                "labels_per_class": result.shots,
                "draw": result.draw,
            }
            settings: dict[str, Any] = {
                "l2": result.l2,
                "standardised": standardise,
                "width": int(train.shape[1]),
            }
            if result.shots is None:
                settings["labelled_images"] = len(support.labels)
            if config.support != "train":
                settings["support"] = config.support
            if config.eval_crop is not None:
                settings["eval_crop"] = config.eval_crop.model_dump()
            if len(unseen):
                settings["classes_without_labels"] = len(unseen)
            judged = of_backbone if method.endswith(f", {backbone}") else truth
            for row, images in tables.scored(
                common, judged, result.predictions, result.selected_on, settings
            ):
                rows.append(row)
                predictions.append(images)
        for name, mean in _means(rows[own:]).items():
            print(f"{name}: {mean:.3f}", flush=True)
    return save_evaluation(context, rows, predictions, overlap)


def support_of(dataset: Dataset, config: Evaluate) -> Support:
    """Train, with `support: train+dev` then dev."""
    splits: tuple[Split, ...] = ("train", "dev") if config.support == "train+dev" else ("train",)
    by_split = [dataset.labels(split) for split in splits]
    labels = np.concatenate(by_split)
    needed = np.arange(len(labels))
    if not config.linear_probe:
        draws = range(config.draws)
        drawn = [draw_labels(labels, max(config.shots), config.seed, draw) for draw in draws]
        needed = np.unique(np.concatenate(drawn))
    return Support(
        np.repeat(splits, [len(own) for own in by_split]),
        np.concatenate([np.arange(len(own)) for own in by_split]),
        labels,
        needed,
    )


def _labelled(dataset: Dataset, support: Support) -> pa.Table:
    """The columns COMPARED for the images that the support needs."""
    splits: list[Split] = list(dict.fromkeys(support.splits.tolist()))
    rows = pa.concat_tables([dataset.index(split).select(COMPARED) for split in splits])
    return rows.take(support.needed)


def save_evaluation(
    context: Context[AnyStage], rows: list[Any], predictions: list[Any], overlap: Overlap
) -> Result:
    """Write the two tables of an evaluation; its accuracies, averaged over draws, and the overlap of training and test
    become the artifact's metrics."""
    with context.staging() as staging:
        tables.write_table(staging.path / "rows.parquet", rows, tables.ROWS)
        tables.write_predictions(staging.path / "predictions.parquet", predictions)
    return Result(tables.digest_rows(rows, tables.ROWS), staging.files, _means(rows) | overlap.metrics)


def _means(rows: list[Any]) -> dict[str, float | int | str]:
    """Mean accuracy over the draws, by method and number of labels."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        labels = "all" if row["labels_per_class"] is None else row["labels_per_class"]
        real = tables.REAL if row["task"].endswith(tables.REAL) else ""
        groups.setdefault(f"{row['method']} @ {labels}{real}", []).append(row["value"])
    return {name: float(np.mean(values)) for name, values in groups.items()}


def _features(
    dataset: Dataset, model_folder: Path, support: Support, config: Evaluate, backbone: str
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], bool]]:
    """(method, features of the support's images [n, d], of test [m, d], whether they are standardised) of each row.

    Of the support only images that some draw takes are read; the features of the others are zero, and nobody looks
    at them. `backbone` is what the model's own row is called, PRETRAINED or SEEN.
    """
    from vit_model.build import build
    from vit_model.weights import load_model

    model, contract = load_model(model_folder)
    preprocessing = contract.preprocessing
    if config.eval_crop is not None:
        preprocessing = Preprocessing(**(preprocessing.model_dump() | config.eval_crop.model_dump()))
    needed = support.needed

    def features(preprocessing: Preprocessing, *functions: Embed) -> Iterator[list[NDArray[Any]]]:
        """For each function [features of the support, of test]; an image is decoded once for all of them."""
        splits = dict.fromkeys(support.splits[needed].tolist())
        parts = [
            _embedded(
                dataset,
                split,
                support.rows[needed][support.splits[needed] == split],
                preprocessing,
                functions,
            )
            for split in splits
        ]
        test = _embedded(dataset, "test", np.arange(dataset.info.splits["test"]), preprocessing, functions)
        for *own, of_test in zip(*parts, test, strict=True):
            train = np.zeros((len(support.labels), of_test.shape[1]), of_test.dtype)
            train[needed] = np.concatenate(own)
            yield [train, of_test]

    untrained = build(contract.architecture)
    untrained.initialise(config.seed)
    networks = {backbone: model, UNTRAINED: untrained}
    embed = [partial(_embed, network, contract, config.threads) for network in networks.values()]
    for method, (train, test) in zip(networks, features(preprocessing, *embed), strict=True):
        yield f"{FAMILIES[contract.architecture.family]}, {method}", train, test, True
    small = preprocessing.model_copy(update={"resolution": min(preprocessing.resolution, PIXELS_SIDE)})
    [(train, test)] = features(small, lambda images: images.reshape(len(images), -1) / np.float32(255))
    yield "pixels", train, test, False
    yield "pixels, standardised", train, test, True


def _embedded(
    dataset: Dataset,
    split: Split,
    rows: NDArray[np.int64],
    preprocessing: Preprocessing,
    functions: Sequence[Embed],
) -> list[NDArray[Any]]:
    """What each function makes of these rows of a split, [n, d]; few images are in memory at once."""
    found: list[list[NDArray[Any]]] = [[] for _ in functions]
    for start in range(0, len(rows), DECODED):
        images = dataset.images(split, preprocessing, rows[start : start + DECODED])
        for parts, function in zip(found, functions, strict=True):
            parts.append(function(images))
    return [np.concatenate(parts) for parts in found]


def _embed(model: Network, contract: ModelContract, threads: int, images: NDArray[Any]) -> NDArray[Any]:
    """The frozen representation [n, width] of images, in float32."""
    import torch

    from ray_jobs.training.devices import device, set_threads
    from vit_model.preprocessing import normalise

    set_threads(threads)
    where = device()
    model = model.to(where).eval()
    with torch.inference_mode():
        parts = [
            model.forward_features(normalise(batch.to(where), contract.preprocessing, torch.float32))[1].cpu()
            for batch in torch.from_numpy(images).split(BATCH)
        ]
    return torch.cat(parts).numpy()


if __name__ == "__main__":
    run_stage("evaluate")
