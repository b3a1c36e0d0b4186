"""DINO: its loss, head and centre against the authors' formulas, views of several sizes, the measures of a collapse."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.support.vits import TINY, noise, randomised
from tests.support.workers import run_workers
from vit_model.config import ViTConfig
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.objectives.dino import Dino, Head, Teacher, alarms, at_side, dino_loss, measures
from vit_model.weights import transfer_backbone

GREY: dict[str, Any] = TINY | {"in_channels": 1}
SMALL: dict[str, Any] = {"hidden_width": 24, "bottleneck_width": 6, "output_width": 10}
SIDES = (8, 8, 4, 4, 4)


def small_task(frozen_steps: int = 0, **options: Any) -> Dino:
    """A task whose weights are all random, positions and biases included."""
    task: Dino = randomised(Dino(ViT(ViTConfig(**GREY | options)), **SMALL, frozen_steps=frozen_steps))
    return task


def random_views(b: int) -> list[Tensor]:
    return [noise(b, 1, side, side, seed=seed) for seed, side in enumerate(SIDES)]


def authors_loss(outputs: Tensor, teacher: Tensor, centre: Tensor, temperatures: tuple[float, float]) -> float:
    """The loop of the authors' `DINOLoss.forward` in numpy, without its stable logarithms."""
    (taught_at, learned_at), total, terms = temperatures, 0.0, 0
    for number, given in enumerate(teacher.double().numpy()):
        powers = np.exp((given - centre.double().numpy()) / taught_at)
        target = powers / powers.sum(1, keepdims=True)
        for view, output in enumerate(outputs.double().numpy()):
            if view == number:
                continue
            powers = np.exp(output / learned_at)
            total += np.mean(np.sum(-target * np.log(powers / powers.sum(1, keepdims=True)), axis=1))
            terms += 1
    return total / terms


@pytest.mark.parametrize("views", [2, 5])
def test_the_loss_is_the_authors_loop_over_pairs_of_views(views: int) -> None:
    outputs, given, centre = noise(views, 4, 9), noise(2, 4, 9, seed=1), noise(9, seed=2)
    teacher = Teacher(small_task())
    teacher.centre = nn.Parameter(centre, requires_grad=False)
    taught = teacher.targets(given.flatten(0, 1), 0.3).view(2, 4, 9)
    expected = authors_loss(outputs, given, centre, (0.3, 0.2))
    assert dino_loss(outputs, taught, 0.2).item() == pytest.approx(expected, rel=1e-5)
    rounded = dino_loss(outputs.bfloat16(), taught, 0.2)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(expected, rel=0.02)


def test_the_head_is_the_authors() -> None:
    """Three layers with GELU, the unit sphere, and torch's weight normalisation with a gain that stays 1."""
    head, features = small_task().projector, noise(5, 16)
    last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 10, bias=False))
    with torch.no_grad():
        last.parametrizations.weight.original0.fill_(1)
        last.parametrizations.weight.original1.copy_(head.last_layer.weight)
    first, _, second, _, third = head.mlp
    hidden = functional.gelu(second(functional.gelu(first(features))))
    bottleneck = third(hidden)
    torch.testing.assert_close(head(features), last(bottleneck / bottleneck.norm(dim=1, keepdim=True)))
    with torch.no_grad():
        before = head(features)
        head.last_layer.weight *= 3
        torch.testing.assert_close(head(features), before)


def test_a_head_starts_as_the_authors_and_its_seed_decides_it() -> None:
    before = torch.random.get_rng_state()
    head = Head(384, 2048, 256, 4096, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    shapes = [tuple(layer.weight.shape) for layer in head.modules() if isinstance(layer, nn.Linear)]
    assert shapes == [(2048, 384), (2048, 2048), (256, 2048), (4096, 256)]
    for layer in head.mlp[::2]:
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert not layer.bias.any()
    assert head.last_layer.bias is None
    assert head.last_layer.weight.abs().max() <= 1 / 16
    assert head.last_layer.weight.std().item() == pytest.approx(1 / 16 / math.sqrt(3), rel=0.02)
    same, other = Head(384, 2048, 256, 4096, seed=0), Head(384, 2048, 256, 4096, seed=1)
    for name, weight in head.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
    assert not torch.equal(head.last_layer.weight, other.last_layer.weight)


@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_views_of_one_size_are_computed_together_as_if_each_were_alone(depth: float) -> None:
    task, views = small_task(stochastic_depth=depth), random_views(3)
    draws = [torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(n)) for n in range(5)] if depth else [None] * 5
    taught = noise(6, 10).softmax(1)
    outputs = [
        task.projector(at_side(task.model, side)(view, drawn))
        for side, view, drawn in zip(SIDES, views, draws, strict=True)
    ]
    expected = dino_loss(torch.stack(outputs), taught.view(2, 3, 10), 0.1)
    torch.testing.assert_close(task(taught, *views, *(draws if depth else ())), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position_resize": "bicubic"},
        {"position": "learned2d"},
        {"position": "sincos2d"},
        {"position_at": "every_layer"},
        {"axial": True, "pooling": "gap"},
        {"registers": 2, "pooling": "gap"},
        {"position": "rope", "gelu": "swiglu"},
    ],
    ids=str,
)
def test_a_vit_at_another_size_is_one_that_took_over_the_weights(options: dict[str, Any]) -> None:
    model = small_task(**options, image_size=16).model
    other = ViT(model.config.model_copy(update={"image_size": 8}))
    transfer_backbone(other, model)
    small = noise(2, 1, 8, 8)
    torch.testing.assert_close(at_side(model, 8)(small), other(small))
    assert at_side(model, 16) is model
    whole = noise(2, 1, 16, 16)
    before = model(whole)
    at_side(model, 8)(small).square().sum().backward()
    assert torch.equal(model(whole), before), "the model itself still takes its own size"
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_recomputed_blocks_have_the_same_gradients() -> None:
    gradients = []
    for is_recomputed in (False, True):
        task = small_task()
        task.model.activation_checkpointing = is_recomputed
        task(noise(6, 10).softmax(1), *random_views(3)).backward()
        gradients.append([weight.grad for weight in task.parameters()])
    torch.testing.assert_close(*gradients)


