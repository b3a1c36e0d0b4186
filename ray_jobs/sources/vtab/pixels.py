"""Pixels as VTAB's copies of data sets have them, where these are not what the authors ship.

In: an image file. Out: an image file. Pure functions of its bytes; each raises UserError for what is no image, is
damaged, or has more than MAX_PIXELS pixels.
"""

from __future__ import annotations

import io
import warnings
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ray_jobs.sources.vtab.archives import decode_bgr, encode_jpeg
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS

RADIUS, KEPT = 300, 270  # pixels: of the eye after scaling, and what is kept of it
_SIGMA, _QUALITY = 10, 72


def btgraham(image: bytes) -> bytes:
    """A photograph of an eye's fundus as the winner of Kaggle's competition of 2015 made it: `btgraham-300` of TFDS.

    Scaled to a radius of 300 pixels, the local average subtracted, outside of a circle of 270 grey, cropped to that
    circle, JPEG of quality 72.
    """
    pixels = decode_bgr(image, upright=True)
    if pixels.dtype != np.uint8:
        raise UserError("not 8 bits a channel")
    return encode_jpeg(equalised(pixels), _QUALITY)


def equalised(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`btgraham` from pixels to pixels, [h, w, 3] to at most [540, 540, 3]; the order of channels does not matter."""
    import cv2

    row = image[len(image) // 2].sum(axis=1)
    radius = np.count_nonzero(row > row.mean() / 10) / 2
    scale = RADIUS / (radius if radius >= 1 else len(image) / 2)  # there are black images
    height, width = (round(side * scale) for side in image.shape[:2])
    if not 0 < height * width <= MAX_PIXELS:
        raise UserError(f"the eye has a radius of {radius} pixels: {width} x {height} at one of {RADIUS}")
    scaled = cv2.resize(image, None, fx=scale, fy=scale)
    blurred = cv2.GaussianBlur(scaled, (0, 0), _SIGMA)
    sharp = cv2.addWeighted(scaled, 4, blurred, -4, 128)
    y, x = sharp.shape[0] // 2, sharp.shape[1] // 2
    circle = cv2.circle(np.zeros(sharp.shape[:2], np.uint8), (x, y), KEPT, 1, thickness=-1)
    sharp[circle == 0] = 128
    return cast(NDArray[np.uint8], sharp[max(y - KEPT, 0) : y + KEPT, max(x - KEPT, 0) : x + KEPT])


def without_alpha(image: bytes) -> bytes:
    """The colours of a PNG as they are stored, whatever its alpha; its own bytes where nothing is transparent."""
    pixels = _decoded(image)
    if pixels.mode != "RGBA" or pixels.getchannel("A").getextrema() == (255, 255):
        return image
    data = io.BytesIO()
    pixels.convert("RGB").save(data, "PNG")
    return data.getvalue()


def _decoded(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
                small = image.width * image.height <= MAX_PIXELS
                if small:
                    image.load()
        # Pillow's readers raise whatever their parsing trips over
        except Exception as error:
            raise UserError(f"not a PNG, or damaged: {error}") from error
    if not small:
        raise UserError("too many pixels (bomb)")
    return image
