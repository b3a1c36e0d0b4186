"""Files that lie: each is one clear ValueError that names it, runs nothing, and takes no memory to speak of."""

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_jobs.evaluation.measuring import resident
from tests.support.parity import randomise
from tests.support.vits import contract_for
from vit_model import formats
from vit_model.config import ViTConfig
from vit_model.formats import hugging_face, timm
from vit_model.model import ViT

CONFIG = ViTConfig(image_size=16, patch_size=8, width=64, depth=2, num_heads=1, mlp_dim=48, num_classes=2, gelu="exact")


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A sound folder, of Hugging Face's or of timm's."""
    model = randomise(ViT(CONFIG))
    contract = contract_for(CONFIG, ("a", "b"))
    write = {"hf": hugging_face.write, "timm": timm.write}[request.param]
    write(tmp_path / "model", model, contract)
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before < 400 * 2**20, "more than 400 MiB were taken"


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        change(content)
        save_file(content, folder / "model.safetensors")

    return damage


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


DINOV3 = {"model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]}


def config(**fields: Any) -> Callable[[Path], None]:
    """Of a Hugging Face folder its fields, of one of timm's its model_args."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        target = content.get("model_args", content)
        target.update(fields)
        (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")

    return damage


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8") and None


def gigabytes(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(8 * 2**30)  # a hole; whoever reads it takes 8 GiB


def set_nan(content: dict[str, Tensor]) -> None:
    next(tensor for name, tensor in sorted(content.items()) if name.endswith("weight")).view(-1)[1] = float("nan")


def two_transposed(content: dict[str, Tensor]) -> None:
    for name in [name for name in content if name.endswith(("mlp.fc1.weight", "intermediate.dense.weight"))]:
        content[name] = content[name].T.contiguous()


def header(entry: dict[str, Any]) -> Callable[[bytes], bytes]:
    content = json.dumps({"x": entry}).encode()
    return lambda _: struct.pack("<Q", len(content)) + content


SAFETENSORS = {  # whatever the format of the folder
    "cut short": (raw(lambda data: data[:-100]), "not a complete safetensors file"),
    "empty": (raw(lambda _: b""), "not a complete safetensors file"),
    "header of 64 MiB": (
        raw(lambda data: struct.pack("<Q", 2**26) + b" " * 2**26),
        "its header claims 67108864 bytes",
    ),
    "header is no JSON": (
        raw(lambda data: data[:9] + b"}" * 40 + data[49:]),
        "not a complete safetensors file",
    ),
    "tensor beyond the file": (
        raw(header({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]})),
        "not a complete safetensors file",
    ),
    "unknown dtype": (
        raw(header({"dtype": "F3", "shape": [0], "data_offsets": [0, 0]})),
        "not a complete safetensors file",
    ),
}
BOTH = {
    "NaN": (tensors(set_nan), "holds NaN or infinite values"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "does not contain weights"),
    "surplus": (
        tensors(lambda content: content.update(mine=torch.zeros(2), yours=torch.zeros(2))),
        "unexpected tensors for this architecture: mine, yours",
    ),
    "integers": (
        tensors(
            lambda content: content.update(
                {name: tensor.char() for name, tensor in content.items() if "norm" in name and "bias" in name}
            )
        ),
        r"torch\.int8.*; quantised weights are not supported",
    ),
    "config of gigabytes": (gigabytes, "config.json has 8589934592 bytes"),
    "config nested": (text("config.json", "[" * 10**6), "config.json is not valid JSON"),
    "config is a list": (text("config.json", "[1]"), "config.json holds a list"),
    "config is not text": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"),
        "config.json is not valid JSON",
    ),
    "config missing": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "config of nobody": (text("config.json", "{}"), "config.json has neither model_type nor architecture"),
}
HF = {
    "missing": (
        tensors(lambda content: [content.pop(f"vit.layernorm.{leaf}") for leaf in ("weight", "bias")]),
        r"missing tensors for this architecture: layernorm\.bias, layernorm\.weight",
    ),
    "transposed": (
        tensors(two_transposed),
        r"layer\.0\.intermediate\.dense\.weight \[64, 48\] instead of \[48, 64\].*layer\.1",
    ),
    "depth": (config(num_hidden_layers=10**9), r"the architecture has 1000000000 blocks"),
    "width": (config(hidden_size=10**9), r"the architecture has 2 blocks of width 1000000000"),
    "image": (config(image_size=10**9), r"the architecture has 2 blocks"),
    "oblong patches": (config(patch_size=[8, 4]), "does not describe a ViT"),
    "digits": (config(num_hidden_layers=10**4000), "lacks|the architecture has 1000"),
    "heads": (config(num_attention_heads=5), "width 64 is not a multiple of num_heads 5"),
    "no number": (config(hidden_size="64"), "hidden_size is '64'; expected a number"),
    "no activation": (config(hidden_act="relu"), "hidden_act 'relu' is not supported; gelu"),
    "quantised": (config(quantization_config={}), "quantized weights"),
    "RoPE": (config(**DINOV3, rope_theta=1e4), "rope_theta 10000.0 is not supported; 100 is"),
    "many tokens": (config(**DINOV3, image_size=8192), "image_size 8192 is more than 4096"),
    "gated": (config(**DINOV3, use_gated_mlp=True), "hidden_act 'gelu' is not supported; silu is"),
    "SwiGLU": (config(use_swiglu_ffn=True), "SwiGLU is not supported"),
    "other model": (config(model_type=["vit"]), r"model_type \['vit'\] is not supported; vit, deit"),
    "other class": (
        config(architectures=["ViTForMaskedImageModeling"]),
        "'ViTForMaskedImageModeling'.* is not supported",
    ),
    "too few labels": (config(id2label={"0": "a"}), "id2label must name the 2 classes"),
    "pixels nested": (
        text("preprocessor_config.json", '{"size":' * 10**5),
        "preprocessor_config.json is not valid JSON",
    ),
    "pixels of text": (
        text(
            "preprocessor_config.json",
            json.dumps({"size": 16, "resample": 2, "image_mean": ["x"] * 3, "image_std": [1] * 3}),
        ),
        "preprocessor_config.json has no valid preprocessing",
    ),
}
TIMM = {
    "missing": (
        tensors(lambda content: [content.pop(f"norm.{leaf}") for leaf in ("weight", "bias")]),
        r"missing tensors for this architecture: norm\.bias, norm\.weight",
    ),
    "transposed": (
        tensors(two_transposed),
        r"blocks\.\d\.mlp\.fc[12]\.weight \[\d+, \d+\] instead of \[\d+, \d+\], blocks",
    ),
    "depth": (config(depth=10**9), "the architecture has 1000000000 blocks"),
    "width": (config(embed_dim=10**9), "the architecture has 2 blocks"),
    "width of text": (config(embed_dim="64"), "unsupported model: "),
    "image": (config(img_size=10**9), "pos_embed has 5 entries; expected 125000000x125000000 patches"),
    "no patches": (config(patch_size=0), "unsupported model: "),
    "unknown argument": (config(qk_norm=True), "model_args qk_norm are not supported"),
    "pooling": (config(global_pool="max"), "global_pool 'max'"),
    "activation": (config(act_layer="relu"), "act_layer 'relu' is not supported"),
    "name": (
        lambda folder: rename(folder, "eva02_base_patch14_224"),
        "architecture 'eva02_base_patch14_224' is not supported",
    ),
    "kernel": (
        tensors(lambda content: content.update({"patch_embed.proj.weight": torch.zeros(64)})),
        r"is \[64\]; expected a kernel",
    ),
}


