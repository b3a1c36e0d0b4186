"""The optimizer against independent arithmetic: the schedule's shape, what is decayed, what float32 weights are for."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from pipelines.spec import Optimizer
from ray_jobs.training import optim
from ray_jobs.training.engine import EMA, Plain
from ray_jobs.training.task import DivergenceError
from tests.support import timm_models
from tests.support.pretraining import pretraining
from tests.support.vits import TINY
from tests.support.zero_matrix import muon_step
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.parts import AroundModel, ParameterGroups


def tiny_vit(**fields: object) -> ViT:
    return ViT(ViTConfig(**TINY, in_channels=1, num_classes=3, **fields))


class Linear(nn.Linear, ParameterGroups):
    """One layer."""


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


def big_visions_rates(steps, base, warmup, cooldown=0, timescale=None):
    """create_learning_rate_schedule of its utils.py, for rsqrt; without a timescale, no decay."""
    step = np.arange(steps)
    decayed = base / np.sqrt(1 + (step - warmup) / timescale) if timescale else np.full(steps, base)
    rates = np.where(warmup <= step, decayed, base) * np.minimum(1.0, step / warmup)
    return rates * np.minimum(1.0, (steps - step) / cooldown) if cooldown else rates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 7}, {"warmup": 7}),
        (
            {"schedule": "constant", "warmup_steps": 7, "cooldown_fraction": 0.2},
            {"warmup": 7, "cooldown": 20},
        ),
        ({"schedule": "rsqrt", "timescale": 30}, {"warmup": 10, "timescale": 30}),
        (
            {"schedule": "rsqrt", "timescale": 30, "cooldown_fraction": 0.5},
            {"warmup": 10, "cooldown": 50, "timescale": 30},
        ),
    ],
)
def test_rsqrt_and_cooldown_are_big_visions(settings, expected):
    rates = [optim.learning_rate(step, 100, 0.3, Optimizer(**settings)) for step in range(100)]
    np.testing.assert_allclose(rates, big_visions_rates(100, 0.3, **expected), rtol=1e-12)


@pytest.mark.parametrize("pooling", ["cls", "gap"])
def test_exactly_the_kernels_of_linear_layers_are_decayed(pooling):
    model = tiny_vit(pooling=pooling, representation_head=True)
    decayed, spared = optim.make_optimizer(model, Optimizer(weight_decay=0.3), base=1.0).param_groups
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    assert {id(parameter) for parameter in decayed["params"]} == kernels
    assert {id(parameter) for parameter in spared["params"]} == {id(p) for p in model.parameters()} - kernels
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)


@pytest.mark.parametrize("fields", [{}, {"pooling": "gap", "registers": 2, "position": "learned2d"}])
def test_rates_of_layers_are_timms(fields):
    timm_models.load()
    from timm.optim import param_groups_layer_decay

    model = tiny_vit(**fields)
    model.group_matcher = lambda coarse: {  # as timm's for a ViT, but with the final norm beside the head, as in BEiT
        "stem": r"^cls_token|reg_token|pos_embed|patch_embed",
        "blocks": [(r"^blocks\.(\d+)", None)],
    }
    theirs = {
        id(parameter): group["lr_scale"]
        for group in param_groups_layer_decay(model, layer_decay=0.6)
        for parameter in group["params"]
    }
    optimizer = optim.make_optimizer(model, Optimizer(layer_decay=0.6), base=1.0)
    optim.set_learning_rate(optimizer, 0.5)
    ours = {id(parameter): group["lr"] / 0.5 for group in optimizer.param_groups for parameter in group["params"]}
    assert ours == pytest.approx(theirs)


def wide_vit(width: int) -> ViT:
    """All heads have 16 numbers."""
    sizes = {"patch_size": 4, "width": width, "depth": 2, "num_heads": width // 16, "mlp_dim": 4 * width}
    return ViT(ViTConfig(**sizes, image_size=16, num_classes=10, pooling="gap"))


def test_mup_divides_the_rates_of_matrices_and_heads_by_the_width_and_keeps_their_decay():
    """Yang et al. 2022, Table 3, for Adam; the decay is what a step takes, rate times weight_decay."""
    model = wide_vit(128)
    groups = optim.make_optimizer(model, Optimizer(weight_decay=0.3, base_width=32), base=1.0).param_groups
    of_name = {
        name: group for group in groups for name, p in model.named_parameters() if any(p is q for q in group["params"])
    }
    wide = {name for name, group in of_name.items() if group["scale"] == 1 / 4}
    assert wide == {
        "head.weight",
        *(f"blocks.{n}.{part}.weight" for n in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")),
    }
    assert {group["scale"] for name, group in of_name.items() if name not in wide} == {1.0}
    taken = {name: group["scale"] * group["weight_decay"] for name, group in of_name.items()}
    assert {name for name, decay in taken.items() if decay == 0.3} == {*wide, "patch_embed.proj.weight"}


def test_steps_change_what_a_model_computes_as_much_at_every_width_with_mup_only():
    """The coordinate check of Yang et al. 2022, section D.1: the change of the logits after five steps of one rate."""

    def change(width: int, base_width: int | None) -> float:
        torch.manual_seed(0)
        images, labels = torch.randn(64, 3, 16, 16), torch.arange(64) % 10
        model = wide_vit(width)
        model.initialise(seed=0)
        optimizer = optim.make_optimizer(model, Optimizer(weight_decay=0.0, base_width=base_width), base=1.0)
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optim.set_learning_rate(optimizer, 4e-3)
            optimizer.step()
        return float(model(images).detach().std())

    widths = (32, 128, 512)
    standard, mup = ([change(width, base) for width in widths] for base in (None, 32))
    assert standard[0] == mup[0]
    assert max(mup) < 1.6 * min(mup), mup
    assert standard[2] > 4 * standard[0], standard


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("backbone", ("head",)),
        (0, ("blocks", "norm", "head")),
        (1, ("blocks.1", "norm", "head")),
        (2, ("norm", "head")),
    ],
)
def test_frozen_weights_are_those_before_a_block_or_all_but_the_head(what, trained):
    model = tiny_vit(registers=1)
    optim.freeze(model, what)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == [name for name, _ in model.named_parameters() if name.startswith(trained)]


def test_the_head_first_moves_alone_and_then_with_the_others():
    model = tiny_vit()
    optimizer = optim.make_optimizer(model, Optimizer(layer_decay=0.5), base=1.0, head_first=3)
    engine, images = Plain(model, optimizer, torch.float32, clip_norm=1.0), torch.randn(4, 1, 8, 8)
    nn.init.normal_(model.head.weight)
    for step in range(5):
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        engine.backward((engine(images) - 1).square().sum())
        engine.step(1e-2)
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
        assert moved == ({*before} if step >= 3 else {"head.weight", "head.bias"})


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


@pytest.mark.parametrize("settings", [{"weight_decay": 100.0}, {"weight_decay": 0.1, "decay": "times_schedule"}])
def test_big_visions_recipe_is_ours_with_its_decay_times_the_schedule_or_divided_by_its_rate(settings):
    """docs/training.md says how to copy a recipe. With wd times the rate, a thousandth of the decay would be left."""
    rng, lr, wd = np.random.default_rng(0), 0.001, 0.1
    kernel, gradients = rng.normal(size=(2, 3)), rng.normal(size=(20, 2, 3))
    expected = big_visions_steps(kernel, gradients, lr=lr, wd=wd, clip=1.0, warmup=5)
    copied = Optimizer(betas=(0.9, 0.999), warmup_fraction=0.25, clip_norm=1.0, **settings)
    model = Linear(3, 2, bias=False).double()
    model.weight.data = torch.from_numpy(kernel.copy())
    engine = Plain(model, optim.make_optimizer(model, copied, lr), torch.float32, copied.clip_norm)
    for step, gradient in enumerate(gradients):
        engine.backward((model.weight * torch.from_numpy(gradient)).sum())
        engine.step(optim.learning_rate(step, 20, lr, copied))
    np.testing.assert_allclose(model.weight.detach().numpy(), expected, rtol=1e-5)
    assert np.abs(expected / kernel).max() < 0.5, "the decay can be seen"


MATRICES = {"attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"}


def test_muon_steps_the_matrices_of_the_blocks_of_the_model():
    model = AroundModel()
    model.model, model.blocks = tiny_vit(pooling="map"), nn.ModuleList([nn.Linear(4, 4)])
    optimizer = optim.make_optimizer(model, Optimizer(name="muon"), base=1.0)
    names = {weight: name for name, weight in model.named_parameters()}
    stepped = {names[weight] for group in optimizer.muon.param_groups for weight in group["params"]}
    assert stepped == {f"model.blocks.{block}.{name}" for block in (0, 1) for name in MATRICES}
    others = {names[weight] for group in optimizer.adamw.param_groups for weight in group["params"]}
    assert others == set(names.values()) - stepped


@pytest.mark.parametrize("decay", ["times_rate", "times_schedule"])
def test_steps_of_muon_are_a_plain_loops(decay):
    """The rest is AdamW's to 1e-6; how far the matrices moved, to 5e-3, because Muon's iterations are in bfloat16."""
    ours, plain = tiny_vit(), tiny_vit()
    plain.load_state_dict(ours.state_dict())
    settings = Optimizer(name="muon", weight_decay=0.1, decay=decay, layer_decay=0.5, momentum=0.95, betas=(0.9, 0.95))
    optimizer = optim.make_optimizer(ours, settings, base=0.02)
    engine = Plain(ours, optimizer, torch.float32, settings.clip_norm, accumulation=2)
    named = dict(plain.named_parameters())
    start = {name: weight.detach().clone() for name, weight in named.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in named.items() if name[9:] in MATRICES}
    layers = {"blocks.0": 2, "blocks.1": 1, "norm": 0, "head": 0}  # above each; the embeddings have 3
    scale = {
        name: 0.5 ** next((above for start, above in layers.items() if name.startswith(start)), 3) for name in named
    }
    decays = {  # the same for all layers if it is not multiplied by the layer's rate
        name: 0.1 / (0.02 * scale[name] if decay == "times_schedule" else 1)
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear)
        for name in [f"{name}.weight"]
    }
    groups = [
        {"params": [weight], "name": name, "weight_decay": decays.get(name, 0.0)}
        for name, weight in named.items()
        if name not in momenta
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for rate in (0.0, 0.01, 0.02, 0.005):
        gradients = {name: torch.randn(weight.shape, generator=generator) for name, weight in named.items()}
        for _ in range(2):
            pairs = zip(ours.parameters(), gradients.values(), strict=True)
            engine.backward(sum((weight * gradient).sum() for weight, gradient in pairs))
        norm = engine.step(rate)
        for name, weight in named.items():
            weight.grad = gradients[name]
        assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item())
        for name, momentum in momenta.items():
            muon_step(named[name], momentum, rate * scale[name], decays[name])
        for group in adamw.param_groups:
            group["lr"] = rate * scale[group["name"]]
        adamw.step()
    for name, weight in ours.named_parameters():
        whole = named[name] - start[name] if name in momenta else named[name]
        bound = 5e-3 if name in momenta else 1e-6
        assert (weight - named[name]).norm() <= bound * whole.norm(), name
    for shard in engine.state_shards():
        if shard.kind == "momentum_buffer":
            torch.testing.assert_close(shard.values, momenta[shard.name].flatten(), rtol=1e-5, atol=1e-7)


def test_steps_too_small_for_bfloat16_are_not_lost():
    model = Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = Plain(
        model,
        optim.make_optimizer(model, Optimizer(weight_decay=0.0), base=1.0),
        torch.bfloat16,
        clip_norm=1.0,
    )
    for _ in range(100):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step(1e-4)  # bfloat16 has nothing between 1 and 0.996
    assert model.weight.item() == pytest.approx(0.99, abs=1e-4)
    assert engine.module.weight.item() == model.weight.bfloat16().item() < 1.0


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing():
    """Neither the weights nor the optimizer's averages; the norm tells."""
    model = tiny_vit()
    settings = Optimizer(ema=0.9)
    for name in ("adamw", "sgd", "muon"):
        optimizer = settings.model_copy(update={"name": name})
        engine = Plain(model, optim.make_optimizer(model, optimizer, base=1.0), torch.float32, clip_norm=1.0)
        for broken in (False, True):
            shards = engine.state_shards() if broken else ()
            before = [(kind, name, values.clone()) for kind, name, _, values in shards]
            loss = engine(torch.ones(2, 1, 8, 8)).square().sum()
            engine.backward(loss * math.inf if broken else loss)
            assert math.isfinite(engine.step(1e-2)) == (not broken)
        for (kind, name, values), shard in zip(before, engine.state_shards(), strict=True):
            if kind != EMA:  # which moves towards the weights
                assert torch.equal(values, shard.values), (kind, name)


