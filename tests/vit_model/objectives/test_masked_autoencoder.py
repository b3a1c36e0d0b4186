"""Masked autoencoders: loss and gradients of transformers' own, what is masked, and costs."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.support import vits
from tests.support.digits import as_input
from tests.support.parity import assert_close, randomise
from tests.support.vits import transformers
from vit_model import compute
from vit_model.config import MaeOptions, ViTConfig
from vit_model.model import ViT
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder, normalised

TINY = vits.TINY | {"image_size": 16, "in_channels": 3, "gelu": "exact"}
NARROW = {"decoder_width": 24, "decoder_depth": 2, "decoder_heads": 3}


def make(decoder: dict[str, Any] | None = None, seed: int = 0, **fields: Any) -> MaskedAutoencoder:
    options = MaeOptions.model_validate(NARROW | (decoder or {}))
    return MaskedAutoencoder(ViT(ViTConfig.model_validate(TINY | fields)), options, seed)


def batch(config: ViTConfig, b: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Images, their pixels, and draws."""
    rng = np.random.default_rng(seed)
    sides = *config.image_shape, config.in_channels
    pixels = torch.from_numpy(rng.integers(0, 256, (b, *sides), dtype=np.uint8))
    return as_input(pixels), pixels, torch.from_numpy(rng.random((b, config.num_patches)))


# --------------------------------------------------------------------------------------- against transformers


def their_names(ours: dict[str, Tensor], config: ViTConfig, decoder_depth: int) -> dict[str, Tensor]:
    """Our tensors (weights or gradients) as ViTMAEForPreTraining names and shapes them."""
    embeddings = "vit.embeddings.patch_embeddings.projection"
    out = {
        "vit.embeddings.cls_token": ours["model.cls_token"],
        "decoder.mask_token": ours["decoder.mask_token"],
        f"{embeddings}.weight": ours["model.patch_embed.proj.weight"].reshape(
            config.width, config.in_channels, config.patch_size, config.patch_size
        ),
        f"{embeddings}.bias": ours["model.patch_embed.proj.bias"],
    }
    if "model.pos_embed" in ours:
        out["vit.embeddings.position_embeddings"] = ours["model.pos_embed"]
    renamed = {"model.norm": "vit.layernorm", "decoder.embed": "decoder.decoder_embed"}
    renamed |= {"decoder.norm": "decoder.decoder_norm", "decoder.head": "decoder.decoder_pred"}
    for kind in ("weight", "bias"):
        out |= {f"{theirs}.{kind}": ours[f"{name}.{kind}"] for name, theirs in renamed.items()}
    out |= their_blocks(ours, "model.blocks", "vit.layers", config.depth)
    return out | their_blocks(ours, "decoder.blocks", "decoder.decoder_layers", decoder_depth)


