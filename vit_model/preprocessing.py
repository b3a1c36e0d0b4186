"""From an image file to a model's input, according to its `Preprocessing`.

In: a file, its bytes, a PIL image or a uint8 array. Out: uint8 [resolution, resolution, c]; for a batch of these,
the normalised tensor that a model takes. Files may come from anywhere: only common raster formats are read,
nothing in them is executed, and their size is checked before they are decoded.

`normalise` imports torch when called, because importing it takes two seconds that reading images does not need.
Use: `normalise(torch.from_numpy(load_image(path, preprocessing))[None], preprocessing, torch.float32)`.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, PngImagePlugin

from vit_model.contract import Preprocessing
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
# Pillow refuses a PNG with more text than this, 1 MiB for a compressed one by default. No pixel depends on it.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 2**28


def load_image(
    source: "str | Path | bytes | Image.Image | NDArray[np.uint8]", preprocessing: Preprocessing
) -> "NDArray[np.uint8]":
    """Load one image as uint8 [resolution, resolution, channels]; an array must be [h, w], [h, w, 1] or [h, w, 3].

    `flatten` decodes the pixels; colours become grey (ITU-R 601) if the model has one channel. Raises UserError if the
    source is not an image, is damaged, wholly transparent, has more than 16 bits per channel, or has more than
    `MAX_PIXELS` pixels before or after resizing.
    """
    name, flat = _decode(source, preprocessing.channels)
    pixels = np.asarray(_resize(name, flat, preprocessing))
    return pixels.reshape(preprocessing.resolution, preprocessing.resolution, preprocessing.channels).copy()


def decode_image(source: "str | Path | bytes | Image.Image", channels: int) -> "NDArray[np.uint8]":
    """Decode an image without cropping or resizing it: uint8 [h, w, channels], upright. Raises as `load_image`."""
    _, flat = _decode(source, channels)
    return np.asarray(flat).reshape(flat.height, flat.width, channels)


def open_image(source: str | Path | bytes, formats: tuple[str, ...] = FORMATS) -> "Image.Image":
    """Open an image file without decoding it. Raises what Pillow raises."""
    # Without a list of formats Pillow would hand PostScript to an interpreter.
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)


def is_supported(image: "Image.Image") -> bool:
    """Return whether an opened image has at most 16 bits per channel. Pillow scales deep PGMs to 16 bits."""
    return image.mode in MODES or (image.mode, image.format) == ("I", "PPM")


def flatten(image: "Image.Image") -> "Image.Image":
    """Decode a supported image: upright by its EXIF, transparent parts on white, in "L" or "RGB".

    Keeps the higher 8 of 16 bits, as libpng does, and the first frame of an animation. Raises what Pillow raises, and
    UserError if the image is wholly transparent.
    """
    return on_colour(upright(image)[0], "white")


def upright(image: "Image.Image") -> "tuple[Image.Image, bool]":
    """Decode a supported image, upright by its EXIF, with 8 bits per channel and its transparency.

    The bool says that Pillow alone reads other pixels, because it ignores properties of the file: in deep grey, the
    number of bits, inverted black and white and the transparent value; in other PNGs without 8 bits, the scale of the
    transparent value; in a BMP whose alpha is 0 everywhere, that it has no alpha.
    """
    scale = {"L;2": 85, "L;4": 17, "RGB;16B": 1 / 256}.get(_raw_mode(image))  # of a pixel to 8 bits
    turned = ImageOps.exif_transpose(image)
    if turned.mode in ("I", *SIXTEEN_BITS):
        return _eight_bits(turned, getattr(image, "tag_v2", {}))
    if scale is not None and "transparency" in turned.info:
        unscaled, value = turned.convert("RGBA"), turned.info["transparency"]
        turned.info["transparency"] = (
            int(value * scale) if isinstance(value, int) else tuple(int(part * scale) for part in value)
        )
        return turned, turned.convert("RGBA") != unscaled
    if image.format == "BMP" and turned.mode == "RGBA" and not turned.getchannel("A").getbbox():
        return turned.convert("RGB"), True
    return turned, False


def on_colour(image: "Image.Image", colour: str) -> "Image.Image":
    """Return an `upright` image on a colour, in "L" or "RGB". Raises UserError if it is wholly transparent."""
    grey = image.mode in ("1", "L", "LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if not image.getchannel("A").getbbox():
            raise UserError("wholly transparent")
        image = Image.alpha_composite(Image.new("RGBA", image.size, colour), image)
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


def _decode(source: "str | Path | bytes | Image.Image | NDArray[np.uint8]", channels: int) -> "tuple[str, Image.Image]":
    """Return the source's name for messages, and the image decoded, upright, in grey or RGB."""
    name = str(source) if isinstance(source, str | Path) else "image"
    image = _open(name, source)
    _check_size(name, image.width, image.height)
    if not is_supported(image):
        raise UserError(f"{name}: unsupported pixel format (Pillow mode {image.mode!r}); use 8 or 16 bits per channel")
    with _reading(name):
        return name, flatten(image).convert("L" if channels == 1 else "RGB")


