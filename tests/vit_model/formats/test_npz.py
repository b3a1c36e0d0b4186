"""Google's .npz: numpy computes our logits from our file, and every kind of their files is read.

Run: pytest tests/vit_model/formats.
"""

import io
import math
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support import google_numpy, timm_models, vits
from tests.support.vits import contract_for, random_images, randomised
from vit_model.config import ResNetConfig, ViTConfig
from vit_model.formats import Imported, npz
from vit_model.model import ViT
from vit_model.preprocessing import normalise

Arrays = dict[str, NDArray[Any]]
SMALL = vits.SMALL | {"width": 16, "depth": 2, "mlp_dim": 24}
KINDS: dict[str, dict[str, Any]] = {
    "fine-tuned": {},
    "pre-trained, with the tanh layer": {"representation_head": True},
    "no head": {"num_classes": 0},
    "gap": {"pooling": "gap"},
    "one channel": {"in_channels": 1},
    "MAP head": {"pooling": "map"},
    "class token without a position": {"class_token": True, "class_position": False},
    "hybrid": {"stem": (1, 2), "patch_size": 8, "image_size": 24},
    "hybrid without stages": {"stem": (), "patch_size": 8, "image_size": 24},
    "sincos2d": {"position": "sincos2d", "pooling": "gap", "image_size": 224, "patch_size": 56},
}


def configuration(**fields: Any) -> ViTConfig:
    return ViTConfig.model_validate(SMALL | fields)


def written(path: Path, **fields: Any) -> ViT:
    """A model whose file is at `path`."""
    model = randomised(configuration(**fields)).eval()
    npz.write(path, model, contract_for(model.config))
    return model


def rebuilt(imported: Imported) -> ViT:
    """strict: exactly the architecture's tensors."""
    model = ViT(imported.architecture).eval()
    model.load_state_dict(imported.weights, strict=True)
    return model


