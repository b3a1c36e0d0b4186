"""Likely wrong labels: as cleanlab finds them, as planted, and what is refused by name."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.linear_model import Ridge

from ray_jobs.evaluation.label_issues import (
    LABEL_ISSUES,
    find_issues,
    issues_table,
    left_out_probabilities,
    read_issues,
    read_probabilities,
    thresholds,
    write_issues,
    write_probabilities,
)
from vit_model.errors import UserError

IMAGES, CLASSES, PLANTED = 2000, 7, 100


def noisy(seed: int, least: float = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels of which some are wrong, probabilities of a model that knows high classes better, the wrong places."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, IMAGES)
    logits = rng.normal(size=(IMAGES, CLASSES))
    logits[np.arange(IMAGES), labels] += np.linspace(least, 7, CLASSES)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    places = rng.permutation(IMAGES)[:PLANTED]
    labels[places] = (labels[places] + rng.integers(1, CLASSES, PLANTED)) % CLASSES
    return labels, probabilities, places


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_labels_in_the_same_order_as_cleanlab(seed: int, dtype: type) -> None:
    cleanlab = pytest.importorskip("cleanlab.filter")
    labels, probabilities, _ = noisy(seed)
    probabilities = probabilities.astype(dtype)
    theirs = cleanlab.find_label_issues(
        labels,
        probabilities,
        filter_by="low_self_confidence",
        return_indices_ranked_by="self_confidence",
        n_jobs=1,
    )
    ours = find_issues(labels, probabilities)
    assert len(ours.places) == len(theirs) > PLANTED / 2
    doubtful = theirs[probabilities[theirs].argmax(axis=1) != labels[theirs]]  # the only difference
    np.testing.assert_array_equal(ours.places[: len(doubtful)], doubtful)
    assert len(doubtful) > 0.95 * len(theirs)
    np.testing.assert_array_equal(ours.suggested, probabilities[ours.places].argmax(axis=1))
    assert (ours.suggested != labels[ours.places]).all()


def test_planted_labels_come_first() -> None:
    labels, probabilities, places = noisy(0, least=7)
    first = find_issues(labels, probabilities).places[:PLANTED]
    assert len(np.intersect1d(first, places)) >= 0.9 * PLANTED


def test_a_class_without_images_reaches_no_threshold_and_ties_stay_in_their_order() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1])
    probabilities = np.array(
        [[0.1, 0.6, 0.3]] + [[0.7, 0.2, 0.1]] * 2 + [[0.8, 0.1, 0.1]] * 2 + [[0.1, 0.8, 0.1]]
    )
    assert thresholds(labels, probabilities).tolist() == pytest.approx([0.5, 1 / 3, np.inf])
    found = find_issues(labels, probabilities)
    assert (found.places.tolist(), found.suggested.tolist()) == ([0, 3, 4], [1, 0, 0])


@pytest.mark.parametrize(
    ("labels", "row", "message"),
    [
        ([0, 2], [0.5, 0.5], r"label 2 of image 1 must be from 0 to 1"),
        ([0, -1], [0.5, 0.5], r"label -1 of image 1"),
        ([0, 1], [np.nan, 0.5], r"probabilities of image 1 are nan to nan"),
        ([0, 1], [0.4, 0.5], r"probabilities of image 1 .* with sum 0\.9"),
        ([0, 1], [-0.5, 1.5], r"probabilities of image 1 are -0\.5 to 1\.5"),
    ],
)
def test_what_is_no_probability_or_label_is_named(labels: list[int], row: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_issues(np.array(labels), np.array([[0.5, 0.5], row]))


def test_an_image_left_out_is_scored_by_a_fit_to_the_others() -> None:
    """Against scikit-learn, fitted anew without each image; a class without images has probability 0."""
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 3], 12)
    features = rng.normal(size=(36, 5)) + rng.normal(size=(4, 5))[labels]
    probabilities, settings = left_out_probabilities(features, labels, 4)
    assert (probabilities[:, 2] == 0).all()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)
    scaled = (features - features.mean(0)) / (features.std(0) + 1e-5)
    inputs = np.hstack([scaled, np.full((36, 1), 100.0)])
    for image in (0, 17, 35):
        others = np.delete(np.arange(36), image)
        targets = 2.0 * np.eye(4)[labels[others]][:, [0, 1, 3]] - 1
        scores = (
            Ridge(settings["l2"], fit_intercept=False)
            .fit(inputs[others], targets)
            .predict(inputs[[image]])[0]
        )
        expected = np.exp(scores / settings["temperature"])
        np.testing.assert_allclose(probabilities[image, [0, 1, 3]], expected / expected.sum(), rtol=1e-4)
    features[3, 2] = np.nan
    with pytest.raises(UserError, match=r"labelled features hold nan at \[3, 2\]"):
        left_out_probabilities(features, labels, 4)


def test_probabilities_and_issues_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, probabilities, _ = noisy(1)
    ids = [f"id{number}" for number in range(IMAGES)]
    index = pa.table(
        {"sample_id": ids, "key": ids, "split": ["train"] * IMAGES, "label": pa.array(labels, pa.int32())}
    )
    for number in (0, 1):
        own = np.arange(number, IMAGES, 2)
        write_probabilities(tmp_path / f"p/{number}", index["sample_id"].take(own), probabilities[own])
    read = read_probabilities([tmp_path / "p/1", tmp_path / "p/0"], index)
    np.testing.assert_array_equal(read, probabilities.astype(np.float32))
    names = tuple("abcdefg")
    table = issues_table(index, names, probabilities, find_issues(labels, probabilities))
    write_issues(tmp_path / "issues", table)
    assert read_issues(tmp_path / "issues").equals(table) and table.schema == LABEL_ISSUES
    row = table.to_pylist()[0]
    place = ids.index(row["sample_id"])
    assert row["rank"] == 1 and row["label"] == names[labels[place]]
    assert row["suggested_probability"] == np.float32(probabilities[place, names.index(row["suggested"])])
    (tmp_path / "issues").write_bytes(b"x")
    with pytest.raises(UserError, match="issues is missing or damaged"):
        read_issues(tmp_path / "issues")
