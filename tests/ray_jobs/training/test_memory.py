"""The memory that a pretraining's log predicts for each worker is what it then takes."""

import contextlib
import ctypes
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from pipelines.spec import ModelSize, Pretrain
from ray_jobs.data import shards
from ray_jobs.evaluation.measuring import resident
from ray_jobs.training import loop, optim
from tests.support import datasets
from tests.support.workers import run_workers

_MMAP_THRESHOLD = -3  # of malloc.h
SMALL = ModelSize(patch_size=4, width=128, depth=1, num_heads=2)
LARGE = ModelSize(patch_size=4, width=768, depth=8, num_heads=12)  # 57 million parameters
WIDE = ModelSize(patch_size=4, width=1280, depth=4, num_heads=20)  # 79 million
MEDIUM = ModelSize(patch_size=4, width=384, depth=8, num_heads=6)  # 14 million
FEW = 8  # images, whose activations tests/vit_model/test_compute.py compares
MANY = 512  # as many activations as ZeRO-1 has weights, gradients and states
PRETRAIN = {
    "job": "pretrain",
    "data": "noise",
    "resolution": 8,
    "steps": 4,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey noise of 8x8."""
    folder, rng = tmp_path_factory.mktemp("dataset"), np.random.default_rng(0)
    images = rng.integers(0, 255, (32, 8, 8, 1)).astype(np.uint8)
    splits = {
        "train": [datasets.raw(f"{number:04d}", image, number % 3) for number, image in enumerate(images)]
    }
    size = shards.ImageSize(height=8, width=8, channels=1)
    datasets.put(folder, "noise", ("a", "b", "c"), size, splits | {"dev": [], "test": []})
    return folder


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("zero_stage", "dtype", "micro_batches", "model", "batch_size", "objective"),
    [
        (0, "bfloat16", 1, LARGE, FEW, "softmax"),
        (1, "float32", 1, LARGE, FEW, "softmax"),
        (1, "float32", 1, MEDIUM, MANY, "softmax"),
        (1, "bfloat16", 1, LARGE, FEW, "softmax"),
        (1, "bfloat16", 1, WIDE, FEW, "softmax"),
        (1, "bfloat16", 2, LARGE, FEW, "softmax"),
        (2, "bfloat16", 2, LARGE, FEW, "softmax"),
        (3, "float32", 1, LARGE, FEW, "softmax"),
        (3, "bfloat16", 1, LARGE, FEW, "softmax"),
        (1, "bfloat16", 1, LARGE, FEW, "contrastive"),
        (2, "float32", 1, MEDIUM, MANY, "contrastive"),
    ],
)
def test_two_workers_take_the_predicted_memory(
    dataset, tmp_path, zero_stage, dtype, micro_batches, model, batch_size, objective
):
    fields = {"zero_stage": zero_stage, "dtype": dtype, "gradient_accumulation_steps": micro_batches}
    fields |= {"model": model, "batch_size": batch_size, "objective": objective, "augment": "shift"}
    run_workers(2, _worker, f"file://{tmp_path}/store", fields, dataset, tmp_path)
    said = (tmp_path / "said.txt").read_text()
    line = next(line for line in said.splitlines() if line.startswith("estimated memory"))
    predicted = float(re.findall(r"([\d,.]+) MiB at most", line)[0].replace(",", ""))
    taken = [int((tmp_path / f"{rank}.txt").read_text()) / 2**20 for rank in (0, 1)]
    assert taken == pytest.approx([predicted, predicted], rel=0.15), line


def _worker(rank: int, meeting: str, fields: dict[str, Any], dataset: Path, folder: Path) -> None:
    warnings.simplefilter("ignore")  # DeepSpeed calls deprecated functions of torch
    os.environ["LOCAL_RANK"] = str(rank)
    # Give freed memory back at once; glibc keeps some of it otherwise (docs/zero.md).
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    place = loop.Worker(rank, 2, rank)

    def train(**changed: Any) -> str:
        config = Pretrain.model_validate(PRETRAIN | fields | changed)
        output = None if rank else folder / f"{len(changed)}"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            loop.train(config, shards.open_dataset(dataset), output, place)
        return said.getvalue()

    train(model=SMALL)  # imports, libraries, buffers of fixed size
    before, taken, rate_of = resident("VmRSS"), 0, optim.learning_rate

    def learning_rate(step: int, *arguments: Any) -> float:
        """At the beginning of a step: look at the peak of the steps before."""
        nonlocal taken
        taken = resident("VmHWM") - before
        return rate_of(step, *arguments)

    optim.learning_rate = learning_rate
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    said = train()
    (folder / f"{rank}.txt").write_text(str(taken))
    if rank == 0:
        (folder / "said.txt").write_text(said)
    dist.destroy_process_group()
