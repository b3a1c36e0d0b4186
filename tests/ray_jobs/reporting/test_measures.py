"""Entries from tables of predictions in any order, against grouping them in plain Python."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_jobs.evaluation.intervals import Interval
from ray_jobs.evaluation.rows import PREDICTIONS, REAL, ROWS, Row, Truth, scored, write_parquet
from ray_jobs.reporting import measures, mistakes
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.page import groups
from ray_jobs.reporting.verdicts import sentence, verdicts
from tests.support.records import make_manifest
from tests.support.scores import make_entry, put_scores
from vit_model.errors import UserError

SETTINGS = [("few-shot linear", "ViT", 5, 3), ("linear probe", "ViT", None, 1), ("baseline", "k-NN", None, 1)]


def put(folder: Path, task: str, images: int, seed: int) -> list[Row]:
    """Both tables of an evaluation, the predictions of each draw in an order of its own; and all predictions."""
    rng, shuffle = np.random.default_rng(seed), random.Random(seed)
    labels = rng.integers(0, 3, images)
    rows, parts = [], []
    for protocol, method, shots, draws in SETTINGS:
        for draw in range(draws):
            order = shuffle.sample(range(images), images)
            common = {"protocol": protocol, "method": method, "labels_per_class": shots, "draw": draw}
            ids = [f"{task} é {number}" for number in order]
            truth = Truth(task, ids, labels[order])
            [(row, part)] = scored(common, truth, rng.integers(0, 3, images), "dev", {})
            rows.append(row)
            parts.append(part)
    put_scores(folder, zip(rows, shuffle.sample(parts, len(parts)), strict=True))
    return [row for part in parts for row in part.to_pylist()]


def read(folders: dict[str, Path]) -> list[Entry]:
    parts = [(stage, make_manifest("evaluate", key=stage * 3), folder) for stage, folder in folders.items()]
    rows = measures.join_tables(parts, "rows.parquet", ROWS)
    predictions = measures.join_tables(parts, "predictions.parquet", PREDICTIONS)
    return measures.entries(rows, predictions, {})


def test_entries_are_the_predictions_by_setting_draw_and_image(tmp_path: Path) -> None:
    given = {
        stage: put(tmp_path / stage, task, images, seed)
        for seed, (stage, task, images) in enumerate([("a", "x", 40), ("b", "y", 25), ("c", "x", 40)])
    }
    entries = read({stage: tmp_path / stage for stage in given})
    assert len(entries) == 3 * len(SETTINGS)
    for entry in entries:
        assert entry.artifact == entry.stage * 3
        own: dict[int, dict[str, Row]] = {}
        for row in given[entry.stage]:
            if (row["protocol"], row["labels_per_class"]) == (entry.protocol, entry.labels_per_class):
                own.setdefault(row["draw"], {})[row["sample_id"]] = row
        ids = sorted(own[0])
        assert entry.sample_ids == tuple(ids)
        assert entry.draws == tuple(sorted(own))
        assert entry.labels.tolist() == [own[0][identity]["label"] for identity in ids]
        for draw, answers in zip(entry.draws, entry.predictions.tolist(), strict=True):
            assert answers == [own[draw][identity]["prediction"] for identity in ids]


def test_without_predictions_there_are_no_entries(tmp_path: Path) -> None:
    tmp_path.joinpath("a").mkdir()
    assert read({"a": tmp_path / "a"}) == []


def test_texts_of_a_joined_table_are_texts_in_its_file(tmp_path: Path) -> None:
    put(tmp_path / "a", "x", 5, 0)
    parts = [("a", make_manifest("evaluate", key="k"), tmp_path / "a")]
    joined = measures.join_tables(parts, "predictions.parquet", PREDICTIONS)
    write_parquet(tmp_path / "joined.parquet", joined)
    names = ["artifact", "stage", *PREDICTIONS.names]
    assert pq.read_schema(tmp_path / "joined.parquet").names == names
    assert pq.read_schema(tmp_path / "joined.parquet").types[2:] == PREDICTIONS.types
    assert pq.read_table(tmp_path / "joined.parquet").to_pylist() == joined.to_pylist()


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", "x", 5, 0)
    path, parts = tmp_path / "a" / "predictions.parquet", [("a", make_manifest("evaluate"), tmp_path / "a")]
    write_parquet(path, pq.read_table(path).drop_columns(["correct"]))
    with pytest.raises(UserError, match="has the columns"):
        measures.join_tables(parts, "predictions.parquet", PREDICTIONS)


def test_with_reals_labels_a_task_of_its_own_stands_behind_the_authors(tmp_path: Path) -> None:
    common = {"protocol": "fine-tuning", "method": "ViT, pretrained", "labels_per_class": None, "draw": 0}
    real = pa.array([[0, 1], [2], []], pa.list_(pa.int32()))
    truth = Truth("ImageNet-1k", ["a", "b", "c"], np.array([0, 1, 2]), real)
    found = scored(common, truth, np.array([1, 0, 2]), "dev", {})
    put_scores(tmp_path, found)
    plain, judged = read({"a": tmp_path})
    assert (plain.task, plain.sample_ids) == ("ImageNet-1k", ("a", "b", "c"))
    assert plain.correct.tolist() == [[False, False, True]]
    assert (judged.task, judged.sample_ids) == ("ImageNet-1k" + REAL, ("a", "b"))
    assert judged.correct.tolist() == [[True, False]] and judged.accuracy.value == 0.5
    assert mistakes.main_entry([judged, plain]) is plain
    assert [(one.sample_id, one.prediction) for one in mistakes.worst(judged, [judged])] == [("b", 0)]


def test_of_equally_frequent_mistakes_the_most_confident_come_first(tmp_path: Path) -> None:
    common = {"protocol": "fine-tuning", "method": "ViT, pretrained", "labels_per_class": None, "draw": 0}
    truth = Truth("x", ["a", "b", "c", "d"], np.array([0, 1, 2, 0]))
    put_scores(tmp_path, scored(common, truth, np.array([1, 0, 0, 0]), "dev", {}))
    (one,) = read({"a": tmp_path})
    for probabilities, order in (
        ([0.4, 0.9, 0.6, 1.0], ["b", "c", "a"]),
        ([0.4, 0.9, 0.95, 1.0], ["c", "b", "a"]),
    ):
        sure = replace(one, probabilities=np.array([probabilities]))
        assert [mistake.sample_id for mistake in mistakes.worst(sure, [sure])] == order


def test_mistakes_are_never_shown_of_a_part_of_test(tmp_path: Path) -> None:
    common = {"protocol": "fine-tuning", "method": "ViT, pretrained", "labels_per_class": None, "draw": 0}
    truth = Truth("x", ["a", "b"], np.array([0, 1]), seen=np.array([True, False]))
    found = scored(common, truth, np.array([0, 0]), "dev", {})
    put_scores(tmp_path, found)
    parts = read({"a": tmp_path})
    assert len(parts) == 2 and mistakes.main_entry(parts) is None


def test_a_linear_probe_is_not_compared_with_a_classifier_that_chose_its_settings_otherwise() -> None:
    def entry(protocol: str, method: str, right: int) -> Entry:
        return make_entry(np.arange(20)[None] < right, task="x", artifact="a", protocol=protocol, method=method)

    probe, fitted = entry("linear probe", "ViT, pretrained", 15), entry("fine-tuning", "ViT, pretrained", 16)
    pixels, baseline = entry("linear probe", "pixels", 10), entry("baseline", "RBF SVM", 12)
    found = verdicts([probe, pixels, fitted, baseline])
    assert [(verdict.method, verdict.reference) for verdict in found] == [(probe, pixels), (fitted, baseline)]
    said = "(its training images are unknown) reaches 75.0%, pixels (linear probe) 50.0%"
    assert said in sentence(found[0], None, {"a"}) and "unknown" not in sentence(found[0], None, {"b"})
    assert isinstance(probe.accuracy, Interval)
    lines = [
        {
            "task": "x",
            "protocol": one.protocol,
            "labels": "all labels",
            "accuracy": one.accuracy.value,
            "apart": False,
        }
        for one in (probe, pixels, fitted, baseline)
    ]
    assert [name for name, _ in groups(lines)] == [
        "x, linear probe, all labels",
        "x, fine-tuning and baselines, all labels",
    ]
