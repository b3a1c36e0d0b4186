"""Segmentation masks of a dataset's images: the class of each pixel.

A dataset whose source has masks has `masks/NNNNN.parquet` beside each shard, with a row per image: its
sample_id and the mask as a PNG of 8 bits. A pixel's value is the index of its class in `mask_classes` of dataset.json,
or IGNORED.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from ray_jobs.data.images import translate_errors
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS, open_image

IGNORED = 255  # a pixel without a class; it is neither used for training nor scored
MASKS = pa.schema([pa.field("sample_id", pa.string(), False), pa.field("mask", pa.binary(), False)])
_GREY = {1: 255, 2: 85, 4: 17}  # what Pillow multiplies grey of fewer than 8 bits by
Mask = NDArray[np.uint8]
"""[h, w]"""


class StoredMask(NamedTuple):
    """A mask as a PNG (lossless), a hash of its size and pixels, and the number of pixels of each value."""

    png: bytes
    digest: str
    pixels: Counter[int]

    @classmethod
    def of(cls, mask: Mask) -> StoredMask:
        file = io.BytesIO()
        Image.fromarray(mask).save(file, "PNG")
        digest = hashlib.sha256(f"{mask.shape}".encode() + mask.tobytes()).hexdigest()[:32]
        values, counts = np.unique(mask, return_counts=True)
        return cls(file.getvalue(), digest, Counter(dict(zip(values.tolist(), counts.tolist(), strict=True))))


def decode_mask(data: bytes) -> Mask:
    """Decode an untrusted PNG with one value of 1, 2, 4 or 8 bits per pixel, grey or indexed.

    Raises:
        UserError: a short reason: "empty file", "not an image", "too many pixels (bomb)", "truncated", "damaged", or
            the wrong mode.
    """
    if not data:
        raise UserError("empty file")
    with translate_errors(), open_image(data, ("PNG",)) as image:
        size, mode = image.width * image.height, image.mode
        if size <= MAX_PIXELS and mode == "P":
            return np.asarray(image)
        if size <= MAX_PIXELS and mode in ("1", "L"):
            bits = data[24]  # of a pixel, as the header says
            return np.asarray(image.convert("L")) // _GREY.get(bits, 1)
    if size > MAX_PIXELS:
        raise UserError("too many pixels (bomb)")
    raise UserError(f"pixels of Pillow's mode {mode}; expected one value of 8 bits or fewer per pixel, its class")


def colours(png: bytes, mask: Mask) -> dict[int, tuple[int, ...]]:
    """Return the colour that an indexed PNG, of which `mask` was decoded, gives each value; none for a grey one."""
    with translate_errors(), open_image(png, ("PNG",)) as image:
        palette = image.getpalette() or []
    return {value: tuple(palette[3 * value : 3 * value + 3]) for value in np.unique(mask).tolist() if palette}


def check_mask(mask: Mask, width: int, height: int, num_classes: int) -> None:
    """Raise UserError, with a short reason, for a mask of another size than its image, or with an unknown class."""
    if mask.shape != (height, width):
        raise UserError(f"its size is {mask.shape[1]} x {mask.shape[0]}, the image's {width} x {height}")
    if unknown := sorted(set(np.unique(mask).tolist()) - {*range(num_classes), IGNORED}):
        raise UserError(f"it has the value {unknown[0]}, which is not a class")


def mask_file(shard: str) -> str:
    """Return the name of the file with the masks of a shard's images, relative to the dataset's folder."""
    return f"masks/{Path(shard).name}"


def write_masks(path: Path, masks: Mapping[str, StoredMask]) -> None:
    """Write the masks of a shard's images by sample_id; the same masks in the same order give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table([list(masks), [mask.png for mask in masks.values()]], schema=MASKS)
    pq.write_table(table, path, compression="NONE", write_page_checksum=True)


def read_masks(paths: Sequence[Path], sample_ids: pa.Array) -> list[bytes]:
    """Return the PNGs of these images, in their order.

    Raises:
        UserError: a file is missing or damaged, or has no mask of an image.
    """
    parts = []
    for path in paths:
        try:
            table = pq.read_table(path, schema=MASKS, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} is missing or damaged: {error}") from error
        parts.append(table.filter(pc.is_in(table["sample_id"], sample_ids)))
    stored = pa.concat_tables([MASKS.empty_table(), *parts])
    places = pc.index_in(sample_ids, stored["sample_id"].combine_chunks())
    if places.null_count:
        missing = sample_ids.filter(pc.is_null(places))[0].as_py()
        raise UserError(f"{paths[0].parent}: no mask of image {missing}; the dataset is damaged")
    masks: list[bytes] = stored["mask"].take(places).to_pylist()
    return masks
