"""`vitflow explain` finds the fields that make two results differ, and what each contributes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import ViTConfig, ViTForImageClassification

from tests.conftest import Vitflow

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


def write_model(folder: Path) -> Path:
    """A small ViT of transformers' own making, with random weights."""
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
    return folder


def write_recipe(path: Path, model: Path, **fields: Any) -> Path:
    source = {"kind": "shapes", "label": "colour", "resolution": 32, "images": 200, "dev_images": 10}
    stages = {
        "drawn": {"job": "ingest", "source": source | {"test_images": 300}, "max_distance": None},
        "vit": {"job": "import", "path": str(model), "preprocessing": "half"},
        "probe": {"job": "evaluate", "data": "drawn", "backbone": "vit", "shots": [5], "draws": 3, **fields},
    }
    path.write_text(yaml.safe_dump({"name": path.stem, "stages": stages}))
    return path


def test_two_planted_differences_are_found(tmp_path: Path, vitflow_local: Vitflow) -> None:
    store = ("--store", tmp_path / "s")
    model = write_model(tmp_path / "model")
    middle = {"crop": "center", "crop_fraction": 0.5}
    vitflow_local("run", write_recipe(tmp_path / "one.yaml", model), *store)
    other = write_recipe(tmp_path / "other.yaml", model, eval_crop=middle, protocol="big_vision")
    vitflow_local("run", other, *store)
    runs = json.loads(vitflow_local("list", "--kind", "evaluations", *store, "--json").stdout)
    one, other = (f"{run['run']}/probe" for run in runs)

    found = json.loads(vitflow_local("explain", one, other, *store, "--json").stdout)
    (setting,) = found["settings"]
    effects = {field["field"]: field["effect"] for field in setting["fields"]}
    assert effects.keys() == {"eval_crop", "protocol"}
    assert all(effects.values()), "each changes the accuracy"
    assert setting["together"] == pytest.approx(setting["b"] - setting["a"], abs=1e-12), "nothing else differs"
    assert setting["rest"] == pytest.approx(setting["together"] - sum(effects.values()), abs=1e-12)
    assert len(found["literature"]) == 2

    shown = vitflow_local("explain", one, other, *store, VITFLOW_RAY_DIR="/nonexistent").stdout
    assert "eval_crop: none -> crop center, crop_fraction 0.5" in shown, "and nothing ran again"
    assert "are the same" in vitflow_local("explain", one, one, *store).stdout
    wrong = vitflow_local("explain", one.replace("probe", "drawn"), other, *store, check=2).stderr
    assert "expected one of evaluate, segment, finetune, detect, by its key or RUN/STAGE" in wrong
