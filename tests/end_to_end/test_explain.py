"""`vitflow explain` finds the fields that make two results differ, and what each contributes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Vitflow
from tests.end_to_end.test_import import write_hugging_face

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


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
    model = write_hugging_face(tmp_path / "model", processor=False)
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
