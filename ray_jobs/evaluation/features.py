"""Features of labelled and test images: from a frozen backbone, from an untrained model, and plain pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipelines.spec import Evaluate
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluation.leakage import COMPARED
from ray_jobs.evaluation.supports import draw_labels
from ray_jobs.process.devices import device, set_threads
from vit_model.build import Network, build
from vit_model.config import ModelContract, Preprocessing
from vit_model.preprocessing import normalise
from vit_model.variants import FAMILIES
from vit_model.weights import load_model

# The pixels of larger images are reduced to this side; more inputs would be too many for a linear probe.
PIXELS_SIDE = 32
UNTRAINED = "untrained"
BATCH = 256  # images per forward pass
DECODED = 4 * BATCH  # images in memory at once; 450 MB at 384 x 384 pixels

Embed = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class Support:
    """The labelled images that draws are taken from: the split, the row in it and the label of each, all [n].

    `needed` [m] are the ascending indices of the images that some draw takes, or of all for a linear probe.
    """

    splits: NDArray[Any]
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    needed: NDArray[np.int64]


def support_of(dataset: Dataset, config: Evaluate) -> Support:
    """Return the images of train, followed by those of dev with `support: train+dev`."""
    splits: tuple[Split, ...] = ("train", "dev") if config.support == "train+dev" else ("train",)
    by_split = [dataset.labels(split) for split in splits]
    labels = np.concatenate(by_split)
    needed = np.arange(len(labels))
    if not config.linear_probe:
        draws = range(config.draws)
        drawn = [draw_labels(labels, max(config.shots), config.seed, draw) for draw in draws]
        needed = np.unique(np.concatenate(drawn))
    return Support(
        np.repeat(splits, [len(split_labels) for split_labels in by_split]),
        np.concatenate([np.arange(len(split_labels)) for split_labels in by_split]),
        labels,
        needed,
    )


def labelled_rows(dataset: Dataset, support: Support) -> pa.Table:
    """Return the columns COMPARED of the images that the support needs."""
    splits: list[Split] = list(dict.fromkeys(support.splits.tolist()))
    rows = pa.concat_tables([dataset.index(split).select(COMPARED) for split in splits])
    return rows.take(support.needed)


def features_of(
    dataset: Dataset, model_folder: Path, support: Support, config: Evaluate, backbone: str
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], bool]]:
    """Yield (method, support features [n, d], test features [m, d], whether to standardise) for each kind of features.

    Only support images that some draw takes are read; the features of the others stay zero and are never used.
    `backbone` names the model's own features: PRETRAINED or SEEN.
    """
    model, contract = load_model(model_folder)
    preprocessing = contract.preprocessing
    if config.eval_crop is not None:
        preprocessing = Preprocessing(**(preprocessing.model_dump() | config.eval_crop.model_dump()))
    needed = support.needed

    def features(preprocessing: Preprocessing, *functions: Embed) -> Iterator[list[NDArray[Any]]]:
        """Yield [support features, test features] for each function, decoding every image once for all of them."""
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
        for *support_parts, test_features in zip(*parts, test, strict=True):
            train = np.zeros((len(support.labels), test_features.shape[1]), test_features.dtype)
            train[needed] = np.concatenate(support_parts)
            yield [train, test_features]

    untrained = build(contract.architecture)
    untrained.initialise(config.seed)
    networks = {backbone: model, UNTRAINED: untrained}
    functions = [partial(embed, network, contract, config.threads) for network in networks.values()]
    for method, (train, test) in zip(networks, features(preprocessing, *functions), strict=True):
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
    """Apply each function to these rows of a split, [n, d] each, with few images in memory at once."""
    features: list[list[NDArray[Any]]] = [[] for _ in functions]
    for start in range(0, len(rows), DECODED):
        images = dataset.images(split, preprocessing, rows[start : start + DECODED])
        for parts, function in zip(features, functions, strict=True):
            parts.append(function(images))
    return [np.concatenate(parts) for parts in features]


def embed(model: Network, contract: ModelContract, threads: int, images: NDArray[Any]) -> NDArray[Any]:
    """Return the frozen representation [n, width] of images, in float32."""
    set_threads(threads)
    target = device()
    model = model.to(target).eval()
    with torch.inference_mode():
        parts = [
            model.forward_features(normalise(batch.to(target), contract.preprocessing, torch.float32))[
                1
            ].cpu()
            for batch in torch.from_numpy(images).split(BATCH)
        ]
    return torch.cat(parts).numpy()