@pytest.mark.parametrize("folder", ["timm"], indirect=True)
def test_a_block_of_a_number_beyond_all_is_counted_before_it_is_built(folder: Path) -> None:
    tensors(lambda content: content.update({"blocks.100000000.norm1.bias": torch.zeros(64)}))(folder)
    with pytest.raises(ValueError, match="the architecture has 100000001 blocks"):
        formats.read(folder / "model.safetensors")


def rename(folder: Path, name: str) -> None:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(content | {"architecture": name}), encoding="utf-8")


CASES = [
    *(pytest.param("hf", *case, id=f"hf-{name}") for name, case in (SAFETENSORS | BOTH | HF).items()),
    *(pytest.param("timm", *case, id=f"timm-{name}") for name, case in (BOTH | TIMM).items()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "damage", "message"), CASES, indirect=["folder"])
def test_a_damaged_folder_is_one_clear_error(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    formats.read(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        formats.read(folder)
    assert str(folder) in str(caught.value)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**36,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["alone", "hidden", "bomb"])
def test_a_pickle_runs_nothing(tmp_path: Path, zipped: bool, where: str) -> None:
    trap = tmp_path / "executed"
    content: Any = {"model": {"x": torch.zeros(2)}, "args": Bomb() if where == "bomb" else Evil(trap)}
    torch.save(
        Evil(trap) if where == "alone" else content,
        tmp_path / "weights",
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(ValueError, match=r"weights is not a complete torch\.save file .*: it refers to"):
        formats.read(tmp_path / "weights")
    assert not trap.exists()
    torch.load(tmp_path / "weights", weights_only=False) if where != "bomb" else None
    assert trap.exists() == (where != "bomb")  # so it would have


def test_a_pickle_where_another_format_belongs_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for name in ("model.safetensors", "pytorch_model.bin", "config.json"):
            (tmp_path / "model" / name).write_bytes(pickle.dumps(Evil(trap), protocol))
            with pytest.raises(ValueError, match="model"):
                formats.read(tmp_path / "model")
            with pytest.raises(ValueError, match="model"):
                formats.read(tmp_path / "model" / name)
            (tmp_path / "model" / name).unlink()
            (tmp_path / "model" / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    assert not trap.exists()


def test_a_view_that_repeats_one_number_is_not_made_real(tmp_path: Path) -> None:
    for zipped in (True, False):
        path = tmp_path / "weights"
        torch.save({"x": torch.zeros(1).expand(2**36)}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match="weights: its tensors claim more than its"):
            formats.read(path)


def test_an_archive_that_unpacks_to_more_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "weights", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**26)
    with pytest.raises(ValueError, match=r"data\.pkl is compressed or longer than the file"):
        formats.read(tmp_path / "weights")


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_cut_short_or_changed_anywhere_is_an_error_or_finite_weights(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "weights"
    model = randomise(ViT(CONFIG))
    torch.save({"model": model.state_dict()}, path, _use_new_zipfile_serialization=zipped)
    data = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        place = int(torch.randint(0, len(data), (1,), generator=generator))
        byte = int(torch.randint(0, 256, (1,), generator=generator))
        for damaged in (data[:place], data[: place // 8] + bytes([byte]) + data[place // 8 + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match="weights"):
                formats.read(path)  # our patch kernels are no kernels to timm: the sound file is an error too


def test_an_old_pickle_that_lists_a_storage_it_has_not_is_an_error(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(3)}, tmp_path / "weights", _use_new_zipfile_serialization=False)
    data = (tmp_path / "weights").read_bytes()
    # an address, so that it is another each time; if it has ten digits, the byte of its length is a line's end
    key = re.findall(rb"(?s)X.\0\0\0(\d{5,})q", data)[-1]
    at = data.rindex(key)
    (tmp_path / "weights").write_bytes(data[:at] + b"x" + data[at + 1 :])
    with pytest.raises(ValueError, match=r"not a complete torch\.save file.*storage key"):
        formats.read(tmp_path / "weights")


def test_shards_lie_beside_their_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    index = tmp_path / "model.safetensors.index.json"
    for shards, message in (
        ({"x": "../model.safetensors"}, "is not the name of a file in the same folder"),
        ({"x": "/etc/passwd"}, "is not the name of a file in the same folder"),
        ({"x": 3}, "weight_map must name the file of each tensor"),
        ([], "weight_map must name the file of each tensor"),
        ({"x": "missing.safetensors"}, "missing.safetensors is missing"),
    ):
        index.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            formats.read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x89PNG", b"PK\x03\x04", b"hello world, this is no checkpoint", b"\x80\x02."]
)
def test_a_file_of_no_format_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(ValueError, match="weights"):
        formats.read(tmp_path / "weights")
    with pytest.raises(ValueError, match="nowhere is missing"):
        formats.read(tmp_path / "nowhere")


def test_our_own_folder_is_read(tmp_path: Path) -> None:
    from vit_model.weights import save_model

    model = randomise(ViT(CONFIG))
    save_model(tmp_path, model, contract_for(CONFIG, ("a", "b"), "Apache-2.0"))
    read = formats.read(tmp_path)
    assert (read.architecture, read.class_names, read.license) == (CONFIG, ("a", "b"), "Apache-2.0")
    assert all(torch.equal(read.weights[name], tensor) for name, tensor in model.state_dict().items())


VALUES: tuple[Any, ...] = (None, "x", -1, 10**30, [0, 0], {"height": "x"})


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["hf", "timm"], indirect=True)
def test_any_value_anywhere_is_read_or_is_a_clear_error(folder: Path) -> None:
    wrong = 0
    for file in [path for path in folder.iterdir() if path.suffix == ".json"]:
        whole = json.loads(file.read_text(encoding="utf-8"))
        parts = [whole, *(part for part in whole.values() if isinstance(part, dict))]
        for part in parts:
            # keys that only other families have: a value for them must do no harm either
            for key in [
                *part,
                "vision_config",
                "architectures",
                "mlp_ratio",
                "label_names",
                "pool_include_prefix",
            ]:
                kept = dict(part)
                for value in VALUES:
                    part[key] = value
                    file.write_text(json.dumps(whole), encoding="utf-8")
                    try:
                        assert formats.read(folder).weights
                    except ValueError as error:
                        assert str(folder) in str(error), f"{file.name}: {key} = {value!r}: {error}"
                        wrong += 1
                    part.clear()
                    part.update(kept)
        file.write_text(json.dumps(whole), encoding="utf-8")
    assert wrong > 50
