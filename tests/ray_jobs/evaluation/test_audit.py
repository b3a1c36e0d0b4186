"""The audit stage, in this process: planted labels are found, finished folds taken over, seen labels refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.spec import Audit
from pipelines.store import Layout, Manifest, Store, commit, create_attempt, input_ref, open_store
from ray_jobs import audit
from ray_jobs.data import shards
from ray_jobs.evaluation.label_issues import FILE, read_issues
from ray_jobs.process.context import Context
from ray_jobs.tuning import folds
from tests.support import datasets
from tests.support.checkpoints import SIZE, put_untrained
from tests.support.records import make_context, make_manifest
from vit_model.errors import UserError

FIT = {"folds": 3, "model": SIZE, "resolution": 8, "learning_rate": 1e-2, "steps": 30, "batch_size": 16}
COUNTS = {"train": 90, "dev": 30, "test": 10}
WRONG = {"train": (3, 40, 77), "dev": (8,)}
NAMES = ("dark", "bright", "nobody")


def put_noise(folder: Path, lonely: bool = False) -> None:
    """Dark or bright noise: the class, but for WRONG; a third class has no image, or one."""
    rng = np.random.default_rng(0)
    splits = {}
    for split, count in COUNTS.items():
        splits[split] = samples = []
        for number in range(count):
            pixels = rng.integers(0, 64, (8, 8, 1)).astype(np.uint8)
            pixels += np.uint8(150 * (number % 2))
            label = (number + (number in WRONG.get(split, ()))) % 2
            if lonely and (split, number) == ("train", 0):
                label = 2
            samples.append(datasets.raw(f"{split}/{number:04d}", pixels, label))
    image = shards.ImageSize(height=8, width=8, channels=1)
    datasets.put(folder, "noise", NAMES, image, splits)


class Made:
    """A store with the dataset, and models of it: untrained ones that say how they were trained."""

    def __init__(self, root: Path, lonely: bool = False) -> None:
        self.store: Store = open_store(str(root))
        with self.store.staging(Layout.files("ingest", "data", 1)) as staging:
            put_noise(staging.path, lonely)
            self.info = shards.open_dataset(staging.path).info
        digest = self.info.content_digest
        self.data = commit(
            self.store,
            make_manifest("ingest", key="data", stage="noise", content_digest=digest, files=staging.files),
        )

    def model(self, job: str, says: str = "unknown", **config: Any) -> Manifest:
        model = put_untrained(self.store, self.data, "model", job, training_data=says)
        inputs = {} if job == "import" else {"data": [input_ref(self.store, self.data)]}
        changes = {"stage": "backbone", "inputs": inputs, "config": config}
        return commit(self.store, model.model_copy(update=changes))

    def context(self, number: int = 1, backbone: Manifest | None = None, **fields: Any) -> Context[Audit]:
        given = {} if backbone is None else {"backbone": backbone}
        config = Audit.model_validate({"job": "audit", "data": "noise", **dict.fromkeys(given, "backbone"), **fields})
        context = make_context(self.store, config, data=self.data, **given)
        attempt = create_attempt(self.store, context.attempt.model_copy(update={"number": number}))
        return Context(attempt, config, context.inputs)

    def issues(self, context: Context[Audit]) -> pa.Table:
        return read_issues(self.store.local(Layout.files("audit", "k", context.attempt.number), ()) / FILE)


PLANTED = {f"{split}/{number:04d}" for split, numbers in WRONG.items() for number in numbers}


@pytest.mark.parametrize("source", ["features", "folds"])
def test_planted_labels_are_listed_first_with_the_right_class(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "store")
    if source == "features":
        context = made.context(backbone=made.model("pretrain", objective="mae"))
    else:
        context = made.context(cross_validation=FIT)
    result = audit.audit(context)
    rows = made.issues(context).to_pylist()[: len(PLANTED)]
    assert {row["sample_id"] for row in rows} == PLANTED == {row["file"] for row in rows}
    assert all({row["label"], row["suggested"]} == {"dark", "bright"} for row in rows)
    assert all(row["split"] == row["file"].partition("/")[0] for row in rows)
    assert result.metrics["audited"] == COUNTS["train"] + COUNTS["dev"]
    assert "1 class without an image in train and dev: nobody" in capsys.readouterr().out
    assert {Path(file.path).parts[0] for file in result.files} == {FILE, "probabilities"}


def test_no_fold_is_judged_by_a_model_that_was_fitted_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on a copy: each fit sees all images but those of the fold, whose probabilities it then gives."""
    made, fitted = Made(tmp_path / "store"), []
    real = folds.fit

    def recording(task: Any, data: shards.Images, *arguments: Any, **named: Any) -> Any:
        fitted.append(set(data.rows["sample_id"].to_pylist()))
        return real(task, data, *arguments, **named)

    monkeypatch.setattr(folds, "fit", recording)
    context = made.context(cross_validation=FIT)
    audit.audit(context)
    folder = made.store.local(Layout.files("audit", "k", 1), ()) / "probabilities"
    judged = [set(pq.read_table(folder / f"{number}.parquet")["sample_id"].to_pylist()) for number in range(3)]
    every = set.union(*judged)
    assert len(every) == COUNTS["train"] + COUNTS["dev"]
    assert all(own == every - held_out for own, held_out in zip(fitted, judged, strict=True))


