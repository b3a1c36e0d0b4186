"""The network's parts against torch's, its initialisation and its options. Run: pytest tests/vit_model."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from tests.support.vits import OPTIONS, SMALL, random_images, randomised
from vit_model.blocks import attention
from vit_model.config import ViTConfig
from vit_model.model import ViT


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def test_patch_embedding_is_the_convolution() -> None:
    config = ViTConfig.model_validate(SMALL)
    embed, images = randomised(config).patch_embed, random_images(config, 2)
    kernel = embed.proj.weight.reshape(config.width, config.in_channels, config.patch_size, config.patch_size)
    convolved = F.conv2d(images, kernel, embed.proj.bias, stride=config.patch_size)
    torch.testing.assert_close(embed(images), convolved.flatten(2).transpose(1, 2))
    channels_last = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(embed(channels_last), embed(images))


def test_initialisation_follows_the_table() -> None:
    sizes = {"image_size": 64, "patch_size": 8, "width": 192, "depth": 2, "num_heads": 3, "mlp_dim": 768}
    config = ViTConfig(**sizes, num_classes=50, representation_head=True, head_bias=-10.0)
    weights = ViT(config).state_dict()

    def is_uniform(tensor: Tensor, bound: float) -> None:
        assert 0.999 * bound < tensor.abs().max() <= bound
        assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert tensor.mean().abs() < 0.02 * bound

    for layer in range(2):
        block = f"blocks.{layer}"
        for part in weights[f"{block}.attn.qkv.weight"].chunk(3):
            # sqrt(6 / (192 + 192)), a matrix of width 192; a fused Xavier's would be 0.088
            is_uniform(part, 0.125)
        is_uniform(weights[f"{block}.attn.proj.weight"], 0.125)
        for name in ("fc1", "fc2"):
            is_uniform(weights[f"{block}.mlp.{name}.weight"], math.sqrt(6 / (192 + 768)))
            assert weights[f"{block}.mlp.{name}.bias"].std().item() == pytest.approx(1e-6, rel=0.2)
    for name, fan_in in (("patch_embed.proj.weight", 8 * 8 * 3), ("pre_logits.weight", 192)):
        assert weights[name].std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
        assert weights[name].abs().max() < 2.3 * fan_in**-0.5  # cut at 2 / 0.8796 standard deviations
    assert weights["pos_embed"].std().item() == pytest.approx(0.02, rel=0.03)
    for name, tensor in weights.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float(name.endswith("weight"))))
        elif name == "head.bias":
            assert torch.equal(tensor, torch.full_like(tensor, -10.0))
        elif name in ("cls_token", "head.weight") or (name.endswith("bias") and "mlp" not in name):
            assert torch.count_nonzero(tensor) == 0


def test_a_seed_decides_all_weights_and_building_leaves_the_global_generator_alone() -> None:
    config = ViTConfig.model_validate({**SMALL, "representation_head": True})
    before = torch.get_rng_state()
    first, second = ViT(config), ViT(config)
    assert torch.equal(torch.get_rng_state(), before)
    second.initialise(seed=7)
    assert not torch.equal(first.pos_embed, second.pos_embed)
    second.to(torch.bfloat16)
    second.initialise(seed=0)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter.to(torch.bfloat16), second.get_parameter(name)), name


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers' eager attention computes it, softmax in float32 or better."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    precise = torch.promote_types(query.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=precise).to(query.dtype) @ value


def with_gradients(function: Any, parts: list[Tensor]) -> list[Tensor]:
    """What attention gives and what it passes back to query, key and value, in float64."""
    inputs = [part.clone().requires_grad_() for part in parts]
    out = function(*inputs)
    assert out.dtype == parts[0].dtype
    out.square().sum().backward()
    return [out.detach().double(), *(tensor.grad.double() for tensor in inputs if tensor.grad is not None)]


@pytest.mark.parametrize("tokens", [17, 65])  # few and many go different ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_as_exact_as_hugging_face_s(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, 3, tokens, 16, generator=generator).mul(2).to(dtype) for _ in range(3)]
    exact = with_gradients(plain_attention, [part.double() for part in parts])
    ours, theirs = with_gradients(attention, parts), with_gradients(plain_attention, parts)
    for right, mine, other in zip(exact, ours, theirs, strict=True):
        rounding = relative_difference(other, right) if dtype == torch.bfloat16 else 20 * torch.finfo(dtype).eps
        assert relative_difference(mine, right) <= 1.01 * rounding


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distillation": True},
        {"registers": 2, "layer_scale": 0.5},
        {"position": "relative"},
        {"position": "rope", "registers": 2},
        {"residual": False, "representation_head": True},
        {"position_at": "every_layer", "depth": 1},
    ],
    ids=str,
)
def test_tokens_that_nobody_reads_are_left_out_of_the_last_block_only(options: dict[str, Any]) -> None:
    config = ViTConfig.model_validate({**SMALL, **options})
    model = randomised(config).double()
    images = random_images(config, 3).double()
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[1]))

    def logits_of_all_tokens(images: Tensor) -> Tensor:
        tokens, representation = model.forward_features(images)
        logits: Tensor = model.head(representation)
        return (logits + model.head_dist(tokens[:, 1])) / 2 if config.distillation else logits

    results = []
    for function in (model, logits_of_all_tokens):
        model.zero_grad()
        logits = function(images)
        logits.square().sum().backward()
        gradients = [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
        results.append([logits.detach(), *gradients])
    for ours, whole in zip(*results, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-12)
    n = config.num_tokens
    assert seen == [n] * (config.depth - 1) + [1 + config.distillation] + [n] * config.depth


@pytest.mark.parametrize(
    "options", [{"stochastic_depth": 0.2}, {"class_token": False, "pooling": "gap", "axial": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_checkpointing_computes_each_block_twice_and_gives_the_same_bits(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    model = randomised(ViTConfig.model_validate({**SMALL, **options, "dropout": 0.1}))
    images, calls = random_images(model.config, 5).to(dtype), 0

    def count(*arguments: object) -> None:  # before, because a block that is computed again is stopped early
        nonlocal calls
        calls += 1

    for block in model.blocks:
        block.register_forward_pre_hook(count)
    model.to(dtype).train()
    gradients = []
    for model.activation_checkpointing in (False, True):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(model(images).float().square().sum(), [*model.parameters()]))
    assert calls == 3 * len(model.blocks)
    assert all(map(torch.equal, *gradients))


def test_dropout_acts_at_four_sites_and_only_in_training() -> None:
    with_dropout = randomised(ViTConfig.model_validate({**SMALL, "dropout": 0.5}))
    without = randomised(ViTConfig.model_validate(SMALL))
    images = random_images(without.config, 2)
    assert torch.equal(with_dropout.eval()(images), without(images))
    with_dropout.train()
    assert not torch.equal(with_dropout(images), with_dropout(images))

    zeros: list[float] = []
    block = with_dropout.blocks[0]
    for module in (with_dropout.dropout, block.attn.dropout, block.mlp.dropout):  # type: ignore[union-attr]
        module.register_forward_hook(lambda _m, _i, output: zeros.append((output == 0).float().mean().item()))  # type: ignore[union-attr]
    with_dropout(images)
    assert len(zeros) == 4  # position sum, attention projection, GELU, second linear layer
    assert all(0.4 < fraction < 0.6 for fraction in zeros)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_builds_what_is_counted_and_all_of_it_is_trained(options: dict[str, Any]) -> None:
    config = ViTConfig.model_validate({**SMALL, **options})
    model = randomised(config).train()
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    images = random_images(config, 4)
    tokens, representation = model.forward_features(images)
    assert tokens.shape == (4, config.num_tokens, config.width)
    assert representation.shape == (4, config.width)
    torch.manual_seed(0)
    model(images).square().sum().backward()  # type: ignore[no-untyped-call]
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not untouched
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    fresh = ViT(config)
    assert not fresh.head.weight.any() and not fresh(images).any()


def test_axial_blocks_are_torchs_own_under_masks_of_rows_and_columns() -> None:
    """Section D.6: row attention and an MLP, then column attention and an MLP; here each is full, but masked."""
    config = ViTConfig.model_validate(
        {**SMALL, "axial": True, "pooling": "gap", "depth": 2, "image_size": (12, 20), "gelu": "exact"}
    )
    ours = randomised(config).double()
    place = torch.arange(config.num_patches)
    rows, columns = place // config.grid[1], place % config.grid[1]
    layers = nn.ModuleList()
    for block in ours.blocks:
        layer = nn.TransformerEncoderLayer(
            config.width,
            config.num_heads,
            config.mlp_dim,
            dropout=0.0,
            activation="gelu",
            layer_norm_eps=config.layer_norm_eps,
            batch_first=True,
            norm_first=True,
        ).double()
        renamed = {"attn.qkv.": "self_attn.in_proj_", "attn.proj": "self_attn.out_proj"}
        renamed |= {"mlp.fc1": "linear1", "mlp.fc2": "linear2"}
        weights = block.state_dict()
        for old, new in renamed.items():
            weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
        layer.load_state_dict(weights, strict=True)
        layers.append(layer)
    x = torch.randn(2, config.num_patches, config.width, dtype=torch.float64, requires_grad=True)
    expected = x
    for index, layer in enumerate(layers):
        line = columns if index % 2 else rows
        expected = layer(expected, src_mask=line[:, None] != line[None, :])
    expected = ours.norm(expected)
    found = ours.encode(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    first, last = ours.blocks[0], ours.blocks[3]
    mine = [x, first.attn.qkv.weight, last.attn.qkv.weight, last.mlp.fc1.weight]
    other = [x, *(layers[index].self_attn.in_proj_weight for index in (0, 3)), layers[3].linear1.weight]
    direction = torch.randn_like(found)
    ours_theirs = [
        torch.autograd.grad((out * direction).sum(), weights) for out, weights in ((found, mine), (expected, other))
    ]
    torch.testing.assert_close(*ours_theirs, rtol=1e-9, atol=1e-11)


def test_stochastic_depth_keeps_the_mean_and_leaves_later_blocks_out_more_often() -> None:
    model = ViT(ViTConfig.model_validate({**SMALL, "stochastic_depth": 0.5})).train()
    torch.manual_seed(0)
    factors = model.drop_path_factors(torch.zeros(4000, 1, 1))
    assert factors is not None and factors.shape == (3, 2, 4000, 1, 1)
    for rate, of_block in zip([0, 0.25, 0.5], factors, strict=True):
        for of_branch in of_block:
            assert set(of_branch.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - rate)).item()}
            assert (of_branch == 0).float().mean().item() == pytest.approx(rate, abs=0.035)
            assert of_branch.mean().item() == pytest.approx(1, abs=0.07)
    correlation = factors[1:].flatten(0, 1).flatten(1).corrcoef()
    assert (correlation - torch.eye(4)).abs().max() < 0.06, "all branches are decided by themselves"
    assert model.eval().drop_path_factors(torch.zeros(4, 1, 1)) is None


def test_an_images_draws_decide_which_of_its_branches_are_left_out() -> None:
    config = ViTConfig.model_validate({**SMALL, "stochastic_depth": 0.5})
    model = randomised(config).double().train()
    images = random_images(config, 6).double()
    draws = torch.rand(6, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    draws[0], draws[1] = 0.0, 0.5
    found = model.encode(model.embed(images), drop_path_draws=draws)
    for tokens, image, of_image in zip(found, images, draws, strict=True):
        x = model.embed(image[None])
        for block, rate, (of_attention, of_mlp) in zip(model.blocks, [0, 0.25, 0.5], of_image, strict=True):
            if of_attention >= rate:
                x = x + block.attn(block.norm1(x)) / (1 - rate)  # type: ignore[operator]
            if of_mlp >= rate:
                x = x + block.mlp(block.norm2(x)) / (1 - rate)  # type: ignore[operator]
        torch.testing.assert_close(tokens, model.norm(x)[0])
    model.eval()
    assert torch.equal(model(images, draws), model(images))


def test_positions_of_rows_and_columns_are_in_raster_order_without_one_for_the_class_token() -> None:
    config = ViTConfig.model_validate({**SMALL, "position": "learned2d", "image_size": (8, 12)})
    model = randomised(config)
    table = model.positions(0)
    assert table is not None and not table[:, 0].any()
    for row in range(2):
        for column in range(3):
            expected = torch.cat([model.pos_embed_x[0, column], model.pos_embed_y[0, row]])
            assert torch.equal(table[0, 1 + 3 * row + column], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "cls", "class_token": False}, "pooling 'cls' needs class_token"),
        ({"pooling": "gap", "class_position": True}, "class_position true needs class_token"),
        ({"distillation": True, "pooling": "map"}, "distillation needs pooling 'cls'"),
        ({"norm_after_pooling": True}, "norm_after_pooling needs pooling 'gap'"),
        ({"position": "sincos2d", "position_at": "shared"}, "needs learned tables; position is 'sincos2d'"),
        ({"axial": True}, "cannot be combined with class_token"),
        (
            {"axial": True, "pooling": "gap", "stochastic_depth": 0.1},
            "stochastic_depth 0.1 cannot be combined with axial",
        ),
        (
            {"stem": (1, 1, 1), "patch_size": 4},
            "patch_size 4 is not a multiple of 16, the stride of a stem with 3",
        ),
        ({"image_size": (12, 13)}, "image_size 13 is not a multiple of patch_size 4; 12 or 16 would fit"),
        ({"position": "learned2d", "width": 30, "num_heads": 3}, "width 30 is not a multiple of 4"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ViTConfig.model_validate({**SMALL, **options})
