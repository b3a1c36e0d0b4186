"""Images of a dataset artifact for the page: contact sheets, and images by their id.

In: an opened dataset. Out: `data:` addresses of small PNG (where pixels are few) or JPEG images, and counts. Of the
images only those that are shown are read.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from ray_jobs.data.shards import Dataset, Split
from vit_model.config import Preprocessing

MAX_CLASSES = 40  # of more classes a seeded choice is shown
TILES = 120  # images on a sheet, about
SMALL = 32  # images up to this many pixels a side are shown pixel by pixel
PHOTO = 112  # larger ones are cropped and brought to this many pixels a side
_SHEET = 3  # keeps this module's random numbers apart from other users of the same seed


@dataclass(frozen=True)
class Tiles:
    """Some images of a class, as `data:` addresses."""

    name: str
    images: tuple[str, ...]


def describe(dataset: Dataset) -> dict[str, Any]:
    """What a dataset holds: splits, classes, images set aside, balance of the classes in train; and its notes."""
    names = dataset.info.class_names
    counts = np.bincount(dataset.labels("train"), minlength=len(names))
    return {
        "name": dataset.info.name,
        "splits": {split: dataset.info.splits[split] for split in ("train", "dev", "test")},
        "num_classes": len(names),
        "image": dataset.info.image.model_dump() if dataset.info.image else None,
        "quarantined": pq.ParquetFile(dataset.folder / "quarantine.parquet").metadata.num_rows,
        "balance": {
            "least": int(counts.min()),
            "median": float(np.median(counts)),
            "most": int(counts.max()),
        },
        "notes": list(dataset.info.notes),
        "rarest": [names[label] for label in np.argsort(counts, kind="stable")[:3]],
    }


def contact_sheet(dataset: Dataset) -> list[Tiles]:
    """Some training images of many classes, chosen with a fixed seed."""
    lines = chosen(dataset.labels("train"))
    addresses = iter(addresses_of(dataset, "train", np.concatenate([*lines.values(), np.zeros(0, int)])))
    names = dataset.info.class_names
    return [Tiles(names[label], tuple(next(addresses) for _ in rows)) for label, rows in lines.items()]


def chosen(labels: np.ndarray) -> dict[int, np.ndarray]:
    """Places of some images of many classes, by class, with a fixed seed."""
    rng = np.random.default_rng([0, _SHEET])
    present = np.unique(labels)
    if len(present) > MAX_CLASSES:
        present = np.sort(rng.choice(present, MAX_CLASSES, replace=False))
    each = int(np.clip(TILES // max(1, len(present)), 2, 8))
    return {int(label): rng.permutation(np.flatnonzero(labels == label))[:each] for label in present}


def addresses_of(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> list[str]:
    """The images of these rows of a split as `data:` addresses: squares cut from the middle, their own pixels
    enlarged without blur where they are few."""
    return [_address(pixels) for pixels in squares(dataset, split, rows)]


def squares(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """The images of these rows of a split, uint8 [n, side, side, channels]: squares cut from the middle."""
    size = dataset.info.image
    side, channels = (max(size.height, size.width), size.channels) if size else (PHOTO, 3)
    half = (0.5,) * channels
    preprocessing = Preprocessing(
        mean=half, std=half, crop="center", resolution=min(side, PHOTO), channels=channels
    )
    return dataset.images(split, preprocessing, np.asarray(rows, int))


def _address(pixels: np.ndarray) -> str:
    """A `data:` address of one image, uint8 [side, side, channels]."""
    image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    buffer = io.BytesIO()
    if small := image.width <= SMALL:
        side = image.width * max(1, 2 * SMALL // image.width)
        image.resize((side, side), Image.Resampling.NEAREST).save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=82)
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
