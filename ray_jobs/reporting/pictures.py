"""Images of a dataset artifact for the page: contact sheets, and images by their id.

In: an opened dataset. Out: `data:` URLs of PNG (small images) or JPEG images, and counts. Reads only the images that
are shown.
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
from ray_jobs.randomness import Purpose
from vit_model.contract import Preprocessing

MAX_CLASSES = 40  # more classes are sampled with a fixed seed
TILES = 120  # approximate number of images on a sheet
SMALL = 32  # images up to this side in pixels are enlarged without interpolation
PHOTO = 112  # larger images are cropped to a square and resized to this side


@dataclass(frozen=True)
class Tiles:
    """Some images of a class, as `data:` URLs."""

    name: str
    images: tuple[str, ...]


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe a dataset: splits, classes, quarantined images, class balance in train, and its notes."""
    names = dataset.info.label_names
    counts = np.bincount(dataset.labels("train"), minlength=len(names))
    return {
        "name": dataset.info.name,
        "splits": {split: dataset.info.splits[split] for split in ("train", "dev", "test")},
        "num_classes": len(dataset.info.class_names),
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
    """Return some training images of up to MAX_CLASSES classes, chosen with a fixed seed."""
    by_class = sample_rows(dataset.labels("train"))
    urls = iter(data_urls(dataset, "train", np.concatenate([*by_class.values(), np.zeros(0, int)])))
    names = dataset.info.label_names
    return [Tiles(names[label], tuple(next(urls) for _ in rows)) for label, rows in by_class.items()]


def sample_rows(labels: np.ndarray) -> dict[int, np.ndarray]:
    """Sample some images of up to MAX_CLASSES classes with a fixed seed; return their rows by class."""
    rng = np.random.default_rng([0, Purpose.CONTACT_SHEET])
    present = np.unique(labels)
    if len(present) > MAX_CLASSES:
        present = np.sort(rng.choice(present, MAX_CLASSES, replace=False))
    per_class = int(np.clip(TILES // max(1, len(present)), 2, 8))
    return {int(label): rng.permutation(np.flatnonzero(labels == label))[:per_class] for label in present}


def data_urls(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> list[str]:
    """Return the images of these rows of a split as `data:` URLs: centre squares, enlarged without blur if small."""
    return [_data_url(pixels) for pixels in squares(dataset, split, rows)]


def squares(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the centre squares of these rows of a split, uint8 [n, side, side, channels]."""
    size = dataset.info.image
    side, channels = (max(size.height, size.width), size.channels) if size else (PHOTO, 3)
    half = (0.5,) * channels
    preprocessing = Preprocessing(
        mean=half, std=half, crop="center", resolution=min(side, PHOTO), channels=channels
    )
    return dataset.images(split, preprocessing, np.asarray(rows, int))


def _data_url(pixels: np.ndarray) -> str:
    """Encode one image, uint8 [side, side, channels], as a `data:` URL."""
    image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
    if image.width > SMALL:
        return jpeg_url(image)
    side = image.width * max(1, 2 * SMALL // image.width)
    return _url(image.resize((side, side), Image.Resampling.NEAREST), "png")


def jpeg_url(image: Image.Image) -> str:
    """Encode an image as a `data:` URL of a JPEG."""
    return _url(image, "jpeg", quality=82)


def _url(image: Image.Image, form: str, **options: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return f"data:image/{form};base64,{base64.b64encode(buffer.getvalue()).decode()}"
