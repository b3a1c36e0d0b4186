"""timm's checkpoints: parity with timm's own models, round trips, what names imply, hostile files."""

import argparse
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support import timm_models
from tests.support.parity import assert_close, contract_of, gradients_by_our_names, our_outputs, randomise
from tests.support.vits import contract_for, noise
from vit_model import formats
from vit_model.config import ViTConfig
from vit_model.contract import Preprocessing
from vit_model.formats import timm as ours_of_timm
from vit_model.formats.timm_architecture import conventions
from vit_model.model import ViT

SIDE = 32
SIZES = {
    "img_size": SIDE,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 1.5,
    "num_classes": 5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_base_patch16_224", {}),
    "no head": ("vit_base_patch16_224", {"num_classes": 0}),
    "no qkv bias": ("vit_base_patch16_224_miil", {}),
    "fc_norm": ("eva_large_patch14_196", {}),
    "gap": ("vit_medium_patch16_gap_240", {"qkv_bias": True}),
    "dinov2": ("vit_base_patch14_dinov2", {"num_classes": 0}),
    "dinov2 registers": ("vit_base_patch14_reg4_dinov2", {}),
    "registers with positions": ("vit_so150m_patch16_reg4_gap_256", {"num_heads": 4}),
    "clip": ("vit_base_patch16_clip_quickgelu_224", {}),
    "clip, exact gelu": ("vit_base_patch16_clip_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "siglip, tanh": ("vit_so400m_patch16_siglip_256", {"num_heads": 4}),
    "deit3": ("deit3_base_patch16_224", {}),
    "deit distilled": ("deit_base_distilled_patch16_224", {}),
    "no positions": ("vit_base_patch16_224", {"pos_embed": "none"}),
    "map over registers": ("test_vit3", {"num_heads": 4}),
}
PIXELS = {
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "interpolation": "bicubic",
    "crop_pct": 0.8,
    "crop_mode": "center",
    "license": "cc-by-4.0",
}


def theirs_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A small model of timm's, and the config.json that its hub would have for it."""
    architecture, changes = MODELS[name]
    arguments = SIZES | changes
    model = randomise(timm_models.load().create_model(architecture, **arguments))
    given = {key: value for key, value in arguments.items() if key != "num_classes"}
    cfg = PIXELS | {"input_size": [3, SIDE, SIDE]}
    config = {
        "architecture": architecture,
        "num_classes": model.num_classes,
        "model_args": given,
        "pretrained_cfg": cfg,
    }
    if architecture == "test_vit3":  # known to timm's own tests alone
        config |= {
            "architecture": "vit_base_patch16_224",
            "model_args": given | {"pool_include_prefix": True},
        }
    return model, config


def save(config: dict[str, Any], model: nn.Module, folder: Path) -> None:
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 40)], ids=["native", "resized"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_timms(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    theirs, config = theirs_of(name)
    save(config, theirs, tmp_path / "model")
    imported = formats.read(tmp_path / "model")
    images = noise(2, 3, *size, seed=3).double()
    if size != (SIDE, SIDE):
        from timm.layers import resample_abs_pos_embed

        # timm's set_input_size makes a new parameter; here the gradient goes through to the old one.
        table = theirs.double().pos_embed
        before = 0 if theirs.no_embed_class else theirs.num_prefix_tokens
        theirs.patch_embed.set_input_size(size)
        if table is not None:
            del theirs.pos_embed
            theirs.pos_embed = resample_abs_pos_embed(table, [6, 5], [4, 4], before)
    expected = theirs.double()(images)
    got, weights = our_outputs(imported, images)
    assert_close({"logits": got.detach()}, {"logits": expected.detach()})
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * probe).sum().backward()
    (got * probe).sum().backward()
    if size != (SIDE, SIDE) and table is not None:
        del theirs.pos_embed
        theirs.pos_embed = table
        theirs.patch_embed.set_input_size((SIDE, SIDE))
    ours = {key: tensor.grad for key, tensor in weights.items() if tensor.grad is not None}
    them = gradients_by_our_names(theirs, functools.partial(save, config), formats.read, tmp_path / "gradients")
    if name in ("registers with positions", "map over registers"):
        # of a sum of two weights: the same for each, twice when read
        del ours["reg_token"], them["reg_token"]
    if name == "no qkv bias":
        ours = {key: tensor for key, tensor in ours.items() if not key.endswith("qkv.bias")}
        them = {key: tensor for key, tensor in them.items() if not key.endswith("qkv.bias")}
    assert_close(ours, them)


@pytest.mark.parametrize("name", MODELS)
def test_what_we_write_timm_loads_strictly_and_we_read_again(tmp_path: Path, name: str) -> None:
    theirs, config = theirs_of(name)
    save(
        config | {"label_names": [f"Größe {index}" for index in range(theirs.num_classes)]},
        theirs,
        tmp_path / "model",
    )
    imported = formats.read(tmp_path / "model")
    assert imported.class_names == tuple(f"Größe {index}" for index in range(theirs.num_classes))
    assert imported.preprocessing == Preprocessing(
        mean=(0.1, 0.2, 0.3),
        std=(0.4, 0.5, 0.6),
        interpolation="bicubic",
        crop="center",
        crop_fraction=0.8,
        resolution=SIDE,
        channels=3,
    )
    model = ViT(imported.architecture)
    model.load_state_dict(imported.weights)
    ours_of_timm.write(tmp_path / "ours", model, contract_of(imported))
    again = formats.read(tmp_path / "ours")
    same = {"layer_scale": imported.architecture.layer_scale}
    assert again.architecture == imported.architecture.model_copy(update=same)
    assert (again.preprocessing, again.class_names, again.license) == (
        imported.preprocessing,
        imported.class_names,
        "cc-by-4.0",
    )
    torch.testing.assert_close(again.weights, imported.weights, rtol=0, atol=0)
    loaded = timm_models.load().create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    images = noise(2, 3, SIDE, SIDE, seed=3)
    with torch.no_grad():
        assert_close({"logits": loaded(images)}, {"logits": theirs(images)})
    data = timm_models.load().data.resolve_model_data_config(loaded)
    assert (tuple(data["mean"]), data["crop_pct"], data["input_size"]) == (
        (0.1, 0.2, 0.3),
        0.8,
        (3, SIDE, SIDE),
    )


def test_names_mean_what_timm_builds_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that timm has: heads, GELU and eps are as its entry point says, or the name is not read."""
    from timm.models import deit, vision_transformer

    built: dict[str, dict[str, Any]] = {}
    for module, creator in ((vision_transformer, "_create_vision_transformer"), (deit, "_create_deit")):
        monkeypatch.setattr(
            module, creator, lambda variant, pretrained=False, **fields: built.update({variant: fields})
        )
    plain = timm_models.load().list_models(module="vision_transformer") + timm_models.load().list_models(module="deit")
    for name in plain:
        timm_models.load().models.model_entrypoint(name)()
    read = 0
    for name in timm_models.load().list_models():
        fields = built.get(name)
        if (
            fields is None
            or set(fields) & {"block_fn", "attn_layer", "mlp_layer", "scale_attn_norm"}
            or "test_" in name
        ):
            with pytest.raises(ValueError, match="is not supported"):
                conventions(name, 768)
        elif fields.get("final_norm", True):
            norm = fields.get("norm_layer")
            eps = norm.keywords["eps"] if norm else 1e-6
            expected = (fields["num_heads"], fields.get("act_layer", "gelu"), eps)
            assert conventions(f"{name}.some_training", fields["embed_dim"]) == expected, name
            read += 1
    assert read > 100


def bare(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with heads of 64 channels, and its state dict."""
    architecture, more = MODELS[name]
    sizes = SIZES | {"embed_dim": 64, "num_heads": 1} | more | changes
    model = randomise(timm_models.load().create_model(architecture, **sizes))
    return model, {key: tensor.contiguous() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("safetensors", name) for name in ("no head", "fc_norm", "gap", "dinov2 registers", "siglip", "deit3")),
        *((form, "deit distilled") for form in ("safetensors", "zip", "pickle", "model.pth")),
    ],
)
def test_a_state_dict_alone_is_read_by_its_shapes(tmp_path: Path, name: str, form: str) -> None:
    theirs, tensors = bare(name)
    path = tmp_path / "weights"  # what it is, its bytes say
    if form == "safetensors":
        save_file(tensors, path)
    elif form == "model.pth":  # as DeiT's authors publish theirs
        torch.save({"model": {f"module.{key}": tensor for key, tensor in tensors.items()}, "epoch": 3}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=form == "zip")
    read = formats.read(path)
    assert read.preprocessing is None
    assert any("assumed, because the file does not say" in line for line in read.lines)
    images = noise(2, 3, SIDE, SIDE, seed=3)
    assert_close({"logits": our_outputs(read, images)[0].detach()}, {"logits": theirs(images).detach()})


