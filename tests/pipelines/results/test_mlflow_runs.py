"""What an MLflow experiment has of a training, read with MLflow's own client."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines.store import open_store
from tests.support.trainings import RUN, line, put_lines, put_run

mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:::mlflow", "ignore::FutureWarning")


def export(store: Any, uri: str) -> str:
    from pipelines.cli import app

    done = CliRunner().invoke(app, ["mlflow", RUN, "--store", store.uri, "--to", uri])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for these tests need no server
    return (tmp_path / "mlflow").as_uri()


def runs_at(uri: str) -> dict[str, Any]:
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("one")
    found = client.search_runs([experiment.experiment_id])
    assert len(found) == len({run.info.run_name for run in found})
    return {run.info.run_name: run for run in found}


def history(uri: str, run: Any, tag: str) -> list[tuple[int, float]]:
    metrics = mlflow.MlflowClient(uri).get_metric_history(run.info.run_id, tag)
    return sorted((each.step, each.value) for each in metrics)


def test_each_training_is_a_run_and_a_second_export_adds_what_is_new(tmp_path: Path, uri: str) -> None:
    store = open_store(str(tmp_path / "s"))
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING", finetune="RUNNING")
    put_lines(
        store,
        "pretrain",
        line(8),
        line(16, dev_accuracy=0.5, few_shot={"5-shot dev": 0.25}, measures={"feature_rank": 3.5}),
    )
    put_lines(store, "finetune", line(4, "trial-0-0"))
    assert "pretrain: 2 new of 2 lines" in export(store, uri)
    put_lines(store, "pretrain", line(24, mfu=None), number=2)
    assert "pretrain: 1 new of 3 lines" in export(store, uri)
    assert "pretrain: 0 new of 3 lines" in export(store, uri)

    runs = runs_at(uri)
    assert set(runs) == {"pretrain", "finetune/learning rate 0.01"}
    pretrain = runs["pretrain"]
    assert pretrain.data.params["steps"] == "40" and pretrain.data.tags["vitflow.run"] == RUN

    assert history(uri, pretrain, "train/loss") == [(8, 1 / 8), (16, 1 / 16), (24, 1 / 24)]
    assert history(uri, pretrain, "dev/accuracy") == [(16, 0.5)]
    assert history(uri, pretrain, "few-shot/5-shot dev") == [(16, 0.25)]
    assert history(uri, pretrain, "objective/feature_rank") == [(16, 3.5)]
    assert [step for step, _ in history(uri, pretrain, "speed/mfu")] == [8, 16]


def test_the_metrics_are_the_logs_although_steps_were_repeated_between_exports(tmp_path: Path, uri: str) -> None:
    store = open_store(str(tmp_path / "s"))
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING")
    put_lines(store, "pretrain", line(8), line(16), line(24, dev_accuracy=0.5))
    export(store, uri)
    put_lines(store, "pretrain", line(16, loss=9.0), attempt=2, start=12)
    assert "pretrain: 2 new of 2 lines" in export(store, uri)
    assert "pretrain: 0 new of 2 lines" in export(store, uri)
    pretrain = runs_at(uri)["pretrain"]
    assert history(uri, pretrain, "train/loss") == [(8, 1 / 8), (16, 9.0)]
    assert history(uri, pretrain, "train/epoch") == [(8, 0.5), (16, 1.0)]
    assert history(uri, pretrain, "dev/accuracy") == []
    assert pretrain.data.params["steps"] == "40"


def test_an_export_that_was_cut_off_is_completed_and_what_is_there_twice_is_not_kept(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "s"))
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING")
    put_lines(store, "pretrain", line(8), line(16))
    log_batch = mlflow.MlflowClient.log_batch

    def cut_off(client: Any, run: str, metrics: Any = (), **rest: Any) -> None:
        log_batch(client, run, metrics=metrics[:3], **rest)

    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "log_batch", cut_off)
        export(store, uri)
    export(store, uri)
    assert history(uri, runs_at(uri)["pretrain"], "train/loss") == [(8, 1 / 8), (16, 1 / 16)]
    mlflow.MlflowClient(uri).log_metric(runs_at(uri)["pretrain"].info.run_id, "train/loss", 1 / 8, step=8)
    export(store, uri)
    assert history(uri, runs_at(uri)["pretrain"], "train/loss") == [(8, 1 / 8), (16, 1 / 16)]
