"""Scenes: objects of different classes, sizes and colours on a canvas, and their boxes, as many as one wants.

Image i is a pure function of (seed, i), of the source's sizes and of its figures: drawn shapes, any way up, or the
images of digits or Fashion-MNIST as ink. An object covers at most `COVERED` of another one's box, or the reverse; a box
is that of the pixels of which an object is at least half, also where a later object hides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pipelines.spec import FACTORS, FASHION_MNIST, DigitsSource, ScenesSource
from ray_jobs.data.boxes import Box
from ray_jobs.data.columns import SEVERAL
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.entries import Files, Listing, table
from ray_jobs.sources.readers import digits, idx, shapes

COVERED = 0.4  # of the smaller of two boxes
EMPTY = 0.04  # of the images have no object
SMALLEST, LARGEST = 1 / 6, 1 / 2  # sides of objects, as shares of the image's
_SEED_PURPOSE = 0x7363656E  # "scen": keeps this stream apart from others with the same seed
_FINER = 4  # times the resolution at which shapes are drawn, for smooth edges
_TRIES = 20  # for a place; then the object is left out
Ink = NDArray[np.uint8]
"""How much of each pixel [h, w] an object covers, 255: all."""


class _Figures(NamedTuple):
    class_names: tuple[str, ...]
    draw: Callable[[str, int, np.random.Generator], tuple[Ink, int]]
    """(split, pixels of the longer side, generator) -> the ink of an object of that split, and its class."""


def listing(source: ScenesSource, files: Files) -> Listing:
    """List images 0, 1, ...: first train, then dev, then test."""
    figures, side = _figures(source.figures, tuple(sorted(files.items()))), source.resolution
    rows = []
    for number, split in enumerate(_splits(source)):
        _, boxes = scene(source, figures, number, split)
        rows.append(
            {
                "key": f"scene-{number:07d}",
                "label": SEVERAL,
                "labels": sorted({box.label for box in boxes}),
                "boxes": boxes,
                "split": split,
                "file": "",
                "offset": number,
                "length": 3 * side**2,
                "codec": "row",
            }
        )
    return Listing(figures.class_names, table(rows), ImageSize(height=side, width=side, channels=3))


def rows(source: ScenesSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield the images [resolution, resolution, 3] of these numbers."""
    figures, splits = _figures(source.figures, tuple(sorted(files.items()))), _splits(source)
    yield from (scene(source, figures, number, splits[number])[0] for number in numbers)


def scene(source: ScenesSource, figures: _Figures, number: int, split: str) -> tuple[NDArray[np.uint8], list[Box]]:
    """Return an image, uint8 [resolution, resolution, 3], and its boxes; later objects lie on earlier ones."""
    rng = np.random.default_rng([source.seed, _SEED_PURPOSE, number])
    side = source.resolution
    canvas = np.tile(
        np.array(shapes._rgb(rng.random(), rng.uniform(0, 0.5), rng.uniform(0, 0.4)), float), (side, side, 1)
    )
    boxes: list[Box] = []
    for _ in range(0 if rng.random() < EMPTY else int(rng.integers(1, source.max_count + 1))):
        size = side * math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST)))
        ink, label = figures.draw(split, max(3, round(size)), rng)
        colour = shapes._rgb(rng.random(), *rng.uniform(0.7, 1.0, 2))
        y, x = np.nonzero(ink >= 128)
        low, high = (x.min(), y.min()), (x.max() + 1, y.max() + 1)
        for _ in range(_TRIES):
            left, top = rng.integers(0, side - ink.shape[1] + 1), rng.integers(0, side - ink.shape[0] + 1)
            x1, y1, x2, y2 = map(float, (left + low[0], top + low[1], left + high[0], top + high[1]))
            box = Box(x1, y1, x2, y2, label)
            if all(_covered(box, other) <= COVERED for other in boxes):
                boxes.append(box)
                place = canvas[top : top + ink.shape[0], left : left + ink.shape[1]]
                place += (np.array(colour, float) - place) * (ink[..., None] / 255)
                break
    return np.rint(canvas).astype(np.uint8), boxes


def _splits(source: ScenesSource) -> list[str]:
    sizes = {"train": source.images, "dev": source.dev_images, "test": source.test_images}
    return [split for split, size in sizes.items() for _ in range(size)]


def _covered(one: Box, other: Box) -> float:
    """Return the area that two boxes share, as a share of the smaller one's."""
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    smaller = min((box.x2 - box.x1) * (box.y2 - box.y1) for box in (one, other))
    return max(0.0, width) * max(0.0, height) / smaller


@lru_cache(maxsize=2)  # a task draws several shards of one source
def _figures(name: str, located: tuple[tuple[str, str], ...]) -> _Figures:
    files = dict(located)
    if name == "shapes":
        return _Figures(FACTORS["shape"], _shape)
    if name == "digits":
        (path,) = files.values()
        images, labels, _ = digits.read(Path(path))
        found = digits.listing(DigitsSource(kind="digits"), files)
        return _pasted(digits.CLASS_NAMES, images[..., 0], labels, found.entries["split"].to_pylist())
    fashion = idx.read(files, len(FASHION_MNIST), range(len(FASHION_MNIST)))
    return _pasted(FASHION_MNIST, fashion.images[..., 0], fashion.labels, fashion.splits)


def _shape(split: str, size: int, rng: np.random.Generator) -> tuple[Ink, int]:
    """Draw a shape, turned by any angle."""
    label, angle = int(rng.integers(len(FACTORS["shape"]))), rng.uniform(0, math.tau)
    turned = shapes._OUTLINES[label] @ np.array(
        [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    )
    turned -= turned.min(axis=0)
    turned *= size / turned.max()
    width, height = np.ceil(turned.max(axis=0)).astype(int)
    canvas = Image.new("L", (width * _FINER, height * _FINER))
    ImageDraw.Draw(canvas).polygon([tuple(point) for point in np.rint(turned * _FINER).tolist()], fill=255)
    return np.asarray(canvas.reduce(_FINER)), label


def _pasted(class_names: tuple[str, ...], images: Ink, labels: NDArray[np.int64], splits: Sequence[str]) -> _Figures:
    """Return figures from grey images [n, h, w], each cut to its ink."""
    ordered = sorted(range(len(splits)), key=splits.__getitem__)
    members = {split: [*rows] for split, rows in groupby(ordered, key=splits.__getitem__)}

    def draw(split: str, size: int, rng: np.random.Generator) -> tuple[Ink, int]:
        row = members[split][int(rng.integers(len(members[split])))]
        y, x = np.nonzero(images[row] >= 32)
        cut = images[row, y.min() : y.max() + 1, x.min() : x.max() + 1]
        scale = size / max(cut.shape)
        width, height = (max(2, round(length * scale)) for length in cut.shape[::-1])
        ink = np.asarray(Image.fromarray(cut).resize((width, height), Image.Resampling.BILINEAR), float)
        return np.rint(255 * ink / ink.max()).astype(np.uint8), int(labels[row])

    return _Figures(class_names, draw)
