"""What VTAB's evaluation needs beside few shots: supports from train and dev, all labels, classes without labels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines import store as st
from pipelines.identity import identity_fields
from pipelines.spec import Evaluate
from pipelines.store import Manifest, Store, open_store
from ray_jobs import evaluate
from ray_jobs.data import shards
from ray_jobs.evaluation import features, frozen, linear_probe
from tests.support.checkpoints import put_untrained
from tests.support.digits import grey, ink, put_digits
from tests.support.records import make_context, make_manifest

LABELS, PIXELS = ink()[1], grey()
PARTS = {"train": range(30), "dev": range(30, 50), "test": range(50, 150)}


def put(store: Store, key: str, parts: Mapping[str, Any]) -> Manifest:
    with store.staging(st.Layout.files("ingest", key, 1)) as staging:
        put_digits(staging.path, "digits", parts)
    return make_manifest("ingest", key=key, files=staging.files)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def digits(store: Store) -> Manifest:
    return put(store, "digits", PARTS)


@pytest.fixture(scope="module")
def model(store: Store, digits: Manifest) -> Manifest:
    return put_untrained(store, digits, "model", training_data="other images")


def run(
    store: Store, data: Manifest, model: Manifest, **fields: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows and predictions of an evaluation."""
    config = Evaluate.model_validate({"job": "evaluate", "data": "d", "backbone": "m"} | fields)
    evaluate.evaluate(make_context(store, config, data=data, backbone=model))
    folder = Path(store.local(st.Layout.files("evaluate", "k", 1), ()))
    return (
        pq.read_table(folder / "rows.parquet").to_pylist(),
        pq.read_table(folder / "predictions.parquet").to_pylist(),
    )


ALL = {"shots": (1,), "draws": 1, "support": "train+dev", "linear_probe": True}


def test_the_linear_probe_is_on_all_labels_with_the_l2_of_leave_one_out(
    store: Store, digits: Manifest, model: Manifest
) -> None:
    """On the pixels of train and dev."""
    found, predictions = run(store, digits, model, **ALL)
    (row,) = [row for row in found if row["method"] == "pixels" and row["labels_per_class"] is None]
    assert (row["protocol"], row["draw"]) == ("linear probe", 0)
    pixels = PIXELS.reshape(-1, 64)[:150] / np.float32(255)
    expected = linear_probe.leave_one_out(pixels[:50], LABELS[:50], pixels[50:], False)
    assert row["selected_on"] == expected.selected_on == "leave-one-out on the support"
    fixed = {"labelled_images": 50, "standardised": False, "support": "train+dev", "width": 64}
    assert json.loads(row["settings"]) == fixed | expected.settings
    ours = [p["prediction"] for p in predictions if p["method"] == "pixels" and p["labels_per_class"] is None]
    np.testing.assert_array_equal(ours, expected.predictions)
    assert row["value"] == np.mean(expected.predictions == LABELS[50:150])


def test_train_and_dev_together_are_a_train_that_has_both(store: Store, digits: Manifest, model: Manifest) -> None:
    """Every row and prediction, of every kind of features, few shots and all."""
    joined = put(store, "joined", {"train": range(50), "test": PARTS["test"]})
    fields = ALL | {"shots": (1, 3), "draws": 2}
    one = run(store, digits, model, **fields)
    two = run(store, joined, model, **fields | {"support": "train"})
    # four kinds of features; three untrained models instead of one with all labels; the most frequent class
    assert len(one[0]) == 4 * (2 * 2 + 1) + 2 + 3 * 2
    for ours, theirs in zip(one[0], two[0], strict=True):
        settings = json.loads(ours["settings"])
        assert settings.pop("support") == "train+dev"
        assert ours | {"settings": settings} == theirs | {"settings": json.loads(theirs["settings"])}
    assert one[1] == two[1]


def test_a_class_without_labels_is_wrong_and_told(store: Store, digits: Manifest, model: Manifest) -> None:
    """Of 397 classes of SUN397, 325 are among VTAB's 1,000 images."""
    few = put(store, "few", {"train": [number for number in range(50) if LABELS[number] < 8], "test": PARTS["test"]})
    found, predictions = run(store, few, model, shots=(1,), draws=1, linear_probe=True)
    assert all(json.loads(row["settings"])["classes_without_labels"] == 2 for row in found)
    assert all(prediction["prediction"] < 8 for prediction in predictions)
    possible = np.mean(LABELS[50:150] < 8)
    assert all(row["value"] <= possible for row in found)
    assert max(row["value"] for row in found) > 0.4


def test_images_are_decoded_a_few_at_a_time(
    store: Store, digits: Manifest, model: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(store, digits, model, **ALL)
    asked = []
    images = shards.Dataset.images

    def counted(self: shards.Dataset, split: Any, preprocessing: Any, indices: Any = None) -> Any:
        asked.append(len(indices))
        return images(self, split, preprocessing, indices)

    monkeypatch.setattr(shards.Dataset, "images", counted)
    monkeypatch.setattr(features, "DECODED", 16)
    after = run(store, digits, model, **ALL)
    assert max(asked) == 16
    assert sum(asked) == 2 * 150, "once for all networks, once for the pixels"
    assert before[1] == after[1]


def test_test_images_are_scored_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = PIXELS.reshape(-1, 64)[:150].astype(np.float32)
    probes = ("least squares", "k-NN", "nearest class mean", "logistic regression")
    config = Evaluate(
        job="evaluate", data="d", backbone="m", shots=(2,), draws=1, linear_probe=True, classifiers=probes
    )

    def results() -> list[frozen.Result]:
        pair, no_rows = (pixels[:50], pixels[50:]), np.zeros(0, np.int64)
        return [*frozen.results(config, [pair], LABELS[:50], LABELS[50:150], True, no_rows)]

    before = results()
    monkeypatch.setattr(linear_probe, "TEST_BLOCK", 7)
    for one, two in zip(before, results(), strict=True):
        np.testing.assert_array_equal(one.fitted.predictions, two.fitted.predictions)
    before = before[:2]
    assert [(result.shots, result.draw) for result in before] == [(2, 0), (None, 0)]


def test_what_was_evaluated_before_keeps_its_key() -> None:
    plain = identity_fields(Evaluate(job="evaluate", data="d", backbone="m"))
    assert set(plain) == {"job", "shots", "draws", "seed"}
    more = identity_fields(Evaluate(job="evaluate", data="d", backbone="m", support="train+dev", linear_probe=True))
    assert more == plain | {"support": "train+dev", "linear_probe": True}
