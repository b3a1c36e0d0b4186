"""The fashion recipe on the authors' files, with a few steps of every training."""

import json
import re
from pathlib import Path

import pytest

from pipelines.spec import FASHION_MNIST_ROOT
from tests.conftest import Vitflow

pytestmark = [
    pytest.mark.full,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not Path(FASHION_MNIST_ROOT).is_dir(), reason="apt-get install dataset-fashion-mnist"),
]


def test_the_recipe_runs_to_its_report(vitflow_local: Vitflow, tmp_path: Path) -> None:
    few = ("pretrain.steps=20", "finetune.steps=20", "few_shot.draws=2", "pixels.max_images=100")
    settings = [argument for value in few for argument in ("--set", value)]
    out = vitflow_local(
        "run", "fashion", "--store", tmp_path, *settings, "--set", "pixels.methods=[majority, k-NN]"
    ).stdout
    (report,) = tmp_path.glob("artifacts/report/*/attempts/1/files/report.json")
    numbers = json.loads(report.read_text())
    datasets = {dataset["name"]: dataset for dataset in numbers["datasets"]}
    assert [dataset["num_classes"] for dataset in datasets.values()] == [10, 7, 3]
    assert [dataset["splits"]["test"] for dataset in datasets.values()] == [10_000, 7_000, 3_000]
    tasks = {(line["task"], line["method"]) for line in numbers["accuracies"]}
    assert ("Fashion-MNIST, 3 held-out classes", "ViT, pretrained") in tasks
    assert ("Fashion-MNIST", "ViT, pretrained") in tasks
    assert any(re.fullmatch(r"k-NN on 5,\d{3} images", method) for _, method in tasks)
    assert "report.html" in out and not numbers["sweeps"]
