"""Few-shot accuracy while a pretraining runs: what the stage evaluate would say of dev, and nothing else changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.spec import Evaluate
from pipelines.store import LogLine, create_attempt
from ray_jobs.data import shards
from ray_jobs.data.shards import open_dataset
from ray_jobs.evaluation import frozen
from ray_jobs.evaluation.features import embed
from ray_jobs.training import loop
from ray_jobs.training.log import LogWriter
from tests.support import datasets
from tests.support.interrupted import configuration, files_below
from tests.support.memory_store import MemoryStore
from tests.support.objectives import MAE
from tests.support.records import make_attempt
from vit_model.errors import UserError
from vit_model.weights import load_model

FEWSHOT = {"shots": (1, 3), "draws": 2, "seed": 7}


def trained(dataset: Path, output: Path, **fields: Any) -> list[LogLine]:
    """Train for ten steps into a folder, and return the log."""
    store, attempt = MemoryStore(), make_attempt("pretrain")
    create_attempt(store, attempt)
    writer = LogWriter(store, attempt)
    config = configuration(steps=10, keep_steps=(), workers=1, dtype="float32", **fields)
    loop.train(config, open_dataset(dataset), output, writer=writer)
    return list(writer.unsaved())


@pytest.mark.parametrize("objective", [MAE, {}, {"optimizer": {"ema": 0.9}}], ids=["MAE", "labels", "averaged"])
def test_it_is_what_evaluate_would_measure_on_dev(dataset: Path, tmp_path: Path, objective: dict[str, Any]) -> None:
    lines = trained(dataset, tmp_path / "a", fewshot=FEWSHOT, **objective)
    assert [line.step for line in lines if line.few_shot] == [2, 4, 6, 8, 10]
    opened = open_dataset(dataset)
    model, contract = load_model(tmp_path / "a")
    train, dev = (embed(model, contract, 1, opened.images(split, contract.preprocessing)) for split in ("train", "dev"))
    stage = Evaluate(job="evaluate", data="d", backbone="m", **FEWSHOT)
    truth, no_rows = opened.labels("dev"), np.zeros(0, np.int64)
    results = [*frozen.results(stage, [(train, dev)], opened.labels("train"), truth, True, no_rows)]
    right = {shots: [r.fitted.predictions == truth for r in results if r.shots == shots] for shots in (1, 3)}
    expected = {f"{shots}-shot dev": pytest.approx(np.mean(draws)) for shots, draws in right.items()}
    assert lines[-1].few_shot == expected


def test_the_result_is_the_same_without_it(dataset: Path, tmp_path: Path) -> None:
    with_it = trained(dataset, tmp_path / "a", fewshot=FEWSHOT)
    without = trained(dataset, tmp_path / "b")
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")
    assert [line.loss for line in with_it] == [line.loss for line in without]
    assert all(line.few_shot is None for line in without)


def test_a_dataset_without_dev_is_refused_at_once(tmp_path: Path) -> None:
    images = {"train": [datasets.raw("t", np.zeros((8, 8, 1), np.uint8), 0)], "dev": [], "test": []}
    size = shards.ImageSize(height=8, width=8, channels=1)
    datasets.put(tmp_path / "d", "bare", ("a", "b"), size, images)
    with pytest.raises(UserError, match="fewshot: dataset bare has no dev split"):
        trained(tmp_path / "d", tmp_path / "a", fewshot=FEWSHOT)
