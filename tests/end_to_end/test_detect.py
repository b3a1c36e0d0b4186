"""Detection from a folder with boxes to the report, with a backbone that another stage has trained."""

import json
from operator import itemgetter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import Vitflow
from tests.end_to_end.test_multi_label import only
from tests.support.boxes import boxed_photos
from vit_model.detection.detector import load_detector

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RECIPE = """
name: objects
stages:
  photos:
    job: ingest
    max_distance: null
    source: {kind: folder, root: ROOT, boxes: kitti}
  vit:
    job: pretrain
    data: photos
    objective: mae
    model: {patch_size: 8, width: 32, depth: 1, num_heads: 2}
    resolution: 32
    learning_rate: 0.001
    steps: 4
    batch_size: 8
    zero_stage: 0
  found:
    job: detect
    data: photos
    backbone: vit
    learning_rates: [0.001, 0.003]
    steps: 6
    batch_size: 8
    channels: 32
    convs: 1
    scales: [2, 1]
  frozen:
    job: detect
    data: photos
    backbone: vit
    freeze: backbone
    learning_rates: [0.003]
    steps: 6
    batch_size: 8
    channels: 32
    convs: 1
    scales: [2, 1]
  report: {job: report, title: Boxes, of: [photos, vit, found, frozen]}
"""


def test_from_boxes_to_the_report(tmp_path: Path, vitflow_local: Vitflow) -> None:
    boxed_photos(root := tmp_path / "photos")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("ROOT", str(root)))
    ended = vitflow_local("run", tmp_path / "r.yaml", "--store", (store := tmp_path / "s"))
    report = json.loads(only(store, "report/*/attempts/1/files/report.json").read_text())
    lines = {(line["stage"], line["method"]): line for line in report["detectors"]}
    assert {method for _, method in lines} == {"ViT, pretrained", "ViT, pretrained, frozen", "the median box"}
    assert report["question"] == "How good is the model?" and "highest AP is" in report["headline"]
    for folder in store.glob("artifacts/detect/*/attempts/1/files"):
        detector, contract = load_detector(folder)
        assert contract.class_names == ("cat", "dog") and detector.head.num_classes == 2
        rows = pq.read_table(folder / "rows.parquet").to_pylist()
        assert {row["protocol"] for row in rows} == {"detection"} and {row["num_images"] for row in rows} == {2}
        weights = json.loads((folder.parents[2] / "manifest.json").read_text())["metrics"]
        assert weights["parameters"] == sum(weight.numel() for weight in detector.parameters())
    page = only(store, "report/*/attempts/1/files/report.html").read_text()
    assert "AP of boxes on test" in page and "highest AP is" in ended.stdout and "Precision by recall" in page
    listed = vitflow_local("list", "--kind", "detectors", "--store", store)
    assert "objects/found" in listed.stdout
    image = root / "test/15.png"
    objects = vitflow_local("predict", "objects/found", image, "--json", "--store", store)
    (found,) = json.loads(objects.stdout)
    with Image.open(image) as opened:
        width, height = opened.size
    assert found["image"] == str(image) and all(
        x >= 0 and x + w <= width + 1e-3 and y + h <= height + 1e-3
        for x, y, w, h in map(itemgetter("bbox"), found["objects"])
    )
    refused = vitflow_local("run", tmp_path / "r.yaml", "--store", store, "--set", "frozen.data=vit", check=2)
    assert "vit is a model; expected a dataset" in refused.stderr
