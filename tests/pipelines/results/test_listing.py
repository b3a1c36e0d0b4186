"""`list` says of each kind what tells its artifacts apart."""

from pathlib import Path

import pytest

from pipelines.engine.history import end_run
from pipelines.results.listing import COLUMNS, KINDS, list_kind
from pipelines.spec import RecipeError
from pipelines.store import FileEntry, add_event, commit, create_attempt, create_run, input_ref, open_store
from tests.support.checkpoints import put_pretraining, put_state
from tests.support.records import flip, make_attempt, make_manifest, make_plan


def test_an_unknown_kind_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'datasets'"):
        list_kind(open_store(str(tmp_path)), "dataset")


def test_every_kind_shows_what_it_is_about(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    source = {"source": {"kind": "folder", "name": "zoo"}}
    data = commit(
        store,
        make_manifest("ingest", key="da", config=source, metrics={"images": 7, "classes": 2, "train": 5}),
    )
    taken = {"data": [input_ref(store, data)]}
    metrics = {"parameters": 9, "dev_accuracy": 0.5}
    commit(store, make_manifest("pretrain", key="ma", config={"steps": 9}, metrics=metrics))
    scores = {"parameters": 9, "validation_accuracy": 0.9, "test_accuracy": 0.625}
    files = (FileEntry(path="a", size=3, sha256="x"), FileEntry(path="b", size=4, sha256="y"))
    commit(store, make_manifest("finetune", key="mb", inputs=taken, metrics=scores, files=files))
    several = {"validation_mAP": 0.5, "test_mAP": 0.375}
    commit(store, make_manifest("finetune", key="mc", inputs=taken, metrics=several))
    commit(store, make_manifest("detect", key="oa", inputs=taken, metrics={"parameters": 8, "test_AP": 0.25}))
    commit(store, make_manifest("baselines", key="ea", inputs=taken, metrics={"k-NN @ 5": 0.25, "SVM @ 5": 0.75}))
    commit(store, make_manifest("report", key="ra", config={"title": "Zoo"}))
    commit(store, make_manifest("audit", key="la", inputs=taken, metrics={"audited": 9, "label_issues": 2}))
    for job in ("embed", "predict", "inspect"):
        commit(store, make_manifest(job, key=job, inputs=taken, metrics={"images": 7}))
    create_run(store, "p-1-1-a", make_plan("p-1-1-a", "x", "y"))
    add_event(store, "p-1-1-a", "stage", stage="x", status="CACHED")
    end_run(store, "p-1-1-a", "FAILED")

    for kind in COLUMNS:
        rows = list_kind(store, kind)
        assert rows
        assert all(set(COLUMNS[kind]) <= row.keys() for row in rows)
        if kind in KINDS:
            assert all({"metrics", "content_digest", "bytes", "user"} <= row.keys() for row in rows)
    (dataset,) = list_kind(store, "datasets")
    assert (dataset["name"], dataset["images"], dataset["classes"]) == ("zoo", 7, 2)
    pretrained, tuned, multi_label = list_kind(store, "models")
    assert multi_label["accuracy"] == "37.5% test mAP"
    assert (pretrained["parameters"], pretrained["accuracy"]) == (9, "50.0% dev")
    assert (tuned["accuracy"], tuned["bytes"], tuned["metrics"]) == ("62.5% test", 7, scores)
    (evaluation,) = list_kind(store, "evaluations")
    assert (evaluation["task"], evaluation["best"]) == ("zoo", "75.0% SVM @ 5")
    (detector,) = list_kind(store, "detectors")
    assert (detector["task"], detector["parameters"], detector["AP"]) == ("zoo", 8, "25.0% test AP")
    (audit,) = list_kind(store, "audits")
    assert (audit["task"], audit["audited"], audit["label_issues"]) == ("zoo", 9, 2)
    for kind in ("embeddings", "predictions", "inspections"):
        (made,) = list_kind(store, kind)
        assert (made["task"], made["images"]) == ("zoo", 7)
    (run,) = list_kind(store, "runs")
    assert (run["status"], run["stages"]) == ("FAILED", "1/2")


def test_checkpoints_are_those_that_can_be_named_and_those_to_resume_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path))
    put_pretraining(store, best=10)
    commit(store, make_manifest("pretrain", key="old", config={"steps": 9}))
    commit(store, make_manifest("finetune", key="tuned"))
    create_attempt(store, make_attempt("pretrain", key="pb", stage="second", run="r2"))
    put_state(store, 1, 7, "pb")
    rows = list_kind(store, "checkpoints")
    assert [(row["key"], row["step"], row["checkpoint"], row["accuracy"], row["run"]) for row in rows] == [
        ("pa", 5, "step:5", None, "r"),
        ("pa", 10, "step:10, best", "25.0% dev", "r"),
        ("pa", 20, "step:20, last", "50.0% dev", "r"),
        ("old", 9, "step:9, last", None, "r"),
        ("pb", 7, "to resume at step 7", None, "r2"),
    ]
    damaged = put_pretraining(store, key="pc")
    flip(tmp_path / damaged.folder / "checkpoints.json")
    assert list_kind(store, "checkpoints") == rows
    assert "checkpoints.json is damaged" in capsys.readouterr().err
