"""Masked patch prediction: targets against loops, exact fractions and gradients."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.support import vits
from tests.support.digits import as_input
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.objectives.masked_patches import MaskedPatches, corrupt, corruption, counts, targets

TINY = vits.TINY | {"patch_size": 2, "in_channels": 1}


def random_draws(b: int, n: int, seed: int = 0) -> Tensor:
    return torch.rand(b, n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_pixels(config: ViTConfig, b: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (b, *config.image_shape, config.in_channels), dtype=np.uint8))


# ------------------------------------------------------------------------------------------------- targets


def colour_class(block: NDArray[np.uint8]) -> int:
    """Of pixels [height, width, c], in Python's integers: 3 bits of each channel's mean."""
    found = 0
    for channel in range(block.shape[2]):
        values = [int(value) for value in block[:, :, channel].ravel()]
        found = 8 * found + sum(values) // len(values) // 32
    return found


def slow_targets(image: NDArray[np.uint8], p: int, target: str) -> list[list[float]]:
    found: list[list[float]] = []
    for row in range(0, image.shape[0], p):
        for column in range(0, image.shape[1], p):
            patch = image[row : row + p, column : column + p]
            if target == "mean_colour":
                found.append([colour_class(patch)])
            elif target == "pixels":
                found.append([value / 127.5 - 1 for value in patch.ravel().tolist()])
            else:
                edges = [(math.floor(k * p / 4), math.ceil((k + 1) * p / 4)) for k in range(4)]
                blocks = [patch[top:bottom, left:right] for top, bottom in edges for left, right in edges]
                found.append([colour_class(block) for block in blocks])
    return found


@pytest.mark.parametrize("target", ["mean_colour", "4x4", "pixels"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", [(16, 32, 16), (28, 14, 14), (8, 12, 4)], ids=str)
def test_targets_are_those_of_a_loop(shape: tuple[int, int, int], channels: int, target: Any) -> None:
    height, width, p = shape
    pixels = np.random.default_rng(0).integers(0, 256, (3, height, width, channels), dtype=np.uint8)
    # means near 160, an edge of the bins
    pixels[0] = np.random.default_rng(1).integers(158, 162, pixels[0].shape)
    pixels[1, :p, :p] = 255
    pixels[1, -p:, -p:] = 0
    expected = np.array([slow_targets(image, p, target) for image in pixels])
    found = targets(torch.from_numpy(pixels), p, target).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_means_on_the_edge_of_a_bin_are_exact() -> None:
    """One less than a multiple of 32 in the sum over the patch is the bin below, whatever the patch's size."""
    for p in (2, 3, 7, 14, 16, 32):
        pixels = np.full((2, p, p, 1), 96, np.uint8)
        pixels[1, 0, 0] = 95
        assert targets(torch.from_numpy(pixels), p, "mean_colour").flatten().tolist() == [3, 2]


# ------------------------------------------------------------------------------------------------- corruption


@pytest.mark.parametrize(("patches", "expected"), [(196, (78, 10, 10)), (49, (20, 2, 2)), (2, (1, 0, 0))])
def test_how_many_are_corrupted(patches: int, expected: tuple[int, int, int]) -> None:
    assert counts(patches) == expected


def test_one_patch_can_not_be_predicted_from_none() -> None:
    with pytest.raises(ValueError, match="at least two patches; the model has 1"):
        counts(1)


def test_every_image_has_exactly_the_fractions() -> None:
    plan = corruption(random_draws(50, 196))
    replaced = plan.source != torch.arange(196)
    assert (plan.masked.sum(dim=1) == 78).all()
    assert (replaced.sum(dim=1) == 10).all()
    assert not (plan.masked & replaced).any()
    assert all(len(set(row)) == 98 for row in plan.predicted.tolist())
    corrupted = torch.zeros(50, 196, dtype=torch.bool).scatter(1, plan.predicted, True)
    assert (corrupted >= (plan.masked | replaced)).all(), "all that is changed is predicted"
    assert ((corrupted & ~plan.masked & ~replaced).sum(dim=1) == 10).all(), "and as many that are not changed"


def test_every_patch_is_equally_likely_to_be_corrupted_in_each_way_and_to_replace_another() -> None:
    n, images = 20, 20_000
    plan = corruption(random_draws(images, n))
    replaced = plan.source != torch.arange(n)
    for what, share in ((plan.masked, 8 / 20), (replaced, 1 / 20)):
        spread = math.sqrt(share * (1 - share) / images)
        assert ((what.double().mean(dim=0) - share).abs() < 5 * spread).all()
    pairs = torch.bincount((torch.arange(n).expand(images, n) * n + plan.source)[replaced], minlength=n * n).view(n, n)
    assert (pairs.diagonal() == 0).all(), "another patch, never the same"
    expected = images / n / (n - 1)
    others = pairs[~torch.eye(n, dtype=torch.bool)]
    assert ((others - expected).abs() < 5 * math.sqrt(expected)).all()