@pytest.mark.parametrize("keys", [("state_dict", "state_dict_ema"), ("model", "model_ema")])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod.", "model.", "model._orig_mod."])
def test_of_a_trainings_checkpoint_the_averages_are_taken_unless_told_otherwise(
    tmp_path: Path, keys: tuple[str, str], prefix: str
) -> None:
    _, tensors = bare("vit")
    raw, averaged = ({f"{prefix}{key}": tensor + add for key, tensor in tensors.items()} for add in (0, 1))
    torch.save({keys[0]: raw, keys[1]: averaged, "epoch": 3}, tmp_path / "both.pt")
    for averages, add, taken, other in ((True, 1, *keys[::-1]), (False, 0, *keys)):
        read = formats.read(tmp_path / "both.pt", averages)
        assert torch.equal(read.weights["norm.weight"], tensors["norm.weight"] + add)
        [line] = [line for line in read.lines if line.startswith(f"weights: {taken}, ")]
        assert line.endswith(f"; the file also has {other}.")
    torch.save({keys[1]: averaged}, tmp_path / "averages.pt")
    assert any("the moving averages." in line for line in formats.read(tmp_path / "averages.pt", False).lines)
    twice = {"model.norm.weight": tensors["norm.weight"]} | tensors
    torch.save(twice, tmp_path / "twice.pt")
    with pytest.raises(ValueError, match="duplicate tensor names"):
        formats.read(tmp_path / "twice.pt")
    torch.save({keys[0]: raw, "args": argparse.Namespace(lr=1)}, tmp_path / "arguments.pt")
    with pytest.raises(ValueError, match=r"refers to argparse.Namespace, .* torch.save\(torch.load\("):
        formats.read(tmp_path / "arguments.pt")


