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
    if "crop" not in policy:
        assert training.crop is None
        assert torch.equal(images, augment(IMAGES, policy, 3, POSITIONS))
        return
    assert torch.equal(images, IMAGES)
    for ours, expected in zip(training.crop(POSITIONS, 50, 70), crops(policy, 3, POSITIONS, 50, 70), strict=True):
        np.testing.assert_array_equal(ours, expected)


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
