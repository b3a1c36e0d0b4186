"""The fairness of a comparison: with the same `Labels`, fine-tuning and the baselines see the same labelled images."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.spec import Baselines, Labels
from pipelines.store import open_store
from ray_jobs import baselines, finetune
from ray_jobs.evaluation import pixel_baselines
from ray_jobs.evaluation.supports import Supports
from ray_jobs.process.context import Context
from ray_jobs.training.evaluators import score
from ray_jobs.tuning import runner as sweep_module
from ray_jobs.tuning.ledger import add_trial
from ray_jobs.tuning.trial import Refitted
from tests.support import datasets
from tests.support.finetuning import COST, configuration, refitted, trial
from tests.support.records import make_context, make_manifest

TEST = 12
FEW, ALL = Labels(per_class=6, draws=3, folds=3, seed=5), Labels(folds=4, seed=5)
LearnerImages = tuple[np.ndarray, np.ndarray]


class Seen(NamedTuple):
    """What a learner was given: pixels [n, d] and labels [n] of each part of each fold, and of each draw."""

    folds: list[tuple[LearnerImages, LearnerImages]]
    draws: list[LearnerImages]
    selected_on: set[str]


def context(folder: Path, config: Any, dev: int) -> Context:
    """Of a dataset of noise, in which no two images are equal."""
    datasets.put_noise(folder / "dataset", {"train": 60, "dev": dev, "test": TEST})
    store = open_store(str(folder / "store"))
    data = make_manifest("ingest")
    shutil.copytree(folder / "dataset", store.local(data.folder, ()))
    return make_context(store, config, data=data)


def seen_by_fine_tuning(folder: Path, labels: Labels, dev: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen([], [], set())

    def images(task: Any, pool: Any) -> LearnerImages:
        pixels = pool.dataset.load(pool.rows, task.contract.preprocessing)
        return pixels.reshape(len(pixels), -1) / 255, pool.labels

    def run_trials(made: Any, pools: Any, folds: Any, missing: Any, finished: Any) -> None:
        for inside, outside in folds:
            task, _ = missing[0]
            seen.folds.append((images(task, pools[0].take(inside)), images(task, pools[0].take(outside))))
        for task, fold in missing:
            add_trial(made, task.trial(fold), trial(1.0, 1.0, 1))

    def run_refits(_: Any, task: Any, pools: Any, draws: Any) -> list[Refitted]:
        seen.draws.extend(images(task, pools[draw]) for draw in draws)
        scored = score(torch.zeros(TEST, 2), np.zeros(TEST, np.int64))
        return [refitted(scored) for _ in draws]

    monkeypatch.setattr(sweep_module, "run_trials", run_trials)
    monkeypatch.setattr(finetune, "run_refits", run_refits)
    monkeypatch.setattr(finetune, "measure_cost", lambda *_: COST)
    config = configuration(labels=labels, learning_rates=(0.1, 0.2), steps=1, batch_size=1)
    made = context(folder, config, dev)
    finetune.main(made)
    written = folder / "store" / "artifacts/finetune/k/attempts/1/files"
    seen.selected_on.update(row["selected_on"] for row in pq.read_table(written / "rows.parquet").to_pylist())
    seen.selected_on.add(json.loads((written / "sweep.json").read_text())["selected_on"])
    return seen


def seen_by_baselines(folder: Path, labels: Labels, dev: int, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen([], [], set())

    def choose(method: str, x: np.ndarray, y: np.ndarray, folds: Any) -> dict[str, float]:
        seen.folds.extend(((x[a], y[a]), (x[b], y[b])) for a, b in folds)
        return {}

    def fit_predict(method: str, chosen: Any, x: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray:
        seen.draws.append((x, y))
        return np.zeros(len(test), np.int64)

    monkeypatch.setattr(pixel_baselines, "choose", choose)
    monkeypatch.setattr(pixel_baselines, "fit_predict", fit_predict)
    config = Baselines(job="baselines", data="d", methods=("k-NN",), labels=labels)
    found, _ = baselines.run_method(context(folder, config, dev), "k-NN")
    seen.selected_on.update(row["selected_on"] for row in found)
    return seen


@pytest.mark.parametrize(
    ("labels", "dev", "selected_on"),
    [
        (FEW, 20, "3-fold cross-validation in draw 0"),
        (ALL, 20, "dev"),
        (ALL, 0, "4-fold cross-validation in train"),
        (ALL.model_copy(update={"use_dev": False}), 20, "4-fold cross-validation in train"),
    ],
    ids=["few labels", "all labels", "no dev", "dev is not used"],
)
def test_both_learners_see_the_same_images_and_select_on_the_same(
    labels: Labels, dev: int, selected_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seen_by_fine_tuning(tmp_path / "finetune", labels, dev, monkeypatch)
    other = seen_by_baselines(tmp_path / "baselines", labels, dev, monkeypatch)
    assert one.selected_on == other.selected_on == {selected_on}
    expected = (1, labels.draws) if selected_on == "dev" else (labels.folds, labels.draws)
    assert (len(one.folds), len(one.draws)) == (expected if labels.per_class else (expected[0], 1))
    images_of_train = 60
    assert labels.use_dev or [len(images) for images, _ in one.draws] == [images_of_train]
    for (ours, our_labels), (theirs, their_labels) in zip(one.draws, other.draws, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(our_labels, their_labels)
    for our_fold, their_fold in zip(one.folds, other.folds, strict=True):
        for (ours, our_labels), (theirs, their_labels) in zip(our_fold, their_fold, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(our_labels, their_labels)


def test_of_all_labels_so_many_images_of_train_are_kept_and_all_of_dev(tmp_path: Path) -> None:
    dataset = context(tmp_path, Baselines(job="baselines", data="d"), dev=20).dataset()
    supports = Supports(dataset.index("train"), dataset.index("dev"), ALL, max_images=25)
    (drawn,) = supports.draws
    assert (np.diff(drawn) > 0).all() and len(drawn) == 45
    assert drawn[25:].tolist() == list(range(60, 80))
    ((inside, outside),) = supports.folds
    assert (inside.tolist(), outside.tolist()) == (list(range(25)), list(range(25, 45)))
