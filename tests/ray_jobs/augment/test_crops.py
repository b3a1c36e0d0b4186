"""Boxes of random crops: against torchvision's loop, their distributions, one image or many; VTAB's switches."""

import math
from typing import get_args

import numpy as np
import pytest
import torch

from pipelines.spec import Augmentation
from pipelines.spec.vtab import TASKS, WHOLE
from ray_jobs.augment import CROPPING, augment, crops
from ray_jobs.augment.crops import resized_crop_boxes
from ray_jobs.augment.random import uniform
from ray_jobs.augment.vtab import augmentation

SIZES = [(224, 224), (375, 500), (500, 375), (100, 700), (700, 100), (32, 32), (5, 3), (1, 1)]


def boxes_of(policy: str, n: int, height: int, width: int) -> list[np.ndarray]:
    return list(crops(policy, 0, np.arange(n), height, width))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_resized_crop_is_torchvisions_loop(height: int, width: int) -> None:
    """Its algorithm as its documentation and paper have it, one try after the other; in the end the middle."""
    draws = uniform(0, np.arange(300), 24)
    fallen_back = 0
    for row, *ours in zip(draws, *resized_crop_boxes(draws, height, width), strict=True):
        for number in range(10):
            area = height * width * (0.08 + 0.92 * row[2 * number])
            ratio = math.exp(math.log(3 / 4) + row[2 * number + 1] * (math.log(4 / 3) - math.log(3 / 4)))
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                expected = [int(row[20] * (height - tall + 1)), int(row[21] * (width - wide + 1)), tall, wide]
                break
        else:
            fallen_back += 1
            wide, tall = width, height
            if width / height < 3 / 4:
                tall = round(width / (3 / 4))
            elif width / height > 4 / 3:
                wide = round(height * (4 / 3))
            expected = [(height - tall) // 2, (width - wide) // 2, tall, wide]
        assert ours == expected
    assert (fallen_back > 0) == (max(height / width, width / height) > 4)


def test_resized_crops_have_a_uniform_area_and_a_log_uniform_aspect() -> None:
    """On a wide range of sides nothing is refused at 224 x 224 but what is too large for the square."""
    _, _, tall, wide, flipped = boxes_of("resized_crop_flip", 20_000, 2000, 2000)
    area, aspect = tall * wide / 2000**2, np.log(wide / tall) / math.log(4 / 3)
    # Up to 3/4 of the area every aspect fits; larger ones are drawn as often, and refused the more the larger.
    small = area[area < 0.75]
    np.testing.assert_allclose(
        np.quantile(small, [0.25, 0.5, 0.75]), 0.08 + 0.67 * np.array([0.25, 0.5, 0.75]), atol=0.015
    )
    np.testing.assert_allclose(np.quantile(aspect[area < 0.75], [0.1, 0.5, 0.9]), [-0.8, 0, 0.8], atol=0.04)
    assert area.min() == pytest.approx(0.08, abs=0.002) and area.max() > 0.97
    assert flipped.mean() == pytest.approx(0.5, abs=0.02)


def test_inceptions_crops_have_uniform_heights_between_their_limits() -> None:
    _, _, tall, wide, flipped = boxes_of("crop_flip", 20_000, 2000, 2000)
    aspect = wide / tall
    np.testing.assert_allclose(
        np.quantile(aspect, [0.1, 0.5, 0.9]), 3 / 4 + np.array([0.1, 0.5, 0.9]) * 7 / 12, atol=0.02
    )
    square = np.abs(aspect - 1) < 0.02
    lowest = 2000 * math.sqrt(0.05)
    part = (tall[square] - lowest) / (2000 - lowest)
    np.testing.assert_allclose(np.quantile(part, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.07)
    assert (tall * wide).min() == pytest.approx(0.05 * 2000**2, rel=0.03)
    assert flipped.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("policy", sorted(CROPPING))
def test_crops_lie_inside_anywhere_and_a_batch_is_its_images(policy: str) -> None:
    heights, widths = np.array(SIZES * 40).T
    positions = np.arange(len(heights)) + 77
    batch = crops(policy, 3, positions, heights, widths)
    assert all(field.dtype == np.int64 for field in batch[:4]) and batch.flipped.dtype == bool
    assert min(field.min() for field in batch[2:4]) >= 1
    beyond = 0
    for start, extent, size in ((batch.top, batch.height, heights), (batch.left, batch.width, widths)):
        is_part = (start >= 0) & (start + extent <= size)
        assert (is_part | (start <= 0) & (start + extent >= size)).all()
        beyond += (~is_part).sum()
    assert (beyond > 0) == (policy == "scale_jitter_flip")
    for number in range(0, len(heights), 7):
        one = crops(policy, 3, positions[number : number + 1], int(heights[number]), int(widths[number]))
        assert [field[0] for field in one] == [field[number] for field in batch]
    other = crops(policy, 3, positions, heights, widths, "view 1")
    assert policy == "flip" or (other.top != batch.top).any()
    assert batch.flipped.any() == policy.endswith("flip")
    assert (batch.flipped != other.flipped).any() == policy.endswith("flip")


def test_large_scale_jitter_has_uniform_factors_and_puts_the_image_anywhere() -> None:
    top, _, tall, wide, _ = boxes_of("scale_jitter_flip", 20_000, 1000, 500)
    factor = 1000 / tall
    np.testing.assert_allclose(np.quantile(factor, [0, 0.25, 0.5, 1]), [0.1, 0.575, 1.05, 2], atol=0.02)
    np.testing.assert_allclose(wide, tall / 2, atol=1)
    for part in (factor < 0.9, factor > 1.1):
        place = np.abs(top[part]) / np.abs(1000 - tall[part])
        np.testing.assert_allclose(np.quantile(place, [0, 0.25, 0.5, 1]), [0, 0.25, 0.5, 1], atol=0.02)
    assert (np.sign(top) == np.sign(1000 - tall) * (top != 0)).all()


def test_bits_crop_is_six_sevenths_of_each_side_everywhere() -> None:
    top, left, tall, wide, _ = boxes_of("squash_crop", 2000, 448, 700)
    assert set(tall) == {384} and set(wide) == {600}
    assert set(top) == set(range(65)) and (left.min(), left.max()) == (0, 100)


def test_a_batch_in_memory_gets_the_same_crops_as_a_decoder_does() -> None:
    """Where a part is not scaled it is the very pixels, mirrored as said."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 9, 9, 3), generator=generator, dtype=torch.uint8)
    positions = np.arange(40)
    flipped = crops("flip", 2, positions, 9, 9).flipped
    expected = [image.flip(1) if mirrored else image for image, mirrored in zip(images, flipped, strict=True)]
    assert torch.equal(augment(images, "flip", 2, positions), torch.stack(expected))
    ramp = torch.arange(0, 252, 4, dtype=torch.uint8).repeat(63, 1)[None, :, :, None].repeat(40, 1, 1, 1)
    taken = crops("resized_crop_flip", 2, positions, 63, 63)
    for row, left, wide, mirrored in zip(
        augment(ramp, "resized_crop_flip", 2, positions)[:, 31, :, 0],
        taken.left,
        taken.width,
        taken.flipped,
        strict=True,
    ):
        # Along a ramp of 4 a pixel a resized part is a ramp from its first to its last pixel.
        values = 4 * (left - 0.5 + (np.arange(63) + 0.5) * wide / 63)
        values = np.clip(values[::-1] if mirrored else values, 0, 248)
        assert np.abs(row.numpy() - values).max() <= 0.51


def test_an_image_that_is_made_smaller_is_whole_among_zeros() -> None:
    positions = np.arange(40)
    boxes = crops("scale_jitter_flip", 2, positions, 60, 60)
    white = augment(torch.full((40, 60, 60, 1), 255, dtype=torch.uint8), "scale_jitter_flip", 2, positions)
    assert set(white.unique().tolist()) == {0, 255}
    sides = 60 * np.minimum(1, 60 / boxes.height)
    assert (np.abs(np.sqrt((white == 255).sum((1, 2, 3)).numpy()) - sides) < 1).all()
    checks = (torch.arange(60)[:, None] + torch.arange(60)) % 2 * 255
    grey = augment(checks.to(torch.uint8).repeat(40, 1, 1)[..., None], "scale_jitter_flip", 2, positions)[sides < 25]
    assert (grey[grey > 0].float() - 127.5).abs().max() < 40, "what becomes small is antialiased"


# BiT, appendix F: no flip for these, no random crop for those.
NO_FLIP = {"dsprites_ori", "smallnorb_azi", "dsprites_loc"}
NO_CROP = {"clevr_count", "clevr_dist", "dmlab", "kitti", "dsprites_loc"}


def test_vtabs_tasks_keep_what_their_answer_depends_on() -> None:
    assert set(TASKS) > NO_FLIP | NO_CROP
    for task, files in TASKS.items():
        policy = augmentation(files.title)
        assert augmentation(files.title + WHOLE) == policy in get_args(Augmentation)
        assert ("flip" in policy, "crop" in policy) == (task not in NO_FLIP, task not in NO_CROP), task
