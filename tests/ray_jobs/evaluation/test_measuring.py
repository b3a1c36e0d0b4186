"""What a model costs: operations as the paper counts them, images per second and memory as this machine has them."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ray_jobs.evaluation import measuring
from ray_jobs.training.cost import finetuning_cost
from ray_jobs.training.task import Task
from tests.support.finetuning import configuration
from tests.support.vits import contract_for
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract

CPU = torch.device("cpu")
MIB = 2**20


def contract(width: int, depth: int) -> ModelContract:
    model = ViTConfig(
        image_size=16, patch_size=4, width=width, depth=depth, num_heads=4, mlp_dim=4 * width, num_classes=2
    )
    return contract_for(model, ("a", "b"))


def test_the_fastest_pass_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is slow, because it builds and caches; another may be, because something else runs."""
    clock, durations = [0.0], iter((9.0, 8.0, 2.0, 1.0, 3.0, 2.0, 2.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def prepare() -> Callable[[], None]:
        def run() -> None:
            clock[0] += next(durations)

        return run

    assert measuring.measure(prepare, CPU).seconds == 1.0
    durations = iter((9.0, 1.0, 40.0, 30.0))
    assert measuring.measure(prepare, CPU).seconds == 40.0, "a slow model is measured once"


def test_the_peak_is_of_what_the_passes_take_beyond_what_was_there() -> None:
    torch.ones(512 * MIB // 4)  # an earlier peak
    there = torch.ones(64 * MIB // 4)

    def prepare() -> Callable[[], None]:
        weights = torch.ones(32 * MIB // 4)

        def run() -> None:
            torch.ones(96 * MIB // 4).add_(weights[0])

        return run

    peak = measuring.measure(prepare, CPU).peak_bytes
    if peak is None:
        pytest.skip("this system does not reset the peak of a process's memory")
    assert peak == pytest.approx(128 * MIB, rel=0.1), f"{len(there)} numbers were there before"


def test_a_larger_model_costs_more_and_training_more_than_a_forward_pass(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    config = configuration(
        resolution=16, batch_size=8, gradient_accumulation_steps=2, learning_rates=(1e-3,), threads=1
    )
    found = [finetuning_cost(Task(config, contract(width, depth), None)) for width, depth in ((16, 1), (256, 4))]
    torch.set_num_threads(threads)
    small, large = found
    assert small.gflops < large.gflops and small.parameters < large.parameters
    assert small.forward.images_per_second > large.forward.images_per_second
    for cost in found:
        assert cost.training is not None
        assert (cost.resolution, cost.threads, cost.training.images) == (16, config.threads, 8)
        assert (cost.forward.dtype, cost.training.dtype) == ("float32", "bfloat16")
    assert large.training is not None
    assert large.training.images_per_second < large.forward.images_per_second
    if large.training.peak_bytes is not None:
        states = 4 * 4 * large.parameters  # float32 weights and gradients, and Adam's two averages
        assert large.training.peak_bytes > states