def test_relative_positions_and_a_classifier_are_refused() -> None:
    with pytest.raises(UserError, match="relative positions of a 2x2 grid have no counterpart on 1x1"):
        at_side(ViT(ViTConfig(**GREY | {"position": "relative"})), 4)
    with pytest.raises(ValueError, match="replaces the classifier: num_classes is 3"):
        small_task(num_classes=3)


def test_the_teacher_follows_the_student_and_its_centre_the_outputs() -> None:
    task = small_task(dropout=0.5, stochastic_depth=0.5)
    teacher, images = Teacher(task), random_views(4)[0]
    features, outputs = teacher(images)
    task.model.eval()
    torch.testing.assert_close(features, task.model(images), msg="no dropout, no stochastic depth")
    torch.testing.assert_close(outputs, task.projector(features))
    assert not outputs.requires_grad and not any(weight.requires_grad for weight in teacher.parameters())
    before = {name: weight.clone() for name, weight in teacher.encoder.named_parameters()}
    with torch.no_grad():
        for weight in task.parameters():
            weight += 1
    teacher.update(task, 0.9)
    for name, weight in teacher.encoder.named_parameters():
        torch.testing.assert_close(weight, before[name] + 0.1)
    assert not teacher.centre.any()
    teacher.recentre(torch.ones(10), 0.9)
    teacher.recentre(torch.ones(10), 0.9)
    torch.testing.assert_close(teacher.centre, torch.full((10,), 0.19))


def test_only_the_last_layer_waits() -> None:
    task = small_task(frozen_steps=7)
    waiting = {name: task.first_step(name) for name, _ in task.named_parameters() if task.first_step(name)}
    assert waiting == {"projector.last_layer.weight": 7}


def test_measures_are_numpys() -> None:
    features, taught = noise(12, 5) + 2, (3 * noise(12, 7, seed=1)).softmax(1)
    measured = measures(features, taught)
    each = taught.double().numpy()

    def entropy(p: np.ndarray) -> np.ndarray:
        return -(p * np.log(p)).sum(-1)

    singular = np.linalg.svd(features.double().numpy(), compute_uv=False)
    assert measured == pytest.approx(
        {
            "teacher_entropy": entropy(each).mean() / math.log(7),
            "mean_entropy": entropy(each.mean(0)) / math.log(7),
            "feature_rank": math.exp(entropy(singular / singular.sum())),
        },
        rel=1e-5,
    )


def _measure(rank: int, folder: Path, features: Tensor, taught: Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    share = slice(4 * rank, 4 * rank + 4)
    torch.save(measures(features[share], taught[share]), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_measure_their_images_together(tmp_path: Path) -> None:
    features, taught = noise(8, 5), noise(8, 7, seed=1).softmax(1)
    run_workers(2, _measure, tmp_path, features, taught)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(measures(features, taught), rel=1e-6)


ONE_IMAGE_EACH = torch.eye(8)
SAME = functional.one_hot(torch.zeros(8, dtype=torch.int64), 8).float()
SOUND = noise(8, 6)


@pytest.mark.parametrize(
    ("taught", "features", "expected"),
    [
        (ONE_IMAGE_EACH, SOUND, set()),
        (0.2 * ONE_IMAGE_EACH + 0.1, SOUND, set()),
        (torch.full((8, 8), 1 / 8), SOUND, {"uniform"}),
        (SAME, SOUND, {"constant"}),
        (0.5 * SAME + 0.5 * SAME.roll(1, 1), SOUND, {"constant"}),
        (ONE_IMAGE_EACH, torch.ones(8, 6) + 0.01 * SOUND, {"rank"}),
        (SAME, torch.ones(8, 6), {"constant", "rank"}),
    ],
)
def test_each_collapse_has_its_alarm(taught: Tensor, features: Tensor, expected: set[str]) -> None:
    assert alarms(measures(features, taught)).keys() == expected
