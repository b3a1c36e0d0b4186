"""How far a run's trainings are, from their logs."""

from dataclasses import replace
from typing import Any

import pytest

from pipelines.engine.runs import run_status
from pipelines.engine.trainings import Training, Trainings
from pipelines.store import InputRef, Layout, add_event, create_attempt, encode, encode_lines, segment_name
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt, make_manifest
from tests.support.trainings import RUN, STAGES, line, put_lines, put_run


def progress(store: Any) -> dict[str, Any]:
    status = run_status(store, RUN)
    Trainings(store, RUN).add_progress(status)
    return {entry["stage"]: entry for entry in status["stages"]}


def test_the_newest_line_says_how_far_a_running_training_is() -> None:
    store = MemoryStore()
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING", finetune="RUNNING")
    put_lines(store, "pretrain", line(8), line(10))
    put_lines(store, "finetune", line(4, "trial-0-0"), line(8, "trial-0-0"))
    put_lines(store, "finetune", line(9, "trial-1-0"))
    stages = progress(store)
    assert stages["pretrain"]["detail"] == (
        "step 10/40 (25%) · epoch 0.625 · loss 0.1 · rate 0.1 · gradient norm 12 · 1,010 images/s · MFU 5%"
        " · waiting for images 10% · 0:01:00 left"
    )
    assert stages["pretrain"]["progress"] == {"steps": 40, **line(10).model_dump(mode="json")}
    assert stages["finetune"]["detail"].startswith("learning rate 0.001, step 9/20 (45%) · ")
    assert stages["finetune"]["detail"].endswith("0:01:00 left of this trial")
    assert "progress" not in stages["digits"]


def test_progress_is_the_running_attempts_and_not_that_of_a_dead_one() -> None:
    store = MemoryStore()
    put_run(store, finetune="STOPPED")
    put_lines(store, "finetune", line(18, "trial-0-0"))
    add_event(store, RUN, "stage", stage="finetune", status="RUNNING", attempt=2)
    assert "progress" not in progress(store)["finetune"]
    put_lines(store, "finetune", line(3, "trial-0-0", time="2025-12-31T00:00:00+00:00"), attempt=2)
    assert progress(store)["finetune"]["progress"]["step"] == 3, "its machine's clock may be behind"


@pytest.mark.parametrize("status", ["PENDING", "SUCCEEDED", "FAILED"])
def test_a_training_that_does_not_run_makes_no_progress(status: str) -> None:
    store = MemoryStore()
    put_run(store, pretrain=status)
    put_lines(store, "pretrain", line(8))
    assert "progress" not in progress(store)["pretrain"]


def test_a_training_without_a_line_says_nothing() -> None:
    store = MemoryStore()
    put_run(store, pretrain="RUNNING")
    assert "progress" not in progress(store)["pretrain"]


def test_fits_have_titles() -> None:
    store = MemoryStore()
    put_run(store, finetune="CACHED")
    (training,) = Trainings(store, RUN).of(run_status(store, RUN))
    assert [training.title(fit) for fit in (None, "trial-1-2", "refit-1-3", "refit-1-120-3")] == [
        "",
        "learning rate 0.001, fold 2",
        "draw 3",
        "draw 3",
    ]
    assert training.title("trial-1-0") == "learning rate 0.001"  # selected on dev
    folded = replace(training, has_folds=True)
    assert folded.title("trial-1-0") == "learning rate 0.001, fold 0"
    searched = replace(training, config={**training.config, "learning_rates": [], "search": {"kind": "asha"}})
    assert searched.title("trial-12-0") == "trial 12"
    several = [{"labels": {"per_class": 5, "draws": 3}}, {"labels": {"per_class": None}, "refits": 3}]
    titles = [replace(training, config=training.config | fields).title("refit-1-0") for fields in several]
    assert titles == ["draw 0", "draw 0"] and training.title("refit-1-0") == "refit"
    proposed = ("trial-12-p0a1b2c3d-1", "refit-12-p01234567-2", "refit-12-p01234567-120-2")
    assert [searched.title(fit) for fit in proposed] == ["trial 12, fold 1", "draw 2", "draw 2"]
    whole = training.config["steps"]
    assert [searched.steps(fit) for fit in proposed] == [whole, whole, 120]
    assert [training.steps(fit) for fit in ("refit-1-3", "refit-1-120-3")] == [training.config["steps"], 120]


def test_only_a_trial_with_early_stopping_may_end_before_its_last_step() -> None:
    stopped = Training("finetune", "finetune", "k", {"early_stopping": {"evaluations": 5, "patience": 2}})
    assert [stopped.may_end_before(fit) for fit in ("trial-0-0", "refit-0-12-0")] == [True, False]
    assert not Training("finetune", "finetune", "k", {"early_stopping": None}).may_end_before("trial-0-0")


@pytest.mark.parametrize(
    ("labels", "dev", "has_folds"),
    [
        ({}, 9, False),
        ({}, 0, True),
        ({}, None, False),  # its data set was removed
        ({"use_dev": False}, 9, True),
        ({"per_class": 5}, 9, True),
    ],
)
def test_a_fine_tuning_has_folds_if_it_has_few_labels_or_no_dev(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, Any], dev: int | None, has_folds: bool
) -> None:
    monkeypatch.setitem(STAGES, "finetune", STAGES["finetune"] | {"labels": labels})
    store = MemoryStore()
    put_run(store, finetune="CACHED")
    data = InputRef(job="ingest", key="digits", content_digest="d", manifest_sha256="m")
    create_attempt(store, make_attempt("finetune", key="finetune", number=2, inputs={"data": [data]}))
    if dev is not None:
        manifest = make_manifest(key="digits", metrics={"dev": dev})
        assert store.create(Layout.manifest("ingest", "digits"), encode(manifest))
    (training,) = Trainings(store, RUN).of(run_status(store, RUN))
    assert training.title("trial-0-0") == "learning rate 0.01" + ", fold 0" * has_folds


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
@pytest.mark.parametrize(
    "fit",
    [
        *("x", "-", "--", "trial", "trial-0", "trial-99-0", "trial-a-b", "trial-0-0-s0a", "trial-0-1-2-3"),
        *("refit-0", "refit-0-0-1", f"trial-{'9' * 80}-0"),
    ],
)
@pytest.mark.parametrize("seconds", [1e300, -1e300])
def test_a_log_may_say_anything_without_an_error(stage: str, fit: str, seconds: float) -> None:
    store = MemoryStore()
    put_run(store, **{stage: "RUNNING"})
    odd = line(8, fit, seconds_left=seconds, loss=-1e308, time="9999-12-31T23:59:59+00:00")
    assert store.create(segment_name(stage, stage, 1, 0, "A" * 26, 1), encode_lines([line(3), odd]))
    assert progress(store)[stage]["progress"]["step"] == 8
    (training,) = Trainings(store, RUN).of(run_status(store, RUN))
    assert training.title(fit) and training.steps(fit) > 0
