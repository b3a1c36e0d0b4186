"""The optimizer against independent arithmetic: the schedule's shape, what is decayed, what float32 weights are for."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from pipelines.spec import Optimizer, Pretrain
from ray_jobs.training import optim
from ray_jobs.training.engine import Plain
from vit_model.config import ViTConfig
from vit_model.model import ViT


def tiny_vit(**fields: object) -> ViT:
    return ViT(
        ViTConfig(
            image_size=8,
            patch_size=4,
            in_channels=1,
            width=16,
            depth=2,
            num_heads=2,
            mlp_dim=32,
            num_classes=3,
            **fields,
        )
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rate_rises_linearly_to_the_base_then_falls_towards_zero(schedule):
    optimizer = Optimizer(warmup_fraction=0.1, schedule=schedule)
    rates = [optim.learning_rate(step, 200, 0.5, optimizer) for step in range(201)]
    assert rates[:21] == pytest.approx([0.5 * step / 20 for step in range(21)])
    assert max(rates) == rates[20] == 0.5
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[20:]))
    assert rates[110] == pytest.approx(0.25)  # both decays are at a half in their middle
    assert rates[200] == pytest.approx(0.0, abs=1e-12)


def test_cosine_is_torchs():
    parameter = nn.Parameter(torch.zeros(1))
    torchs = torch.optim.SGD([parameter], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torchs, T_max=50)
    for step in range(50):
        assert optim.learning_rate(step, 50, 0.3, Optimizer(warmup_fraction=0.0)) == pytest.approx(
            scheduler.get_last_lr()[0]
        )
        torchs.step()
        scheduler.step()


def test_step_outside_the_run_is_refused():
    with pytest.raises(ValueError, match="step 11 is not from 0 to total_steps 10"):
        optim.learning_rate(11, 10, 0.1, Optimizer())


@pytest.mark.parametrize("pooling", ["cls", "gap"])
def test_exactly_the_kernels_of_linear_layers_are_decayed(pooling):
    model = tiny_vit(pooling=pooling, representation_head=True)
    decayed, spared = optim.adamw(model, Optimizer(weight_decay=0.3)).param_groups
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    assert {id(parameter) for parameter in decayed["params"]} == kernels
    assert {id(parameter) for parameter in spared["params"]} == {id(p) for p in model.parameters()} - kernels
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)


def test_a_step_is_adamw_with_decay_times_the_learning_rate():
    model = nn.Linear(3, 2).double()
    before, rate = model.weight.detach().clone(), 0.01
    optimizer = optim.adamw(model, Optimizer(weight_decay=0.1, betas=(0.9, 0.95)))
    optim.set_learning_rate(optimizer, rate)
    gradient = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model.weight.grad, model.bias.grad = gradient.clone(), torch.zeros(2, dtype=torch.float64)
    optimizer.step()
    # Bias correction makes both moments of the first step those of the gradient itself.
    expected = before * (1 - rate * 0.1) - rate * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(model.weight.detach(), expected)


def big_visions_steps(kernel, gradients, *, lr, wd, clip, warmup):
    """Its chain in numpy (optax.py): clip, Adam, times lr, plus wd times the kernel, all of it times the schedule."""
    mean, square = np.zeros_like(kernel), np.zeros_like(kernel)
    for step, gradient in enumerate(gradients):
        gradient = gradient * min(1.0, clip / np.linalg.norm(gradient))
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        adam = mean / (1 - 0.9 ** (step + 1)) / (np.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-8)
        progress = np.clip((step - warmup) / (len(gradients) - warmup), 0, 1)
        schedule = min(1, step / warmup) * 0.5 * (1 + np.cos(np.pi * progress))
        kernel = kernel - schedule * (lr * adam + wd * kernel)
    return kernel


def test_big_visions_recipe_is_ours_with_its_decay_divided_by_its_rate():
    """docs/training.md says how to copy a recipe. With wd taken as it is, a thousandth of the decay would be left."""
    rng, lr, wd = np.random.default_rng(0), 0.001, 0.1
    kernel, gradients = rng.normal(size=(2, 3)), rng.normal(size=(20, 2, 3))
    expected = big_visions_steps(kernel, gradients, lr=lr, wd=wd, clip=1.0, warmup=5)
    copied = Optimizer(weight_decay=wd / lr, betas=(0.9, 0.999), warmup_fraction=0.25, clip_norm=1.0)
    model = nn.Linear(3, 2, bias=False).double()
    model.weight.data = torch.from_numpy(kernel.copy())
    engine = Plain(model, optim.adamw(model, copied), torch.float32, copied.clip_norm)
    for step, gradient in enumerate(gradients):
        engine.backward((model.weight * torch.from_numpy(gradient)).sum())
        engine.step(optim.learning_rate(step, 20, lr, copied))
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-5)
    assert np.abs(expected / kernel).max() < 0.5, "the decay can be seen"


def test_a_step_without_a_copy_is_torchs_clipping_and_adamw():
    ours, theirs = tiny_vit().double(), tiny_vit().double()
    engine = Plain(ours, optim.adamw(ours, Optimizer(weight_decay=0.0)), torch.float32, clip_norm=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(3):
        engine.backward((engine(images) - 1).square().sum())
        norm = engine.step(1e-2)
        reference.zero_grad()
        (theirs(images) - 1).square().sum().backward()
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1).item())
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_steps_too_small_for_bfloat16_are_not_lost():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = Plain(model, optim.adamw(model, Optimizer(weight_decay=0.0)), torch.bfloat16, clip_norm=1.0)
    for _ in range(100):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step(1e-4)  # bfloat16 has nothing between 1 and 0.996
    assert model.weight.item() == pytest.approx(0.99, abs=1e-4)
    assert engine.module.weight.item() == model.weight.bfloat16().item() < 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, torch.tensor(math.nan)])
def test_numbers_that_are_not_finite_name_the_step_and_a_way_out(value):
    with pytest.raises(ValueError, match=r"loss is .* at step 7: lower learning_rate"):
        optim.check_finite("loss", value, 7)


def pretraining(**fields: object) -> Pretrain:
    required = {
        "job": "pretrain",
        "data": "d",
        "model": "Ti/16",
        "resolution": 16,
        "steps": 1,
        "learning_rate": 1,
    }
    return Pretrain.model_validate(required | fields)


def test_deepspeed_shares_the_batch_among_workers_and_micro_batches():
    settings = optim.deepspeed_config(pretraining(batch_size=96, gradient_accumulation_steps=4), 3)
    sizes = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    assert [settings[size] for size in sizes] == [96, 4, 8]
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    with pytest.raises(ValueError, match=r"batch_size 6 is not a multiple of the 4 workers.*1, 2, 3, 6"):
        optim.deepspeed_config(pretraining(batch_size=6), 4)
    with pytest.raises(
        ValueError, match=r"6 / gradient_accumulation_steps 3 = 2 is not a multiple of the 3 work"
    ):
        optim.deepspeed_config(pretraining(batch_size=6, gradient_accumulation_steps=3), 3)
