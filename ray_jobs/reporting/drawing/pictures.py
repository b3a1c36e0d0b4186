"""Images for the page: contact sheets, images by their id, where a model looked, and what is inside of one.

In: an opened dataset, and for `overlays` the artifact of a fine-tuned ViT; or the tables of an inspection. Out: `data:`
URLs of PNG (small images) or JPEG images, and counts. Reads only the images that are shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pipelines.store import Manifest, Store, local_files
from ray_jobs.data.boxes import of_rows, sizes_of
from ray_jobs.data.columns import each_label
from ray_jobs.data.shards import Dataset, Images, Split
from ray_jobs.detection import mistakes
from ray_jobs.detection.average_precision import Boxes, Detected
from ray_jobs.randomness import Purpose
from vit_model.contract import MODEL_FILES, Preprocessing
from vit_model.inspection import attention_rollout
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

MAX_CLASSES = 40  # more classes are sampled with a fixed seed
TILES = 120  # approximate number of images on a sheet
FEW = 5  # training images of a class; with fewer, its results are mostly chance
FEW_DEV = 10  # dev images of a class; with fewer, its threshold is mostly chance
SMALL = 32  # images up to this side in pixels are enlarged without interpolation
PHOTO = 112  # larger images are cropped to a square and resized to this side
MOST_BYTES = 2**29  # of a model to read, above ViT-B in float32; its pass over 24 images takes 0.8 TFLOPs
TINT, STRENGTH = (255, 90, 0), 0.65
COOL, NEUTRAL = (30, 80, 160), (240, 240, 240)  # of cosines -1 and 0; 1 is TINT
GOLDEN = (5**0.5 - 1) / 2  # of a turn, between the hues of two neighbouring classes
DETECTED = 192  # side of an image with detections
RIGHT, WRONG, MISSED = "#3ec46d", "#ff4d3d", "white"
LEVELS = 16  # of attention, so that a last bit of difference does not show


@dataclass(frozen=True)
class Tiles:
    """Some images of a class, as `data:` URLs."""

    name: str
    images: tuple[str, ...]


class Inside(NamedTuple):
    """The pictures of an `inspect` stage; empty where the model does not have them."""

    filters: list[str]
    positions: str
    seen: list[tuple[str, str]]
    """images as the model sees them, and the same tinted by attention rollout"""


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe a dataset: splits, classes, quarantined images, class balance, and its notes.

    `few` names the classes with fewer than FEW training images, `few_dev` those with fewer than FEW_DEV dev images,
    `untested` those without an image in a test split, and `rarest` up to three that have fewer than the largest.
    `sampled`: the contact sheet has only some of the classes.
    """
    names = dataset.info.label_names
    counts, held_out, tested = (
        np.bincount(each_label(dataset.index(split)), minlength=len(names)) for split in ("train", "dev", "test")
    )
    return {
        "name": dataset.info.name,
        "splits": {split: dataset.info.splits[split] for split in ("train", "dev", "test")},
        "num_classes": len(dataset.info.class_names),
        "mask_classes": len(dataset.info.mask_classes),
        "image": dataset.info.image.model_dump() if dataset.info.image else None,
        "quarantined": pq.ParquetFile(dataset.folder / "quarantine.parquet").metadata.num_rows,
        "balance": {
            "least": int(counts.min()),
            "median": float(np.median(counts)),
            "most": int(counts.max()),
        },
        "notes": list(dataset.info.notes),
        "few": [names[label] for label in np.flatnonzero(counts < FEW)],
        "few_dev": [names[label] for label in np.flatnonzero(held_out < FEW_DEV)],
        "untested": [names[label] for label in np.flatnonzero(tested == 0) if tested.any()],
        "rarest": [names[label] for label in np.argsort(counts, kind="stable")[:3] if counts[label] < counts.max()],
        "sampled": bool(np.count_nonzero(counts) > MAX_CLASSES),
    }


def contact_sheet(dataset: Dataset) -> list[Tiles]:
    """Return some training images of up to MAX_CLASSES classes, chosen with a fixed seed."""
    by_class = sample_rows(Images(dataset, dataset.index("train")).labels)
    urls = iter(data_urls(dataset, "train", np.concatenate([*by_class.values(), np.zeros(0, int)])))
    names = dataset.info.label_names
    return [Tiles(names[label], tuple(next(urls) for _ in rows)) for label, rows in by_class.items()]


