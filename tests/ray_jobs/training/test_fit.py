"""What a fit takes, and trainings that do not fit into memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipelines.spec import Finetune
from ray_jobs.data.shards import Images, open_dataset
from ray_jobs.training import fit as fits
from ray_jobs.training import loop
from ray_jobs.training.task import Task
from tests.support.interrupted import configuration
from tests.support.vits import contract_for
from vit_model.errors import UserError


def task(**fields: object) -> Task:
    """Return the task of fine-tuning a ViT-L/16 at 384 pixels."""
    base = {"job": "finetune", "data": "d", "model": "L/16", "resolution": 384, "batch_size": 8, "steps": 1}
    config = Finetune.model_validate(base | {"learning_rates": [0.1]})
    assert config.model is not None
    contract = contract_for(config.model.architecture(384, 3, 10))
    start = {"backbone": "b", "model": None} if fields else {}
    return Task(Finetune.model_validate(config.model_dump() | start | fields), contract, None)


@pytest.mark.parametrize("fields", [{"lora": {"rank": 8}}, {"freeze": "all_but_biases"}], ids=str)
def test_few_weights_are_trained_with_fewer_operations(fields: dict[str, object]) -> None:
    assert fits.fit_flops(task(**fields)) < 0.7 * fits.fit_flops(task())


def on_cpu(*_: object) -> None:
    torch.empty(1 << 50)


def on_gpu(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has 1 GiB free.")


@pytest.mark.parametrize("allocate", [on_cpu, on_gpu])
def test_what_does_not_fit_into_memory_is_refused_with_advice(
    allocate: Callable[..., None], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_dataset(dataset)

    def pretrain() -> None:
        loop.train(configuration(), data, tmp_path / "model")

    def fine_tune() -> None:
        fits.fit(task(), Images(data, data.index("train")), 0.1, seed=0)

    monkeypatch.setattr(loop, "start", allocate)
    monkeypatch.setattr(fits, "start", allocate)
    for train in (pretrain, fine_tune):
        with pytest.raises(UserError, match=r"memory: .*(can't|Tried to) allocate") as refused:
            train()
        for remedy in ("batch_size", "gradient_accumulation_steps", "activation_checkpointing", "zero_stage"):
            assert remedy in str(refused.value)
