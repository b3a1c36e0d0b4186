"""Masks of drawn figures: the background, and the shape that each pixel shows.

They belong to the images of `shapes`, whose random numbers they draw in the same order. That module's text is in the
key of every dataset of shapes, so this is a module of its own, which is in the key only with `masks: true`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw

from pipelines.spec import FACTORS, ShapesSource
from ray_jobs.data.masks import Mask
from ray_jobs.sources.archives.entries import Files
from ray_jobs.sources.readers import shapes

MASK_CLASSES = ("background", *FACTORS["shape"])


def masks(source: ShapesSource, files: Files, entries: pa.Table) -> Iterator[Mask]:
    """Yield the mask [resolution, resolution] of each image, in order."""
    yield from (mask(source, number) for number in entries["offset"].to_pylist())


def mask(source: ShapesSource, number: int) -> Mask:
    """Return the mask of an image: a pixel is of the figure if this covers at least half of it."""
    factors, places, rng = shapes._drawn(source, number)
    rng.random(6)  # the colours of the figure and of the background
    finer = shapes._FINER
    angle = math.tau * (factors["orientation"] + rng.uniform(-0.25, 0.25)) / len(FACTORS["orientation"])
    half = source.resolution * finer / shapes._CELLS / 2
    radius = half * (0.4 + 0.5 * (factors["scale"] + rng.random()) / len(FACTORS["scale"]))
    turned = shapes._OUTLINES[factors["shape"]] @ np.array(
        [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
    )
    canvas = Image.new("L", (source.resolution * finer,) * 2)
    draw = ImageDraw.Draw(canvas)
    for place in places:
        cell = half * (2 * np.array([place % shapes._CELLS, place // shapes._CELLS]) + 1)
        centre = cell + rng.uniform(radius - half, half - radius, 2)
        draw.polygon([tuple(point) for point in np.rint(centre + radius * turned).tolist()], fill=255)
    covered = np.asarray(canvas.reduce(finer)) >= 128
    return np.where(covered, np.uint8(1 + factors["shape"]), np.uint8(0))
