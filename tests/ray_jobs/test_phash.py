"""The perceptual hash: near-copies of photographs are near, different pictures are far, flat ones say nothing."""

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy.fft import dctn
from sklearn.datasets import load_sample_images

from ray_jobs.images import phash


def parts() -> list[Image.Image]:
    """24 disjoint parts of scikit-learn's two photographs."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    return [
        one.crop((x, y, x + 160, y + 140))
        for one in photographs
        for x in range(0, 640, 160)
        for y in range(0, 420, 140)
    ]


def hashed(image: Image.Image) -> int:
    return phash(np.asarray(image.convert("L")))


def saved(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda image: saved(image, 90), 0.95),
        (lambda image: saved(image, 50), 0.85),
        (lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC), 0.8),
        (lambda image: ImageEnhance.Brightness(image).enhance(0.8), 0.8),
        (lambda image: image.crop((2, 1, image.width - 2, image.height - 1)), 0.8),
    ],
    ids=["jpeg 90", "jpeg 50", "halved", "darker", "cut by 1 %"],
)
def test_near_copies_are_within_four_bits(change, share: float) -> None:  # type: ignore[no-untyped-def]
    near = [(hashed(image) ^ hashed(change(image))).bit_count() <= 4 for image in parts()]
    assert np.mean(near) >= share


def test_different_pictures_are_far_apart() -> None:
    hashes = [hashed(image) for image in parts()]
    distances = [(one ^ other).bit_count() for n, one in enumerate(hashes) for other in hashes[:n]]
    assert min(distances) >= 14


def test_the_bits_are_those_of_the_cosine_transform() -> None:
    """Against SciPy's, but where a frequency is nearly the median."""
    for image in parts():
        small = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BOX), float)
        found = dctn(small, type=2)[1:9, 1:9].ravel()
        expected = int(np.packbits(found > np.sort(found)[31]).view(">u8")[0])
        assert (hashed(image) ^ expected).bit_count() <= 2


@pytest.mark.parametrize("shape", [(8, 8), (1, 1), (375, 500)])
def test_a_flat_image_has_no_hash(shape: tuple[int, int]) -> None:
    assert phash(np.full(shape, 77, np.uint8)) == 0
    assert phash(np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape).astype(np.uint8)) < 2**64
