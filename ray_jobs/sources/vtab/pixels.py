"""Conversions of images in VTAB's copies of datasets that the authors' archives do not have.

In: an image file. Out: an image file. All are pure functions of the file's bytes. They raise UserError for a file that
is not an image, is damaged, or has more than MAX_PIXELS pixels; its messages are stored in the quarantine.
"""

from __future__ import annotations

import io
from typing import cast

import cv2
import numpy as np
from numpy.typing import NDArray

from ray_jobs.data.images import translate_errors
from ray_jobs.sources.vtab.archives import decode_bgr, encode_jpeg
from vit_model.errors import UserError
from vit_model.preprocessing import MAX_PIXELS, open_image

RADIUS, KEPT = 300, 270  # pixels: radius of the eye after scaling, and radius of the part that is kept
_SIGMA, _QUALITY = 10, 72


def btgraham(image: bytes) -> bytes:
    """Convert a photograph of an eye's fundus as the winner of Kaggle's 2015 competition did: TFDS's `btgraham-300`.

    The image is scaled to a radius of 300 pixels, its local average is subtracted, everything outside a circle with a
    radius of 270 pixels becomes grey, and the circle is cropped and encoded as JPEG of quality 72.
    """
    pixels = decode_bgr(image, upright=True)
    if pixels.dtype != np.uint8:
        raise UserError("not 8 bits a channel")
    return encode_jpeg(equalised(pixels), _QUALITY)


def equalised(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert pixels as `btgraham` does: [h, w, 3] to at most [540, 540, 3]; the order of channels does not matter."""
    row = image[len(image) // 2].sum(axis=1)
    radius = np.count_nonzero(row > row.mean() / 10) / 2
    scale = RADIUS / (radius if radius >= 1 else len(image) / 2)  # some images are black
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
    """Return a PNG with its stored colours and without alpha; the file itself if nothing is transparent."""
    with translate_errors(), open_image(image, ("PNG",)) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise UserError("too many pixels (bomb)")
        opened.load()
        if opened.mode != "RGBA" or opened.getchannel("A").getextrema() == (255, 255):
            return image
        data = io.BytesIO()
        opened.convert("RGB").save(data, "PNG")
    return data.getvalue()
