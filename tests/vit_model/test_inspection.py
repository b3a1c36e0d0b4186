"""What models look at, against slow loops, scikit-learn and Hugging Face. Run: pytest tests/vit_model."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.vits import SMALL, random_images, randomised
from vit_model import inspection
from vit_model.config import ResNetConfig, ViTConfig
from vit_model.model import ViT
from vit_model.resnet import ResNet

MODELS: list[dict[str, Any]] = [
    {},
    {"image_size": (8, 20)},
    {"registers": 2, "class_position": False},
    {"distillation": True},
    {"pooling": "gap"},
    {"pooling": "gap", "class_token": True, "norm_after_pooling": True, "registers": 1},
    {"pooling": "map"},
    {"position": "relative"},
    {"position": "rope"},
    {"position_at": "every_layer"},
    {"position": "learned2d", "position_at": "shared", "norm_first": True},
    {"residual": False, "layer_scale": 0.1},
    {"stem": (1, 1), "patch_size": 8, "image_size": (16, 32)},
]
AXIAL: list[dict[str, Any]] = [
    {"axial": True, "pooling": "gap", "image_size": (8, 20)},
    {"axial": True, "pooling": "map", "image_size": (16, 8), "position_at": "every_layer"},
]


def model_and_images(options: dict[str, Any], batch: int = 3) -> tuple[ViT, Tensor]:
    config = ViTConfig.model_validate({**SMALL, **options})
    return randomised(config), random_images(config, batch)


def slow_weights(model: ViT, images: Tensor) -> list[np.ndarray]:
    """softmax(q k / sqrt(e)) of each block, head by head, from what each block's attention is really given."""
    given: list[Tensor] = []
    handles = [
        block.attn.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0])) for block in model.blocks
    ]
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    found = []
    for block, tokens in zip(model.blocks, given, strict=True):
        x = tokens.double().numpy()
        heads, width = model.config.num_heads, model.config.width
        e = width // heads
        kernel, bias = (t.detach().double().numpy() for t in (block.attn.qkv.weight, block.attn.qkv.bias))
        weights = np.empty((len(x), heads, x.shape[1], x.shape[1]))
        for h in range(heads):
            query = x @ kernel[h * e : (h + 1) * e].T + bias[h * e : (h + 1) * e]
            of_key = slice(width + h * e, width + (h + 1) * e)
            key = x @ kernel[of_key].T + bias[of_key]
            if model.config.position == "rope":
                query, key = (slowly_turned(part, model.config) for part in (query, key))
            scores = np.einsum("bqe,bke->bqk", query, key)
            if block.attn.pos_embed is not None:
                table = block.attn.pos_embed.detach().double().numpy()
                for q, k in itertools.product(range(x.shape[1]), repeat=2):
                    scores[:, q, k] += query[:, q] @ table[q - k + x.shape[1] - 1]
            exponent = np.exp(scores / math.sqrt(e))
            weights[:, h] = exponent / exponent.sum(axis=-1, keepdims=True)
        found.append(weights)
    return found