def their_blocks(weights: dict[str, Tensor], ours: str, theirs: str, depth: int) -> dict[str, Tensor]:
    """Our blocks' tensors below the name `ours` as transformers names them below `theirs`."""
    renamed = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed |= {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    out = {}
    for layer in range(depth):
        for kind in ("weight", "bias"):
            for old, new in renamed.items():
                out[f"{theirs}.{layer}.{new}.{kind}"] = weights[f"{ours}.{layer}.{old}.{kind}"]
            parts = weights[f"{ours}.{layer}.attn.qkv.{kind}"].chunk(3)
            for name, part in zip("qkv", parts, strict=True):
                out[f"{theirs}.{layer}.attention.{name}_proj.{kind}"] = part
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        ({}, {"position": "sincos2d_moco"}),
        ({"normalise": False, "mask_fraction": 0.5, "decoder_depth": 1}, {"in_channels": 1}),
    ],
    ids=["the paper's", "learned positions, pixels, one block"],
)
def test_loss_and_all_gradients_are_those_of_transformers(decoder: dict[str, Any], fields: dict[str, Any]) -> None:
    task = make(decoder, **fields)
    randomise(task)
    config, options = task.model.config, task.options
    theirs = (
        transformers()
        .ViTMAEForPreTraining(
            transformers().ViTMAEConfig(
                image_size=config.image_size,
                patch_size=config.patch_size,
                num_channels=config.in_channels,
                hidden_size=config.width,
                num_hidden_layers=config.depth,
                num_attention_heads=config.num_heads,
                intermediate_size=config.mlp_dim,
                layer_norm_eps=config.layer_norm_eps,
                decoder_hidden_size=options.decoder_width,
                decoder_num_hidden_layers=options.decoder_depth,
                decoder_num_attention_heads=options.decoder_heads,
                decoder_intermediate_size=4 * options.decoder_width,
                mask_ratio=options.mask_fraction,
                norm_pix_loss=options.normalise,
            )
        )
        .eval()
    )
    positions = theirs.vit.embeddings.position_embeddings.requires_grad_(config.position == "learned1d")
    fixed = {"decoder.decoder_pos_embed": their_table(config, options.decoder_width)}
    if not positions.requires_grad:
        fixed["vit.embeddings.position_embeddings"] = their_table(config, config.width)
    weights = their_names(dict(task.named_parameters()), config, options.decoder_depth)
    theirs.load_state_dict({name: values.detach() for name, values in (weights | fixed).items()})
    images, pixels, draws = batch(config)
    # In float64: the gradient of the keys' biases is zero, and what rounding leaves of it depends on the processor.
    task.double(), theirs.double()
    loss = task(images.double(), pixels, draws)
    loss.backward()
    expected = theirs(images.double(), noise=draws).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours = {name: gradient(parameter) for name, parameter in task.named_parameters()}
    wanted = {name: gradient(p) for name, p in theirs.named_parameters() if p.requires_grad}
    assert_close(their_names(ours, config, options.decoder_depth), wanted)


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def their_table(config: ViTConfig, width: int) -> Tensor:
    """The fixed positions, with a zero for the class token; the authors' have their halves exchanged."""
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

    table: Tensor = build_2d_sinusoidal_position_embedding(*config.grid, width, cls_token=True)
    return table[None]


# ------------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("patches", "fraction", "visible"),
    [(196, 0.75, 49), (16, 0.75, 4), (10, 0.9, 1), (10, 0.8, 2), (3, 0.5, 1), (256, 0.85, 38)],
)
def test_the_fraction_that_is_seen_is_rounded_down(patches: int, fraction: float, visible: int) -> None:
    assert MaeOptions(mask_fraction=fraction).visible(patches) == visible


def test_patches_are_normalised_as_by_numpy() -> None:
    patches = np.random.default_rng(0).random((2, 3, 12), dtype=np.float32)
    patches[0, 0] = 0.5
    mean, variance = patches.mean(-1, keepdims=True), patches.var(-1, ddof=1, keepdims=True)
    expected = (patches - mean) / np.sqrt(variance + 1e-6)
    np.testing.assert_allclose(normalised(torch.from_numpy(patches)), expected, rtol=1e-5, atol=1e-6)


def test_the_encoder_sees_nothing_of_masked_patches_and_the_decoder_their_places() -> None:
    task = make({"decoder_depth": 1})
    randomise(task)
    images, _, draws = batch(task.model.config)
    order = draws.argsort(dim=1)
    predicted = task.predict(images, order)
    assert predicted.shape == (4, 12, 48)
    masked = torch.ones(4, 16).scatter(1, order[:, :4], 0).view(4, 1, 4, 4)
    hidden = masked.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).bool()
    changed = torch.where(hidden, torch.randn(images.shape), images)
    torch.testing.assert_close(task.predict(changed, order), predicted, rtol=0, atol=0)
    assert not torch.allclose(task.predict(torch.where(hidden, images, -images), order), predicted)
    again = torch.cat([order[:, :4], order[:, 4:].flip(1)], dim=1)
    torch.testing.assert_close(task.predict(images, again).flip(1), predicted)
    assert not torch.allclose(predicted[:, 0], predicted[:, 1]), "mask tokens differ only in their places"


