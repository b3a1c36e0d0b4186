"""A fine-tuning of a tiny model on tiny images, as a driver would have prepared it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from pipelines.spec import Finetune, Labels, Model
from pipelines.store import FileEntry, Manifest, Store, create_attempt, open_store
from ray_jobs import finetune
from ray_jobs.data import shards
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.cost import Cost, Speed
from ray_jobs.process.context import Context
from ray_jobs.training import optim
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.contract import model_contract
from ray_jobs.training.task import Score, Task, at_point, make_task
from ray_jobs.tuning import fits
from ray_jobs.tuning.ledger import images_table, open_ledger
from ray_jobs.tuning.trial import Refit, Refitted, Trial
from tests.support import datasets
from tests.support.checkpoints import SIZE
from tests.support.records import make_context, make_manifest
from vit_model.build import build
from vit_model.weights import save_model

COUNTS = {"train": 60, "dev": 20, "test": 30}
DATA = make_manifest(content_digest="halves")
COST = Cost(  # for tests without Ray, in which nothing is measured
    resolution=8,
    parameters=1,
    gflops=1.0,
    device="A processor",
    threads=1,
    forward=Speed(images=1, dtype="float32", images_per_second=1.0, peak_bytes=None),
)


def put_halves(folder: Path) -> Path:
    """Dark noise of 8x8, its left or its right half bright: the class."""
    return datasets.put_halves(folder, COUNTS, ("left", "right"))


def configuration(**fields: object) -> Finetune:
    base = {
        "job": "finetune",
        "data": "halves",
        "model": SIZE,
        "resolution": 8,
        "learning_rates": (1e-4, 1e-2),
        "steps": 20,
        "batch_size": 8,
        "labels": Labels(per_class=4, draws=2, folds=2),
    }
    return Finetune.model_validate(base | fields)


def trial(accuracy: float, loss: float, step: int, **fields: Any) -> Trial:
    return Trial(accuracy=accuracy, loss=loss, step=step, **fields)


def refitted(score: Score, **fields: Any) -> Refitted:
    """A refit with these results."""
    base = {"accuracy": score.accuracy, "loss": score.loss, "step": 1, "point": {}, "substitutes": 0}
    file = FileEntry(path="images.parquet", size=0, sha256="0")
    record = Refit(**base | {"images": file, "curve": (), "files": ()} | fields)
    return Refitted(record, images_table(score))


def save_backbone(folder: Path, size: Model = SIZE, side: int = 8, channels: Literal[1, 3] = 1) -> None:
    """A model of five other classes."""
    image = shards.ImageSize(height=side, width=side, channels=channels)
    none = {"train": 0, "dev": 0, "test": 0}
    info = shards.DatasetInfo(
        name="other", class_names=tuple("abcde"), image=image, splits=none, shards=(), content_digest="other"
    )
    contract = model_contract(size, side, info)
    model = build(contract.architecture)
    model.initialise(configuration().seed + 5)
    save_model(folder, model, contract)


def context(store_root: Path, dataset: Path, config: Finetune) -> Context[Finetune]:
    """The first attempt, with the dataset in place of a committed one."""
    store = open_store(str(store_root))
    shutil.copytree(dataset, store.local(DATA.folder, ()))
    return make_context(store, config, data=DATA)


def attempt(root: Path, config: Finetune, number: int, code: str = "c") -> Context[Finetune]:
    """An attempt at the same key in a store that has the dataset, as a driver prepares it."""
    given = make_context(open_store(str(root)), config, data=DATA)
    record = given.attempt.model_copy(update={"number": number, "code_digest": code})
    return replace(given, attempt=create_attempt(given.open_store(), record))


def attempt_of(store: Store, config: Finetune, data: Manifest, number: int = 1) -> Context[Any]:
    """An attempt of a fine-tuning of this data set, as a driver makes it."""
    given = make_context(store, config, data=data)
    record = given.attempt.model_copy(update={"number": number, "job": config.job})
    return replace(given, attempt=create_attempt(store, record))


def first_refit(given: Context[Any]) -> tuple[Task, Dataset, Refitted]:
    """The refit of draw 0 with the first learning rate, which continues what earlier attempts left."""
    dataset = given.dataset()
    task = make_task(given.config, dataset, given.input("backbone") if given.config.backbone else None)
    pools, _ = finetune.labelled(given.config, dataset)
    point = {"learning_rate": given.config.learning_rates[0]}
    task = at_point(task, 0, point, dataset)._replace(attempts=open_ledger(given).attempts)
    done = fits.refit(given, task, pools[0], 0)
    assert done is not None
    return task, dataset, done


def save_at_once(patch: pytest.MonkeyPatch) -> None:
    """Have each checkpoint written before its training goes on."""
    save = CheckpointManager.save

    def save_now(manager: CheckpointManager, *arguments: Any) -> None:
        save(manager, *arguments)
        manager.wait()

    patch.setattr(CheckpointManager, "save", save_now)


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch, fit: Callable[[], object]) -> None:
    """Let a fit end before a step, as a signal would, when all its checkpoints are written."""
    rate = optim.learning_rate

    def killed(at: int, *arguments: Any) -> float:
        if at == step:
            raise KeyboardInterrupt
        return rate(at, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        save_at_once(patch)
        patch.setattr(optim, "learning_rate", killed)
        fit()
