"""The configuration: counts against the papers' tables, and its messages. Run: pytest tests/vit_model."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing
from vit_model.model import ViT

# Variant at 224 pixels; parameters without a head, with 1000 classes, with 21843, with 21843 behind tanh.
# The 1000-class column is google-research/vision_transformer's models_test.py.
PUBLISHED = [
    ("Ti/16", 5_524_416, 5_717_416, 9_740_115, 9_777_171),
    ("S/32", 22_493_952, 22_878_952, 30_903_507, 31_051_347),
    ("S/16", 21_665_664, 22_050_664, 30_075_219, 30_223_059),
    ("B/32", 87_455_232, 88_224_232, 104_252_499, 104_843_091),
    ("B/16", 85_798_656, 86_567_656, 102_595_923, 103_186_515),
    ("L/32", 305_510_400, 306_535_400, 327_899_475, 328_949_075),
    ("L/16", 303_301_632, 304_326_632, 325_690_707, 326_740_307),
    ("H/14", 630_764_800, 632_045_800, 658_745_683, 660_385_363),
]
# Larger images, no class token, and hybrids, all with 1000 classes.
OTHERS: list[tuple[str, dict[str, Any], int]] = [
    ("B/16", {"image_size": 384}, 86_859_496),
    ("B/16", {"pooling": "gap"}, 86_566_120),
    ("R50+B/16", {}, 98_659_112),
    ("R50+L/32", {}, 328_994_856),
    ("R26+S/32", {}, 36_431_912),
    ("R26+B/32", {}, 101_383_976),
    ("R+Ti/16", {}, 6_337_704),
]


def built(config: ViTConfig) -> int:
    """Count by building the modules, without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ViT(config).parameters())


@pytest.mark.parametrize(("name", "bare", "imagenet", "in21k", "in21k_hidden"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(
    name: str, bare: int, imagenet: int, in21k: int, in21k_hidden: int
) -> None:
    for count, classes, hidden in (
        (bare, 0, False),
        (imagenet, 1000, False),
        (in21k, 21_843, False),
        (in21k_hidden, 21_843, True),
    ):
        config = ViTConfig.variant(name, image_size=224, num_classes=classes, representation_head=hidden)
        assert config.num_parameters == count
        assert built(config) == count


@pytest.mark.parametrize(("name", "fields", "count"), OTHERS)
def test_parameter_counts_of_other_models(name: str, fields: dict[str, Any], count: int) -> None:
    config = ViTConfig.variant(name, num_classes=1000, **{"image_size": 224} | fields)
    assert config.num_parameters == built(config) == count


def test_unknown_variant_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'Ti-16'; the nearest is 'Ti/16'"):
        ViTConfig.variant("Ti-16", image_size=224)


def test_variant_cannot_be_given_another_width() -> None:
    with pytest.raises(ValueError, match=r"'B/16' already fixes width"):
        ViTConfig.variant("B/16", image_size=224, width=64)


def test_image_that_does_not_divide_names_sizes_that_do() -> None:
    with pytest.raises(ValueError, match=r"image_size 384 .* patch_size 14; 378 or 392"):
        ViTConfig.variant("H/14", image_size=384)
    with pytest.raises(ValueError, match=r"image_size 8 .* patch_size 16; 16 would fit"):
        ViTConfig.variant("B/16", image_size=8)


def test_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"width 64 .* num_heads 3; 2 would fit"):
        ViTConfig(image_size=8, patch_size=2, width=64, depth=1, num_heads=3, mlp_dim=64)


def test_fine_tuning_leaves_the_head_of_the_pretraining_behind() -> None:
    """The tanh layer and the bias of the classifier."""
    pretrained = ViTConfig.variant("Ti/16", image_size=224, num_classes=7, representation_head=True, head_bias=-10.0)
    assert pretrained.for_finetuning(384, 3) == ViTConfig.variant("Ti/16", image_size=384, num_classes=3)


def test_unknown_fields_and_changes_are_refused() -> None:
    config = ViTConfig.variant("Ti/16", image_size=224)
    with pytest.raises(ValidationError, match="pool_type"):
        ViTConfig.variant("Ti/16", image_size=224, pool_type="gap")
    with pytest.raises(ValidationError, match="frozen"):
        config.width = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="finite"):
        ViTConfig.variant("Ti/16", image_size=224, head_bias=float("nan"))


def test_preprocessing_needs_a_mean_for_each_channel() -> None:
    with pytest.raises(ValueError, match=r"mean \(0.5,\) must have 3 values"):
        Preprocessing(mean=(0.5,), std=(0.5, 0.5, 0.5), resolution=8, channels=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_names": ("a",)}, "class_names has 1 names, num_classes is 2"),
        (
            {"preprocessing": Preprocessing(mean=(0.5,), std=(0.5,), resolution=16, channels=1)},
            "preprocessing.resolution is 16, architecture.image_size 8",
        ),
        (
            {"preprocessing": Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, resolution=8, channels=3)},
            "preprocessing.channels is 3, architecture.in_channels 1",
        ),
    ],
)
def test_contract_parts_must_agree(change: dict[str, object], message: str) -> None:
    config = ViTConfig(
        image_size=8, patch_size=4, in_channels=1, width=8, depth=1, num_heads=2, mlp_dim=16, num_classes=2
    )
    parts: dict[str, object] = {
        "architecture": config,
        "class_names": ("a", "b"),
        "preprocessing": Preprocessing(mean=(0.5,), std=(0.5,), resolution=8, channels=1),
        "training_data": "sha256:0",
        "license": None,
    }
    contract = ModelContract.model_validate(parts)
    assert ModelContract.model_validate_json(contract.model_dump_json()) == contract
    with pytest.raises(ValueError, match=message):
        ModelContract.model_validate(parts | change)


def test_configuration_needs_no_torch() -> None:
    code = "import sys, vit_model.config; sys.exit(bool({'torch', 'numpy', 'PIL'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
