"""MoCo v3: its loss against a loop, and which weights are trained."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.vits import TINY, noise
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.objectives.contrastive import MoCo, MomentumEncoder, info_nce
from vit_model.objectives.momentum import momentum
from vit_model.objectives.workers import BatchNorm

GREY: dict[str, Any] = TINY | {"in_channels": 1, "position": "sincos2d_moco"}


def small_task(**options: Any) -> MoCo:
    return MoCo(ViT(ViTConfig(**GREY | options)), hidden_width=24, output_width=12)


def two_views(b: int) -> tuple[Tensor, Tensor]:
    return noise(b, 1, 8, 8, seed=1), noise(b, 1, 8, 8, seed=2)


def test_the_momentum_rises_to_one_along_a_cosine() -> None:
    assert [momentum(step, 100) for step in (0, 50, 100)] == pytest.approx([0.99, 0.995, 1.0])
    assert momentum(25, 100, 0.9) == pytest.approx(1 - 0.1 * (1 + math.sqrt(0.5)) / 2)
    rising = [momentum(step, 30) for step in range(31)]
    assert rising == sorted(rising)


def test_info_nce_is_a_loop_over_pairs() -> None:
    queries, keys, temperature = noise(5, 7, seed=1), noise(5, 7, seed=2), 0.3
    total = 0.0
    for number, query in enumerate(queries):
        scores = [torch.dot(query, key) / query.norm() / key.norm() / temperature for key in keys]
        total -= math.log(math.exp(scores[number]) / sum(math.exp(score) for score in scores))
    assert info_nce(queries, keys, temperature).item() == pytest.approx(2 * 0.3 * total / 5, rel=1e-5)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs(affine: bool) -> None:
    x = noise(9, 6) * 3 + 2
    ours, theirs = BatchNorm(6, affine), nn.BatchNorm1d(6, affine=affine, track_running_stats=False)
    if ours.weight is not None and ours.bias is not None:
        with torch.no_grad():
            for mine, other in ((ours.weight, theirs.weight), (ours.bias, theirs.bias)):
                mine.copy_(noise(6, seed=3))
                other.copy_(mine)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16


def test_gradients() -> None:
    queries, keys = (noise(4, 3, seed=seed, dtype=torch.float64) for seed in (1, 2))
    assert torch.autograd.gradcheck(lambda given: info_nce(given, keys, 0.2), (queries.requires_grad_(),))
    norm = BatchNorm(3, affine=True).double()
    assert torch.autograd.gradcheck(norm, (noise(5, 3, dtype=torch.float64).requires_grad_(),))


def test_the_loss_is_symmetric_and_made_of_these_parts() -> None:
    """Queries through the predictor, keys of the other view through the momentum encoder without one."""
    task, (one, other) = small_task(), two_views(6)
    momentum_encoder = MomentumEncoder(task)
    with torch.no_grad():
        for parameter in momentum_encoder.parameters():
            parameter.add_(0.1 * noise(*parameter.shape))
    expected = torch.zeros(())
    for mine, others in ((one, other), (other, one)):
        query = task.predictor(task.projector(task.model(mine)))
        key = momentum_encoder.encoder(others)
        cosines = nn.functional.cosine_similarity(query[:, None], key[None], dim=2)
        expected = expected - 2 * 0.2 * (cosines / 0.2).log_softmax(dim=1).diagonal().mean()
    torch.testing.assert_close(task(one, other, *momentum_encoder.keys(one, other)), expected)
    torch.testing.assert_close(task(other, one, *momentum_encoder.keys(other, one)), expected)


def test_layers_are_those_of_the_authors() -> None:
    task = MoCo(ViT(ViTConfig(**GREY)))
    sizes = [
        [tuple(layer.weight.shape) for layer in layers if isinstance(layer, nn.Linear)]
        for layers in (task.projector, task.predictor)
    ]
    assert sizes == [[(4096, 16), (4096, 4096), (256, 4096)], [(4096, 256), (256, 4096)]]
    kinds = ["Linear", "BatchNorm", "ReLU"]
    assert [type(layer).__name__ for layer in task.projector] == [*kinds, *kinds, "Linear", "BatchNorm"]
    assert [type(layer).__name__ for layer in task.predictor] == [*kinds, "Linear", "BatchNorm"]
    assert [name for name, _ in task.predictor.named_parameters()] == [
        "0.weight",
        "1.weight",
        "1.bias",
        "3.weight",
    ]


def test_a_seed_decides_all_weights_and_building_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, same = small_task(), small_task()
    other = MoCo(ViT(ViTConfig(**GREY)), hidden_width=24, output_width=12, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
    assert not torch.equal(one.projector[0].weight, other.projector[0].weight)
    bound = 24**-0.5
    weights = one.projector[3].weight
    assert weights.abs().max() <= bound
    assert weights.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_what_is_trained_what_follows_and_what_stays() -> None:
    task = small_task(patch_bias=True)
    momentum_encoder, views = MomentumEncoder(task), two_views(6)
    start = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    task(*views, *momentum_encoder.keys(*views)).backward()
    patches = {"model.patch_embed.proj.weight", "model.patch_embed.proj.bias"}
    assert {name for name, parameter in task.named_parameters() if parameter.grad is None} == patches
    optimizer.step()
    before = {name: parameter.clone() for name, parameter in momentum_encoder.encoder.named_parameters()}
    followed = dict(nn.Sequential(task.model, task.projector).named_parameters())
    moved = 0
    momentum_encoder.update(task, 0.9)
    for name, parameter in momentum_encoder.encoder.named_parameters():
        torch.testing.assert_close(parameter, 0.9 * before[name] + 0.1 * followed[name])
        assert not parameter.requires_grad and parameter.grad is None
        moved += not torch.equal(parameter, before[name])
    assert moved == len(followed) - 2, "all but the patch projection"
    for name in patches:
        assert torch.equal(task.get_parameter(name), start[name])
        assert torch.equal(momentum_encoder.get_parameter(name.replace("model", "encoder.0")), start[name])


def test_the_momentum_encoder_of_bfloat16_weights_takes_small_steps() -> None:
    task = small_task()
    momentum_encoder = MomentumEncoder(task)
    before = momentum_encoder.get_parameter("encoder.1.0.weight").clone()
    task.bfloat16()
    with torch.no_grad():
        task.projector[0].weight.add_(1)
    for _ in range(10):
        momentum_encoder.update(task, 0.9999)
    moved = momentum_encoder.get_parameter("encoder.1.0.weight") - before
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), rtol=0.05, atol=0)


@pytest.mark.parametrize("changed", [{"num_classes": 3}, {"representation_head": True}])
def test_a_model_with_a_classifier_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replaces the classifier"):
        small_task(**changed)
