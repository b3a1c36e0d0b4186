"""Hugging Face's folders: parity with transformers' own models, round trips, hostile files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support.parity import assert_close, contract_of, gradients_by_our_names, our_outputs, randomise
from tests.support.vits import contract_for, noise, transformers
from vit_model import formats
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing
from vit_model.formats import Imported, hugging_face, timm
from vit_model.model import ViT
from vit_model.predict import classify
from vit_model.preprocessing import load_image, normalise
from vit_model.weights import save_model

pytestmark = pytest.mark.slow
SIDE = 32
SIZES = {
    "image_size": SIDE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DINO = {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {
    "mlp_ratio": 2,
    "layerscale_value": 0.7,
}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 49408,
}


def vit(name: str = "ViTForImageClassification", **fields: Any) -> nn.Module:
    return getattr(transformers(), name)(transformers().ViTConfig(**SIZES | {"num_labels": 5} | fields))


def deit(name: str) -> nn.Module:
    return getattr(transformers(), name)(transformers().DeiTConfig(**SIZES, num_labels=5))


def siglip(name: str, **fields: Any) -> nn.Module:
    return getattr(transformers(), name)(
        transformers().SiglipConfig(vision_config=SIZES | fields, text_config=TEXT, num_labels=5)
    )


def dinov2_with_zeros() -> nn.Module:
    model = randomise(transformers().Dinov2ForImageClassification(transformers().Dinov2Config(**DINO, num_labels=5)))
    with torch.no_grad():
        model.classifier.weight[:, 32:] = 0
    return model


def dinov3(**fields: Any) -> nn.Module:
    config = SIZES | {"layerscale_value": 0.7, "num_register_tokens": 3} | fields
    return transformers().DINOv3ViTModel(transformers().DINOv3ViTConfig(**config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vit": vit,
    "vit-tanh-eps": lambda: vit(hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
    "vit-no-qkv-bias": lambda: vit(qkv_bias=False),
    "vit-pooler": lambda: vit("ViTModel"),
    "vit-mae": lambda: transformers().ViTMAEModel(transformers().ViTMAEConfig(**SIZES, mask_ratio=0.0)),
    "deit-distilled": lambda: deit("DeiTForImageClassificationWithTeacher"),
    "deit-one-head": lambda: deit("DeiTForImageClassification"),
    "dinov2": lambda: transformers().Dinov2Model(transformers().Dinov2Config(**DINO)),
    "dinov2-head": dinov2_with_zeros,
    "dinov2-registers": lambda: transformers().Dinov2WithRegistersModel(
        transformers().Dinov2WithRegistersConfig(**DINO, num_register_tokens=3)
    ),
    "dinov3": lambda: dinov3(),
    "dinov3-large": lambda: dinov3(use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False),
    "clip": lambda: transformers().CLIPVisionModel(transformers().CLIPVisionConfig(**SIZES)),
    "clip-projection": lambda: transformers().CLIPVisionModelWithProjection(
        transformers().CLIPVisionConfig(**SIZES, projection_dim=7)
    ),
    "siglip": lambda: transformers().SiglipVisionModel(transformers().SiglipVisionConfig(**SIZES)),
    "siglip-head": lambda: siglip("SiglipForImageClassification", vision_use_head=False),
}
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}


def save(model: nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)  # type: ignore[operator]
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")


def their_output(model: nn.Module, images: Tensor, resized: bool = False) -> Tensor:
    kwargs: dict[str, Any] = {}
    if resized and "Dinov2" not in type(model).__name__:
        kwargs["interpolate_pos_encoding"] = True
    if "MAE" in type(model).__name__:  # it shuffles the patches by this
        patches = images.shape[2] * images.shape[3] // 64
        kwargs["noise"] = torch.arange(patches).float().expand(len(images), -1)
    out = model(images, **kwargs)
    for name in ("logits", "image_embeds", "pooler_output"):
        if name in out:
            return out[name]
    return out.last_hidden_state[:, 0]


def model_of(imported: Imported) -> tuple[ViT, ModelContract]:
    model = ViT(imported.architecture)
    model.load_state_dict(imported.weights)
    return model, contract_of(imported)


@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 40)], ids=["native", "resized"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_transformers(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    theirs = randomise(MODELS[name]()) if name != "dinov2-head" else MODELS[name]()
    save(theirs, tmp_path / "model")
    imported = formats.read(tmp_path / "model")
    images = noise(2, 3, *size, seed=3).double()
    expected = their_output(theirs.double(), images, size != (SIDE, SIDE))
    got, weights = our_outputs(imported, images)
    assert_close({"logits": got.detach()}, {"logits": expected.detach()})
    probe = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (expected * probe).sum().backward()
    (got * probe).sum().backward()
    ours = {key: tensor.grad for key, tensor in weights.items() if tensor.grad is not None}
    if name == "dinov2-head":  # the other half of the classifier has a gradient, and no place in our model
        with torch.no_grad():
            theirs.classifier.weight.grad[:, 32:] = 0  # type: ignore[union-attr, index]
    them = gradients_by_our_names(theirs, save, formats.read, tmp_path / "gradients")
    if name == "deit-one-head":
        # of a sum of two weights: the same for each, twice when read
        del ours["reg_token"], them["reg_token"]
    if name == "vit-no-qkv-bias":
        ours = {key: tensor for key, tensor in ours.items() if not key.endswith("qkv.bias")}
        them = {key: tensor for key, tensor in them.items() if not key.endswith("qkv.bias")}
    if name.startswith("dinov3"):  # without some biases, which are zeros here
        for key in [key for key in ours if key.endswith("qkv.bias")]:
            absent = them[key] == 0
            assert absent.any()
            ours[key][absent] = 0
    if name == "clip-projection":
        del ours["head.bias"], them["head.bias"]
    if name == "vit-mae":
        del ours["pos_embed"], them["pos_embed"]  # fixed there
    assert_close(ours, them)


@pytest.mark.parametrize("name", MODELS)
def test_what_we_write_transformers_loads_strictly_and_we_read_again(tmp_path: Path, name: str) -> None:
    theirs = randomise(MODELS[name]()) if name != "dinov2-head" else MODELS[name]()
    save(theirs, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: cc-by-4.0\ntags:\n- x\n---\nText\n")
    imported = formats.read(tmp_path / "model")
    assert imported.license == "cc-by-4.0"
    model, contract = model_of(imported)
    hugging_face.write(tmp_path / "ours", model, contract)
    again = formats.read(tmp_path / "ours")
    # the licence is in the card, which `export` writes (tests/pipelines/machine/test_export.py)
    assert (again.architecture, again.preprocessing, again.class_names) == (
        imported.architecture,
        imported.preprocessing,
        imported.class_names,
    )
    torch.testing.assert_close(again.weights, imported.weights, rtol=0, atol=0)
    kind = getattr(transformers(), json.loads((tmp_path / "ours/config.json").read_text())["architectures"][0])
    loaded, info = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    images = noise(2, 3, SIDE, SIDE, seed=3)
    with torch.no_grad():
        expected = model.eval()(images)
        assert_close({"logits": their_output(loaded.eval(), images)}, {"logits": expected})


OURS: dict[str, dict[str, Any]] = {
    "no head": {},
    "gap": {"pooling": "gap", "num_classes": 3},
    "distilled, no head": {"distillation": True},
    "one channel": {"in_channels": 1, "num_classes": 3},
    "oblong": {"image_size": (16, 24), "num_classes": 2},
    "tanh layer": {"representation_head": True},
    "registers and layer scale": {"registers": 2, "layer_scale": 1e-4, "num_classes": 3},
    "rotary": {"position": "rope", "layer_scale": 0.5},
    "rotary and gated": {"position": "rope", "layer_scale": 0.5, "registers": 2, "gelu": "swiglu"},
    "pre-norm": {"norm_first": True, "patch_bias": False, "gelu": "quick"},
}


def ours(**fields: Any) -> tuple[ViT, ModelContract]:
    config = ViTConfig(
        **{"image_size": 16, "patch_size": 8, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32} | fields
    )
    model = randomise(ViT(config))
    pixels = {"std": (0.25,) * config.in_channels, "crop": "center", "crop_fraction": 16 / 18}
    names = [f"Größe {index}" for index in range(config.num_classes)]
    return model, contract_for(config, names, "Apache-2.0", **pixels, crop_offset="floor")


@pytest.mark.parametrize("name", OURS)
def test_our_own_architectures_compute_the_same_in_transformers(tmp_path: Path, name: str) -> None:
    model, contract = ours(**OURS[name])
    hugging_face.write(tmp_path, model, contract)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    loaded, info = getattr(transformers(), config["architectures"][0]).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info.values()), info
    images = torch.randn(2, model.config.in_channels, *model.config.image_shape)
    with torch.no_grad():
        assert_close({"output": their_output(loaded.eval(), images)}, {"output": model(images)})
    if config["id2label"]:
        assert loaded.config.id2label == dict(enumerate(contract.class_names))
    again = formats.read(tmp_path)
    torch.testing.assert_close(again.weights, {**model.state_dict()}, rtol=0, atol=0)
    same = {"position_resize": again.architecture.position_resize}
    assert again.architecture == model.config.model_copy(update=same)
    assert again.class_names == contract.class_names
    assert again.preprocessing == (None if name == "oblong" else contract.preprocessing)


@pytest.mark.parametrize(
    "fields",
    [
        {"position": "sincos2d"},
        {"pooling": "map", "num_classes": 3},
        {"representation_head": True, "num_classes": 3},
        {"pooling": "gap", "norm_after_pooling": True},
        {"class_position": False},
        {"registers": 2},
        {"position": "rope"},
        {"gelu": "swiglu"},
        {"pooling": "gap"},
    ],
)
def test_what_no_class_of_transformers_computes_is_not_written(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no class of transformers computes this architecture"):
        hugging_face.write(tmp_path / "x", *ours(**fields))
    assert not (tmp_path / "x").exists()


def test_a_projection_has_no_bias(tmp_path: Path) -> None:
    model, contract = ours(norm_first=True, patch_bias=False, num_classes=3)
    with pytest.raises(ValueError, match=r"'head\.bias' cannot be written"):
        hugging_face.write(tmp_path / "x", model, contract)


@pytest.mark.parametrize(
    ("crop", "resized", "offset"),
    [
        ("squash", 16, "round"),
        ("squash", 17, "round"),
        ("squash", 18, "round"),
        ("squash", 19, "floor"),  # the middle of 19 begins at 1.5: at 2 in torchvision, at 1 in transformers
        ("center", 16, "floor"),
        ("center", 18, "floor"),
        ("center", 19, "floor"),
    ],
)
def test_pixels_are_those_of_transformers_at_odd_and_even_sizes(
    tmp_path: Path, crop: str, resized: int, offset: str
) -> None:
    model, contract = ours(num_classes=2)
    pixels = contract.preprocessing.model_copy(
        update={
            "crop": crop,
            "crop_fraction": 16 / resized,
            "interpolation": "bicubic",
            "crop_offset": offset,
        }
    )
    lines = hugging_face.write(tmp_path, model, contract.model_copy(update={"preprocessing": pixels}))
    assert lines == []
    assert formats.read(tmp_path).preprocessing == pixels
    processor = transformers().AutoImageProcessor.from_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sizes = [
        (37, 61),
        (16, 16),
        (64, 20),
        *((resized, resized + more) for more in range(9)),
        (resized + 3, resized),
    ]
    wrong = {}
    for size in sizes:
        image = torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8).numpy()
        theirs = processor(image, return_tensors="pt")["pixel_values"]
        found = {
            kind: normalise(torch.from_numpy(load_image(image, given))[None], given, torch.float32)
            for kind in ("floor", "round")
            for given in [pixels.model_copy(update={"crop_offset": kind})]
        }
        assert (theirs - found[offset]).abs().max() < 1e-5, size
        wrong[size] = bool((theirs - found["round"]).abs().max() > 1e-5)
    assert any(wrong.values()) == (offset == "floor")
    if offset == "floor":
        kept = contract.model_copy(update={"preprocessing": pixels.model_copy(update={"crop_offset": "round"})})
        [line] = hugging_face.write(tmp_path / "round", model, kept)
        assert line.startswith("crop_offset: transformers rounds it down")
        [line] = timm.write(tmp_path / "timm", model, contract.model_copy(update={"preprocessing": pixels}))
        assert line.startswith("crop_offset: timm rounds half to even")


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression", "single_label_classification"])
def test_the_kind_of_a_head_is_kept_or_refused(tmp_path: Path, kind: str) -> None:
    theirs = vit(problem_type=kind, id2label=dict(enumerate("abcde")), label2id={}, layer_norm_eps=1e-6)
    save(theirs, tmp_path / "theirs")
    if kind == "regression":
        with pytest.raises(ValueError, match=r"problem_type 'regression' is not supported.*base_model"):
            formats.read(tmp_path / "theirs")
        theirs.base_model.save_pretrained(tmp_path / "theirs")  # type: ignore[operator, union-attr]
        assert formats.read(tmp_path / "theirs").class_names == ()
        return
    imported = formats.read(tmp_path / "theirs")
    assert imported.problem_type == kind
    model, contract = model_of(imported)
    contract = contract.model_copy(update={"problem_type": kind})
    save_model(tmp_path / "ours", model, contract)
    assert formats.read(tmp_path / "ours").problem_type == kind
    assert ("problem_type" in (tmp_path / "ours/config.json").read_text()) == (kind.startswith("multi"))
    hugging_face.write(tmp_path / "again", model, contract)
    assert formats.read(tmp_path / "again").problem_type == kind
    lines = timm.write(tmp_path / "timm", model, contract)
    assert any("use a sigmoid" in line for line in lines) == kind.startswith("multi")
    Image.fromarray(torch.arange(3072, dtype=torch.uint8).view(32, 32, 3).numpy()).save(tmp_path / "image.png")
    [row] = classify(tmp_path / "ours", [tmp_path / "image.png"])
    inputs = load_image(tmp_path / "image.png", contract.preprocessing)
    images = normalise(torch.from_numpy(inputs)[None], contract.preprocessing, torch.float32)
    with torch.no_grad():
        logits = theirs.eval()(images).logits[0]
    expected = logits.sigmoid() if kind.startswith("multi") else logits.softmax(0)
    found = {top["class"]: top["probability"] for top in row["top"]}
    assert found == pytest.approx(dict(zip("abcde", expected.tolist(), strict=True)), abs=1e-5)


def test_one_output_is_a_regression_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    save(vit(num_labels=1), tmp_path / "regression")
    with pytest.raises(ValueError, match="with one output, a regression, is not supported"):
        formats.read(tmp_path / "regression")
    save(vit(num_labels=1, problem_type="multi_label_classification"), tmp_path / "yes or no")
    assert formats.read(tmp_path / "yes or no").problem_type == "multi_label_classification"


@pytest.mark.parametrize("writer", [hugging_face, timm])
def test_a_projection_is_no_classifier(tmp_path: Path, writer: Any) -> None:
    theirs = randomise(MODELS["clip-projection"]())
    save(theirs, tmp_path / "theirs")
    imported = formats.read(tmp_path / "theirs")
    assert (imported.class_names, imported.architecture.num_classes) == ((), 7)
    model, contract = model_of(imported)
    writer.write(tmp_path / "written", model, contract)
    again = formats.read(tmp_path / "written")
    assert again.class_names == () and torch.equal(again.weights["head.weight"], imported.weights["head.weight"])
    save_model(tmp_path / "ours", model, contract)
    with pytest.raises(ValueError, match="has no classifier, only representations"):
        classify(tmp_path / "ours", [])


def test_sharded_half_precision_and_new_names_are_read(tmp_path: Path) -> None:
    theirs = randomise(vit())
    save(theirs, tmp_path / "whole")
    whole = formats.read(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")  # type: ignore[operator]
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    save_file(theirs.state_dict(), tmp_path / "new" / "model.safetensors")
    assert "vit.layers.1.attention.q_proj.bias" in theirs.state_dict()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    torch.save(theirs.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    for folder in ("shards", "new", "pickle"):
        read = formats.read(tmp_path / folder)
        assert read.preprocessing is None
        assert "preprocessing: preprocessor_config.json is missing." in read.lines
        torch.testing.assert_close(read.weights, whole.weights, rtol=0, atol=0)
    theirs.half().save_pretrained(tmp_path / "half")  # type: ignore[operator]
    half = formats.read(tmp_path / "half")
    assert "weights: converted from float16 to float32." in half.lines
    assert all(torch.equal(half.weights[key], tensor.half().float()) for key, tensor in whole.weights.items())


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_of_a_model_with_a_text_tower_the_image_tower_is_taken(tmp_path: Path, tower: str) -> None:
    kind = {"clip": "CLIP", "siglip": "Siglip"}[tower]
    config = getattr(transformers(), f"{kind}Config")(vision_config=SIZES, text_config=TEXT, projection_dim=6)
    theirs = randomise(getattr(transformers(), f"{kind}Model")(config))
    save(theirs, tmp_path)
    read = formats.read(tmp_path)
    images = noise(2, 3, SIDE, SIDE, seed=3)
    with torch.no_grad():
        expected = theirs.get_image_features(images)  # type: ignore[operator]
    expected = expected if isinstance(expected, Tensor) else expected.pooler_output
    assert_close({"features": our_outputs(read, images)[0].detach()}, {"features": expected})
    assert any("tensors that the encoder does not use were dropped" in line for line in read.lines)


def test_what_a_nested_configuration_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    """In files of whole models, only what differs from the defaults is written for the parts."""
    for kind, left_out in (
        ("CLIP", ("hidden_act", "layer_norm_eps")),
        ("Siglip", ("hidden_act", "layer_norm_eps")),
    ):
        config = getattr(transformers(), f"{kind}Config")(vision_config=SIZES, text_config=TEXT, projection_dim=6)
        save(randomise(getattr(transformers(), f"{kind}Model")(config)), tmp_path / kind)
        whole = formats.read(tmp_path / kind).architecture
        path = tmp_path / kind / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in left_out:
            del content["vision_config"][key]
        path.write_text(json.dumps(content), encoding="utf-8")
        assert formats.read(tmp_path / kind).architecture == whole


def test_the_mean_of_siglips_tokens_leaves_its_map_head_behind(tmp_path: Path) -> None:
    theirs = randomise(siglip("SiglipForImageClassification"))
    save(theirs, tmp_path)
    read = formats.read(tmp_path)
    assert any(line.startswith("attn_pool: dropped") for line in read.lines)
    images = noise(2, 3, SIDE, SIDE, seed=3)
    assert_close({"logits": our_outputs(read, images)[0].detach()}, {"logits": their_output(theirs, images).detach()})


def test_a_size_that_patches_do_not_fill_is_cut_as_the_convolution_cuts_it(tmp_path: Path) -> None:
    theirs = randomise(
        transformers().SiglipVisionModel(transformers().SiglipVisionConfig(**SIZES | {"image_size": 37}))
    )
    save(theirs, tmp_path)
    read = formats.read(tmp_path)
    assert read.architecture.image_size == 32
    assert any(line.startswith("image_size: 32 instead of 37") for line in read.lines)
    images = noise(2, 3, 37, 37, seed=3)
    expected = theirs(images).pooler_output.detach()
    assert_close({"y": our_outputs(read, images[:, :, :32, :32])[0].detach()}, {"y": expected})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"size": {"height": 40, "width": 40}}, None),
        ({"do_normalize": False}, None),
        ({"resample": 1}, None),
        ({"image_mean": None}, None),
        ({"image_std": [0.5]}, None),
        (
            {
                "do_center_crop": True,
                "crop_size": {"height": SIDE, "width": SIDE},
                "size": {"height": 40, "width": 40},
            },
            ("squash", 0.8),
        ),
        (
            {"size": SIDE, "feature_extractor_type": "ViTFeatureExtractor", "image_processor_type": None},
            ("squash", 1.0),
        ),
        ({"size": {"shortest_edge": 40}, "do_center_crop": True, "crop_size": SIDE}, ("center", 0.8)),
        (
            {
                "size": 40,
                "do_center_crop": True,
                "crop_size": SIDE,
                "image_processor_type": "CLIPFeatureExtractor",
            },
            ("center", 0.8),
        ),
        ({"resample": 2}, ("squash", 1.0)),
        ({"size": SIDE, "crop_size": SIDE, "image_processor_type": "DeiTImageProcessor"}, ("squash", 1.0)),
        ({"size": 40, "crop_size": SIDE, "image_processor_type": "DeiTImageProcessor"}, ("squash", 0.8)),
    ],
)
def test_preprocessing_is_taken_where_it_can_be_said(
    tmp_path: Path, change: dict[str, Any], expected: tuple[str, float] | None
) -> None:
    save(vit(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change), encoding="utf-8")
    read = formats.read(tmp_path)
    pixels = read.preprocessing
    if expected is None:
        assert pixels is None
        assert any("has unsupported settings" in line for line in read.lines)
    else:
        assert pixels is not None
        assert (pixels.crop, pixels.crop_fraction, pixels.resolution, pixels.mean) == (
            *expected,
            SIDE,
            (0.1, 0.2, 0.3),
        )
        assert pixels.interpolation == ("bilinear" if change.get("resample") == 2 else "bicubic")


def test_dinov2_is_taken_at_the_size_of_its_processor_as_transformers_runs_it(tmp_path: Path) -> None:
    for name in ("dinov2", "dinov2-registers"):
        theirs = randomise(MODELS[name]())
        save(theirs, tmp_path / name)
        processor = PROCESSOR | {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 30},
            "crop_size": 24,
        }
        (tmp_path / name / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
        read = formats.read(tmp_path / name)
        assert read.architecture.image_size == 24
        assert read.preprocessing is not None
        assert (read.preprocessing.resolution, read.preprocessing.crop_fraction) == (24, 0.8)
        assert any(line.startswith("pos_embed: resized from 4x4 to 3x3 patches, for the 24x24") for line in read.lines)
        images = noise(2, 3, 24, 24, seed=3)
        assert_close({"y": our_outputs(read, images)[0].detach()}, {"y": their_output(theirs, images).detach()})


def test_a_pooler_is_read_with_tanh_alone(tmp_path: Path) -> None:
    save(vit("ViTModel", pooler_act="relu"), tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: pooler_act 'relu' is not supported; tanh is"):
        formats.read(tmp_path)


@pytest.mark.parametrize("side", [0, 8 * 10**6, 10**30])
def test_dinov2_is_not_blown_up_to_a_processors_size(tmp_path: Path, side: int) -> None:
    save(MODELS["dinov2"](), tmp_path)
    processor = PROCESSOR | {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": side}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    read = formats.read(tmp_path)
    assert read.architecture.image_size == SIDE
    assert read.preprocessing is None


def test_what_a_processors_class_implies_is_filled_in(tmp_path: Path) -> None:
    save(vit(), tmp_path)
    old = {
        "do_normalize": True,
        "do_resize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": SIDE,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(old), encoding="utf-8")
    pixels = formats.read(tmp_path).preprocessing
    assert pixels == Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=SIDE, channels=3)
    assert transformers().ViTImageProcessor().resample == 2


def test_numbers_stand_for_classes_without_names(tmp_path: Path) -> None:
    save(vit(num_labels=3), tmp_path)
    assert formats.read(tmp_path).class_names == ("0", "1", "2")
