"""The recipe `continual` on a folder that grows: a first model, a worse one that is refused, a better one, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.store import alias_history, all_manifests, open_store
from tests.conftest import Vitflow

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
RNG = np.random.default_rng(0)


def add(folder: Path, each: int, wrong: bool = False) -> None:
    """Add images of noise whose brighter half says the class; `wrong`: in the other class's folder."""
    for number in range(2 * each):
        label = number % 2
        pixels = RNG.integers(0, 130, (32, 32, 3), np.uint8)
        pixels[16 * label : 16 * (label + 1)] += np.uint8(60)
        path = folder / "ab"[label ^ wrong] / f"{len(list(folder.rglob('*.png'))):05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def test_each_run_decides_whether_its_model_replaces_the_one_in_use(vitflow_local: Vitflow, tmp_path: Path) -> None:
    photos, frozen, store = tmp_path / "photos", tmp_path / "frozen", tmp_path / "s"
    add(photos, 60)
    add(frozen / "train", 20)
    add(frozen / "test", 1000)
    changes = {"photos.source.root": photos, "frozen.source.root": frozen, "train.steps": 100, "train.batch_size": 32}
    model = "{patch_size: 8, width: 32, depth: 1, num_heads: 2, pooling: gap}"
    changes |= {
        "train.model": model,
        "train.workers": 1,
        "train.dtype": "float32",
        "few_shot.draws": 2,
        "train.learning_rate": 0.003,
    }

    def run(**more: Any) -> str:
        given = changes | {name.replace("__", "."): value for name, value in more.items()}
        words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        return vitflow_local("run", "continual", "--store", store, *words, COLUMNS="300").stdout

    opened = open_store(str(store))

    def moves() -> list[tuple[int, str]]:
        return [(record.number, record.why) for record in alias_history(opened, "production")]

    said = run()
    assert "@production: promoted: the accuracy is " in said and "Nothing to compare" not in said
    assert moves() == [(1, "rule")]
    first = alias_history(opened, "production")[-1]
    add(photos, 200, wrong=True)
    said = run()
    assert "@production: refused, worse: " in said and "more than 2 points are lost" in said
    assert moves() == [(1, "rule")]
    for path in list(photos.rglob("*.png")):
        path.unlink()
    add(photos, 200)
    said = run(train__steps=120)
    assert "a loss of 2 points is ruled out" in said
    assert moves() == [(1, "rule"), (2, "rule")]
    *_, newest = all_manifests(opened, "pretrain")
    assert [each.key for each in newest.inputs["init_from"]] == [first.target and first.target.key], "not the refused"
    vitflow_local("alias", "rollback", "production", "--store", store)
    run(train__steps=120)
    assert moves() == [(1, "rule"), (2, "rule"), (3, "rollback")], "the comparison is cached"
    listed = json.loads(vitflow_local("list", "--kind", "models", "--json", "--store", store).stdout)
    assert [row["alias"] for row in listed] == ["@production", None, None]
    compared = vitflow_local("report", "compare", "continual/promote", "@production", "--store", store, check=2)
    assert "no measurements" in compared.stderr