def _open(name: str, source: "str | Path | bytes | Image.Image | NDArray[np.uint8]") -> "Image.Image":
    """Open the image without decoding it."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim < 2 or source.shape[2:] not in ((), (1,), (3,)):
            raise UserError(f"array is {source.dtype} {source.shape}; expected uint8 [h, w], [h, w, 1] or [h, w, 3]")
        return Image.fromarray(source[:, :, 0] if source.shape[2:] == (1,) else source)
    with _reading(name):
        return open_image(source)


def _raw_mode(image: "Image.Image") -> str:
    """Return Pillow's name for the layout of an opened PNG's pixels; "" for another format, or once it is decoded."""
    tiles = getattr(image, "tile", []) if image.format == "PNG" else []
    return str(tiles[0].args) if tiles else ""


def _eight_bits(image: "Image.Image", tags: dict[int, Any]) -> "tuple[Image.Image, bool]":
    """Return deep grey as "L" or "LA", and whether it is more than its higher 8 of 16 bits; `tags` are a TIFF's."""
    values = np.asarray(image)
    bits = tags.get(ExifTags.Base.BitsPerSample, (16,))[0]
    is_inverted = tags.get(ExifTags.Base.PhotometricInterpretation) == 0
    grey = Image.fromarray((values >> (bits - 8)).astype(np.uint8) ^ np.uint8(255 * is_inverted))
    is_hidden = values == image.info.get("transparency", -1)
    if is_hidden.any():
        grey.putalpha(Image.fromarray(np.where(is_hidden, np.uint8(0), np.uint8(255))))
    return grey, bits != 16 or is_inverted or bool(is_hidden.any())


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Convert Pillow's exceptions for damaged files into a UserError that names the file."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{name} is too large; at most {MAX_PIXELS} pixels are read: {error}") from error
    except UserError as error:
        raise UserError(f"{name} cannot be used: {error}") from error
    # Pillow's readers raise many types of errors (struct.error, SyntaxError, KeyError, ...).
    except Exception as error:
        raise UserError(f"{name} cannot be read as an image ({', '.join(FORMATS)}): {error}") from error


def _resize(name: str, image: "Image.Image", preprocessing: Preprocessing) -> "Image.Image":
    """Resize and crop to the square of `resolution`; sizes are rounded as by timm, torchvision and transformers."""
    size = preprocessing.resolution
    shorter = preprocessing.resized
    width, height = image.size
    if preprocessing.crop == "squash":
        width, height = shorter, shorter
    elif width <= height:
        width, height = shorter, int(shorter * height / width)
    else:
        width, height = int(shorter * width / height), shorter
    _check_size(name, width, height)
    rounded = round if preprocessing.crop_offset == "round" else math.floor
    left, top = rounded((width - size) / 2), rounded((height - size) / 2)
    return _scale(image, width, height, preprocessing.interpolation).crop((left, top, left + size, top + size))


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
