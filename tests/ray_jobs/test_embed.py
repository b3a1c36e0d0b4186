"""The stages embed and predict: equal to a loop by hand, the same bytes if they are killed, from any kind of folder."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.store import Layout, Store, commit, create_attempt, open_store
from ray_jobs import embed
from ray_jobs.data.shards import SPLITS, open_dataset
from ray_jobs.process.context import Context, Result
from tests.conftest import Vitflow
from tests.support import datasets
from tests.support.archives import image
from tests.support.checkpoints import put_untrained
from tests.support.records import make_context, make_manifest
from vit_model.errors import UserError
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

COUNTS = {"train": 21, "dev": 4, "test": 10}
TYPES = {name: pa.string() for name in ("sample_id", "key", "split", "label")}


class Made:
    """A store with a data set of noise and an untrained model of it."""

    def __init__(self, root: Path, counts: dict[str, int] = COUNTS, **contract: Any) -> None:
        self.store: Store = open_store(str(root))
        with self.store.staging(Layout.files("ingest", "data", 1)) as staging:
            datasets.put_noise(staging.path, counts)
        self.data = commit(self.store, make_manifest("ingest", key="data", files=staging.files))
        self.model = commit(self.store, put_untrained(self.store, self.data, "model", **contract))

    def context(self, job: str = "embed", number: int = 1, **fields: Any) -> Context[Any]:
        kind = {"embed": embed.Embed, "predict": embed.Predict}[job]
        config = kind.model_validate({"job": job, "data": "noise", "backbone": "model"} | fields)
        context = make_context(self.store, config, data=self.data, backbone=self.model)
        attempt = create_attempt(self.store, context.attempt.model_copy(update={"number": number}))
        return Context(attempt, config, context.inputs)


def table_of(context: Context[Any], result: Result) -> pa.Table:
    attempt = context.attempt
    folder = context.open_store().local(Layout.files(attempt.job, attempt.key, attempt.number), result.files)
    return pa.concat_tables([pq.read_table(folder / file.path) for file in result.files])


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_values_equal_those_of_a_loop_by_hand(problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "SMALLEST", 8)
    made = Made(tmp_path / "store", problem_type=problem)
    model, contract = load_model(made.store.local(made.model.folder, made.model.files))
    dataset = open_dataset(made.store.local(made.data.folder, made.data.files))
    expected: dict[str, tuple[Any, ...]] = {}
    for split in SPLITS:
        index = dataset.index(split).select(["sample_id", "key", "label"]).to_pylist()
        for row, pixels in zip(index, dataset.images(split, contract.preprocessing), strict=True):
            x = normalise(torch.from_numpy(pixels[None]), contract.preprocessing, torch.float32)
            with torch.no_grad():
                logits = model(x)[0]
                features = model.forward_features(x)[1][0]
            many = logits.sigmoid() if problem.startswith("multi") else logits.softmax(0)
            expected[row["sample_id"]] = (row["key"], split, "abc"[row["label"]], features, many)

    for job in ("embed", "predict"):
        context = made.context(job)
        result = embed.infer(context)
        table = table_of(context, result)
        values = "feature" if job == "embed" else "probabilities"
        width = pa.list_(pa.float32(), 16 if job == "embed" else 3)
        one, many = (
            {"prediction": pa.string(), "probability": pa.float32()},
            {"predictions": pa.list_(pa.string())},
        )
        extra = {} if job == "embed" else many if problem.startswith("multi") else one
        assert dict(zip(table.column_names, table.schema.types, strict=True)) == TYPES | extra | {values: width}
        assert len(result.files) == 5 and result.metrics["images"] == 35 and len(table) == 35
        for row in table.to_pylist():
            key, split, label, features, likely = expected[row["sample_id"]]
            assert (row["key"], row["split"], row["label"]) == (key, split, label)
            np.testing.assert_allclose(row[values], features if job == "embed" else likely, rtol=1e-4, atol=1e-5)
            if job == "predict" and problem.startswith("multi"):
                assert row["predictions"] == [
                    name for name, value in zip("abc", row[values], strict=True) if value >= 0.5
                ]
            elif job == "predict":
                assert row["probability"] == max(row[values])
                assert row["prediction"] == "abc"[int(np.argmax(row[values]))]
        assert set(table["sample_id"].to_pylist()) == expected.keys()
        about = json.loads(table.schema.metadata[b"vitflow"])
        assert about["model"] == "model" and about["checkpoint"] == "last"
        assert about["class_names"] == ["a", "b", "c"]
        assert about["preprocessing"]["resolution"] == 8


def test_only_the_wanted_splits_are_computed(tmp_path: Path) -> None:
    context = Made(tmp_path / "store").context(splits=["test", "dev"])
    assert sorted(table_of(context, embed.infer(context))["split"].to_pylist()) == ["dev"] * 4 + ["test"] * 10
    nothing = Made(tmp_path / "other", {"train": 3}).context(splits=["dev"])
    with pytest.raises(UserError, match="has no images in dev"):
        embed.infer(nothing)


def test_finished_parts_are_taken_over_and_the_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embed, "SMALLEST", 8)
    made, real = Made(tmp_path / "store"), embed.write_part

    def fails_at_last(*arguments: Any) -> Any:
        if arguments[3] == 3:
            raise RuntimeError("killed")
        return real(*arguments)

    monkeypatch.setattr(embed, "write_part", fails_at_last)
    with pytest.raises(RuntimeError, match="killed"):
        embed.infer(made.context())
    monkeypatch.setattr(embed, "write_part", real)
    again = embed.infer(made.context(number=2))
    out = capsys.readouterr().out
    assert all(f"part {number}: from attempt 1" in out for number in range(3)) and "part 3: from" not in out
    assert again == embed.infer(Made(tmp_path / "other").context())


def test_a_model_without_a_classifier_does_not_predict(tmp_path: Path) -> None:
    made = Made(tmp_path / "store", class_names=())
    with pytest.raises(UserError, match=r"no classifier, only representations; use embed"):
        embed.infer(made.context("predict"))


# ------------------------------------------------------------------------------------------------- without labels

TINY_VIT = "{patch_size: 8, width: 16, depth: 1, num_heads: 2}"
UNLABELLED = """
name: photos
stages:
  photos: {{job: ingest, source: {{kind: folder, root: {root}, labels: false}}}}
  pretrain:
    job: pretrain
    data: photos
    objective: mae
    mae: {{decoder_width: 16, decoder_depth: 1, decoder_heads: 2}}
    model: {model}
    resolution: 16
    steps: 2
    batch_size: 4
    learning_rate: 0.001
  embed: {{job: embed, data: photos, backbone: pretrain}}
  report: {{job: report, title: Photos, of: [photos, pretrain, embed]}}
