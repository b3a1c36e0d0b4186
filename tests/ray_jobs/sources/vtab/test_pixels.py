"""Published pixel recipes, against the formula in numpy and scipy."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import scipy
from numpy.typing import NDArray
from PIL import Image

from ray_jobs.sources.vtab.pixels import btgraham, equalised, without_alpha


def eye(height: int, width: int, radius: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A disc of soft colours on black, as a camera of the fundus makes it."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / scale + phase) + np.cos(y / scale) for scale, phase in ((9, 0), (14, 1), (23, 2))], 2)
    disc = np.hypot(y - height // 2, x - width // 2) < radius
    pixels = (120 + 40 * waves + rng.normal(0, 3, waves.shape)) * disc[..., None]
    return np.clip(pixels, 0, 255).astype(np.uint8)


def resized(image: NDArray[np.uint8], scale: float) -> NDArray[np.float64]:
    """Bilinear without a filter against aliasing; the centres of pixels lie at one half."""
    for axis in (0, 1):
        size = image.shape[axis]
        at = np.clip((np.arange(round(size * scale)) + 0.5) / scale - 0.5, 0, size - 1)
        low = np.minimum(at.astype(int), size - 2)
        share = np.expand_dims(at - low, (1, 2) if axis == 0 else (0, 2))
        image = image.take(low, axis) * (1 - share) + image.take(low + 1, axis) * share
    return np.rint(image)


@pytest.mark.parametrize(("height", "width", "radius"), [(200, 260, 110), (700, 900, 360), (150, 400, 140)])
def test_btgraham_is_the_published_formula(height: int, width: int, radius: int) -> None:
    image = eye(height, width, radius, np.random.default_rng(radius))
    sums = image[height // 2].astype(float).sum(1)
    scaled = resized(image, 300 / (np.sum(sums > sums.mean() / 10) / 2))
    blurred = scipy.ndimage.gaussian_filter(scaled, (10, 10, 0), mode="mirror", truncate=3)
    sharp = np.clip(4 * scaled - 4 * blurred + 128, 0, 255)
    y, x = np.ogrid[: scaled.shape[0], : scaled.shape[1]]
    middle_y, middle_x = scaled.shape[0] // 2, scaled.shape[1] // 2
    distance = np.hypot(y - middle_y, x - middle_x)
    sharp[distance > 270] = 128
    box = np.s_[max(middle_y - 270, 0) : middle_y + 270, max(middle_x - 270, 0) : middle_x + 270]
    expected, ring = sharp[box], np.abs(distance[box] - 270) < 1.5  # circles differ in a pixel
    found = equalised(image)
    assert found.shape == expected.shape
    off = np.abs(found - expected)[~ring]
    # 8 bits are rounded after each step, and then multiplied by 4
    assert off.max() <= 12
    assert off.mean() < 1.5
    assert np.abs(expected - 128)[~ring].mean() > 5 * off.mean()


def test_btgraham_is_a_jpeg_of_the_eye() -> None:
    pixels = eye(300, 320, 140, np.random.default_rng(0))
    pixels[..., 2] //= 4
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "JPEG", quality=95)
    with Image.open(io.BytesIO(btgraham(data.getvalue()))) as image:
        assert (image.format, image.size) == ("JPEG", (540, 540))
        # red stays red: OpenCV's order of channels is not Pillow's
        found, expected = np.asarray(image, float), equalised(np.asarray(Image.open(data)))
        off, swapped = (np.abs(each - expected).mean() for each in (found, found[..., ::-1]))
        assert off < swapped / 2


def test_an_eye_that_is_black_or_tiny_is_no_bomb() -> None:
    assert equalised(np.zeros((100, 200, 3), np.uint8)).shape == (540, 540, 3)
    speck = np.zeros((2000, 2000, 3), np.uint8)
    speck[1000, 1000:1002] = 255
    with pytest.raises(ValueError, match=r"the eye has a radius of 1\.0 pixels: 600000 x 600000"):
        equalised(speck)


def test_alpha_is_dropped_and_opaque_images_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20, 30, 4), np.uint8)

    def png(pixels: NDArray[np.uint8]) -> bytes:
        data = io.BytesIO()
        Image.fromarray(pixels).save(data, "PNG")
        return data.getvalue()

    found = Image.open(io.BytesIO(without_alpha(png(pixels))))
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), pixels[..., :3])
    pixels[..., 3] = 255
    for opaque in (png(pixels), png(pixels[..., :3].copy())):
        assert without_alpha(opaque) == opaque


@pytest.mark.parametrize("recipe", [btgraham, without_alpha])
def test_other_bytes_are_refused(recipe: Callable[[bytes], bytes]) -> None:
    for data in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"):
        with pytest.raises(ValueError, match="not an image"):
            recipe(data)


def test_deep_images_are_no_eyes() -> None:
    data = io.BytesIO()
    Image.fromarray(np.full((9, 9), 30_000, np.uint16)).save(data, "PNG")
    with pytest.raises(ValueError, match="not 8 bits a channel"):
        btgraham(data.getvalue())