def load(path: Path) -> Arrays:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def save(path: Path, arrays: Arrays) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def difference(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sincos2d"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@torch.no_grad()
def test_numpy_computes_our_logits_from_the_file(
    tmp_path: Path, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    model = written(tmp_path / "model.npz", **KINDS[kind])
    images = random_images(model.config).to(dtype)
    theirs = google_numpy.forward(tmp_path / "model.npz", images.permute(0, 2, 3, 1).numpy())
    assert difference(model.to(dtype)(images).numpy(), theirs) < tolerance


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("fine-tuned", {}),
        ("MAP head", {"global_pool": "map", "class_token": False}),
        ("class token without a position", {"no_embed_class": True}),
    ],
)
@torch.no_grad()
def test_timm_computes_our_logits_from_the_file(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    timm_models.load()
    from timm.models.vision_transformer import VisionTransformer

    model = written(tmp_path / "model.npz", **KINDS[kind])
    theirs = VisionTransformer(
        img_size=12,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=4,
        mlp_ratio=1.5,
        num_classes=7,
        act_layer=partial(torch.nn.GELU, approximate="tanh"),
        **fields,
    ).eval()
    theirs.load_pretrained(str(tmp_path / "model.npz"))
    images = random_images(model.config)
    assert difference(model(images).numpy(), theirs(images).numpy()) < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_bit_as_timm_reads_it_and_back(tmp_path: Path) -> None:
    timm_models.load()
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    config = ResNetConfig(units=(2, 1), width_factor=2, image_size=224, num_classes=7)
    model = randomised(config).eval()
    path = tmp_path / "model.npz"
    lines = npz.write(path, model, contract_for(config))
    assert lines[0] == "image_size: 224 is not in the file"
    assert lines[1].startswith("root pool: exact for big_transfer's bit_pytorch and timm"), "and not big_vision"
    theirs = ResNetV2(
        layers=(2, 1),
        channels=(256, 512),
        num_classes=7,
        width_factor=2,
        stem_type="fixed",
        conv_layer=StdConv2d,
    ).eval()
    theirs.load_pretrained(str(path))
    images = random_images(config)
    assert difference(model(images).numpy(), theirs(images).numpy()) < 1e-5
    imported = npz.read(path)
    assert imported.architecture == config
    assert imported.preprocessing == contract_for(config).preprocessing
    torch.testing.assert_close(imported.weights, {**model.state_dict()}, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_keeps_every_bit(tmp_path: Path, kind: str) -> None:
    model = written(tmp_path / "model.npz", **KINDS[kind])
    imported = npz.read(tmp_path / "model.npz")
    assert imported.architecture == model.config
    assert imported.preprocessing == contract_for(model.config).preprocessing
    assert imported.class_names == tuple(map(str, range(model.config.num_classes)))
    torch.testing.assert_close(imported.weights, {**model.state_dict()}, rtol=0, atol=0)
    npz.write(tmp_path / "again.npz", rebuilt(imported), contract_for(model.config))
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "model.npz").read_bytes()


def big_vision(arrays: Arrays) -> Arrays:
    """The same model as big_vision names and stores it: a class token takes its position with it (trap 17)."""
    newer = {"MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0"}
    newer |= {"LayerNorm_2": "LayerNorm_1", "MlpBlock_3": "MlpBlock_0"}
    out = {re.sub("|".join(newer), lambda match: newer[match[0]], name): a for name, a in arrays.items()}
    positions = out.pop("Transformer/posembed_input/pos_embedding")
    if "cls" in out:
        out["cls"] = out["cls"] + positions[:, :1]
        positions = positions[:, 1:]
    out["pos_embedding"] = positions
    return out


def scanned(arrays: Arrays) -> Arrays:
    """All layers in one array, as big_vision keeps them where it loops over them by lax.scan."""
    first = "Transformer/encoderblock_0/"
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in arrays:
        if name.startswith(first):
            inner = name.removeprefix(first)
            layers = [arrays[f"Transformer/encoderblock_{layer}/{inner}"] for layer in range(2)]
            stacked[f"Transformer/encoderblock/{inner}"] = np.stack(layers)
    return stacked


@pytest.mark.parametrize("kind", ["fine-tuned", "pre-trained, with the tanh layer", "gap"])
@torch.no_grad()
def test_big_visions_files_are_the_same_function(tmp_path: Path, kind: str) -> None:
    model = written(tmp_path / "model.npz", **KINDS[kind])
    arrays = big_vision(load(tmp_path / "model.npz"))
    save(tmp_path / "new.npz", arrays)
    save(tmp_path / "scan.npz", {f"params/{name}": array for name, array in scanned(arrays).items()})
    images = random_images(model.config)
    expected = google_numpy.forward(tmp_path / "new.npz", images.permute(0, 2, 3, 1).numpy())
    assert difference(model(images).numpy(), expected) < 1e-5
    for name in ("new.npz", "scan.npz"):
        imported = npz.read(tmp_path / name)
        assert not imported.architecture.class_position
        assert difference(rebuilt(imported)(images).numpy(), expected) < 1e-5


def test_training_checkpoints_and_image_towers_are_read(tmp_path: Path) -> None:
    model = written(tmp_path / "model.npz", pooling="map")
    arrays = load(tmp_path / "model.npz")
    optimizer = {f"opt/state/{name}": np.zeros(2) for name in arrays}
    save(tmp_path / "training.npz", {f"opt/target/{name}": array for name, array in arrays.items()} | optimizer)
    imported = npz.read(tmp_path / "training.npz")
    assert imported.architecture == model.config
    assert any(f"{len(arrays)} arrays outside opt/target/" in line for line in imported.lines)

    towers = {f"params/img/{name}": array for name, array in arrays.items()} | {"params/t": np.ones(1)}
    save(tmp_path / "towers.npz", towers)
    tower = npz.read(tmp_path / "towers.npz")
    assert tower.architecture.num_classes == 0
    assert tower.class_names == ()
    assert any(line.startswith("head: dropped") for line in tower.lines)
    for name, tensor in tower.weights.items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_half_precision_and_compression_are_read(tmp_path: Path) -> None:
    written(tmp_path / "model.npz")
    arrays = load(tmp_path / "model.npz")
    full = npz.read(tmp_path / "model.npz").weights

    def as_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
        bits = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy()
        return bits.view("V2")  # what numpy makes of it

    np.savez_compressed(tmp_path / "b.npz", **{name: as_bfloat16(array) for name, array in arrays.items()})
    np.savez_compressed(tmp_path / "h.npz", **{name: array.astype("f2") for name, array in arrays.items()})
    for file, dtype in (("b.npz", torch.bfloat16), ("h.npz", torch.float16)):
        imported = npz.read(tmp_path / file)
        assert f"converted {len(arrays)} arrays of half precision to float32" in imported.lines
        for name, tensor in imported.weights.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, full[name].to(dtype).float()), name