def test_the_authors_own_names_of_dinov2_deit3_and_mae_are_read(tmp_path: Path) -> None:
    theirs, tensors = bare("dinov2 registers")
    # Meta's file: registers without a position, the class token with one, a token for masked patches
    table, cls = tensors.pop("pos_embed"), tensors["cls_token"]
    first = torch.randn(1, 1, 64)
    tensors |= {"pos_embed": torch.cat([first, table], dim=1), "cls_token": cls - first}
    tensors |= {"register_tokens": tensors.pop("reg_token"), "mask_token": torch.zeros(1, 64)}
    tensors = {re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key): tensor for key, tensor in tensors.items()}
    save_file(tensors | {"decoder_embed.weight": torch.zeros(3, 64)}, tmp_path / "weights")
    read = formats.read(tmp_path / "weights")
    assert read.architecture.registers == 4
    assert read.architecture.class_position
    assert "weights: dropped decoder_embed.weight, mask_token." in read.lines
    images = noise(2, 3, SIDE, SIDE, seed=3)
    assert_close({"logits": our_outputs(read, images)[0].detach()}, {"logits": theirs(images).detach()})


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("vit_giant_patch14_dinov2", "SwiGLU"),
        ("vit_base_patch16_xp_224", "norms of queries and keys|parallel blocks"),
        ("vit_base_patch16_18x2_224", "parallel blocks"),
        ("vit_base_patch16_clip_224", "norm_pre means CLIP"),
        ("vit_base_patch16_dinov3", "."),
        ("vit_intern300m_patch14_448", r"missing tensors for this architecture: norm\.bias, norm\.weight"),
    ],
)
def test_what_we_have_not_is_refused_by_its_name(tmp_path: Path, architecture: str, message: str) -> None:
    model = timm_models.load().create_model(
        architecture, img_size=28, patch_size=14, embed_dim=64, depth=1, num_heads=1, mlp_ratio=2.0
    )
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, tmp_path / "weights")
    with pytest.raises(ValueError, match=message):
        formats.read(tmp_path / "weights")