def test_a_sample_has_the_same_loss_in_any_company() -> None:
    task = make()
    together = task(*batch(task.model.config))
    alone = [task(*(part[i : i + 1] for part in batch(task.model.config))) for i in range(4)]
    torch.testing.assert_close(torch.stack(alone).mean(), together)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pooling": "gap"},
        {"pooling": "gap", "class_token": True, "norm_after_pooling": True, "registers": 2},
        {"distillation": True, "norm_first": True, "position": "learned2d", "layer_scale": 0.1},
        {"position": "none", "in_channels": 1},
    ],
    ids=str,
)
def test_every_weight_is_trained_with_and_without_recomputation(fields: dict[str, Any]) -> None:
    task = make(**fields)
    randomise(task)
    gradients = []
    for recomputes in (False, True):
        task.model.activation_checkpointing = recomputes
        task.zero_grad()
        task(*batch(task.model.config)).backward()
        gradients.append({name: gradient(parameter) for name, parameter in task.named_parameters()})
    assert all(values.any() for values in gradients[0].values())
    for name, values in gradients[0].items():
        assert torch.equal(values, gradients[1][name]), name


def test_the_decoder_is_drawn_from_the_seed_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = make(), make(), make(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for name, values in one.decoder.named_parameters():
        assert torch.equal(values, same.decoder.state_dict()[name])
        is_drawn = name == "mask_token" or values.ndim == 2
        assert torch.equal(values, other.decoder.state_dict()[name]) is not is_drawn
    weight = make({"decoder_width": 256, "decoder_heads": 4}, width=192).decoder.embed.weight
    assert weight.var().item() == pytest.approx(2 / (256 + 192), rel=0.05)


def test_bfloat16_is_about_the_same() -> None:
    task = make()
    images, pixels, draws = batch(task.model.config)
    full = task(images, pixels, draws)
    half = task.bfloat16()(images.bfloat16(), pixels, draws)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(full.item(), rel=0.02)


@pytest.mark.parametrize(
    ("decoder", "fields", "message"),
    [
        ({}, {"num_classes": 3}, "num_classes is 3"),
        ({}, {"pooling": "map"}, "pooling 'map'; use 0, False, and 'cls' or 'gap'"),
        ({}, {"position": "relative"}, "position is 'relative'"),
        ({}, {"position": "rope"}, "position is 'rope'"),
        ({}, {"position_at": "every_layer"}, "position_at 'every_layer'"),
        ({}, {"axial": True, "pooling": "gap"}, "axial True"),
        ({}, {"stem": (), "patch_size": 8}, "convolutions of a hybrid's stem"),
        ({"mask_fraction": 0.95}, {}, "mask_fraction 0.95 of 16 leaves 0 visible; use a higher resolution"),
        ({}, {"patch_size": 16}, "of 1 leaves 0 visible"),
        ({"mask_fraction": 1e-12}, {}, "of 16 leaves 16 visible"),
        ({}, {"patch_size": 1}, "use normalise false"),
        ({"decoder_heads": 5}, {}, "decoder_width 24 is not a multiple of decoder_heads 5"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    decoder: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(decoder, **fields)


# ------------------------------------------------------------------------------------------------------ costs

COSTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"decoder_depth": 1}, {"pooling": "gap"}),
    ({"mask_fraction": 0.4}, {"norm_first": True, "layer_scale": 0.1, "registers": 3}),
    ({}, {"pooling": "gap", "class_token": True, "norm_after_pooling": True, "in_channels": 1}),
]
LARGER = {"image_size": 64, "width": 32, "mlp_dim": 96, "depth": 3}


@pytest.mark.parametrize(("decoder", "fields"), COSTS, ids=str)
def test_operations_are_those_that_torch_counts(decoder: dict[str, Any], fields: dict[str, Any]) -> None:
    task = make(decoder, **LARGER | fields)
    config = task.model.config
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        task.to("meta").predict(torch.empty(1, config.in_channels, 64, 64), torch.zeros(1, 256, dtype=torch.int64))
    assert compute.forward_flops(config, task.options) == counter.get_total_flops()


def test_the_papers_settings_take_the_calculated_fraction_of_supervised_training() -> None:
    def gain(name: str, depth: int) -> float:
        model = ViTConfig.variant(name, image_size=224)
        return compute.train_flops(model) / compute.train_flops(model, MaeOptions(decoder_depth=depth))

    assert gain("B/16", 8) == pytest.approx(1.80, abs=0.005)
    assert gain("B/16", 1) == pytest.approx(3.4, abs=0.05)
    assert gain("L/16", 8) == pytest.approx(2.97, abs=0.005)
