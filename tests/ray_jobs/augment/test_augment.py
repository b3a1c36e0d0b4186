"""Augmentation: per sample, whatever the batch; each policy against a plain computation of the same."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from ray_jobs.augment import CROPPING, augment, crop_boxes, drop_path_draws, uniform
from ray_jobs.augment.batch import shift
from vit_model.config import ResNetConfig, ViTConfig


def pictures(n: int, size: int = 8, channels: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (n, size, size, channels), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("policy", [*sorted(CROPPING), "none", "shift", "shift_flip"])
def test_a_sample_is_changed_alike_in_any_batch(policy: str) -> None:
    images, positions = pictures(64, channels=3), np.arange(1000, 1064)
    whole = augment(images, policy, 5, positions)
    assert whole.shape == images.shape and whole.dtype == torch.uint8
    for part in (slice(0, 16), slice(16, 64), slice(40, 41)):
        assert torch.equal(augment(images[part], policy, 5, positions[part]), whole[part])
    if policy != "none":
        assert not torch.equal(augment(images, policy, 6, positions), whole)
        assert not torch.equal(augment(images, policy, 5, positions + 64), whole)


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform(0, np.arange(20_000))
    assert draws.min() >= 0 and draws.max() < 1
    np.testing.assert_allclose(np.quantile(draws, [0.1, 0.5, 0.9], axis=0).T, [[0.1, 0.5, 0.9]] * 8, atol=0.015)
    correlation = np.corrcoef(np.hstack([draws[:-1], draws[1:], uniform(1, np.arange(19_999))]).T)
    assert np.abs(correlation - np.eye(24)).max() < 0.03


def test_a_samples_stochastic_depth_is_the_same_in_any_batch() -> None:
    sizes = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 3, "num_heads": 1, "mlp_dim": 8}
    config, positions, cpu = ViTConfig(**sizes, stochastic_depth=0.1), np.arange(50, 114), torch.device("cpu")
    one, other = drop_path_draws(config, 5, positions, cpu, views=2)
    assert one.shape == (64, 3, 2) and len(torch.stack([one, other]).unique()) == 2 * 64 * 3 * 2
    for part in (slice(0, 16), slice(16, 64), slice(40, 41)):
        again = drop_path_draws(config, 5, positions[part], cpu, views=2)
        assert torch.equal(again[0], one[part]) and torch.equal(again[1], other[part])
    assert not torch.equal(drop_path_draws(config, 6, positions, cpu, views=2)[0], one)
    assert drop_path_draws(ViTConfig(**sizes), 5, positions, cpu) == ()
    assert drop_path_draws(ResNetConfig.variant("R50x1", image_size=32), 5, positions, cpu) == ()


def test_shift_moves_by_one_pixel_and_brings_in_zeros() -> None:
    images, draws = pictures(200, channels=3), uniform(0, np.arange(200))
    seen = set()
    for image, moved in zip(images.numpy(), shift(images, draws).numpy(), strict=True):
        padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
        fits = [(y, x) for y in range(3) for x in range(3) if (padded[y : y + 8, x : x + 8] == moved).all()]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) == 9


def test_shift_flip_is_a_shift_of_which_half_are_mirrored() -> None:
    images, positions = pictures(200), np.arange(200)
    shifted = augment(images, "shift", 0, positions).numpy()
    flipped = 0
    for one, both in zip(shifted, augment(images, "shift_flip", 0, positions).numpy(), strict=True):
        mirrored = not (one == both).all()
        np.testing.assert_array_equal(both, one[:, ::-1] if mirrored else one)
        flipped += mirrored
    assert 70 < flipped < 130


def test_crop_is_the_crop_resized_and_half_are_flipped() -> None:
    size = 48
    smooth = functional.interpolate(pictures(60, 6, 3).permute(0, 3, 1, 2).float(), size=(size, size), mode="bicubic")
    images = smooth.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    draws = uniform(3, np.arange(60))
    result = augment(images, "crop_flip", 3, np.arange(60))
    boxes = zip(*crop_boxes(draws, size, size), strict=True)
    for image, row, cropped, (top, left, height, width) in zip(images, draws, result, boxes, strict=True):
        part = image[top : top + height, left : left + width].permute(2, 0, 1)[None].float()
        expected = functional.interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0]
        if row[4] < 0.5:
            expected = expected.flip(-1)
        # Only at the crop's edges do they differ: there ours sees the neighbouring pixels.
        error = (cropped.permute(2, 0, 1).float() - expected).abs()
        assert error.mean() < 1 and error.quantile(0.8) <= 0.51
    assert 0.3 < (draws[:, 4] < 0.5).mean() < 0.7


def test_draws_for_another_purpose_are_others_and_as_many_as_asked_for() -> None:
    positions = np.arange(1000)
    augmenting, masking = uniform(0, positions), uniform(0, positions, 32, "masked patches")
    assert masking.shape == (1000, 32)
    assert len(np.unique(masking)) == masking.size
    assert abs(np.corrcoef(augmenting[:, 0], masking[:, 0])[0, 1]) < 0.1
    np.testing.assert_array_equal(masking[7:9], uniform(0, positions[7:9], 32, "masked patches"))