def test_the_same_audit_has_the_same_bytes_and_finished_folds_are_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls, fit_fold = Made(tmp_path / "store"), [], folds.fit_fold

    def fails_at_last(*arguments: Any) -> Any:
        calls.append(arguments[4])
        if len(calls) == 3:
            raise RuntimeError("killed")
        return fit_fold(*arguments)

    monkeypatch.setattr(folds, "fit_fold", fails_at_last)
    with pytest.raises(RuntimeError, match="killed"):
        audit.audit(made.context(cross_validation=FIT))
    second = audit.audit(made.context(number=2, cross_validation=FIT))
    out = capsys.readouterr().out
    assert "fold 0: from attempt 1" in out and "fold 1: from attempt 1" in out and "fold 2: from" not in out
    fresh = audit.audit(Made(tmp_path / "other").context(cross_validation=FIT))
    assert {file.path: file.sha256 for file in fresh.files} == {file.path: file.sha256 for file in second.files}
    assert fresh.content_digest == second.content_digest


def test_an_image_alone_in_its_class_is_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "store", lonely=True)
    context = made.context(backbone=made.model("pretrain", objective="mae"))
    assert audit.audit(context).metrics["not_audited"] == 1
    assert "1 class with images in one fold only, not audited: nobody" in capsys.readouterr().out
    assert "train/0000" not in made.issues(context)["sample_id"].to_pylist()


@pytest.mark.parametrize(
    ("job", "config"),
    [
        ("finetune", {"labels": {}}),
        ("pretrain", {}),
        ("pretrain", {"objective": "distillation"}),
        ("import", {}),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"cross_validation": {**FIT, "model": None}}])
def test_a_backbone_that_has_learned_these_labels_is_refused(
    job: str, config: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    made = Made(tmp_path / "store")
    backbone = made.model(job, says=made.info.content_digest, **config)
    with pytest.raises(UserError, match=r"backbone backbone: trained on the labels of \d+ of the 120 images"):
        audit.audit(made.context(backbone=backbone, **fields))


def test_unknown_training_images_are_recorded(tmp_path: Path) -> None:
    made = Made(tmp_path / "store")
    result = audit.audit(made.context(backbone=made.model("import")))
    assert result.metrics["unknown_training"] == "backbone (import model)"


def test_folds_keep_groups_together_and_spread_classes() -> None:
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 3, 300))
    groups = [f"g{number}" if number < 40 else None for number in rng.integers(0, 300, 300)]
    content = [f"c{number}" for number in rng.integers(0, 250, 300)]
    images = pa.table({"label": labels, "group": pa.array(groups, pa.string()), "content_id": content})
    found = folds.assign_folds(images, 4, seed=0)
    by_unit: dict[str, set[int]] = {}
    for group, own, fold in zip(groups, content, found, strict=True):
        by_unit.setdefault(group or own, set()).add(int(fold))
    assert {len(each) for each in by_unit.values()} == {1}
    counts = np.stack([np.bincount(found[labels == label], minlength=4) for label in range(3)])
    assert (counts >= 0.6 * counts.mean(axis=1, keepdims=True)).all()
    assert not (found == folds.assign_folds(images, 4, seed=1)).all()
    with pytest.raises(UserError, match=r"cross_validation\.folds 400: train and dev have only \d+ groups"):
        folds.assign_folds(images, 400, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "backbone is missing; give a model stage"),
        ({"cross_validation": {**FIT, "model": None}}, "cross_validation: .*give either backbone"),
        ({"cross_validation": {**FIT, "resolution": 9}}, "cross_validation: .*patch"),
        ({"cross_validation": {**FIT, "folds": 1}}, "folds"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Audit.model_validate({"job": "audit", "data": "d", **fields})
