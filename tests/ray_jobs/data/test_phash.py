"""The perceptual hash: near-copies of photographs are near, different pictures are far, flat ones say nothing."""

import io
from itertools import permutations

import numpy as np
import pytest
import scipy
from PIL import Image, ImageDraw, ImageEnhance

from ray_jobs.data.images import Hashes, examine, hashes


def parts() -> list[Image.Image]:
    """24 disjoint parts of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    return [
        one.crop((x, y, x + 160, y + 140))
        for one in photographs
        for x in range(0, 640, 160)
        for y in range(0, 420, 140)
    ]


def hashed(image: Image.Image) -> int:
    return hashes(np.asarray(image.convert("L"))).phash


def saved(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer)


@pytest.mark.slow
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
        found = scipy.fft.dctn(small, type=2)[1:9, 1:9].ravel()
        expected = int(np.packbits(found > np.sort(found)[31]).view(">u8")[0])
        assert (hashed(image) ^ expected).bit_count() <= 2


@pytest.mark.parametrize("shape", [(8, 8), (1, 1), (375, 500)])
def test_a_flat_image_has_no_hash(shape: tuple[int, int]) -> None:
    assert hashes(np.full(shape, 77, np.uint8)) == Hashes(*[0] * 9)
    ramp = np.arange(shape[0] * shape[1], dtype=np.uint64).reshape(shape).astype(np.uint8)
    assert max(hashes(ramp)) < 2**64


def test_a_part_that_is_flat_has_no_hash() -> None:
    """Else all drawings with an empty middle would be crops of each other."""
    grey = np.random.default_rng(0).integers(0, 256, (100, 150), np.uint8)
    grey[5:-5, 10:-10] = 200
    found = hashes(grey)
    assert found.phash and not found.phash_crop82 and not found.phash_crop75


TURNS = {
    "phash_mirrored": Image.Transpose.FLIP_LEFT_RIGHT,
    "phash_flipped": Image.Transpose.FLIP_TOP_BOTTOM,
    "phash_rotated": Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("view", TURNS)
@pytest.mark.parametrize("size", [(32, 32), (64, 96), (320, 160)])
def test_a_turned_images_hash_is_in_the_images_column_of_it(view: str, size: tuple[int, int]) -> None:
    """Exactly, where 32 pixels are whole blocks of its own; the others' rounding depends on the direction."""
    for image in parts():
        image = image.resize(size)
        turned = hashes(np.asarray(image.transpose(TURNS[view]).convert("L"))).phash
        bits = (getattr(hashes(np.asarray(image.convert("L"))), view) ^ turned).bit_count()
        assert bits == 0 or (view == "phash_rotated" and bits <= 4)


CROPS = ("phash", "phash_crop95", "phash_crop82", "phash_crop75")
COMPARED = [("phash", "phash"), ("phash_inside", "phash"), *permutations(CROPS, 2)]


def padded(image: Image.Image) -> Image.Image:
    frame = Image.new("RGB", (image.width, image.height + 60))
    frame.paste(image, (0, 30))
    return frame


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda image: image.crop((8, 7, 152, 133)), 0.9),  # 5 % off each side
        (lambda image: image.crop((19, 17, 141, 123)), 0.85),  # 12 %
        (padded, 0.8),
    ],
    ids=["cut by 5 %", "cut by 12 %", "bars above and below"],
)
def test_crops_share_a_view_within_four_bits(change, share: float) -> None:  # type: ignore[no-untyped-def]
    def views(image: Image.Image) -> dict[str, int]:
        return hashes(np.asarray(image.convert("L")))._asdict()

    def distance(one: dict[str, int], other: dict[str, int]) -> int:
        compared = [(one[mine], other[theirs]) for mine, theirs in COMPARED if one[mine] and other[theirs]]
        return min((mine ^ theirs).bit_count() for mine, theirs in compared)

    images = [views(image) for image in parts()]
    copies = [views(saved(change(image), 85)) for image in parts()]
    nearest = np.array([[distance(copy, image) for copy in copies] for image in images])
    assert np.mean(nearest.diagonal() <= 4) >= share
    assert (nearest <= 4).sum() == (nearest.diagonal() <= 4).sum(), "no others are near"


def test_what_is_transparent_is_hashed_on_white_and_on_black() -> None:
    image = parts()[3]
    alpha = Image.new("L", image.size, 0)
    ImageDraw.Draw(alpha).ellipse((5, 5, 155, 135), fill=255)
    image.putalpha(alpha)
    file = io.BytesIO()
    image.save(file, "PNG")
    found = examine(file.getvalue()).hashes
    for colour, own in ("white", found.phash), ("black", found.phash_on_black):
        flat = Image.alpha_composite(Image.new("RGBA", image.size, colour), image)
        assert (hashed(saved(flat.convert("RGB"), 90)) ^ own).bit_count() <= 4
    image.putalpha(255)
    file = io.BytesIO()
    image.save(file, "PNG")
    assert examine(file.getvalue()).hashes.phash_on_black == 0


def test_small_images_have_but_one_hash() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (31, 64), np.uint8)
    assert hashes(grey).phash and not any(hashes(grey)[1:])
