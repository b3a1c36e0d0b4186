"""Examine one image of a source: its format and size, whether it can be used, and hashes that identify copies.

In: a file's bytes, or pixels. Out: `Facts`, after decoding the image completely, once.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from ray_jobs.data.jpeg import plain_jpeg
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS, flatten, is_supported, on_colour, open_image, upright

MAX_SCANS = 500  # in a JPEG; programs write about 10, and an appended film may look like 100
_START_OF_SCAN = b"\xff\xda"
DECODING = 2  # the version of the decoder; raise it if it reads the pixels of some images differently
STORED_QUALITY = 95  # JPEG quality of images that are stored smaller
_HASHED_SIDE = 64  # minimum pixels per side of a hashed image, if it has so many

_SIDE = 32  # pixels per side of the input of a perceptual hash
_COSINES = np.round(1024 * np.cos(np.pi * np.arange(1, 9)[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE)))
_SIGNS = np.array([-1, 1] * 4)  # factors of the frequencies 1..8 if their axis is reversed
_CUT = (0.025, 0.09, 0.125)  # cut off each end of a side, which leaves .95, .82 and .75 of the side
_BORDER = 16  # grey levels by which a border of one colour may vary, because JPEG adds noise


class Hashes(NamedTuple):
    """Perceptual hashes of an image and of some of its views, see `hashes`."""

    phash: int
    phash_mirrored: int
    phash_flipped: int
    phash_rotated: int
    phash_crop95: int
    phash_crop82: int
    phash_crop75: int
    phash_inside: int
    phash_on_black: int


class Facts(NamedTuple):
    """Facts about a decoded image. Width and height are measured after rotation by EXIF's orientation."""

    format: str
    """"jpeg", "png", ...; "raw" for pixels."""
    width: int
    height: int
    channels: int
    """1: grey, else 3."""
    hashes: Hashes
    decoding: int | None = None
    """DECODING, if earlier decoders read other pixels; it marks the image in the dataset's content digest."""

    def columns(self) -> dict[str, Any]:
        """Return the facts as columns of the index, with one column per hash."""
        return {name: value for name, value in self._asdict().items() if name != "hashes"} | (self.hashes._asdict())


def examine(data: bytes) -> Facts:
    """Decode an image file completely (the first frame of an animation).

    `vit_model.preprocessing.load_image` can read every file that passes.

    Raises:
        UserError: a short reason: "empty file", "not an image", "too many pixels (bomb)", "too many scans (bomb)",
            "pixels of Pillow's mode F, not 8 or 16 bits a channel", "wholly transparent", "truncated", "damaged".
    """
    if not data:
        raise UserError("empty file")
    with translate_errors():
        form, size, channels, grey, on_black, decoding = _decoded_plain(data) or _decoded(data)
    return Facts(form, *size, channels, hashes(grey, on_black), decoding)


def shrunk(data: bytes, facts: Facts, short_side: int) -> tuple[bytes, Facts]:
    """Return an image file whose shorter side has at most `short_side` pixels, and its facts.

    A larger image is resized, bilinear and antialiased as in evaluation, and becomes a JPEG of quality 95, upright and
    without transparency. Any other image is returned unchanged. The hashes are always the original's.

    Raises:
        UserError: as `examine`.
    """
    if min(facts.width, facts.height) <= short_side:
        return data, facts
    with translate_errors(), open_image(data) as image:
        flat = flatten(image)
        width, height = (round(side * short_side / min(flat.size)) for side in flat.size)
        file = io.BytesIO()
        flat.resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=STORED_QUALITY)
    return file.getvalue(), facts._replace(format="jpeg", width=width, height=height)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn every exception of Pillow into a UserError with a short reason, and silence its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except UserError:  # refused, with its reason
        raise
    # Pillow's readers raise many types (struct.error, SyntaxError, EOFError, ...), and one bad file must become
    # one row of the quarantine.
    except Exception as error:
        raise UserError(_reason(error)) from error


# format, (width, height), channels, the grey image, the grey image on black if part of it is transparent, `decoding`
_Decoded = tuple[str, tuple[int, int], int, NDArray[np.uint8], NDArray[np.uint8] | None, int | None]


