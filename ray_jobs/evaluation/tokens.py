"""Tokens of image patches: from a frozen backbone, from untrained models, and the pixels of each patch.

In: rows of a dataset with masks. Out: for each kind of tokens, the sums from which a linear classifier is fitted, or
the confusions of its predictions and the masks. Tokens are never kept, because an image has hundreds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipelines.spec import Segment
from ray_jobs.data.masks import Mask
from ray_jobs.data.shards import Split
from ray_jobs.evaluation.features import INITIALISATIONS, PIXELS, UNTRAINED, Weights, embed_patches
from ray_jobs.evaluation.segmentation import Moments, confusion, shares_of_patches
from ray_jobs.process.context import Context
from vit_model.contract import read_contract
from vit_model.variants import FAMILIES

BATCH = 32  # images per forward pass; their tokens are in memory in float64
DECODED = 1024  # images per task


class Kind(NamedTuple):
    """One kind of tokens."""

    method: str
    draw: int
    grid: tuple[int, int]
    """the numbers of rows and columns of patches"""


def kinds_of(context: Context[Segment], backbone: str) -> list[Kind]:
    """Return the kinds of tokens, in the order of the lists below, the backbone's first.

    Args:
        backbone: the name of the model's tokens: PRETRAINED or SEEN.
    """
    architecture = read_contract(context.input("backbone")).architecture
    family = FAMILIES[architecture.family]
    named = [(backbone, 0), *((UNTRAINED, draw) for draw in range(INITIALISATIONS))]
    kinds = [Kind(f"{family}, {name}", draw, architecture.grid) for name, draw in named]
    return [*kinds, Kind(PIXELS, 0, architecture.grid)]


def moments_of_rows(context: Context[Segment], split: Split, rows: NDArray[np.int64]) -> list[Moments]:
    """Return the sums over the tokens of these rows of a split, for each kind of tokens."""
    sums: list[Moments | None] = []
    for tokens, masks in _batches(context, split, rows):
        with threadpool_limits(1):
            shares = [shares_of_patches(mask, tokens[0].grid, tokens[0].num_classes) for mask in masks]
            batch = [Moments.of(kind.flat, np.concatenate(shares)) for kind in tokens]
        before = sums or [None] * len(batch)
        sums = [new if old is None else old + new for old, new in zip(before, batch, strict=True)]
    return [total for total in sums if total is not None]


def confusions_of_rows(
    context: Context[Segment], split: Split, rows: NDArray[np.int64], weights: list[NDArray[np.float64]]
) -> list[NDArray[np.int64]]:
    """Return the confusions [n, variants, classes, classes] of these rows of a split, for each kind of tokens.

    Args:
        weights: [variants, d + 1, classes] for each kind of tokens, as `Moments.fit` returns them.
    """
    confusions: list[list[NDArray[np.int64]]] = [[] for _ in weights]
    for tokens, masks in _batches(context, split, rows):
        for counts, kind, fitted in zip(confusions, tokens, weights, strict=True):
            with threadpool_limits(1):
                scores = np.asarray(kind.flat, np.float64) @ fitted[:, :-1] + fitted[:, -1:]
            by_image = scores.reshape(len(fitted), len(masks), *kind.grid, -1)
            counts += [confusion(by_image[:, place], mask) for place, mask in enumerate(masks)]
    return [np.stack(counts) for counts in confusions]


class _Tokens(NamedTuple):
    """The tokens [n, d] of a batch's patches, image after image."""

    flat: NDArray[np.float32]
    grid: tuple[int, int]
    num_classes: int


def _batches(
    context: Context[Segment], split: Split, rows: NDArray[np.int64]
) -> Iterator[tuple[list[_Tokens], list[Mask]]]:
    """Yield, for each batch of these rows, each kind of tokens, and the masks."""
    dataset, folder, config = context.dataset(), context.input("backbone"), context.config
    contract = read_contract(folder)
    # the whole image: a crop would leave pixels without patches
    squashed = contract.preprocessing.model_copy(update={"crop": "squash", "crop_fraction": 1.0})
    grid, num_classes = contract.architecture.grid, len(dataset.info.mask_classes)
    seeds = range(config.seed, config.seed + INITIALISATIONS)
    networks = [Weights(folder, seed).load()[0] for seed in (None, *seeds)]
    masks = dataset.masks(split, rows)
    for start in range(0, len(rows), BATCH):
        images = dataset.images(split, squashed, rows[start : start + BATCH])
        tokens = [embed_patches(network, contract, config.threads, images) for network in networks]
        tokens.append(_patches(images, grid))
        yield (
            [_Tokens(values.reshape(-1, values.shape[-1]), grid, num_classes) for values in tokens],
            [next(masks) for _ in range(len(images))],
        )


def _patches(images: NDArray[Any], grid: tuple[int, int]) -> NDArray[np.float32]:
    """Return the pixels of each patch in [0, 1], [n, patches, pixels * channels].

    Images are padded with zeros to a multiple of the grid, because the last patches of a ResNet's grid may be cut off.
    """
    count, height, width, channels = images.shape
    rows, columns = (-(-size // parts) for size, parts in zip((height, width), grid, strict=True))
    padding = (0, grid[0] * rows - height), (0, grid[1] * columns - width)
    whole = np.pad(images, ((0, 0), *padding, (0, 0)))
    parts = whole.reshape(count, grid[0], rows, grid[1], columns, channels).swapaxes(2, 3)
    return np.asarray(parts.reshape(count, grid[0] * grid[1], -1) / np.float32(255), np.float32)