def slowly_turned(heads: np.ndarray, config: ViTConfig) -> np.ndarray:
    """Rotary positions as complex numbers, whose real parts are the first half of a head."""
    e = heads.shape[2]
    pairs = heads[..., : e // 2] + 1j * heads[..., e // 2 :]
    for number, place in enumerate(itertools.product(*map(range, config.grid))):
        for axis, side in enumerate(config.grid):
            for k in range(e // 4):
                angle = 2 * math.pi * (2 * (place[axis] + 0.5) / side - 1) * 100 ** (-4 * k / e)
                pairs[:, config.num_prefix_tokens + number, axis * (e // 4) + k] *= np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=2)


@pytest.mark.parametrize("options", [*MODELS, *AXIAL], ids=str)
def test_weights_are_those_that_the_blocks_use(options: dict[str, Any]) -> None:
    model, images = model_and_images(options)
    found = inspection.attention_weights(model, images)
    expected = slow_weights(model, images)
    assert len(found) == len(expected) == model.config.num_blocks
    for index, (ours, slow) in enumerate(zip(found, expected, strict=True)):
        if model.config.axial:
            rows, columns = model.config.grid
            lines, tokens = (columns, rows) if index % 2 else (rows, columns)
            assert ours.shape == (3, lines, 4, tokens, tokens)
            slow = slow.reshape(ours.shape)
        np.testing.assert_allclose(ours, slow, atol=1e-6)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_distance_is_the_mean_over_queries_and_images(options: dict[str, Any]) -> None:
    model, images = model_and_images(options)
    config, skipped = model.config, model.config.num_prefix_tokens
    places = list(itertools.product(*(range(side) for side in config.grid)))
    expected = np.zeros((config.num_blocks, config.num_heads))
    for layer, weights in enumerate(slow_weights(model, images)):
        for h in range(config.num_heads):
            by_query = [
                sum(
                    weights[image, h, skipped + q, skipped + k] * math.dist(places[q], places[k]) * config.patch_size
                    for k in range(len(places))
                )
                for image in range(len(images))
                for q in range(len(places))
            ]
            expected[layer, h] = sum(by_query) / len(by_query)
    np.testing.assert_allclose(inspection.attention_distance(model, images), expected, rtol=1e-5)


@pytest.mark.parametrize("options", AXIAL, ids=str)
def test_distance_in_axial_models_is_along_the_line(options: dict[str, Any]) -> None:
    model, images = model_and_images(options)
    expected = []
    for weights in inspection.attention_weights(model, images):
        places = np.arange(weights.shape[-1])
        distances = np.abs(places[:, None] - places) * model.config.patch_size
        expected.append((weights * distances).sum(axis=-1).mean(axis=(0, 1, 3)))
    np.testing.assert_allclose(inspection.attention_distance(model, images), np.stack(expected), rtol=1e-5)


@pytest.mark.parametrize(("side", "patch", "pixels"), [(14, 16, 116.5), (7, 32, 115.5), (16, 14, 116.6)])
def test_distance_of_uniform_attention_is_the_published_one(side: int, patch: int, pixels: float) -> None:
    """vit.md, section 7. What goes to a class token is lost, and not given to the patches."""
    sizes = {"image_size": side * patch, "patch_size": patch, "width": 8, "depth": 1, "mlp_dim": 8}
    for pooling, lost in (("gap", 0), ("cls", 1)):
        model = ViT(ViTConfig(**sizes, num_heads=2, pooling=pooling))
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight.zero_()  # type: ignore[union-attr, operator]
        distance = inspection.attention_distance(model, torch.zeros(1, 3, side * patch, side * patch))
        whole = distance[0] * (side**2 + lost) / side**2
        assert [round(float(d), 1) for d in whole] == [pixels, pixels]


def test_images_are_handled_in_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = model_and_images({}, batch=5)
    distance, rollout = (
        summary(model, images) for summary in (inspection.attention_distance, inspection.attention_rollout)
    )
    tokens, seen = model.config.num_tokens, []
    monkeypatch.setattr(inspection, "_WEIGHTS_AT_A_TIME", 2 * model.config.num_heads * tokens**2 + 1)
    handle = model.blocks[1].register_forward_pre_hook(lambda _module, inputs: seen.append(len(inputs[0])))
    np.testing.assert_allclose(inspection.attention_distance(model, images), distance, rtol=1e-6)
    np.testing.assert_allclose(inspection.attention_rollout(model, images), rollout, rtol=1e-5)
    handle.remove()
    assert seen == [2, 2, 1] * 2


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_rollout_multiplies_from_the_first_layer_upward(options: dict[str, Any]) -> None:
    model, images = model_and_images(options)
    config = model.config
    rolled = inspection.attention_rollout(model, images)
    assert rolled.shape == (3, *config.grid)
    layers = slow_weights(model, images)
    for image in range(len(images)):
        # Each token's share of the first tokens, told upward one layer after the other.
        shares = {token: np.eye(config.num_tokens)[token] for token in range(config.num_tokens)}
        for weights in layers:
            mean = sum(weights[image, h] for h in range(config.num_heads)) / config.num_heads
            upper = {}
            for token in shares:
                mixed = sum(mean[token, k] * shares[k] for k in shares)
                upper[token] = 0.5 * mixed + 0.5 * shares[token] if config.residual else mixed
            shares = upper
        prefix = config.num_prefix_tokens
        if config.pooling == "cls":
            read = shares[0][prefix:]
        else:
            read = np.mean([shares[token][prefix:] for token in range(prefix, config.num_tokens)], axis=0)
        np.testing.assert_allclose(rolled[image], (read / read.max()).reshape(config.grid), atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"patch_size": 2, "in_channels": 1}, {"stem": (1,), "patch_size": 8, "image_size": 16}],
    ids=str,
)
def test_components_are_scikit_learns(options: dict[str, Any]) -> None:
    from sklearn.decomposition import PCA

    model = randomised(ViTConfig.model_validate({**SMALL, **options}))
    filters = model.patch_embed.proj.weight.detach().double()
    p, channels = model.patch_embed.patch_size, filters.shape[1] // model.patch_embed.patch_size**2
    count = min(filters.shape) - 1
    found = inspection.patch_embedding_components(model, count)
    assert found.shape == (count, p, p, channels)
    # Each filter as [p, p, c], which is how a picture of it is seen.
    pictures = np.stack([f.reshape(channels, p, p).permute(1, 2, 0).numpy().ravel() for f in filters])
    expected = PCA(count, svd_solver="full").fit(pictures).components_
    for ours, other in zip(found.reshape(count, -1), expected, strict=True):
        np.testing.assert_allclose(ours, other * np.sign(other @ ours), atol=1e-8)
        assert ours[np.abs(ours).argmax()] > 0


def test_position_similarity_is_the_cosine_of_every_pair() -> None:
    places: list[dict[str, Any]] = [
        {},
        {"registers": 2, "image_size": (8, 12)},
        {"pooling": "gap", "class_token": True, "class_position": False},
        {"position": "learned2d", "image_size": (8, 20)},
        {"position": "sincos2d", "pooling": "gap", "image_size": (20, 8)},
        {"position_at": "every_layer"},
    ]
    for options in places:
        model, _ = model_and_images(options)
        config = model.config
        rows, columns = config.grid
        layers = config.num_blocks if config.position_at == "every_layer" else 1
        for layer in range(layers):
            found = inspection.position_similarity(model, layer)
            assert found.shape == (rows, columns, rows, columns)
            table = model.positions(layer)
            assert table is not None
            vectors = table[0, -rows * columns :].detach().numpy()
            for i, j, k, m in itertools.product(range(rows), range(columns), repeat=2):
                a, b = vectors[i * columns + j], vectors[k * columns + m]
                cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
                assert found[i, j, k, m] == pytest.approx(cosine, abs=1e-5)


def test_the_model_is_left_as_it_was() -> None:
    model, images = model_and_images({"dropout": 0.5, "stochastic_depth": 0.5})
    model.train()
    model.blocks[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    first, again = (inspection.attention_rollout(model, images) for _ in range(2))
    np.testing.assert_array_equal(first, again)  # no dropout while it looks
    for look in (inspection.attention_weights, inspection.attention_distance):
        look(model, images)
    with pytest.raises(ValueError, match=r"\[3, 3, 8, 8\]; this model needs \[b, 3, 12, 12\]"):
        inspection.attention_distance(model, torch.zeros(3, 3, 8, 8))
    assert {name: module.training for name, module in model.named_modules()} == modes
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_what_a_model_has_not_is_said() -> None:
    model, images = model_and_images(AXIAL[0])
    with pytest.raises(ValueError, match=r"attention rollout .* this model is axial"):
        inspection.attention_rollout(model, images)
    model, _ = model_and_images({})
    with pytest.raises(ValueError, match=r"count is 33; .* from 1 to 32"):
        inspection.patch_embedding_components(model, 33)
    with pytest.raises(ValueError, match=r"layer is 1; with position_at 'stem' it must be from 0 to 0"):
        inspection.position_similarity(model, layer=1)
    for position in ("none", "relative", "rope"):
        model, _ = model_and_images({"position": position})
        with pytest.raises(ValueError, match=f"position similarity .* position '{position}' has none"):
            inspection.position_similarity(model)


def test_a_resnet_has_nothing_to_look_at_here() -> None:
    resnet = ResNet(ResNetConfig(units=(1,), image_size=8))
    images = torch.zeros(1, 3, 8, 8)
    looks: list[tuple[Callable[[], Any], str]] = [
        (lambda: inspection.attention_weights(resnet, images), "attention"),
        (lambda: inspection.attention_distance(resnet, images), "attention distance"),
        (lambda: inspection.attention_rollout(resnet, images), "attention rollout"),
        (lambda: inspection.patch_embedding_components(resnet), "the patch embedding"),
        (lambda: inspection.position_similarity(resnet), "position similarity"),
    ]
    for look, what in looks:
        with pytest.raises(ValueError, match=f"^{what} needs a ViT; this model is a ResNet"):
            look()