def _decoded_plain(data: bytes) -> _Decoded | None:
    """Decode a plain JPEG in a third of Pillow's time; None: Pillow has to decode it.

    libjpeg reads every coefficient, and on any warning Pillow decodes the image. The hashes need only a fraction of the
    pixels.
    """
    jpeg = plain_jpeg(data)
    if jpeg is None or jpeg.height * jpeg.width > MAX_PIXELS or not (jpeg.in_one_scan or _has_few_scans(data)):
        return None
    try:
        grey = simplejpeg.decode_jpeg(data, "GRAY", min_height=_HASHED_SIDE, min_width=_HASHED_SIDE, strict=True)
    except ValueError:
        return None
    return "jpeg", (jpeg.width, jpeg.height), jpeg.channels, grey[:, :, 0], None, None


def _decoded(data: bytes) -> _Decoded:
    """Decode any image with Pillow."""
    with open_image(data) as image:
        if image.width * image.height > MAX_PIXELS:
            raise UserError("too many pixels (bomb)")
        if not is_supported(image):
            raise UserError(f"pixels of Pillow's mode {image.mode}, not 8 or 16 bits a channel")
        # Pillow calls several JPEGs in one file MPO; the first one is used
        form = "jpeg" if image.format == "MPO" else (image.format or "").lower()
        if form == "jpeg" and not _has_few_scans(data):
            raise UserError("too many scans (bomb)")
        meant, is_corrected = upright(image)
        flat, on_black = on_colour(meant, "white"), None
        if meant.has_transparency_data and meant.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            on_black = np.asarray(on_colour(meant, "black").convert("L"))
    grey = np.asarray(flat.convert("L"))
    return form, flat.size, 1 if flat.mode == "L" else 3, grey, on_black, DECODING if is_corrected else None


def _has_few_scans(data: bytes) -> bool:
    """Return whether a JPEG has at most MAX_SCANS scans: each takes time for all pixels but may be a few bytes long."""
    return data.count(_START_OF_SCAN) <= MAX_SCANS


def examine_pixels(pixels: NDArray[np.uint8]) -> Facts:
    """Return the facts about raw pixels, uint8 [h, w, 1 or 3].

    Raises:
        UserError: the pixels have another type or shape.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise UserError(f"pixels are {pixels.dtype} {list(pixels.shape)}, not uint8 [h, w, 1 or 3]")
    height, width, channels = pixels.shape
    grey = pixels[:, :, 0] if channels == 1 else np.asarray(Image.fromarray(pixels).convert("L"))
    return Facts("raw", width, height, channels, hashes(grey))


def content_id(sha256: bytes) -> str:
    """Return the identity of an image's bytes, from their sha256; copies under several names share it."""
    return sha256.hex()[:32]


def sample_id(sha256: bytes, key: str) -> str:
    """Return the identity of a sample, from its bytes' sha256 and its name in the source, which copies do not share."""
    return hashlib.sha256(sha256 + key.encode()).hexdigest()[:32]


