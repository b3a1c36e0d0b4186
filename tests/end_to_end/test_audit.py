"""An audit and segmentations on Ray; what the audit lists is left out of the next dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Vitflow

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
SHAPES = "{kind: shapes, images: 200, dev_images: 40, test_images: 40, resolution: 32, masks: true}"
MODEL = "{patch_size: 8, width: 16, depth: 1, num_heads: 2}"
RECIPE = f"""
name: audited
stages:
  shapes: {{job: ingest, source: {SHAPES}}}
  pretrain:
    {{job: pretrain, data: shapes, model: {MODEL}, resolution: 32, steps: 4, batch_size: 16, learning_rate: 0.001}}
  audit:
    job: audit
    data: shapes
    cross_validation: {{folds: 2, model: {MODEL}, resolution: 32, learning_rate: 0.001, steps: 4, batch_size: 16}}
  segment: {{job: segment, data: shapes, backbone: pretrain}}
  tuned:
    {{job: finetune, masks: true, data: shapes, backbone: pretrain, learning_rates: [1, 2], steps: 4, batch_size: 16}}
  report: {{job: report, title: Audited, of: [shapes, audit, segment, tuned]}}
"""


def test_what_an_audit_lists_leaves_the_dataset(tmp_path: Path, vitflow_local: Vitflow) -> None:
    recipe, store = tmp_path / "audited.yaml", ("--store", tmp_path / "s")
    recipe.write_text(RECIPE)
    vitflow_local("run", recipe, *store)

    def ask(sql: str) -> Any:
        return json.loads(vitflow_local("report", "query", sql, *store, "--json").stdout)

    listed = [row["sample_id"] for row in ask("SELECT sample_id FROM label_issues ORDER BY rank")]
    assert 0 < len(listed) < 240
    rows = ask("SELECT method, protocol FROM rows WHERE metric = 'mIoU'")
    assert {"pixels", "most frequent class"} < {row["method"] for row in rows}
    assert {row["protocol"] for row in rows} == {"linear segmentation", "fine-tuned segmentation"}
    assert "mIoU" in vitflow_local("list", "--kind", "models", *store).stdout

    wrong, cleaned = tmp_path / "wrong.txt", tmp_path / "clean.yaml"
    wrong.write_text("\n".join(listed[:10]))
    source = f"{{job: ingest, source: {SHAPES}, exclude: {wrong}}}"
    cleaned.write_text(f"name: cleaned\nstages:\n  clean: {source}\n")
    vitflow_local("run", cleaned, *store)
    (folder,) = (path for path in (tmp_path / "s").glob("artifacts/ingest/*/attempts/1/files/excluded.parquet"))
    splits = json.loads((folder.parent / "dataset.json").read_text())["splits"]
    assert splits["train"] + splits["dev"] == 240 - 10
    assert splits["test"] == 40