def test_group_norms_of_older_files_are_squeezed(tmp_path: Path) -> None:
    model = written(tmp_path / "model.npz", **KINDS["hybrid"])
    arrays = load(tmp_path / "model.npz")
    wide = {name: a[None, None, None] if "gn" in name else a for name, a in arrays.items()}
    assert wide["block1/unit1/gn_proj/scale"].shape == (1, 1, 1, 256)
    save(tmp_path / "wide.npz", wide)
    weights = npz.read(tmp_path / "wide.npz").weights
    torch.testing.assert_close(weights, {**model.state_dict()}, rtol=0, atol=0)


def test_pixels_are_brought_to_minus_one_and_one(tmp_path: Path) -> None:
    """Trap 15."""
    written(tmp_path / "model.npz")
    imported = npz.read(tmp_path / "model.npz")
    assert imported.preprocessing is not None
    pixels = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(1, 256, 1, 3)
    normalised = normalise(pixels, imported.preprocessing, torch.float32)
    assert torch.allclose(normalised.permute(0, 2, 3, 1), pixels / 127.5 - 1, atol=1e-6)
    assert (imported.preprocessing.interpolation, imported.preprocessing.crop) == ("bilinear", "squash")
    assert "preprocessing as in Google's code: mean and std 0.5, bilinear, squashed to 12 x 12" in imported.lines


def test_heads_that_cannot_classify_are_said(tmp_path: Path) -> None:
    """Trap 24."""
    written(tmp_path / "model.npz")
    assert not any("head:" in line for line in npz.read(tmp_path / "model.npz").lines)
    arrays = load(tmp_path / "model.npz")
    save(tmp_path / "zero.npz", arrays | {"head/kernel": np.zeros_like(arrays["head/kernel"])})
    assert any(line.startswith("head: its kernel is zero") for line in npz.read(tmp_path / "zero.npz").lines)
    written(tmp_path / "none.npz", num_classes=0)
    assert any(line.startswith("head: none in the file") for line in npz.read(tmp_path / "none.npz").lines)


UNSAYABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gelu": "exact"}, {}, "gelu 'exact' cannot be stored in Google's .npz, which implies 'tanh'"),
    ({"layer_norm_eps": 1e-12}, {}, "layer_norm_eps 1e-12 cannot be stored"),
    ({"registers": 2}, {}, "registers 2"),
    ({"layer_scale": 0.1}, {}, "layer_scale 0.1"),
    ({"pooling": "gap", "class_token": True}, {}, "class_token True"),
    ({"pooling": "gap", "norm_after_pooling": True}, {}, "norm_after_pooling True"),
    ({"pooling": "gap", "axial": True}, {}, "axial True"),
    ({"position": "none"}, {}, "position 'none'"),
    ({"position": "learned2d"}, {}, "position 'learned2d'"),
    ({"position": "sincos2d"}, {}, "image_size 12 cannot be stored in Google's .npz; 224 can"),
    ({}, {"mean": (0.4, 0.5, 0.6)}, r"preprocessing has mean \(0.4, 0.5, 0.6\)"),
    ({}, {"std": (0.2, 0.2, 0.2)}, r"std \(0.2, 0.2, 0.2\)"),
]