def hashes(grey: NDArray[np.uint8], on_black: NDArray[np.uint8] | None = None) -> Hashes:
    """Return perceptual hashes, 64 bits each, from grey pixels [h, w]: near-copies differ in a few bits.

    Each compares the frequencies 1..8 by 1..8 of a cosine transform at 32 x 32 pixels with their median
    (Zauner, "Implementation and benchmarking of perceptual image hash functions", 2010):

    - `phash` of the image itself;
    - `phash_mirrored`, `phash_flipped`, `phash_rotated` of the image mirrored left to right, top to bottom, and rotated
      by 90 degrees counterclockwise. The transform gives them: a reversed axis changes the sign of its odd frequencies.
      For each of the eight ways to rotate and mirror a rectangle, one of these four hashes of an image equals one of
      the four of the other: mirrored against flipped is rotated by 180 degrees, and so on;
    - `phash_crop95`, `..82` and `..75` of the middle of the image: that share of each side. Their ratios to each other
      and to the whole (.95, .91, .86, .82, .79, .75) cover every centred crop that leaves three quarters of each side;
    - `phash_inside` of the part inside a border of one colour;
    - `phash_on_black` of `on_black`, the image on black if part of it is transparent (the others use white).

    0 means no hash: the view is one flat colour, there is no border, nothing is transparent, or, except for `phash`,
    a side has fewer than 32 pixels (many views of different small images look alike). All numbers are integers that
    float64 represents exactly, so every machine computes the same bits. benchmarks/near_copies.py measures which copies
    are found.
    """
    image = Image.fromarray(grey)
    whole = _frequencies(image)
    height, width = grey.shape
    views = np.zeros((len(Hashes._fields), *whole.shape))  # in the order of the fields; 0: no such view
    views[0] = whole
    if min(height, width) >= _SIDE:
        views[1:4] = whole * _SIGNS, whole * _SIGNS[:, None], whole.T * _SIGNS[:, None]
        factors = (max(1, width // _HASHED_SIDE), max(1, height // _HASHED_SIDE))
        small = np.asarray(image.reduce(factors), np.float64)
        right, bottom = width / factors[0], height / factors[1]  # the last pixels may be narrower
        for number, cut in enumerate(_CUT, start=4):
            box = (cut * right, cut * bottom, (1 - cut) * right, (1 - cut) * bottom)
            views[number] = _frequencies_in(small, box)
        if (inside := _inside_border(small)) is not None:
            views[7] = _frequencies_in(small, inside)
        if on_black is not None:
            views[8] = _frequencies(Image.fromarray(on_black))
    frequencies = views.reshape(len(views), -1)
    # greater than the 32nd of 64 values, the lower median: 32 bits are set unless values are equal
    bits = frequencies > np.partition(frequencies, 31)[:, 31:32]
    return Hashes._make(np.packbits(bits, axis=1).view(">u8")[:, 0].tolist())


def _frequencies(grey: Image.Image) -> NDArray[np.float64]:
    """Return the frequencies 1..8 by 1..8 [8, 8] of a grey image at 32 x 32 pixels."""
    small = np.asarray(grey.resize((_SIDE, _SIDE), Image.Resampling.BOX), np.float64)
    return np.asarray(_COSINES @ (small * _SIDE**2 - small.sum()) @ _COSINES.T)


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _frequencies_in(grey: NDArray[np.float64], box: _Box) -> NDArray[np.float64]:
    """Return the frequencies 1..8 by 1..8 [8, 8] of a box in a grey image [h, w]."""
    left, top, right, bottom = box
    height, width = grey.shape
    return np.asarray(_cosines(height, top, bottom) @ grey @ _cosines(width, left, right).T)


@lru_cache(4096)
def _cosines(number: int, start: float, end: float) -> NDArray[np.float64]:
    """Return cosines of frequencies 1..8 over [start, end] of `number` pixels: integers [8, number], rows sum to 0."""
    edges = np.clip(np.arange(number + 1), start, end)
    covered, middle = np.diff(edges), (edges[1:] + edges[:-1]) / 2
    rows = covered * np.cos(np.pi * np.arange(1, 9)[:, None] * (middle - start) / (end - start))
    rows = np.round(2**14 * (rows - covered * rows.sum(1, keepdims=True) / (end - start)))
    rows[:, covered.argmax()] -= rows.sum(1)  # the rounding error: a flat image must give 0
    return np.asarray(rows)


def _inside_border(grey: NDArray[np.float64]) -> _Box | None:
    """Return the box inside a border that has the colour of the first or the last corner.

    None: there is no border, or the box has fewer than 16 pixels on a side.
    """
    height, width = grey.shape
    box: list[float] = [0, 0, width, height]
    for corner, first, order in ((grey[0, 0], 0, 1), (grey[-1, -1], 2, -1)):
        differs = np.abs(grey - corner)
        for axis in (0, 1):
            start = int((differs.max(axis)[::order] > _BORDER).argmax())
            if start > 0:
                # a line that is partly border differs less from the border than the next line, by the border's share
                lines = differs.sum(axis)[::order]
                share = lines[start] / lines[min(start + 1, len(lines) - 1)].clip(1)
                box[first + axis] += order * (start + 1 - min(float(share), 1.0))
    left, top, right, bottom = box
    is_border = box != [0, 0, width, height] and min(right - left, bottom - top) >= _SIDE // 2
    return (left, top, right, bottom) if is_border else None


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, (Image.DecompressionBombError, Image.DecompressionBombWarning)):
        return "too many pixels (bomb)"
    message = str(error).lower()
    return "truncated" if "truncated" in message or isinstance(error, EOFError) else "damaged"
