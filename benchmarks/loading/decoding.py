"""One image for the peers and the floor: bytes in, a random crop of SIDE pixels out, flipped half of the time.

The crops have the distribution of ours, torchvision's RandomResizedCrop.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image

from loading.data import RAW_SIDE, is_raw

SIDE = 224
Decode = Callable[[bytes, np.random.Generator], np.ndarray]


def crop(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int, bool]:
    """Draw (top, left, height, width, flipped)."""
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1)
        aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        tall, wide = round((area / aspect) ** 0.5), round((area * aspect) ** 0.5)
        if tall <= height and wide <= width:
            top, left = rng.integers(height - tall + 1), rng.integers(width - wide + 1)
            return int(top), int(left), tall, wide, bool(rng.random() < 0.5)
    return 0, 0, height, width, bool(rng.random() < 0.5)


def with_simplejpeg(data: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode with simplejpeg, resize with torch."""
    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width, is_flipped = crop(rng, *pixels.shape[:2])
    piece = np.ascontiguousarray(pixels[None, top : top + height, left : left + width])
    channels_last = torch.from_numpy(piece).permute(0, 3, 1, 2)  # twice as fast as channels first
    resized = torch.nn.functional.interpolate(channels_last, (SIDE, SIDE), mode="bilinear", antialias=True)
    image = resized[0].permute(1, 2, 0)
    return (image.flip(1) if is_flipped else image).numpy()


def with_pillow(data: bytes, rng: np.random.Generator) -> np.ndarray:
    """Decode and resize with Pillow."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width, is_flipped = crop(rng, image.height, image.width)
    box = (left, top, left + width, top + height)
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if is_flipped else image)


@cache  # so that a worker process draws other crops for every image
def decoder(folder: Path) -> Callable[[bytes], np.ndarray]:
    """Return bytes -> pixels for a set; raw images stay whole. The random numbers are this process's own."""
    if is_raw(folder):
        return lambda data: np.frombuffer(data, np.uint8).reshape(RAW_SIDE, RAW_SIDE, 3)
    rng = np.random.default_rng(os.getpid())
    return lambda data: with_simplejpeg(data, rng)
