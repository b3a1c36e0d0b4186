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


def test_each_training_is_a_run_and_a_second_export_adds_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for this test needs no server
    uri, store = (tmp_path / "mlflow").as_uri(), open_store(str(tmp_path / "s"))
    put_run(store, digits="SUCCEEDED", pretrain="RUNNING", finetune="RUNNING")
    put_lines(store, "pretrain", line(8), line(16, dev_accuracy=0.5, few_shot={"5-shot dev": 0.25}))
    put_lines(store, "finetune", line(4, "trial-0-0"))
    assert "pretrain: 2 new of 2 lines" in export(store, uri)
    put_lines(store, "pretrain", line(24, mfu=None), number=2)
    assert "pretrain: 1 new of 3 lines" in export(store, uri)
    assert "pretrain: 0 new of 3 lines" in export(store, uri)

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("one")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"pretrain", "finetune/learning rate 0.01, fold 0"}
    pretrain = runs["pretrain"]
    assert pretrain.data.params["steps"] == "40" and pretrain.data.tags["vitflow.run"] == RUN

    def values(tag: str) -> dict[int, float]:
        return {each.step: each.value for each in client.get_metric_history(pretrain.info.run_id, tag)}

    assert values("train/loss") == {8: 1 / 8, 16: 1 / 16, 24: 1 / 24}
    assert values("dev/accuracy") == {16: 0.5} and values("few-shot/5-shot dev") == {16: 0.25}
    assert set(values("speed/mfu")) == {8, 16}
