"""The baselines stage: of many images it takes some, and says so where its rows are read."""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.spec import Baselines
from pipelines.store import open_store
from ray_jobs import baselines
from ray_jobs.data.columns import INDEX
from ray_jobs.evaluation.rows import Row
from tests.support import datasets
from tests.support.records import make_context, make_manifest

COUNTS = {"train": 150, "dev": 20, "test": 10}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Noise in two classes."""
    return datasets.put_noise(tmp_path / "dataset", COUNTS, ("a", "b"))


def run(dataset: Path, method: str, **fields: Any) -> tuple[list[Row], list[pa.Table]]:
    """The rows and tables of a method on the dataset in this folder."""
    config = Baselines.model_validate({"job": "baselines", "data": "noise", "methods": [method]} | fields)
    store = open_store(tempfile.mkdtemp(dir=dataset.parent))
    manifest = make_manifest("ingest", content_digest="d")
    shutil.copytree(dataset, store.local(manifest.folder, ()))
    return baselines.run_method(make_context(store, config, data=manifest), method)


@pytest.mark.parametrize(
    ("fields", "method", "labelled"),
    [
        ({"max_images": 100}, "k-NN on 120 images", 120),
        ({"max_images": 150}, "k-NN", 170),
        ({"max_images": 100, "labels": {"per_class": 4, "draws": 1, "folds": 2}}, "k-NN", 8),
    ],
)
def test_a_method_that_saw_fewer_images_than_there_are_says_so(
    dataset: Path, fields: dict[str, object], method: str, labelled: int
) -> None:
    (row,), predictions = run(dataset, "k-NN", **fields)
    assert row["method"] == method and {name for table in predictions for name in table["method"].to_pylist()} == {
        method
    }
    assert f'"labelled_images": {labelled}' in row["settings"]


@pytest.mark.parametrize(
    ("method", "said"),
    [("majority", r"majority: 0\.\d{3}"), ("k-NN", r"k-NN: 0\.\d{3} with n_neighbors \d+")],
)
def test_the_log_says_a_methods_accuracy_and_its_settings_if_it_has_some(
    dataset: Path, capsys: pytest.CaptureFixture[str], method: str, said: str
) -> None:
    run(dataset, method)
    assert re.fullmatch(f"{said}\n", capsys.readouterr().out)


def test_test_labels_change_nothing_but_the_results(dataset: Path) -> None:
    """With several labels per image: settings, probabilities and predicted classes are the same."""
    info = json.loads((dataset / "dataset.json").read_text())
    (dataset / "dataset.json").write_text(json.dumps(info | {"multi_label": True}))
    index = pq.read_table(dataset / "index.parquet").to_pylist()
    rows, tables = [], []
    for turned in (0, 1):
        for number, row in enumerate(index):
            moved = number + turned * (row["split"] == "test")
            row |= {"label": -1, "labels": [[0], [], [0, 1]][moved % 3]}
        pq.write_table(pa.Table.from_pylist(index, INDEX), dataset / "index.parquet")
        found, (table,) = run(dataset, "logistic regression")
        rows.append(found)
        tables.append(table)
    assert [row["settings"] for row in rows[0]] == [row["settings"] for row in rows[1]]
    assert [row["value"] for row in rows[0]] != [row["value"] for row in rows[1]]
    columns = ["sample_id", "scores", "predicted"]
    assert tables[0].select(columns).equals(tables[1].select(columns))
    assert {row["selected_on"] for row in rows[0]} == {"dev, by mAP"}
