"""Several labels per image, from a CSV file to the report: numbers against scikit-learn, thresholds from dev."""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score

from tests.conftest import Vitflow
from vit_model.contract import read_contract

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CLASSES = ("bottom", "left", "top")
RECIPE = """
name: several
stages:
  images:
    job: ingest
    max_distance: null
    source: {{kind: folder, root: {root}, multi_label: true, label_separator: ;}}
  vit:
    job: finetune
    data: images
    model: {{patch_size: 4, width: 16, depth: 1, num_heads: 2}}
    resolution: 8
    learning_rates: [0.01]
    optimizer: {{name: adamw}}
    augment: none
    steps: 40
    batch_size: 16
  classes: {{job: predict, data: images, backbone: vit, splits: [test]}}
  pixels: {{job: baselines, data: images, methods: [majority, k-NN, logistic regression]}}
  report: {{job: report, title: Halves, of: [images, vit, pixels]}}
"""


def only(store: Path, pattern: str) -> Path:
    """The file of the store's only artifact of a job."""
    (path,) = store.glob(f"artifacts/{pattern}")
    return path


def put_halves(root: Path, count: int = 160) -> None:
    """Dark noise of 8x8 with none to three bright halves: the labels."""
    rng, places = np.random.default_rng(0), (np.s_[4:], np.s_[:, :4], np.s_[:4])
    lines = ["file_name,label"]
    for number in range(count):
        pixels, has = rng.integers(0, 64, (8, 8)).astype(np.uint8), rng.random(3) < 0.4
        for place in (place for place, is_bright in zip(places, has, strict=True) if is_bright):
            pixels[place] += rng.integers(20, 90, dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number}.png")
        lines.append(f"{number}.png,{';'.join(np.array(CLASSES)[has])}")
    (root / "metadata.csv").write_text("\n".join(lines))


def test_from_a_table_to_the_report(tmp_path: Path, vitflow_local: Vitflow) -> None:
    (root := tmp_path / "halves").mkdir()
    put_halves(root)
    (tmp_path / "r.yaml").write_text(RECIPE.format(root=root))
    ended = vitflow_local("run", tmp_path / "r.yaml", "--store", (store := tmp_path / "s"))
    table = pq.read_table(only(store, "finetune/*/attempts/1/files/scores.parquet"))
    rows = pq.read_table(only(store, "finetune/*/attempts/1/files/rows.parquet")).to_pylist()
    truth, predicted = (
        np.array([[number in each for number in range(3)] for each in table[name].to_pylist()])
        for name in ("labels", "predicted")
    )
    scores = np.array(table["scores"].to_pylist())
    values = {row["metric"]: row["value"] for row in rows}
    assert values == pytest.approx(
        {
            "mAP": average_precision_score(truth, scores, average="macro"),
            "macro-F1": f1_score(truth, predicted, average="macro"),
            "micro-F1": f1_score(truth, predicted, average="micro"),
        },
        abs=1e-6,
    )
    assert 0.6 < values["mAP"] < 1 and {row["selected_on"] for row in rows} == {"dev, by mAP"}

    model = only(store, "finetune/*/attempts/1/files/config.json")
    contract = read_contract(model.parent)
    assert contract.problem_type == "multi_label_classification" and contract.class_names == CLASSES
    assert all(0 < threshold < 1 and threshold != 0.5 for threshold in contract.thresholds)
    np.testing.assert_array_equal(predicted, scores >= np.array(contract.thresholds))

    named = {
        key: [name for name, is_said in zip(CLASSES, each, strict=True) if is_said]
        for key, each in zip(table["sample_id"].to_pylist(), predicted, strict=True)
    }
    stage = pq.read_table(only(store, "predict/*/attempts/1/files/images/*.parquet"))
    assert dict(zip(*(stage[name].to_pylist() for name in ("sample_id", "predictions")), strict=True)) == named
    command = vitflow_local("predict", "several/vit", "--split", "test", "--csv", "--store", store).stdout
    lines = list(csv.DictReader(io.StringIO(command)))
    said = vitflow_local("predict", "several/vit", "--split", "test", "--store", store).stdout
    limits = dict(re.findall(r"%  (\w+).*\(threshold ([\d.]+)%\)", said))
    expected = dict(zip(CLASSES, contract.thresholds, strict=True))
    assert {name: float(value) / 100 for name, value in limits.items()} == pytest.approx(expected, abs=1e-4)
    keys = dict(zip(*(stage[name].to_pylist() for name in ("key", "sample_id")), strict=True))
    assert {line["image"]: line["prediction"] for line in lines} == {
        key: "; ".join(named[sample]) for key, sample in keys.items()
    }

    report = json.loads(vitflow_local("report", "show", "--store", store, "--json").stdout)
    lines = {line["method"]: line for line in report["other_metrics"] if line["metric"] == "mAP"}
    line = lines["ViT, from scratch"]
    assert line["low"] < values["mAP"] == line["value"] < line["high"]
    assert lines["class frequencies"]["value"] == pytest.approx(truth.mean())
    (verdict,) = report["verdicts"]
    assert verdict["reference"] == max(("k-NN", "logistic regression"), key=lambda name: lines[name]["value"])
    assert report["headline"].startswith(f"The ViT trained from scratch reaches {values['mAP']:.1%} mAP with all")
    assert report["headline"] in " ".join(ended.stdout.split())
    compared = json.loads(
        vitflow_local("report", "compare", "several/pixels", "several/vit", "--store", store, "--json").stdout
    )
    (pair,) = (each for each in compared["both"] if each["a"]["method"] == verdict["reference"])
    bounds = [verdict[name] for name in ("difference", "low", "high")]
    assert bounds == pytest.approx([pair["difference"][name] for name in ("value", "low", "high")])
    assert [each["metric"] for each in verdict["other_differences"]] == ["macro-F1", "micro-F1"]
    compared = json.loads(
        vitflow_local("report", "compare", "several/vit", "several/vit", "--store", store, "--json").stdout
    )
    (pair,) = compared["both"]
    assert (pair["a"]["mAP"], pair["a"]["low"]) == pytest.approx((line["value"], line["low"]))
    assert pair["difference"]["paired"]
    vitflow_local("export", "several/vit", "--format", "hf", "--output", tmp_path / "hf", "--store", store)
    card = (tmp_path / "hf/README.md").read_text()
    thresholds = zip(CLASSES, contract.thresholds, strict=True)
    assert ", ".join(f"{name} {value:.3f}" for name, value in thresholds) in card
    (shown,) = report["several_labels"]
    assert shown["wrong"] == np.count_nonzero((truth != predicted).any(axis=1))
    by_class = {each["name"]: each["average_precision"] for each in shown["classes"]}
    for number, name in enumerate(CLASSES):
        assert by_class[name] == pytest.approx(average_precision_score(truth[:, number], scores[:, number]), abs=1e-6)
    page = only(store, "report/*/attempts/1/files/report.html").read_text()
    assert "Images with the most wrong labels" in page and page.count('alt="test image ') > 0
