"""A training's augmentation: an image is cropped once, by the loader or by the loop, whatever the policy."""

from typing import get_args

import numpy as np
import pytest
import torch

from pipelines.spec import Augmentation
from ray_jobs.augment import TrainTransform, augment, crops
from ray_jobs.augment.views import VIEWS, make_views
from tests.support.pretraining import pretraining

POSITIONS = np.arange(70, 78)
LABELS = torch.arange(8)
IMAGES = torch.randint(0, 256, (8, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def transform(*, from_files: bool, **fields: object) -> TrainTransform:
    config = pretraining(**{"resolution": 16, "batch_size": 8} | fields)
    return TrainTransform(config, seed=3, num_classes=8, from_files=from_files)


@pytest.mark.parametrize("policy", get_args(Augmentation))
def test_stored_pixels_are_cropped_by_the_loop(policy: str) -> None:
    training = transform(from_files=False, augment=policy)
    assert training.crop is None
    (images,), targets = training(IMAGES, LABELS, POSITIONS, 0)
    assert torch.equal(images, augment(IMAGES, policy, 3, POSITIONS))
    assert torch.equal(targets, LABELS)


@pytest.mark.parametrize("policy", get_args(Augmentation))
def test_what_the_loader_cuts_from_a_file_the_loop_leaves_alone(policy: str) -> None:
    training = transform(from_files=True, augment=policy)
    (images,), _ = training(IMAGES, LABELS, POSITIONS, 0)
    if policy in ("none", "flip", "shift", "shift_flip"):
        assert training.crop is None
        assert torch.equal(images, augment(IMAGES, policy, 3, POSITIONS))
        return
    assert torch.equal(images, IMAGES)
    for ours, expected in zip(training.crop(POSITIONS, 50, 70), crops(policy, 3, POSITIONS, 50, 70), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_colours_change_by_factors_of_each_image() -> None:
    training = transform(from_files=True, color_jitter=0.4)
    grey, positions = torch.full((64, 4, 4, 3), 100, dtype=torch.uint8), np.arange(64)
    (changed,), _ = training(grey, torch.arange(64), positions, 0)
    factors = changed.flatten(1).float() / 100  # of the brightness: the rest leaves a grey image as it is
    assert torch.equal(factors.amin(1), factors.amax(1))
    assert 0.6 <= factors.min() < 0.65 and 1.35 < factors.max() <= 1.4 and len(factors[:, 0].unique()) > 25
    (alone,), _ = training(IMAGES[5:], LABELS[5:], POSITIONS[5:], 0)
    (batch,), _ = training(IMAGES, LABELS, POSITIONS, 0)
    assert torch.equal(alone, batch[5:]) and not torch.equal(batch, IMAGES)


@pytest.mark.parametrize("from_files", [True, False])
def test_both_of_mocos_views_are_cut_from_the_whole_image(from_files: bool) -> None:
    training = transform(
        from_files=from_files,
        augment="resized_crop_flip",
        objective="contrastive",
        model={"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2, "position": "sincos2d_moco"},
    )
    assert training.crop is None
    views, _ = training(IMAGES, LABELS, POSITIONS, 0)
    expected = make_views(IMAGES, VIEWS, "resized_crop_flip", 3, POSITIONS)
    assert [torch.equal(*pair) for pair in zip(views, expected, strict=True)] == [True, True]