"""


def put_photos(root: Path, number: int = 9) -> None:
    for place in range(number):
        path = root / ("2024" if place % 2 else ".") / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(place))


@pytest.mark.ray
def test_from_photographs_without_labels_to_features(tmp_path: Path, vitflow_local: Vitflow) -> None:
    put_photos(tmp_path / "photos")
    (tmp_path / "r.yaml").write_text(UNLABELLED.format(root=tmp_path / "photos", model=TINY_VIT))
    vitflow_local("run", tmp_path / "r.yaml", "--store", tmp_path / "s")
    (path,) = (tmp_path / "s").glob("artifacts/embed/*/attempts/1/files/images/00000.parquet")
    rows = pq.read_table(path).to_pylist()
    assert {row["key"] for row in rows} == {f"2024/{n}.png" if n % 2 else f"{n}.png" for n in range(9)}
    assert {(row["split"], row["label"], len(row["feature"])) for row in rows} == {("train", None, 16)}
    (card,) = (tmp_path / "s").glob("artifacts/ingest/*/attempts/1/files/card.md")
    assert "9 images without labels" in card.read_text()
    listed = vitflow_local("list", "--kind", "embeddings", "--store", tmp_path / "s", "--json").stdout
    assert [row["metrics"]["images"] for row in json.loads(listed)] == [9]
    report = json.loads(vitflow_local("report", "show", "--store", tmp_path / "s", "--json").stdout)
    assert [cluster["images"] for cluster in report["embeddings"][0]["clusters"]] == [9]
    assert report["headline"].startswith(
        "This report sorts 9 training images into 1 group that look alike to the model"
    )
    (page,) = (tmp_path / "s").glob("artifacts/report/*/attempts/1/files/report.html")
    assert page.read_text().index('<h2 id="groups-title">') < page.read_text().index('<h2 id="curves-title">')
    assert '<a href="#groups">Groups</a>' in page.read_text() and "Group 1: 9 images" in page.read_text()
    listed = list(csv.reader(page.with_name("groups.csv").read_text().splitlines()))
    assert sorted(listed[1:]) == sorted(["embed", "1", row["key"]] for row in rows)
    assert page.with_name("groups.csv").as_uri() in vitflow_local("report", "show", "--store", tmp_path / "s").stdout
    assert "9 training, 0 dev and 0 test images without labels" in page.read_text()
