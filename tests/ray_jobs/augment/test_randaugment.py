"""RandAugment, operation by operation against Pillow and plain numpy; what is drawn, and by whom it depends."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ray_jobs.augment.randaugment import OPERATIONS, apply, randaugment
from ray_jobs.augment.random import uniform

HEIGHT, WIDTH = 56, 112  # a quarter and a half of the 224 pixels that magnitudes were made for
GREY = (128, 128, 128)
Pixels = np.ndarray


def photographs(n: int, channels: int = 3) -> Pixels:
    """Smooth colours with some noise, of which some are dark and some have few levels."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(n):
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        large = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)).astype(int)
        image = np.clip(large + rng.integers(-9, 10, large.shape), 0, 255)
        image = image // 2 + 20 if number % 4 == 1 else image // 64 * 64 if number % 4 == 2 else image
        found.append(image.astype(np.uint8)[:, :, :channels])
    return np.stack(found)


def turned(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    kind = Image.Transform.AFFINE
    return image.transform(image.size, kind, matrix, Image.Resampling.NEAREST, fillcolor=GREY)


def moved(image: Image.Image, right: float, down: float) -> Pixels:
    """The image's pixels at their place plus (right, down), found one by one."""
    pixels, result = np.asarray(image), np.full((HEIGHT, WIDTH, 3), 128, np.uint8)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            from_x, from_y = int(np.floor(x + right + 0.5)), int(np.floor(y + down + 0.5))
            if 0 <= from_x < WIDTH and 0 <= from_y < HEIGHT:
                result[y, x] = pixels[from_y, from_x]
    return result


def covered(image: Image.Image, half: int, y: float, x: float) -> Pixels:
    result = np.asarray(image).copy()
    middle_y, middle_x = int(y * HEIGHT), int(x * WIDTH)
    result[max(0, middle_y - half) : middle_y + half, max(0, middle_x - half) : middle_x + half] = 128
    return result


def lifted(image: Image.Image, addition: int) -> Pixels:
    pixels = np.asarray(image).astype(int)
    return np.where(pixels < 128, np.minimum(pixels + addition, 255), pixels)


# Each of an image, the level (magnitude / 10), the sign, and the place (y, x) that was drawn.
Truth = Callable[[Image.Image, float, float, tuple[float, float]], Image.Image | Pixels]
TRUTHS: dict[str, Truth] = {
    "AutoContrast": lambda image, m, s, at: ImageOps.autocontrast(image),
    "Equalize": lambda image, m, s, at: ImageOps.equalize(image),
    "Invert": lambda image, m, s, at: ImageOps.invert(image),
    "Rotate": lambda image, m, s, at: image.rotate(s * m * 30, Image.Resampling.NEAREST, fillcolor=GREY),
    "Posterize": lambda image, m, s, at: ImageOps.posterize(image, min(8, max(1, int(m * 4)))),
    "Solarize": lambda image, m, s, at: ImageOps.solarize(image, int(m * 256)),
    "Color": lambda image, m, s, at: ImageEnhance.Color(image).enhance(m * 1.8 + 0.1),
    "Contrast": lambda image, m, s, at: ImageEnhance.Contrast(image).enhance(m * 1.8 + 0.1),
    "Brightness": lambda image, m, s, at: ImageEnhance.Brightness(image).enhance(m * 1.8 + 0.1),
    "Sharpness": lambda image, m, s, at: ImageEnhance.Sharpness(image).enhance(m * 1.8 + 0.1),
    # Pillow counts from the corner of the first pixel, hence the last number.
    "ShearX": lambda image, m, s, at: turned(image, (1, s * m * 0.3, -s * m * 0.15, 0, 1, 0)),
    "ShearY": lambda image, m, s, at: turned(image, (1, 0, 0, s * m * 0.3, 1, -s * m * 0.15)),
    "TranslateX": lambda image, m, s, at: moved(image, s * m * 50, 0),
    "TranslateY": lambda image, m, s, at: moved(image, 0, s * m * 25),
    "Cutout": lambda image, m, s, at: covered(image, int(m * 10), *at),
    "SolarizeAdd": lambda image, m, s, at: lifted(image, int(m * 110)),
}
# A pixel between two may go to either, and Pillow stretches contrast in floats, of which it cuts off the fraction.
TIES = {"Rotate", "ShearX", "ShearY"}


def test_there_are_the_sixteen() -> None:
    assert len(OPERATIONS) == 16 and set(OPERATIONS) == set(TRUTHS)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("magnitude", [0, 3, 10, 15, 20])
def test_an_operation_is_pillows(operation: str, magnitude: float) -> None:
    images = photographs(8)
    draws = uniform(1, np.arange(8), 3, "test")
    assert {True, False} == set(draws[:, 0] < 0.5)
    given = torch.from_numpy(images.copy())
    result = apply(operation, given, magnitude, draws).numpy()
    assert result.dtype == np.uint8 and result.shape == images.shape
    assert (given.numpy() == images).all(), "the images themselves are left alone"
    for image, ours, (sign, y, x) in zip(images, result, draws, strict=True):
        truth = TRUTHS[operation](Image.fromarray(image), magnitude / 10, -1 if sign < 0.5 else 1, (y, x))
        difference = np.abs(ours.astype(int) - np.asarray(truth).astype(int))
        if operation in TIES:
            # shears are by tenths or hundredths of a pixel, so many a pixel lies just between two
            assert (difference.max(axis=2) > 0).mean() < (0.01 if operation == "Rotate" else 0.1)
        else:
            assert difference.max() <= (operation == "AutoContrast")


def test_smoothing_is_pillows() -> None:
    """Strength 0.1 of sharpness is nearly the smoothed image, so that its rounding would show."""
    images = photographs(4)
    ours = apply("Sharpness", torch.from_numpy(images), 0, np.zeros((4, 3))).numpy().astype(int)
    for image, one in zip(images, ours, strict=True):
        smooth = np.asarray(Image.fromarray(image).filter(ImageFilter.SMOOTH)).astype(int)
        assert np.abs(one - smooth).max() <= 0.1 * np.abs(image.astype(int) - smooth).max() + 1


def test_layers_follow_one_another_and_operations_are_drawn_with_replacement() -> None:
    """Each image changes as its own draws say, in any batch, one operation after the other."""
    images, positions = torch.from_numpy(photographs(16)), np.arange(16)
    result = randaugment(images, 2, 12, 9, positions)
    draws = uniform(9, positions, 8, "randaugment")
    for number in range(16):
        one = images[number : number + 1]
        for layer in (draws[number, :4], draws[number, 4:]):
            one = apply(OPERATIONS[int(layer[0] * 16)], one, 12, layer[None, 1:])
        assert torch.equal(one[0], result[number])
    many = (uniform(9, np.arange(4000), 8, "randaugment")[:, [0, 4]] * 16).astype(int)
    counts = np.bincount(many.flatten(), minlength=16)
    assert counts.min() > 400 and counts.max() < 600
    assert 0.04 < (many[:, 0] == many[:, 1]).mean() < 0.085, "the same twice, one time in 16"


def test_grey_images_go_too() -> None:
    images = torch.from_numpy(photographs(32, channels=1))
    assert randaugment(images, 2, 10, 0, np.arange(32)).shape == images.shape
    assert torch.equal(apply("Color", images, 3, np.zeros((32, 3))), images)
