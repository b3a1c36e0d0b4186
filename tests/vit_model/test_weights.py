"""Weight files: the round trip, files that lie, transfer of a backbone. Run: pytest tests/vit_model."""

import errno
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import vits
from tests.support.vits import randomised
from vit_model.blocks import resize_position_embedding
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.weights import load_model, save_model, transfer_backbone

CONFIG = ViTConfig(**vits.TINY | {"patch_size": 2, "mlp_dim": 24}, in_channels=1, num_classes=3)


def changed(**fields: Any) -> ViTConfig:
    return ViTConfig.model_validate(CONFIG.model_dump() | fields)


def contract_for(config: ViTConfig) -> ModelContract:
    names = [f"Größe {index}" for index in range(config.num_classes)]
    return vits.contract_for(config, names, "Apache-2.0", mean=(0.1,), std=(0.3,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", randomised(CONFIG), contract_for(CONFIG))
    return tmp_path / "model"


def test_a_file_that_cannot_be_written_is_an_error_of_the_system_with_its_name(tmp_path: Path) -> None:
    """No file may have more than 1,000 bytes; a full disk is another number of the same error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as error:
            save_model(tmp_path, randomised(CONFIG), contract_for(CONFIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize("fields", [{}, {"pooling": "gap", "representation_head": True}, {"num_classes": 0}])
def test_round_trip_keeps_every_bit(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = changed(**fields)
    model = randomised(config)
    save_model(tmp_path, model, contract_for(config))
    loaded, contract = load_model(tmp_path)
    assert contract == contract_for(config)
    assert loaded.config == config
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(images), model.eval()(images))
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_same_weights_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    loaded, contract = load_model(folder)
    save_model(tmp_path / "again", loaded, contract)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert "Größe 0" in (folder / "config.json").read_text(encoding="utf-8")


def test_half_precision_is_stored_as_float32(tmp_path: Path) -> None:
    model = randomised(CONFIG).to(torch.bfloat16)
    save_model(tmp_path, model, contract_for(CONFIG))
    stored = load_file(tmp_path / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())
    assert torch.equal(stored["pos_embed"].to(torch.bfloat16), model.pos_embed)


def test_saving_refuses_another_contract_and_nan(tmp_path: Path) -> None:
    model = randomised(CONFIG)
    with pytest.raises(ValueError, match="contract is for"):
        save_model(tmp_path, model, contract_for(changed(num_classes=4)))
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match=r"weight 'norm\.weight' holds NaN"):
        save_model(tmp_path, model, contract_for(CONFIG))
    assert not list(tmp_path.iterdir())


def rewrite(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A damage that leaves a proper safetensors file with other tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def replace_weights(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(content(path.read_bytes()))

    return damage


def replace_contract(*keys: str, value: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        contract = json.loads(path.read_text(encoding="utf-8"))
        inner = contract
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        path.write_text(json.dumps(contract), encoding="utf-8")

    return damage


def overlapping_tensors(content: bytes) -> bytes:
    """Two tensors that claim the same bytes."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["blocks.0.norm1.bias"]["data_offsets"] = header["blocks.0.norm1.weight"]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    ("no contract", lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (
        "more behind the data",
        replace_weights(lambda content: content + b"\0"),
        "not a complete safetensors file",
    ),
    ("giant header", replace_weights(lambda content: b"\xff" * 8 + content[8:]), "header claims"),
    (
        "header of 17 MiB",
        replace_weights(lambda _: struct.pack("<Q", 17 * 2**20) + b" " * 17 * 2**20),
        "header claims 17825792 bytes, at most 16777216",
    ),
    (
        "a pickle",
        replace_weights(lambda _: b"\x80\x04\x95" + b"\x00" * 60),
        "not a complete safetensors file",
    ),
    ("overlap", replace_weights(overlapping_tensors), "not a complete safetensors file"),
    ("missing tensor", rewrite(lambda tensors: tensors.pop("norm.bias")), r"parameters in 31 tensors"),
    (
        "unknown tensor",
        rewrite(lambda tensors: tensors.update(gamma=tensors.pop("norm.bias"))),
        "missing tensors for this architecture: norm.bias",
    ),
    (
        "wrong shape",
        rewrite(lambda tensors: tensors.update({"norm.bias": tensors["norm.bias"].reshape(4, 4)})),
        r"norm\.bias \[4, 4\] instead of \[16\]",
    ),
    (
        "wrong type",
        rewrite(lambda tensors: tensors.update({"norm.bias": tensors["norm.bias"].half()})),
        "norm.bias is F16; the architecture needs F32",
    ),
    ("NaN", rewrite(lambda tensors: tensors["norm.bias"].fill_(float("nan"))), "'norm.bias' holds NaN"),
    ("contract is no JSON", lambda folder: (folder / "config.json").write_text("{"), "not a model contract"),
    ("not text", lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "not a model contract"),
    (
        "giant contract",
        lambda folder: (folder / "config.json").write_bytes(b" " * (16 * 2**20 + 1)),
        "the limit is",
    ),
    ("unknown key", replace_contract("plugin", value="os.system"), "plugin"),
    ("newer format", replace_contract("format_version", value=2), "format_version"),
    (
        "another depth",
        replace_contract("architecture", "depth", value=3),
        "the architecture in config.json has",
    ),
    (
        "giant width",
        replace_contract("architecture", "mlp_dim", value=10**15),
        "the architecture in config.json has",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damaged_folders_are_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_every_truncation_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (*range(0, len(content), 97), 5, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_model(folder)


def test_transfer_copies_the_encoder_and_leaves_both_heads() -> None:
    source = randomised(changed(representation_head=True, num_classes=713))
    model = ViT(changed(num_classes=10))
    lines = transfer_backbone(model, source)
    for name, tensor in model.state_dict().items():
        if name.startswith("head."):
            assert torch.count_nonzero(tensor) == 0
        else:
            assert torch.equal(tensor, source.state_dict()[name]), name
    assert lines == [
        "pre_logits: the source's tanh layer was dropped",
        "head: the source's 713 classes were dropped",
        "head: newly initialised for 10 classes",
    ]


def test_transfer_never_copies_a_tanh_layer() -> None:
    source, model = randomised(changed(representation_head=True)), ViT(changed(representation_head=True))
    own = model.pre_logits.weight.clone()
    assert "pre_logits: newly initialised" in transfer_backbone(model, source)
    assert torch.equal(model.pre_logits.weight, own)


@pytest.mark.parametrize("fields", [{"representation_head": True}, {"distillation": True}], ids=str)
@pytest.mark.parametrize("classes", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_transfer_keeps_a_classifier_in_the_models_order(fields: dict[str, Any], classes: tuple[int, ...]) -> None:
    """The same image has the same logit for each class, which now has another place."""
    source, model = randomised(changed(**fields, num_classes=3)), ViT(changed(**fields, num_classes=3))
    lines = transfer_backbone(model, source, classes)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.eval()(images), source.eval()(images)[:, list(classes)])
    moved = "" if classes == (0, 1, 2) else ", in the model's order"
    assert lines == [f"head: the source's 3 classes were kept{moved}"]


@pytest.mark.parametrize("class_token", [True, False])
def test_transfer_resizes_positions_to_the_new_grid(class_token: bool) -> None:
    fields = {"pooling": "gap", "class_token": class_token, "class_position": class_token}
    source, model = randomised(changed(**fields)), ViT(changed(**fields, image_size=12))
    lines = transfer_backbone(model, source)
    assert lines[0] == "pos_embed: resized from 4x4 to 6x6 patches"
    resized = resize_position_embedding(source.pos_embed, (4, 4), (6, 6), int(class_token))
    assert torch.equal(model.pos_embed, resized)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"width": 32, "depth": 3},
            "width is 16 in the backbone, 32 in the model, depth is 2 in the backbone, 3 in",
        ),
        ({"patch_size": 4}, "patch_size is 2 in the backbone, 4 in the model"),
        ({"in_channels": 3}, "in_channels is 1 in the backbone, 3 in the model"),
        ({"pooling": "gap"}, "pooling is 'cls' in the backbone, 'gap' in the model"),
        ({"gelu": "exact"}, "gelu is 'tanh' in the backbone, 'exact' in the model"),
    ],
)
def test_transfer_refuses_another_encoder_and_copies_nothing(fields: dict[str, Any], message: str) -> None:
    model = ViT(changed(**fields))
    before = model.pos_embed.clone()
    with pytest.raises(ValueError, match=message):
        transfer_backbone(model, randomised(CONFIG))
    assert torch.equal(model.pos_embed, before)
