"""Mixup and CutMix: the pixels, the weights, the loss, and the same global batch at any world size."""

from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
import torch.distributed as dist

from pipelines.spec import Finetune, RandAugment
from ray_jobs.augment import TrainTransform
from ray_jobs.augment.mixing import Mix, mix, plan
from tests.support.workers import run_workers
from vit_model.objectives.losses import sigmoid_cross_entropy, softmax_cross_entropy

CLASSES = 7
WHOLE = 65_536


def batch(n: int, height: int = 6, width: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, height, width, 3), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, CLASSES, (n,), generator=generator)


def test_mixup_is_the_weighted_mean_with_the_image_before() -> None:
    images, labels = batch(5)
    mixed, targets = mix(images, labels, CLASSES, Mix(share=int(0.75 * WHOLE), box=None))
    for number in range(5):
        before = (number - 1) % 5
        mean = 0.75 * images[number].numpy() + 0.25 * images[before].numpy()
        assert np.abs(mixed[number].numpy() - mean).max() <= 0.5
        expected = np.zeros(CLASSES)
        expected[labels[number]] += 0.75
        expected[labels[before]] += 0.25
        np.testing.assert_allclose(targets[number], expected)
    same, one_hot = mix(images, labels, CLASSES, Mix(share=WHOLE, box=None))
    assert torch.equal(same, images)
    assert torch.equal(one_hot.argmax(1), labels) and one_hot.max(1).values.min() == 1


def test_cutmix_takes_a_box_of_the_image_before() -> None:
    images, labels = batch(4)
    mixed, targets = mix(images, labels, CLASSES, Mix(share=WHOLE // 2, box=(1, 3, 4, 5)))
    expected = images.numpy().copy()
    expected[:, 1:5, 3:8] = np.roll(images.numpy(), 1, axis=0)[:, 1:5, 3:8]
    np.testing.assert_array_equal(mixed.numpy(), expected)
    np.testing.assert_allclose(targets.sum(1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_mixups_weight_is_the_larger_part_of_a_beta(alpha: float) -> None:
    found = [plan(alpha, 0, 1, step, 8, 8) for step in range(2000)]
    weights = [how.share / WHOLE for how in found if how is not None and how.box is None]
    assert len(weights) == 2000 and min(weights) >= 0.5
    # of b and 1 - b, which have the same distribution, the larger one
    parts = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    expected = scipy.stats.beta.ppf((1 + parts) / 2, alpha, alpha)
    np.testing.assert_allclose(np.quantile(weights, parts), expected, atol=0.02)


def test_cutmix_cuts_what_a_beta_says_and_counts_what_lies_inside() -> None:
    height, width = 60, 80
    shares, areas = [], []
    for step in range(2000):
        how = plan(0, 1.0, 1, step, height, width)
        assert how is not None and how.box is not None
        top, left, tall, wide = how.box
        assert top >= 0 and left >= 0 and top + tall <= height and left + wide <= width
        areas.append(tall * wide / (height * width))
        shares.append(how.share / WHOLE)
    np.testing.assert_allclose(np.add(shares, areas), 1, atol=1e-5)
    # Alpha 1: the area is uniform before it is cut off at the border, which only makes it smaller.
    assert max(areas) > 0.8 and 0.3 < np.mean(areas) < 0.5
    assert np.mean(np.array(areas) > 0.5) < 0.5


def test_with_both_a_step_is_one_or_the_other_and_without_either_neither() -> None:
    boxes = [plan(0.5, 1.0, 3, step, 8, 8) for step in range(400)]
    assert 140 < sum(how is not None and how.box is not None for how in boxes) < 260
    assert None not in boxes
    assert plan(0.0, 0.0, 3, 0, 8, 8) is None
    assert plan(0.2, 0.0, 3, 5, 8, 8) == plan(0.2, 0.0, 3, 5, 8, 8) != plan(0.2, 0.0, 4, 5, 8, 8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_labels_is_the_weighted_sum_of_both(smoothing: float) -> None:
    images, labels = batch(6)
    _, targets = mix(images, labels, CLASSES, Mix(share=int(0.625 * WHOLE), box=None))
    logits = 3 * torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(1))
    for loss in (softmax_cross_entropy, sigmoid_cross_entropy):
        both = 0.625 * loss(logits, labels, smoothing) + 0.375 * loss(logits, labels.roll(1), smoothing)
        torch.testing.assert_close(loss(logits, targets, smoothing), both)


CONFIG = Finetune(
    job="finetune",
    data="d",
    backbone="b",
    learning_rates=(0.1,),
    steps=1,
    batch_size=8,
    randaugment=RandAugment(layers=1, magnitude=10),
    mixup=0.5,
    cutmix=1.0,
)
TRANSFORM = TrainTransform(CONFIG, 5, CLASSES, from_files=False)
STEPS = range(6)


def share(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a worker trains on in each step."""
    images, labels = batch(8)
    own = slice(rank * 8 // world, (rank + 1) * 8 // world)
    parts = []
    for step in STEPS:
        positions = np.arange(8 * step, 8 * step + 8)[own]
        (mixed,), targets = TRANSFORM(images[own], labels[own], positions, step)
        parts.append((mixed, targets))
    return parts


def _worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for world in (4, 2):
        if rank < world:
            where = f"file://{folder}/group{world}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
            torch.save(share(rank, world), folder / f"{rank}of{world}.pt")
            dist.destroy_process_group()


@pytest.mark.slow
def test_the_mixed_global_batch_is_the_same_at_any_world_size(tmp_path: Path) -> None:
    whole = share(0, 1)
    run_workers(4, _worker, tmp_path)
    for world in (2, 4):
        parts = [torch.load(tmp_path / f"{rank}of{world}.pt") for rank in range(world)]
        for step in STEPS:
            for field, expected in enumerate(whole[step]):
                assert torch.equal(torch.cat([part[step][field] for part in parts]), expected)