def sample_rows(labels: np.ndarray) -> dict[int, np.ndarray]:
    """Sample some images of up to MAX_CLASSES classes with a fixed seed; return their rows by class.

    Args:
        labels: as `Images.labels`: int64 [n], or bool [n, classes].
    """
    rng = np.random.default_rng([0, Purpose.CONTACT_SHEET])
    present = np.unique(labels) if labels.ndim == 1 else np.flatnonzero(labels.any(axis=0))
    if len(present) > MAX_CLASSES:
        present = np.sort(rng.choice(present, MAX_CLASSES, replace=False))
    per_class = int(np.clip(TILES // max(1, len(present)), 2, 8))
    is_of = {int(label): labels == label if labels.ndim == 1 else labels[:, label] for label in present}
    return {label: rng.permutation(np.flatnonzero(images))[:per_class] for label, images in is_of.items()}


def data_urls(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> list[str]:
    """Return the images of these rows of a split as `data:` URLs: `squares`, enlarged without blur if small."""
    return [data_url(pixels) for pixels in squares(dataset, split, rows)]


def squares(dataset: Dataset, split: Split, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the centre squares of these rows of a split, uint8 [n, side, side, channels].

    Images that have boxes are squashed to squares, in colour, and their boxes are drawn.
    """
    has_boxes = dataset.info.has_boxes
    preprocessing = _preprocessing(dataset, PHOTO, "squash" if has_boxes else "center")
    pictures = dataset.images(split, preprocessing, np.asarray(rows, int))
    if not has_boxes:
        return pictures
    shown = dataset.index(split).take(np.asarray(rows, int))
    outlined = []
    for pixels, boxes, size in zip(pictures, of_rows(shown), sizes_of(shown), strict=True):
        hues = (round(360 * (box.label * GOLDEN % 1)) for box in boxes)
        colours = ("grey" if box.ignored else f"hsl({hue}, 100%, 55%)" for box, hue in zip(boxes, hues, strict=True))
        coloured = zip((box[:4] for box in boxes), colours, strict=True)
        outlined.append(np.asarray(_outlined(pixels, coloured, size, preprocessing.resolution)))
    return np.stack(outlined)


def _preprocessing(dataset: Dataset, most: int, crop: Literal["squash", "center"]) -> Preprocessing:
    """Return how images become squares of their own size, or of up to `most` pixels a side."""
    size = dataset.info.image
    side, channels = (max(size.height, size.width), size.channels) if size else (most, 3)
    half = (0.5,) * channels
    return Preprocessing(mean=half, std=half, crop=crop, resolution=min(side, most), channels=channels)


def _outlined(
    pixels: np.ndarray,
    boxes: Iterable[tuple[Sequence[float] | np.ndarray, str]],
    size: np.ndarray,
    side: int,
    width: int = 1,
) -> Image.Image:
    """Return an image of `size` (width, height) that was squashed to a square, in colour and with coloured boxes."""
    image = Image.fromarray(np.repeat(pixels, 3 // pixels.shape[-1], axis=-1))
    if image.width != side:
        kind = Image.Resampling.NEAREST if image.width <= SMALL else Image.Resampling.BILINEAR
        image = image.resize((side, side), kind)
    draw = ImageDraw.Draw(image)
    for box, colour in boxes:
        sides = np.clip(np.round(np.asarray(box) * side / np.tile(size, 2)), 0, side - 1)
        draw.rectangle([*sides], outline=colour, width=width)
    return image


def detected_urls(dataset: Dataset, rows: Sequence[int], seen: Sequence[tuple[Boxes, Detected]]) -> list[str]:
    """Return these rows of test as `data:` URLs, squashed to squares, with their boxes and detections.

    Green: right; red: wrong, with a score of SHOWN or more; white: missed boxes.
    """
    chosen = np.asarray(rows, int)
    images = dataset.images("test", _preprocessing(dataset, DETECTED, "squash"), chosen)
    urls = []
    for pixels, (truth, found), size in zip(images, seen, sizes_of(dataset.index("test").take(chosen)), strict=True):
        named = mistakes.named(truth, found)
        drawn = [(box, MISSED) for box in truth.boxes[named.is_missed]]
        drawn += [
            (found.boxes[number], RIGHT if kind == "right" else WRONG)
            for number, kind in zip(named.shown, named.kinds, strict=True)
            if kind != mistakes.IGNORED
        ]
        urls.append(jpeg_url(_outlined(pixels, drawn, size, DETECTED, width=2)))
    return urls


def data_url(pixels: np.ndarray) -> str:
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


def overlays(store: Store, model: Manifest, dataset: Dataset, rows: Sequence[int]) -> list[str]:
    """Return these rows of test as the model saw them, tinted by how much of each patch reaches the representation.

    By attention rollout (Abnar and Zuidema 2020), with one read of the model's file and a forward pass. None for a
    model above MOST_BYTES, or one that is no plain ViT.
    """
    files = [file for file in model.files if file.path in MODEL_FILES]
    size = sum(file.size for file in files)
    if len(files) < 2 or size > MOST_BYTES or not rows:
        return []
    print(f"attention of {len(rows)} images: reads {model.stage}, {size / 2**20:,.1f} MiB", flush=True)
    network, contract = load_model(local_files(store, model, files))
    if not isinstance(network, ViT) or network.config.axial:
        return []
    pixels = dataset.images("test", contract.preprocessing, np.asarray(rows))
    looked = attention_rollout(network, normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32))
    return [tinted(image, attention) for image, attention in zip(pixels, looked, strict=True)]


def tinted(pixels: np.ndarray, attention: np.ndarray) -> str:
    """Tint an image, uint8 [side, side, channels], by its attention [rows, columns], the highest most."""
    side = min(PHOTO, pixels.shape[0] * max(1, 64 // pixels.shape[0]))
    image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).convert("RGB")
    kind = Image.Resampling.NEAREST if side > pixels.shape[0] else Image.Resampling.BILINEAR
    share = (attention - attention.min()) / max(float(np.ptp(attention)), 1e-9)
    level = Image.fromarray(np.round(share * (LEVELS - 1)).astype(np.uint8) * (255 // (LEVELS - 1)))
    weight = np.asarray(level.resize((side, side), Image.Resampling.BILINEAR))[..., None] / 255 * STRENGTH
    mixed = np.asarray(image.resize((side, side), kind)) * (1 - weight) + np.array(TINT) * weight
    return jpeg_url(Image.fromarray(np.round(mixed).astype(np.uint8)))


def inside(folder: Path) -> Inside:
    """Return the pictures of an inspection, from the folder of its tables (`ray_jobs.inspect`)."""
    filters = [data_url(_grey_at_zero(np.array(each))) for each in _column(folder / "filters.parquet", "pixels")]
    positions = _column(folder / "positions.parquet", "cosines")
    seen = []
    if (path := folder / "rollout.parquet").is_file():
        for image, rollout in zip(_column(path, "image"), _column(path, "rollout"), strict=True):
            with Image.open(io.BytesIO(image)) as opened:
                pixels = np.atleast_3d(np.asarray(opened))
            seen.append((data_url(pixels), tinted(pixels, np.array(rollout, np.float32))))
    return Inside(filters, data_url(tiles(np.array(positions))) if positions else "", seen)


def _column(path: Path, name: str) -> list[Any]:
    return list(pq.read_table(path, columns=[name])[name].to_pylist()) if path.is_file() else []


def _grey_at_zero(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return a filter as an image: zero is grey, and the value farthest from zero is black or white."""
    return np.round(127.5 + 127.5 * values / max(float(np.abs(values).max()), 1e-12)).astype(np.uint8)


def tiles(cosines: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return a tile for each patch's cosines [patches, rows, columns], in the patches' places, with white lines."""
    _, rows, columns = cosines.shape
    ends = np.array([COOL, NEUTRAL, TINT], float)
    colours = np.stack([np.interp(cosines, (-1, 0, 1), channel) for channel in ends.T], axis=-1)
    framed = np.pad(colours, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=255)
    grid = framed.reshape(rows, columns, rows + 1, columns + 1, 3).swapaxes(1, 2)
    return np.round(grid.reshape(rows * (rows + 1), columns * (columns + 1), 3)[:-1, :-1]).astype(np.uint8)
