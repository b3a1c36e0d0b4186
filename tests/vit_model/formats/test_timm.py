"""timm's checkpoints: parity with timm's own models, round trips, what names imply, hostile files."""

import functools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.vit_model.formats.parity import assert_close, gradients_by_our_names, our_outputs, randomise
from vit_model import formats
from vit_model.config import ModelContract, Preprocessing, ViTConfig
from vit_model.formats import Imported
from vit_model.formats import timm as ours_of_timm
from vit_model.model import ViT


class _Anything(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Absent(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


def import_timm() -> Any:
    """timm, which imports torchvision for its data loaders and for one class of batch norm.

    torchvision's compiled operators must match torch to the digit, which they often don't, and no ViT needs them.
    So empty modules stand in for it while timm is imported, and are gone afterwards: nobody else sees them.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        names = ["torchvision"]
        names += [f"torchvision.{name}" for name in ("datasets", "ops", "ops.misc", "transforms")]
        names += ["torchvision.transforms.functional"]
        for name in names:
            sys.modules[name] = _Absent(name)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, sys.modules[name])
        try:
            return pytest.importorskip("timm")
        finally:
            for name in names:
                del sys.modules[name]
    return pytest.importorskip("timm")


timm = import_timm()

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
    model = randomise(timm.create_model(architecture, **arguments))
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
    save_file(
        {key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def images_of(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3))


def contract_of(imported: Imported) -> ModelContract:
    assert imported.preprocessing is not None
    return ModelContract(
        architecture=imported.architecture,
        class_names=imported.class_names,
        preprocessing=imported.preprocessing,
        training_data="sha256:" + "0" * 64,
        license=imported.license,
    )


@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 40)], ids=["native", "resized"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_timms(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    theirs, config = theirs_of(name)
    save(config, theirs, tmp_path / "model")
    imported = formats.read(tmp_path / "model")
    images = images_of(*size)
    if size != (SIDE, SIDE):
        from timm.layers import resample_abs_pos_embed

        # timm's set_input_size makes a new parameter; here the gradient goes through to the old one.
        table = theirs.pos_embed
        before = 0 if theirs.no_embed_class else theirs.num_prefix_tokens
        theirs.patch_embed.set_input_size(size)
        if table is not None:
            del theirs.pos_embed
            theirs.pos_embed = resample_abs_pos_embed(table, [6, 5], [4, 4], before)
    expected = theirs(images)
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
    them = gradients_by_our_names(
        theirs, functools.partial(save, config), formats.read, tmp_path / "gradients"
    )
    if name == "registers with positions":
        del (
            ours["reg_token"],
            them["reg_token"],
        )  # of a sum of two weights: the same for each, twice when read
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
    assert again.weights.keys() == imported.weights.keys()
    for key, tensor in imported.weights.items():
        assert torch.equal(again.weights[key], tensor), key
    loaded = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval()
    images = images_of(SIDE, SIDE)
    with torch.no_grad():
        assert_close({"logits": loaded(images)}, {"logits": theirs(images)})
    data = timm.data.resolve_model_data_config(loaded)
    assert (tuple(data["mean"]), data["crop_pct"], data["input_size"]) == ((0.1, 0.2, 0.3), 0.8, (3, SIDE, SIDE))
