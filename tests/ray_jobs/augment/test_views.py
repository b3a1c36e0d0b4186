"""MoCo v3's views: each change against Pillow, colorsys and scipy; how often; by whom it depends."""

import colorsys

import numpy as np
import pytest
import scipy
import torch
from PIL import Image, ImageEnhance

from ray_jobs.augment import augment, colour, crops, uniform
from ray_jobs.augment.views import JITTER, STRENGTHS, VIEWS, View, coloured, make_views, views_of
from tests.support.pretraining import pretraining

NOTHING = [0.99, *[0.5] * 4, *[0.1, 0.2, 0.3, 0.4], 0.99, 0.99, 0.5, 0.99, 0, 0, 0]


def pictures(n: int, size: int = 16, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, size, size, channels), generator=generator, dtype=torch.uint8)


def test_a_hue_is_turned_on_colorsyss_circle() -> None:
    images, turns = pictures(4, 8), torch.tensor([0.1, -0.1, 0.35, 0.0])
    images[0, 0] = 77  # grey has no hue
    result = colour.hue(images, turns).numpy()
    for image, turn, ours in zip(images.numpy(), turns.tolist(), result, strict=True):
        for pixel, found in zip(image.reshape(-1, 3), ours.reshape(-1, 3), strict=True):
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255.0))
            expected = 255 * np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value))
            assert np.abs(found - expected).max() <= 0.51
    assert torch.equal(colour.hue(images[3:], 0.0), images[3:])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_blur_is_scipys_gaussian(channels: int) -> None:
    images, sigmas = pictures(5, 24, channels), torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0])
    result = colour.gaussian_blur(images, sigmas, radius=6).numpy()
    for image, sigma, ours in zip(images.numpy(), sigmas.tolist(), result, strict=True):
        expected = scipy.ndimage.gaussian_filter(
            image.astype(float), (sigma, sigma, 0), mode="nearest", radius=(6, 6, 0)
        )
        assert np.abs(ours - expected).max() <= 0.51
    assert (result[0] == images[0].numpy()).all()


def test_jitter_is_pillows_enhancements_in_the_order_that_is_drawn() -> None:
    images, draws = pictures(24), uniform(3, np.arange(24), 9)
    draws[:, 4] = 0.5  # hue has a test of its own
    enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    jittered = colour.jitter(images, draws, STRENGTHS, JITTER)
    orders, left = set(), 0
    for image, row, ours in zip(images.numpy(), draws, jittered.numpy(), strict=True):
        expected = Image.fromarray(image)
        for change in np.argsort(row[5:9]):
            if row[0] < 0.8 and change < 3:
                factor = 1 + (2 * row[1 + change] - 1) * (0.4, 0.4, 0.2)[change]
                expected = enhance[change](expected).enhance(factor)
        # one rounding apart at most, which later changes may scale up
        assert np.abs(ours.astype(int) - np.asarray(expected).astype(int)).max() <= 2
        orders.add(tuple(np.argsort(row[5:9])))
        left += (ours == image).all()
    assert len(orders) > 10 and 0 < left < 12


def test_each_change_is_made_where_its_draw_says_so() -> None:
    images, view = pictures(5, 224), View(blur=0.5, solarize=0.5)
    draws = np.array([NOTHING] * 5)
    draws[1, 9], draws[2, 10:12], draws[3, 12], draws[4, 0] = 0.1, (0.4, 0.75), 0.4, 0.1
    result = coloured(images, view, draws, scale=1.0)
    assert torch.equal(result[0], images[0])
    luma = np.asarray(Image.fromarray(images[1].numpy()).convert("L"))
    assert (result[1].numpy() == luma[:, :, None]).all()
    assert torch.equal(result[2], colour.gaussian_blur(images[2:3], torch.tensor([0.1 + 0.75 * 1.9]), 6)[0])
    assert torch.equal(result[3], torch.where(images[3] < 128, images[3], 255 - images[3]))
    # all factors are 1 and the turn is 0
    assert (result[4].int() - images[4].int()).abs().max() <= 1


def test_views_differ_are_cropped_as_the_policy_says_and_depend_on_their_sample_alone() -> None:
    images, positions = pictures(24, 32), np.arange(100, 124)
    one, other = make_views(images, VIEWS, "resized_crop_flip", 5, positions)
    assert one.shape == other.shape == images.shape and one.dtype == other.dtype == torch.uint8
    assert all(not torch.equal(first, second) for first, second in zip(one, other, strict=True))
    for part in (slice(0, 8), slice(8, 24), slice(3, 4)):
        parts = make_views(images[part], VIEWS, "resized_crop_flip", 5, positions[part])
        for found, whole in zip(parts, (one, other), strict=True):
            assert (found.int() - whole[part].int()).abs().max() <= 1, "a convolution may round otherwise"
    again = make_views(images, VIEWS, "resized_crop_flip", 5, positions + 24)
    assert not torch.equal(again[0], one)
    cropped = augment(images, "resized_crop_flip", 5, positions, "view 1")
    plain = [torch.equal(first, second) for first, second in zip(cropped, other, strict=True)]
    assert any(plain) and not all(plain), "a tenth is neither blurred nor coloured"


def test_the_views_are_the_authors() -> None:
    """DINO's are two of MoCo's, from 40 to 100 % of an image, and eight of 96 pixels, from 5 to 40 %, half of them
    blurred."""
    fields = {"model": "Ti/16", "resolution": 224, "objective": "dino", "augment": "resized_crop_flip"}
    one, other, *local = views_of(pretraining(**fields))
    assert (one, other) == (View(1.0, 0.0, (0.4, 1.0)), View(0.1, 0.2, (0.4, 1.0)))
    assert local == [View(0.5, 0.0, (0.05, 0.4), 96)] * 8
    mocos = views_of(pretraining(**fields | {"objective": "contrastive"}))
    assert mocos == VIEWS == (View(blur=1.0, solarize=0.0), View(blur=0.1, solarize=0.2))


def test_a_local_view_is_a_small_crop_at_its_own_size() -> None:
    """The values of a ramp tell where each pixel comes from."""
    ramp, positions = (
        torch.arange(64, dtype=torch.uint8).mul(4)[None, None, :, None].expand(500, 64, 64, 1),
        np.arange(500),
    )
    boxes = crops("resized_crop_flip", 0, positions, 64, 64, "view 2", (0.05, 0.4))
    shares = boxes.height * boxes.width / 64**2
    assert 0.04 < shares.min() < 0.07 and 0.38 < shares.max() < 0.42
    assert shares.mean() == pytest.approx(0.225, abs=0.02)
    rows = augment(ramp, "resized_crop_flip", 0, positions, "view 2", (0.05, 0.4), 16)[:, 8, :, 0].numpy()
    along = (np.arange(16) + 0.5) / 16 * boxes.width[:, None] + boxes.left[:, None] - 0.5
    expected = 4 * np.where(boxes.flipped[:, None], along[:, ::-1], along).clip(0, 63)
    assert np.abs(rows - expected).max() <= 0.51
    local = View(0.0, 0.0, (0.05, 0.4), 16)
    shapes = [view.shape for view in make_views(ramp, (*VIEWS, local, local), "resized_crop_flip", 0, positions)]
    assert shapes == [(500, 64, 64, 1)] * 2 + [(500, 16, 16, 1)] * 2


def test_grey_images_have_views_too() -> None:
    one, other = make_views(pictures(20, 8, channels=1), VIEWS, "shift", 0, np.arange(20))
    assert one.shape == other.shape == (20, 8, 8, 1)
    assert not torch.equal(one, other)