@pytest.mark.parametrize(("fields", "preprocessing", "message"), UNSAYABLE, ids=[case[2] for case in UNSAYABLE])
def test_what_readers_would_take_for_another_model_is_not_written(
    tmp_path: Path, fields: dict[str, Any], preprocessing: dict[str, Any], message: str
) -> None:
    model = ViT(configuration(**fields))
    with pytest.raises(ValueError, match=message):
        npz.write(tmp_path / "model.npz", model, contract_for(model.config, **preprocessing))
    assert not list(tmp_path.iterdir())


def test_writing_says_what_the_file_cannot(tmp_path: Path) -> None:
    config = configuration()
    lines = npz.write(tmp_path / "model.npz", ViT(config), contract_for(config, crop="center"))
    assert [line.split(":")[0] for line in lines] == ["preprocessing", "class_names"]


# -- files that lie


def changed(**changes: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Path], None]:
    """Replace arrays, by the last part of their names."""

    def damage(path: Path) -> None:
        arrays = load(path)
        for name in list(arrays):
            if change := changes.get(name.replace("/", "_")):
                arrays[name] = change(arrays[name])
        save(path, arrays)

    return damage


def with_array(name: str, array: NDArray[Any]) -> Callable[[Path], None]:
    return lambda path: save(path, load(path) | {name: array})


def without(name: str) -> Callable[[Path], None]:
    return lambda path: save(path, {key: array for key, array in load(path).items() if not key.startswith(name)})


