"""A pretraining that certainly needs more memory than there is, is refused before anything is allocated."""

import pytest
import torch

from pipelines.spec import Finetune, Pretrain
from ray_jobs.training import estimates
from ray_jobs.training.engine import EngineBytes
from ray_jobs.training.estimates import Memory
from ray_jobs.training.methods import make_method
from ray_jobs.training.task import Task
from tests.support.vits import contract_for
from vit_model.build import build
from vit_model.compute import ModelStates
from vit_model.errors import UserError

GIB = 2**30
CPU = torch.device("cpu")


def huge(**fields: object) -> tuple[Pretrain, Memory]:
    """Return ViT-H/14 with a batch of 65,536 on two workers."""
    base = {"job": "pretrain", "data": "d", "resolution": 224, "steps": 1, "learning_rate": 0.1}
    config = Pretrain.model_validate(base | {"model": "H/14", "batch_size": 2**16} | fields)
    contract = contract_for(config.model.architecture(224, 3, 10))
    return config, estimates.memory(make_method(config, contract, CPU), 2)


def test_what_cannot_fit_is_refused_with_numbers_and_advice() -> None:
    _, needed = huge()
    with pytest.raises(UserError) as refused:
        estimates.require(needed, 64 * GIB, 2)
    said = str(refused.value)
    assert f"each worker needs about {needed.most / GIB:,.1f} GiB" in said
    assert "which 2 workers share, has 64.0 GiB" in said
    for advice in (
        "more workers",
        "zero_stage",
        "activation_checkpointing",
        "gradient_accumulation_steps",
        "batch_size",
    ):
        assert advice in said


@pytest.mark.parametrize(
    "smaller",
    [{"batch_size": 2**10}, {"activation_checkpointing": True}, {"gradient_accumulation_steps": 64}],
    ids=str,
)
def test_following_the_advice_takes_less(smaller: dict[str, object]) -> None:
    assert huge(**smaller)[1].activations < 0.2 * huge()[1].activations


def test_muon_has_one_average_of_the_matrices_of_the_blocks() -> None:
    config, needed = huge(model="Ti/16", zero_stage=0)
    with_muon = huge(model="Ti/16", zero_stage=0, optimizer={"name": "muon"})[1]
    model = build(config.model.architecture(224, 3, 10))
    matrices = sum(
        module.weight.numel() for module in model.blocks.modules() if isinstance(module, torch.nn.Linear)
    )
    assert needed.engine.states.optimizer - with_muon.engine.states.optimizer == 4 * matrices
    assert needed._replace(engine=with_muon.engine) == with_muon


def test_a_doubtful_case_is_let_through() -> None:
    """The estimate is within 15% of what is used."""
    needed = Memory(activations=500, engine=EngineBytes(ModelStates(100, 100, 200), buffers=100))
    estimates.require(needed, 850, 1)
    estimates.require(needed, 1700, 2)
    with pytest.raises(UserError, match=r"but its device has 0\.0 GiB"):
        estimates.require(needed, 849, 1)
    with pytest.raises(UserError, match="machine, which 2 workers share"):
        estimates.require(needed, 1699, 2)


def fit(batch_size: int, **fields: object) -> Task:
    """Return the task of fine-tuning a ViT-L/16 at 384 pixels."""
    base = {
        "job": "finetune",
        "data": "d",
        "model": "L/16",
        "resolution": 384,
        "learning_rates": [0.1],
        "steps": 1,
    }
    config = Finetune.model_validate(base | {"batch_size": batch_size} | fields)
    return Task(config, contract_for(config.model.architecture(384, 3, 10)), None)


def test_a_fit_that_cannot_fit_is_refused_with_advice_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates.devices, "memory", lambda _: 64 * GIB)
    with pytest.raises(
        UserError, match=r"memory: a fit needs about .* but its device has 64\.0 GiB"
    ) as refused:
        estimates.require_fit(fit(512), CPU)
    assert "zero_stage" not in str(refused.value) and "lower resolution" in str(refused.value)
    estimates.require_fit(fit(512, gradient_accumulation_steps=64), CPU)
    whole = fit(512)
    estimates.require_fit(whole._replace(config=whole.config.model_copy(update={"freeze": "backbone"})), CPU)
    estimates.require_fit(fit(8), CPU)


def test_a_fit_needs_what_a_pretraining_by_one_process_does() -> None:
    pretraining = Pretrain.model_validate(
        {
            "job": "pretrain",
            "data": "d",
            "model": "L/16",
            "resolution": 384,
            "steps": 1,
            "learning_rate": 0.1,
            "batch_size": 8,
            "optimizer": {"name": "sgd"},
        }
    )
    task = fit(8, optimizer={"name": "sgd"}, dtype=pretraining.dtype)
    assert estimates.fit_memory(task, CPU) == estimates.memory(
        make_method(pretraining, task.contract, CPU), 1
    )


@pytest.mark.parametrize("fields", [{"lora": {"rank": 8}}, {"freeze": "all_but_biases"}], ids=str)
def test_few_trained_weights_have_gradients_and_averages_alone(fields: dict[str, object]) -> None:
    start = {"backbone": "b", "model": None}
    whole = fit(8)
    few = whole._replace(config=Finetune.model_validate(whole.config.model_dump() | start | fields))
    all_states, states = (estimates.fit_memory(task, CPU).engine.states for task in (whole, few))
    trained = estimates.trained_parameters(few)
    width, blocks = 1024, 24
    # biases of a block, in widths: 3 of qkv, 4 of fc1, 1 each of proj, fc2 and both norms
    per_block = 2 * 2 * 8 * width if "lora" in fields else (3 + 4 + 4) * width
    outside = (width + 1) * 10 + (0 if "lora" in fields else 2 * width)  # the patches' bias and the norm's
    assert trained == blocks * per_block + outside
    assert states.optimizer == 8 * trained and states.gradients == 6 * trained
    added = blocks * per_block if "lora" in fields else 0
    assert states.weights == all_states.weights + 6 * added
    assert estimates.fit_memory(few, CPU).activations < 0.9 * estimates.fit_memory(whole, CPU).activations
    assert estimates.fit_flops(few) < 0.7 * estimates.fit_flops(whole)
