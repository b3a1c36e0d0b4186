"""One folder, ingested twice: a model of one data set has seen test images of the other; no number may come of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Vitflow

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

RECIPE = """
name: leak
stages:
  b: {{job: ingest, source: {{kind: folder, root: "{root}", salt: other}}}}
  a: {{job: ingest, source: {{kind: folder, root: "{root}"}}}}
  tuned:
    job: finetune
    data: a
    model: {{patch_size: 4, width: 16, depth: 1, num_heads: 2}}
    resolution: 8
    learning_rates: [1.0e-3]
    steps: 5
    batch_size: 20
  few_shot: {{job: evaluate, data: b, backbone: tuned, shots: [2], draws: 2}}
  report: {{job: report, title: Leak, of: [b, tuned, few_shot]}}
"""


def write_images(root: Path, numbers: range) -> None:
    """Noise of two classes, each image the same in every folder."""
    for number in numbers:
        path = root / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(path)


def test_a_folder_that_was_split_twice(vitflow_local: Vitflow, tmp_path: Path) -> None:
    root, recipe, store = tmp_path / "images", tmp_path / "leak.yaml", tmp_path / "store"
    write_images(root, range(120))
    recipe.write_text(RECIPE.format(root=root))

    def split(stage: str) -> dict[str, str]:
        """Image -> its split."""
        import pyarrow.parquet as pq

        manifests = (json.loads(path.read_text()) for path in store.glob("artifacts/ingest/*/manifest.json"))
        (key,) = (manifest["key"] for manifest in manifests if manifest["stage"] == stage)
        index = pq.read_table(store / "artifacts/ingest" / key / "attempts/1/files/index.parquet")
        return dict(zip(index["key"].to_pylist(), index["split"].to_pylist(), strict=True))

    refused = vitflow_local("run", recipe, "--store", store, check=1).stdout
    a, b = split("a"), split("b")
    test = [image for image in b if b[image] == "test"]
    leaked = sum(a[image] != "test" for image in test)
    assert 0 < leaked < len(test)
    assert f"trained on {leaked} of the {len(test)} test images of b" in refused
    assert "attempt 2" not in refused and not list(store.glob("artifacts/evaluate/*/manifest.json"))

    vitflow_local("run", recipe, "--store", store, "--set", "few_shot.seen_in_training=report")
    report = json.loads(vitflow_local("report", "show", "--store", store, "--json").stdout)
    apart = {line["method"]: line["num_images"] for line in report["accuracies"] if line["apart"]}
    assert list(apart.values()) == [len(test) - leaked, leaked]
    assert not any("seen in training" in verdict["method"] for verdict in report["verdicts"])

    vitflow_local("run", recipe, "--store", store, "--set", "a.against=[b]")
    made = (json.loads(path.read_text()) for path in store.glob("artifacts/evaluate/*/manifest.json"))
    assert {manifest["metrics"]["test_images_seen_in_training"] for manifest in made} == {leaked, 0}
