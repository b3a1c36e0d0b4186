"""From an image file to a model's input, according to its `Preprocessing`.

In: a file, its bytes, a PIL image or a uint8 array. Out: uint8 [resolution, resolution, c]; for a batch of these,
the normalised tensor that a model takes. Files may come from anywhere: only common raster formats are read,
nothing in them is executed, and their size is checked before they are decoded.

`normalise` imports torch when called, because importing it takes two seconds that reading images does not need.
Use: `normalise(torch.from_numpy(load_image(path, preprocessing))[None], preprocessing, torch.float32)`.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from vit_model.config import Preprocessing
from vit_model.errors import UserError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
# Pillow's modes with up to 16 bits per channel (16-bit colour is "RGB"). 32 bits and floats have no agreed scale.
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", *SIXTEEN_BITS)
MAX_PIXELS = 64 * 2**20


def load_image(
    source: "str | Path | bytes | Image.Image | NDArray[np.uint8]", preprocessing: Preprocessing
) -> "NDArray[np.uint8]":
    """Load one image as uint8 [resolution, resolution, channels]; an array must be [h, w], [h, w, 1] or [h, w, 3].

    Pixels are those of `flatten`; colours become grey (ITU-R 601) if the model has one channel. Raises UserError if the
    source is not an image, is damaged, has more than 16 bits per channel, or has more than `MAX_PIXELS` pixels before
    or after resizing.
    """
    name, flat = _decode(source, preprocessing.channels)
    pixels = np.asarray(_resize(name, flat, preprocessing))
    return pixels.reshape(preprocessing.resolution, preprocessing.resolution, preprocessing.channels).copy()


def decode_image(source: "str | Path | bytes | Image.Image", channels: int) -> "NDArray[np.uint8]":
    """Decode an image without cropping or resizing it: uint8 [h, w, channels], upright. Raises as `load_image`."""
    _, flat = _decode(source, channels)
    return np.asarray(flat).reshape(flat.height, flat.width, channels)


def flatten(image: "Image.Image") -> "Image.Image":
    """Decode an image of one of `MODES`: upright by its EXIF, transparent parts on white, in "L" or "RGB".

    Keeps the higher 8 of 16 bits, as libpng does, and the first frame of an animation. Raises what Pillow raises.
    """
    grey = image.mode in ("1", "L", "LA", *SIXTEEN_BITS)
    image = ImageOps.exif_transpose(image)
    if image.mode in SIXTEEN_BITS:
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if grey else "RGB")


def normalise(images: "Tensor", preprocessing: Preprocessing, dtype: "torch.dtype") -> "Tensor":
    """Convert uint8 [b, h, w, c] to (x / 255 - mean) / std as `dtype` [b, c, h, w], computed in float32.

    Raises ValueError for another dtype or number of channels.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[-1] != preprocessing.channels:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}; expected uint8 [b, h, w, {preprocessing.channels}]"
        )
    mean = torch.tensor(preprocessing.mean, device=images.device)
    std = torch.tensor(preprocessing.std, device=images.device)
    scaled = (images.to(torch.float32) / 255 - mean) / std
    return scaled.permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format)


def _decode(
    source: "str | Path | bytes | Image.Image | NDArray[np.uint8]", channels: int
) -> "tuple[str, Image.Image]":
    """Return the source's name for messages, and the image decoded, upright, in grey or RGB."""
    name = str(source) if isinstance(source, str | Path) else "image"
    image = _open(name, source)
    _check_size(name, image.width, image.height)
    if image.mode not in MODES:
        raise UserError(
            f"{name}: unsupported pixel format (Pillow mode {image.mode!r}); use 8 or 16 bits per channel"
        )
    with _reading(name):
        return name, flatten(image).convert("L" if channels == 1 else "RGB")


def _open(name: str, source: "str | Path | bytes | Image.Image | NDArray[np.uint8]") -> "Image.Image":
    """Open the image without decoding it."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim < 2 or source.shape[2:] not in ((), (1,), (3,)):
            raise UserError(
                f"array is {source.dtype} {source.shape}; expected uint8 [h, w], [h, w, 1] or [h, w, 3]"
            )
        return Image.fromarray(source[:, :, 0] if source.shape[2:] == (1,) else source)
    with _reading(name):
        # Without a list of formats Pillow would hand PostScript to an interpreter.
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert what Pillow raises for damaged files into a UserError that names the file."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name} is too large; at most {MAX_PIXELS} pixels are read: {error}") from error
    # Pillow's readers raise many types of errors (struct.error, SyntaxError, KeyError, ...).
    except Exception as error:
        raise UserError(f"{name} cannot be read as an image ({', '.join(FORMATS)}): {error}") from error


def _resize(name: str, image: "Image.Image", preprocessing: Preprocessing) -> "Image.Image":
    """Resize and crop to the square of `resolution`, with the rounding of timm and torchvision."""
    size = preprocessing.resolution
    shorter = int(size / preprocessing.crop_fraction + 1e-6)  # 384 / (384 / 448) must be 448
    width, height = image.size
    if preprocessing.crop == "squash":
        width, height = shorter, shorter
    elif width <= height:
        width, height = shorter, int(shorter * height / width)
    else:
        width, height = int(shorter * width / height), shorter
    _check_size(name, width, height)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _scale(image, width, height, preprocessing.interpolation).crop(
        (left, top, left + size, top + size)
    )


def _scale(image: "Image.Image", width: int, height: int, interpolation: str) -> "Image.Image":
    if image.size == (width, height):
        return image
    if interpolation != "bilinear_aliased":
        kind = Image.Resampling.BILINEAR if interpolation == "bilinear" else Image.Resampling.BICUBIC
        return image.resize((width, height), kind)
    pixels = np.asarray(image, np.float32)
    rows, columns = _neighbours(image.height, height), _neighbours(image.width, width)
    for axis, (low, high, share) in enumerate((rows, columns)):
        share = np.expand_dims(share, tuple(range(1, pixels.ndim - axis)))
        below, above = pixels.take(low, axis), pixels.take(high, axis)
        pixels = below + (above - below) * share
    return Image.fromarray(pixels.astype(np.uint8))


def _neighbours(old: int, new: int) -> "tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]":
    """Return for each new pixel the two old ones around its centre, and how far it is from the first."""
    place = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = place.astype(np.int64)
    return low, np.minimum(low + 1, old - 1), (place - low).astype(np.float32)


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise UserError(f"{name} has {width} x {height} pixels; at most {MAX_PIXELS} pixels are read")
