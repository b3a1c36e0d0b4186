"""Drawn figures with factors of variation, as many as one wants.

Image i is a pure function of (seed, i) and of the source's sizes: its shape, colour, orientation, scale and count are
drawn first, then the places of its figures in a grid of 3 x 3 cells, then what no label asks for (where in its cell a
figure lies, tones, the background). Every factor is one class among those of `pipelines.spec.FACTORS`.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pipelines.spec import FACTORS, ShapesSource
from ray_jobs.data.shards import ImageSize
from ray_jobs.sources.archives.entries import Files, Listing, table

_SEED_PURPOSE = 0x73686170  # "shap": keeps this stream apart from others with the same seed
_FINER = 4  # drawn at so many times the resolution: smooth edges
_CELLS = 3  # a side
_TURN = np.linspace(0, 2 * math.pi, 40, endpoint=False)


def listing(source: ShapesSource, files: Files) -> Listing:
    """Images 0, 1, ...: first train, then dev, then test."""
    sizes = {"train": source.images, "dev": source.dev_images, "test": source.test_images}
    splits = [split for split, size in sizes.items() for _ in range(size)]
    side = source.resolution
    entries = (
        {
            "key": f"shape-{number:07d}",
            "label": _drawn(source, number)[0][source.label],
            "split": split,
            "file": "",
            "offset": number,
            "length": 3 * side**2,
            "codec": "row",
        }
        for number, split in enumerate(splits)
    )
    names = FACTORS[source.label][: source.max_count if source.label == "count" else None]
    return Listing(names, table(entries), ImageSize(height=side, width=side, channels=3))


def rows(source: ShapesSource, files: Files, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """The images [resolution, resolution, 3] of these numbers."""
    yield from (render(source, number)[0] for number in numbers)


def render(source: ShapesSource, number: int) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """One image, uint8 [resolution, resolution, 3], and the class of each of its factors."""
    factors, places, rng = _drawn(source, number)
    hue = (factors["colour"] / len(FACTORS["colour"]) + rng.uniform(-0.04, 0.04)) % 1
    colour = _rgb(hue, *rng.uniform(0.7, 1.0, 2))
    background = _rgb(rng.random(), rng.uniform(0, 0.5), rng.uniform(0, 0.4))
    angle = math.tau * (factors["orientation"] + rng.uniform(-0.25, 0.25)) / len(FACTORS["orientation"])
    half = source.resolution * _FINER / _CELLS / 2
    radius = half * (0.4 + 0.5 * (factors["scale"] + rng.random()) / len(FACTORS["scale"]))
    turned = _OUTLINES[factors["shape"]] @ np.array(
        [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    )
    canvas = Image.new("RGB", (source.resolution * _FINER,) * 2, background)
    draw = ImageDraw.Draw(canvas)
    for place in places:
        cell = half * (2 * np.array([place % _CELLS, place // _CELLS]) + 1)
        centre = cell + rng.uniform(radius - half, half - radius, 2)
        draw.polygon([tuple(point) for point in np.rint(centre + radius * turned).tolist()], fill=colour)
    return np.asarray(canvas.reduce(_FINER)), factors


def _drawn(source: ShapesSource, number: int) -> tuple[dict[str, int], list[int], np.random.Generator]:
    """The factors of an image, the cells of its figures, and what draws the rest."""
    rng = np.random.default_rng([source.seed, _SEED_PURPOSE, number])
    factors = {name: int(rng.integers(len(FACTORS[name]))) for name in ("shape", "colour", "orientation", "scale")}
    count = int(rng.integers(source.max_count))
    places: list[int] = rng.permutation(_CELLS**2)[: count + 1].tolist()
    return factors | {"position": places[0], "count": count}, places, rng


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _outline(points: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
    """Around the centre of its box, its farthest point at distance 1; x to the right, y down."""
    outline = np.array(points, np.float64)
    outline -= (outline.min(0) + outline.max(0)) / 2
    farthest: NDArray[np.float64] = outline / np.hypot(*outline.T).max()
    return farthest


def _heart(turn: float) -> tuple[float, float]:
    x = 16 * math.sin(turn) ** 3
    return x, -13 * math.cos(turn) + 5 * math.cos(2 * turn) + 2 * math.cos(3 * turn) + math.cos(4 * turn)


_HALF = np.linspace(-math.pi / 2, math.pi / 2, 20)
_POINTS = {  # none looks the same turned, so that orientation can be told of each
    "arrow": [(0, -1), (0.7, -0.1), (0.25, -0.1), (0.25, 1), (-0.25, 1), (-0.25, -0.1), (-0.7, -0.1)],
    "drop": [(0, -1.6), *((0.7 * math.cos(turn), 0.7 * math.sin(turn)) for turn in np.linspace(-0.5, 3.64, 24))],
    "flag": [(-0.6, -1), (0.9, -0.4), (-0.3, 0.2), (-0.3, 1), (-0.6, 1)],
    "heart": [_heart(turn) for turn in _TURN],
    "hook": [(-0.5, -1), (-0.1, -1), (-0.1, 0.55), (0.7, 0.55), (0.7, 1), (-0.5, 1)],
    "moon": [
        *((math.cos(turn), math.sin(turn)) for turn in _HALF),
        *((0.45 * math.cos(turn), math.sin(turn)) for turn in _HALF[-2:0:-1]),
    ],
    "sail": [(-0.6, 0.9), (0.8, 0.9), (-0.6, -1)],
    "tee": [(-0.8, -1), (0.8, -1), (0.8, -0.6), (0.2, -0.6), (0.2, 1), (-0.2, 1), (-0.2, -0.6), (-0.8, -0.6)],
}  # fmt: skip
_OUTLINES = [_outline(_POINTS[name]) for name in FACTORS["shape"]]