def test_what_timm_has_not_is_not_written(tmp_path: Path) -> None:
    theirs, config = theirs_of("vit")
    save(config, theirs, tmp_path / "model")
    read = formats.read(tmp_path / "model")
    for fields, message in (
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps 1e-12"),
        ({"position": "sincos2d"}, "position 'sincos2d'"),
        ({"representation_head": True}, "representation_head true"),
        ({"norm_first": True}, "patch_bias without norm_first"),
        ({"registers": 2, "distillation": True}, "distillation with registers"),
    ):
        changed = read.architecture.model_validate(read.architecture.model_dump() | fields)
        contract = contract_of(read._replace(architecture=changed))
        with pytest.raises(ValueError, match=f"timm's VisionTransformer does not support .*{message}"):
            ours_of_timm.write(tmp_path / "x", ViT(changed), contract)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": None}, "mean and std are missing"),
        ({"crop_mode": "border"}, "crop_mode 'border'"),
        ({"interpolation": "lanczos"}, "interpolation 'lanczos'"),
    ],
)
def test_preprocessing_that_cannot_be_said_is_none_and_the_reason_is(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    theirs, config = theirs_of("vit")
    pixels = {key: value for key, value in (config["pretrained_cfg"] | change).items() if value is not None}
    save(config | {"pretrained_cfg": pixels}, theirs, tmp_path / "model")
    read = formats.read(tmp_path / "model")
    assert read.preprocessing is None
    assert any(message in line for line in read.lines)


OURS: dict[str, dict[str, Any]] = {
    "registers beside a class token with a position": {"registers": 3, "layer_scale": 0.1, "num_classes": 3},
    "registers beside one without": {"registers": 3, "class_position": False},
    "map over all tokens": {"pooling": "map", "class_token": True, "registers": 2, "num_classes": 3},
    "mean of patches, norm after": {
        "pooling": "gap",
        "norm_after_pooling": True,
        "class_token": True,
        "num_classes": 3,
    },
    "mean of patches, norm before": {"pooling": "gap", "num_classes": 3},
    "pre-norm": {
        "norm_first": True,
        "patch_bias": False,
        "gelu": "quick",
        "layer_norm_eps": 1e-5,
        "num_classes": 3,
    },
    "distilled": {"distillation": True, "num_classes": 3},
    "oblong, one channel": {"image_size": (16, 24), "in_channels": 1, "mlp_dim": 37},
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_architectures_compute_the_same_in_timm(tmp_path: Path, name: str) -> None:
    sizes = {"image_size": 16, "patch_size": 8, "width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 40}
    config = ViTConfig(**sizes | OURS[name])
    model = randomise(ViT(config))
    assert isinstance(model, ViT)
    contract = contract_for(config, std=(0.25,) * config.in_channels)
    ours_of_timm.write(tmp_path / "model", model, contract)
    loaded = timm_models.load().create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    images = torch.randn(2, config.in_channels, *config.image_shape)
    with torch.no_grad():
        assert_close({"output": loaded(images)}, {"output": model(images)})
    again = formats.read(tmp_path / "model")
    same = {"position_resize": again.architecture.position_resize}
    assert again.architecture == config.model_copy(update=same)
    assert again.class_names == contract.class_names
    assert again.preprocessing == (None if "oblong" in name else contract.preprocessing)
    torch.testing.assert_close(again.weights, {**model.state_dict()}, rtol=0, atol=0)
