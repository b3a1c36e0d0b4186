"""A training ends within ten steps of a gradient that is not finite, and says where to look."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Images, open_dataset
from ray_jobs.training.guard import Guard

BATCH = 12


@pytest.fixture(scope="module")
def images(dataset: Path) -> Images:
    opened = open_dataset(dataset)
    return Images(opened, opened.index("train"))


def watched(guard: Guard, norms: dict[int, float]) -> int:
    """Return the first step after which the guard raises; the norms of other steps are 1."""
    for step in range(100):
        try:
            guard.watch(step, torch.tensor(norms.get(step, 1.0)))
        except ValueError:
            return step
    return 100


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_it_ends_within_ten_steps(images, norm):
    sampler = Sampler(images, seed=0, batch_size=BATCH)
    for bad in range(20, 40):
        assert bad <= watched(Guard(images, sampler, 100, None), {bad: norm}) < bad + 10
    assert watched(Guard(images, sampler, 100, None), {99: norm}) == 99, "the last step is looked at, too"
    assert watched(Guard(images, sampler, 100, None), {}) == 100


def test_the_message_names_the_first_bad_step_and_the_log_all_images_of_it_over_all_workers(images, capsys):
    shares = [Sampler(images, seed=0, batch_size=BATCH, rank=rank, world=2).batches(0) for rank in range(2)]
    for _ in range(13):
        rows = np.concatenate([next(share)[1] for share in shares])
    names = {images.rows["key"][int(row)].as_py() for row in rows}
    guard = Guard(images, Sampler(images, seed=0, batch_size=BATCH, rank=1, world=2), 100, None)
    with pytest.raises(ValueError, match=r"gradient norm is nan at step 12, and this update was not applied") as told:
        for step in range(20):
            guard.watch(step, torch.tensor(math.nan if step in (12, 15) else 1.0))
    (line,) = capsys.readouterr().out.splitlines()
    assert set(line.removeprefix("images of step 12: ").split()) == names
    assert "and 7 more" in str(told.value)
