"""One image as it comes from a source: what it is, whether it can be used, and hashes by which copies are found.

In: a file's bytes, or pixels. Out: `Facts`, after the image was decoded completely, once.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ray_jobs.jpeg import plain_jpeg
from vit_model.preprocessing import FORMATS, MAX_PIXELS, MODES, flatten

MAX_SCANS = 500  # of a JPEG; programs write 10 or so, a film behind it may look like 100
_START_OF_SCAN = b"\xff\xda"
STORED_QUALITY = 95  # of what is stored smaller
_HASHED_SIDE = 64  # pixels at least, where the image has them

_SIDE = 32  # pixels a side of what a perceptual hash looks at
_COSINES = np.round(
    1024 * np.cos(np.pi * np.arange(1, 9)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE))
).astype(np.int64)


class Facts(NamedTuple):
    """What a decoded image is; width and height are those after its turning by EXIF."""

    format: str
    """"jpeg", "png", ...; "raw" for pixels."""
    width: int
    height: int
    channels: int
    """1: grey, else 3."""
    phash: int


def examine(data: bytes) -> Facts:
    """Decode an image file completely. What passes is what `vit_model.preprocessing.load_image` reads.

    Raises ValueError with a short reason: "empty file", "not an image", "too many pixels (bomb)", "too many scans
    (bomb)", "pixels of Pillow's mode F, not 8 or 16 bits a channel", "truncated", "damaged". Of an animation the first
    frame counts.
    """
    if not data:
        raise ValueError("empty file")
    with _told():
        form, size, channels, grey = _plain(data) or _any(data)
        return Facts(form, *size, channels, phash(grey))


def shrunk(data: bytes, facts: Facts, short_side: int) -> tuple[bytes, Facts]:
    """An image file whose shorter side has at most so many pixels, and its facts, but for the hash, which stays.

    A larger one is resized, bilinear and antialiased as evaluation does it, and becomes a JPEG of quality 95, upright
    and without transparency; any other is itself. Raises ValueError as `examine`.
    """
    if min(facts.width, facts.height) <= short_side:
        return data, facts
    with _told(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        flat = flatten(image)
        width, height = (round(side * short_side / min(flat.size)) for side in flat.size)
        file = io.BytesIO()
        flat.resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=STORED_QUALITY)
    return file.getvalue(), facts._replace(format="jpeg", width=width, height=height)


@contextmanager
def _told() -> Iterator[None]:
    """Whatever Pillow raises in the block is a ValueError with a short reason; what it warns of is silent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except _RefusedError:
        raise
    # Pillow's readers raise whatever their parsing trips over (struct.error, SyntaxError, EOFError, ...),
    # and one bad file must become one line of quarantine.
    except Exception as error:
        raise ValueError(_reason(error)) from error


class _RefusedError(ValueError):
    """An image that is not even decoded."""


_Seen = tuple[str, tuple[int, int], int, NDArray[np.uint8]]  # format, (width, height), channels, it in grey


def _plain(data: bytes) -> _Seen | None:
    """A JPEG of nothing unusual, in a third of Pillow's time; None: let Pillow decode.

    libjpeg reads every coefficient, and the least warning leaves the image to Pillow. What is hashed needs no more than
    a fraction of the pixels, which the same coefficients give.
    """
    jpeg = plain_jpeg(data)
    if (
        jpeg is None
        or jpeg.height * jpeg.width > MAX_PIXELS
        or not (jpeg.in_one_scan or _has_few_scans(data))
    ):
        return None
    try:
        grey = simplejpeg.decode_jpeg(
            data, "GRAY", min_height=_HASHED_SIDE, min_width=_HASHED_SIDE, strict=True
        )
    except ValueError:
        return None
    return "jpeg", (jpeg.width, jpeg.height), jpeg.channels, grey[:, :, 0]


def _any(data: bytes) -> _Seen:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise _RefusedError("too many pixels (bomb)")
        if image.mode not in MODES:
            raise _RefusedError(f"pixels of Pillow's mode {image.mode}, not 8 or 16 bits a channel")
        # several JPEGs in one file, of which the first counts, are a format of its own to Pillow
        form = "jpeg" if image.format == "MPO" else (image.format or "").lower()
        if form == "jpeg" and not _has_few_scans(data):
            raise _RefusedError("too many scans (bomb)")
        flat = flatten(image)
    return form, flat.size, 1 if flat.mode == "L" else 3, np.asarray(flat.convert("L"))


def _has_few_scans(data: bytes) -> bool:
    """Every scan of a progressive JPEG goes over all its pixels, and may be a few bytes long."""
    return data.count(_START_OF_SCAN) <= MAX_SCANS


def examine_pixels(pixels: NDArray[np.uint8]) -> Facts:
    """The facts of raw pixels, uint8 [h, w, 1 or 3]. Raises ValueError for another shape."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise ValueError(f"pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 [h, w, 1 or 3]")
    height, width, channels = pixels.shape
    grey = pixels[:, :, 0] if channels == 1 else np.asarray(Image.fromarray(pixels).convert("L"))
    return Facts("raw", width, height, channels, phash(grey))


def content_id(sha256: bytes) -> str:
    """Identity of an image's bytes alone, from their sha256: copies of one image under several names share it."""
    return sha256.hex()[:32]


def sample_id(sha256: bytes, key: str) -> str:
    """Identity of one sample, from its bytes' sha256 and its name in the source, which tells copies apart."""
    return hashlib.sha256(sha256 + key.encode()).hexdigest()[:32]


def phash(grey: NDArray[np.uint8]) -> int:
    """A hash of what is seen, 64 bits, from grey pixels [h, w]: near-copies differ in a few bits.

    The signs of the frequencies 1..8 by 1..8 of the image's cosine transform at 32 x 32 pixels, against their median
    (Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010). 0: the image is one flat
    colour, which says nothing of what it shows. Integers throughout: every machine gets the same bits.

    Measured on 39 parts of three photographs: of those saved as JPEG with quality 90 / 50 100 / 95 % are within 4 bits,
    of those halved in size or a fifth brighter or darker 97 %, cut by 1 / 2 % a side 87 / 51 %; two different parts
    never come nearer than 18. A hash of gradients (9 x 8 parts, each against its neighbour) finds about as many (90 %
    of quality 50, 85 % of cuts by 1 %), but different parts come as near as 6. Small pictures collide: within 4 bits of
    another are 7 % of 10,000 of Fashion-MNIST (59 % by gradients) and 10 % of the 8x8 digits (82 %).
    """
    small = np.asarray(Image.fromarray(grey).resize((_SIDE, _SIDE), Image.Resampling.BOX), np.int64)
    centred = small * _SIDE**2 - small.sum()
    found = (_COSINES @ centred @ _COSINES.T).ravel()
    # > the median, without its half: 32 bits are set unless values are equal
    return int(np.packbits(found > np.partition(found, 31)[31]).view(">u8")[0])


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return "too many pixels (bomb)"
    message = str(error).lower()
    return "truncated" if "truncated" in message or isinstance(error, EOFError) else "damaged"