def test_a_training_step_does_not_import_torchs_compiler():
    """It takes longer than importing torch."""
    code = """
import sys, torch
from pipelines.spec import Optimizer
from ray_jobs.training import engine, optim
from vit_model.config import ViTConfig
from vit_model.model import ViT
for name in ("adamw", "muon"):
    model = ViT(ViTConfig(image_size=4, patch_size=4, width=4, depth=1, num_heads=1, mlp_dim=4, num_classes=2))
    plain = engine.Plain(
        model, optim.make_optimizer(model, Optimizer(name=name, ema=0.9), base=1.0), torch.bfloat16, 1.0
    )
    plain.backward(plain(torch.ones(1, 3, 4, 4, dtype=torch.bfloat16)).sum())
    plain.step(1.0)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_deepspeed_shares_the_batch_among_workers_and_micro_batches():
    settings = optim.deepspeed_config(pretraining(batch_size=96, gradient_accumulation_steps=4), 3)
    sizes = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
    assert [settings[size] for size in sizes] == [96, 4, 8]
    assert settings["data_types"]["grad_accum_dtype"] == "fp32"
    with pytest.raises(ValueError, match=r"batch_size 6 is not a multiple of the 4 workers.*1, 2, 3, 6"):
        optim.deepspeed_config(pretraining(batch_size=6), 4)
    with pytest.raises(ValueError, match=r"6 / gradient_accumulation_steps 3 = 2 is not a multiple of the 3 work"):
        optim.deepspeed_config(pretraining(batch_size=6, gradient_accumulation_steps=3), 3)


def test_a_loss_may_be_negative_but_a_norm_may_not() -> None:
    """Objectives that maximise a similarity have a negative loss; DeepSpeed gives -1 for a norm that is not finite."""
    optim.check_finite(-0.5, 0)
    assert optim.is_finite_norm(0.5) and not any(map(optim.is_finite_norm, (-1.0, math.inf, math.nan)))
    for loss in (math.nan, math.inf, -math.inf):
        with pytest.raises(DivergenceError, match="at step 3"):
            optim.check_finite(loss, 3)