def test_a_sample_is_corrupted_the_same_in_any_company() -> None:
    draws = random_draws(7, 16)
    together = corruption(draws)
    for number in range(7):
        alone = corruption(draws[number : number + 1])
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one[0], other[number])


def test_embeddings_are_exchanged_as_planned() -> None:
    patches, mask = torch.randn(5, 16, 3), torch.randn(1, 1, 3)
    plan = corruption(random_draws(5, 16))
    found = corrupt(patches, mask, plan)
    for image in range(5):
        for patch in range(16):
            masked = bool(plan.masked[image, patch])
            expected = mask[0, 0] if masked else patches[image, plan.source[image, patch]]
            assert torch.equal(found[image, patch], expected)


# ------------------------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("target", ["mean_colour", "4x4", "pixels"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_that_of_the_corrupted_patches(target: Any, channels: int) -> None:
    """Put together here from the model's parts, patch by patch."""
    config = ViTConfig(**TINY | {"in_channels": channels, "registers": 1})
    task = MaskedPatches(ViT(config), target)
    pixels, draws = random_pixels(config, 3), random_draws(3, 16)
    start = task(as_input(pixels), pixels, draws).item()
    if target != "pixels":
        assert start == pytest.approx(math.log(8**channels), rel=1e-5)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    loss = task(as_input(pixels), pixels, draws)
    plan = corruption(draws)
    embedded = corrupt(task.model.patch_embed(as_input(pixels)), task.mask_token, plan)
    tokens = task.model.encode(task.model.assemble(embedded))[:, 2:]
    losses = []
    for image in range(3):
        wanted = slow_targets(pixels[image].numpy(), 2, target)
        for patch in plan.predicted[image].tolist():
            outputs = task.head(tokens[image, patch])
            if target == "pixels":
                losses.append((outputs - torch.tensor(wanted[patch])).square().mean())
                continue
            parts = outputs.view(-1, 8**channels).log_softmax(dim=1)
            losses += [-part[label] for part, label in zip(parts, wanted[patch], strict=True)]
    assert loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pooling": "gap"},
        {"pooling": "gap", "norm_after_pooling": True},
        {"axial": True, "pooling": "gap"},
        {"norm_first": True, "position": "learned2d", "position_at": "every_layer"},
    ],
    ids=str,
)
def test_all_of_the_model_is_trained(options: dict[str, Any]) -> None:
    config = ViTConfig(**TINY | options)
    task = MaskedPatches(ViT(config))
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(0))
    pixels = random_pixels(config, 4)
    task(as_input(pixels), pixels, random_draws(4, 16)).backward()
    still = [name for name, parameter in task.named_parameters() if parameter.grad is None]
    assert not still


@pytest.mark.parametrize("target", ["mean_colour", "pixels"])
def test_gradients(target: Any) -> None:
    config = ViTConfig(**TINY | {"width": 8, "depth": 1, "mlp_dim": 8, "in_channels": 3, "image_size": 4})
    task = MaskedPatches(ViT(config), target).double()
    torch.nn.init.normal_(task.head.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(task.mask_token, generator=torch.Generator().manual_seed(1))
    pixels, draws = random_pixels(config, 2), random_draws(2, 4)

    def loss(images: Tensor, mask: Tensor) -> Any:
        changed = {"mask_token": mask}
        return torch.func.functional_call(task, changed, (images, pixels, draws))

    images = as_input(pixels).double().requires_grad_()
    assert torch.autograd.gradcheck(loss, (images, task.mask_token))


def test_bfloat16_is_about_the_same() -> None:
    config = ViTConfig(**TINY)
    task = MaskedPatches(ViT(config))
    torch.nn.init.normal_(task.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    pixels, draws = random_pixels(config, 8), random_draws(8, 16)
    full = task(as_input(pixels), pixels, draws)
    half = task.bfloat16()(as_input(pixels).bfloat16(), pixels, draws)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(full.item(), rel=0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_classes": 3}, "num_classes is 3"),
        ({"representation_head": True}, "representation_head True"),
        ({"pooling": "map"}, "pooling 'map'"),
        ({"image_size": 2}, "at least two patches; the model has 1"),
    ],
)
def test_a_model_with_parts_that_are_not_trained_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedPatches(ViT(ViTConfig(**TINY | changed)))