def npy(shape: tuple[int, ...], data: bytes, descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


def with_member(name: str, content: bytes, **claims: int) -> Callable[[Path], None]:
    """Replace a member by these bytes, and let the table of contents claim something else about it."""

    def damage(path: Path) -> None:
        with zipfile.ZipFile(path) as old:
            members = {info.filename: old.read(info) for info in old.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for other, stored in (members | {name: content}).items():
                new.writestr(other, stored)
            for field, value in claims.items():
                setattr(new.getinfo(name), field, value)

    return damage


def with_objects(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return open, (str(path.parent / "executed"),)

    np.savez(path, allow_pickle=True, **load(path), evil=np.array([Trap()], dtype=object))


def giant_directory(path: Path) -> None:
    """A table of contents as long as the file's largest number."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\5\6")
    content[at + 12 : at + 16] = struct.pack("<I", 2**31)
    path.write_bytes(bytes(2**31 // 2**20) + bytes(content))


def many_members(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(1100):
            archive.writestr(f"{index:04000}", b"")


def flipped(flag: int) -> Callable[[Path], None]:
    """Set a bit in the flags of every member, in both headers."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            at = content.find(signature)
            while at >= 0:
                content[at + offset] |= flag
                at = content.find(signature, at + 4)
        path.write_bytes(bytes(content))

    return damage


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("cls.npy", npy((1, 1, 16), bytes(64)))


KERNEL = "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel.npy"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "one array": (lambda path: path.write_bytes(npy((2**50,), bytes(8))), "not a zip archive"),
    "another model": (lambda path: save(path, {"w": np.ones(3)}), "no array 'embedding/kernel'.*it has 'w'"),
    "objects": (with_objects, "array 'evil.npy' holds object"),
    "doubles": (
        with_array("cls", np.zeros((1, 1, 16))),
        "array 'cls.npy' holds float64; float32, float16 and bfloat16",
    ),
    "NaN": (changed(cls=lambda array: array * math.nan), "'cls_token' holds NaN"),
    "a gap in the blocks": (
        without("Transformer/encoderblock_0/"),
        "missing array 'Transformer/encoderblock_0/",
    ),
    "a text tower": (
        with_array("txt/head/bias", np.ones(2, "f4")),
        "unexpected tensors for this architecture: txt",
    ),
    "two names of a layer": (with_array("pos_embedding", np.ones((1, 9, 16), "f4")), "are the same layer"),
    "not square": (
        changed(Transformer_posembed_input_pos_embedding=lambda a: a[:, :7]),
        "has 7 entries; expected a square of patches, with or without the class token",
    ),
    "oblong patches": (
        changed(embedding_kernel=lambda array: array[:2]),
        "patches are 2 x 4; they must be square",
    ),
    "a flat kernel": (
        changed(embedding_kernel=lambda array: array[0]),
        r"'embedding/kernel' is \[4, 3, 16\]",
    ),
    "another width": (changed(cls=lambda array: array[..., :8]), r"cls \[1, 1, 8\] instead of \[1, 1, 16\]"),
    "wide resnet": (with_array("conv_root/kernel", np.ones((7, 7, 3, 128), "f4")), "missing tensors"),
    "five stages": (with_array("block9/unit1/conv1/kernel", np.ones((1, 1, 1, 1), "f4")), r"stages \[9\]"),
    "endless layers": (
        with_array("Transformer/encoderblock/x", np.ones(2000, "f4")),
        "stacks 2000 layers; the limit is 1000",
    ),
    "more than claimed": (with_member(KERNEL, npy((16, 24), bytes(16 * 24 * 4 + 1))), "which does not match"),
    "deep header": (with_member(KERNEL, b"\x93NUMPY\1\0\x90\1" + b"(" * 400), "is not a readable checkpoint"),
    "a long second header": (
        with_member(KERNEL, b"\x93NUMPY\2\0\xff\xff\xff\x7f" + bytes(9000)),
        "is not a readable checkpoint",
    ),
    "version 3": (with_member(KERNEL, b"\x93NUMPY\3\0" + npy((16, 24), b"")[8:]), r"version \(3, 0\)"),
    "negative sides": (
        with_member(KERNEL, npy((-16, -24), bytes(16 * 24 * 4))),
        "every side must be positive",
    ),
    "a petabyte": (with_member(KERNEL, npy((2**40, 2**10), b""), file_size=2**52), "its arrays claim"),
    "half a gigabyte that is not there": (
        with_member(KERNEL, npy((2**17, 1024), b""), file_size=128 + 2**29),
        "instead of",
    ),
    "another sum": (with_member(KERNEL, npy((16, 24), bytes(16 * 24 * 4)), CRC=7), "Bad CRC-32"),
    "encrypted": (flipped(1), "encrypted"),
    "giant table of contents": (giant_directory, "not a readable checkpoint"),
    "many members": (many_members, "its table of contents claims"),
    "a name twice": (twice, "two arrays with the same name"),
    "heads that don't divide": (
        lambda path: save(
            path,
            {
                name: np.ones((16, 3, 5), "f4") if name.endswith("query/kernel") else array
                for name, array in load(path).items()
            },
        ),
        "width 16 is not a multiple of num_heads 3",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_files_are_refused_without_memory_for_their_claims(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "model.npz"
    written(path)
    damage(path)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            npz.read(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] in ([], ["model.npz"])


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    written(path)
    content = path.read_bytes()
    for length in range(0, len(content), 499):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"model\.npz"):
            npz.read(path)


def test_flipped_bytes_are_refused_or_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    model = written(path)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    # The table of contents is a small part of a file, and the part that is read first.
    places = [*generator.integers(len(content), size=50), *range(content.index(b"PK\1\2"), len(content), 67)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.integers(8)
        path.write_bytes(bytes(damaged))
        try:
            weights = npz.read(path).weights
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert refused > 50
