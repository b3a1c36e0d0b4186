"""Other people's weights through the whole DAG and out again: what transformers makes of them is what vitflow does."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from tests.support.stores import snapshot

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CLASSES = ("blue", "green", "red")


def write_images(root: Path, each: int = 14) -> list[Path]:
    """Noisy images of three colours and of many sizes, in class folders."""
    rng = np.random.default_rng(0)
    for channel, name in enumerate(reversed(CLASSES)):
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 160, (*rng.integers(12, 40, 2), 3), dtype=np.uint8)
            pixels[..., channel] += 60
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return sorted(root.rglob("*.png"))


def write_hugging_face(folder: Path, *, processor: bool = True) -> Path:
    """A small ViT of transformers' own making, with random weights and a preprocessing that nobody would guess."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=4,
        id2label={0: "a", 1: "b", 2: "c", 3: "d"},
        initializer_range=0.2,
    )
    ViTForImageClassification(config).save_pretrained(folder)
    if processor:
        ViTImageProcessor(
            size={"height": 16, "width": 16},
            resample=3,
            image_mean=[0.4, 0.5, 0.6],
            image_std=[0.2, 0.25, 0.3],
        ).save_pretrained(folder)
    return folder


def by_transformers(folder: Path, images: Sequence[Path]) -> list[dict[str, float]]:
    """Class -> probability for each image file, by transformers alone."""
    model = ViTForImageClassification.from_pretrained(folder).eval()
    processor = ViTImageProcessor.from_pretrained(folder)
    pixels = processor([Image.open(path).convert("RGB") for path in images], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        probabilities = model(pixels).logits.softmax(-1)
    return [{model.config.id2label[i]: p for i, p in enumerate(row)} for row in probabilities.tolist()]


def by_vitflow(vitflow: Any, model: str, images: Sequence[Path], store: Path) -> list[dict[str, float]]:
    found = json.loads(vitflow("predict", model, *images, "--store", store, "--json").stdout)
    return [{top["class"]: top["probability"] for top in row["top"]} for row in found]


def assert_alike(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert [row.keys() for row in one] == [row.keys() for row in other]
    for ours, theirs in zip(one, other, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert max(ours, key=lambda name: ours[name]) == max(theirs, key=lambda name: theirs[name])


@pytest.mark.full
def test_imported_fine_tuned_and_exported_it_classifies_as_transformers_does(vitflow: Any, tmp_path: Path) -> None:
    images, checkpoint, store = write_images(tmp_path / "images"), tmp_path / "vit", tmp_path / "store"
    write_hugging_face(checkpoint)
    recipe = tmp_path / "mine.yaml"
    vitflow("init", recipe, "--images", tmp_path / "images", "--from", checkpoint, "--store", store)
    changes = {
        "vit.learning_rates": [0.003, 0.01],
        "vit.steps": 30,
        "vit.batch_size": 8,
        "vit.augment": "none",
    }
    run = ["run", recipe, "--store", store]
    run += [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]

    first = vitflow(*run, "--verbose").stdout
    assert "mean 0.4, 0.5, 0.6, std 0.2, 0.25, 0.3; bicubic, squashed to 16 x 16" in first
    assert "report.html" in first
    before = snapshot(store)
    again = vitflow(*run, PYTHONPROFILEIMPORTTIME="1")
    assert again.stdout.count("CACHED") == 5
    imported = {line.rsplit("|", 1)[-1].strip() for line in again.stderr.splitlines()}
    assert not imported & {"torch", "ray", "numpy", "boto3"}
    assert snapshot(store) == before, "the second run touches nothing"

    backbone = by_vitflow(vitflow, "mine/vit_2", images, store)
    assert_alike(backbone, [{name: row[name] for name in "abcd"} for row in by_transformers(checkpoint, images)])

    output = tmp_path / "exported"
    said = vitflow("export", "mine/vit", "--format", "hf", "--output", output, "--store", store)
    assert f"wrote {output}: " in said.stdout
    assert snapshot(store) == before
    tuned, expected = (by_vitflow(vitflow, "mine/vit", images, store), by_transformers(output, images))
    assert set(tuned[0]) == set(CLASSES)
    assert_alike(tuned, expected)
    spread = np.std([[row[name] for name in CLASSES] for row in tuned], axis=0)
    assert spread.min() > 0.01, "what all images get would be alike anyhow"

    back = vitflow("import", output, "--store", store, "--name", "back").stdout
    key = re.search(r"model (\w{12})", back)
    assert key is not None
    assert_alike(by_vitflow(vitflow, key[1], images, store), tuned)
