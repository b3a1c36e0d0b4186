"""Likely wrong labels: as cleanlab finds them, as planted, and what is refused by name."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge

from ray_jobs.evaluation.label_issues import (
    LABEL_ISSUES,
    doubts,
    find_issues,
    headline,
    issues_table,
    left_out_probabilities,
    measure_list,
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
    doubtful = theirs[probabilities[theirs].argmax(axis=1) != labels[theirs]]  # the others take up room there
    np.testing.assert_array_equal(ours.places[: len(doubtful)], doubtful)
    assert len(doubtful) > 0.95 * len(theirs)
    np.testing.assert_array_equal(ours.suggested, probabilities[ours.places].argmax(axis=1))
    assert (ours.suggested != labels[ours.places]).all()


def digits_audited(features: int, share: float) -> tuple[float, float, dict[str, float]]:
    """Digits with a share of wrong labels and so many random features: recall and precision of the list; metrics."""
    pixels, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(features)
    places = rng.permutation(len(labels))[: int(share * len(labels))]
    labels[places] = (labels[places] + rng.integers(1, 10, len(places))) % 10
    inputs = np.maximum((pixels - pixels.mean(axis=0)) @ rng.normal(size=(64, features)), 0)
    probabilities, _ = left_out_probabilities(inputs, labels, 10)
    found = find_issues(labels, probabilities).places
    hits = int(np.isin(found, places).sum())
    metrics = measure_list(labels, probabilities, len(found), 0)
    metrics |= {"agreement": float((probabilities.argmax(axis=1) == labels).mean())}
    metrics |= {"label_issues": len(found), "audited": len(labels)}
    return hits / max(1, len(places)), hits / max(1, len(found)), metrics


@pytest.mark.parametrize("features", [1, 4, 10, 20, 200])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.15])
def test_a_list_is_worth_what_labels_replaced_on_purpose_say(features: int, share: float) -> None:
    recall, precision, metrics = digits_audited(features, share)
    if share:  # three standard errors of the planted ones' share, and their effect on the model
        error = 3 * (recall * (1 - recall) / (1797 * share)) ** 0.5
        assert metrics["flip_recall"] == pytest.approx(recall, abs=0.02 + error)
    said = headline(metrics)
    if doubts(metrics):
        assert precision < 0.4 or share > 0.05
        assert "does not show how many labels are wrong" in said and "likely wrong" not in said
    else:
        assert precision <= metrics["expected_precision"] + 0.01
        assert f"at most about {metrics['expected_precision']:.0%} of the list" in said
    if features == 1:
        assert metrics["agreement"] < 0.36 and doubts(metrics)
    if features == 200:
        assert doubts(metrics) is None and metrics["expected_precision"] > precision - 0.1


def test_more_is_asked_of_a_model_if_guessing_is_often_right() -> None:
    assert doubts({"agreement": 0.79, "largest_class": 0.5}) and not doubts({"agreement": 0.81, "largest_class": 0.5})
    assert doubts({"agreement": 0.95, "largest_class": 0.9}) and not doubts({"agreement": 0.97, "largest_class": 0.9})
    poor = {"agreement": 0.5, "largest_class": 0.0, "label_issues": 3, "audited": 9}
    assert headline(poor).startswith("the model agrees with only 50.0% of the labels; below 60.0%")


def test_without_a_replaced_or_a_listed_label_nothing_is_said_of_them() -> None:
    one = measure_list(np.zeros(5, int), np.ones((5, 1)), 0, 0)
    assert one == {"largest_class": 1.0, "flip_recall": 0.0, "expected_precision": 0.0}
    none = {"agreement": 1.0, "label_issues": 0, "audited": 5}
    said = "0 of 5 labels are listed as likely wrong; the model agrees with 100.0% of all"
    assert headline(one | none) == said
    found = {"largest_class": 0.5, "flip_recall": 0.97, "expected_precision": 0.0} | none
    assert headline(found) == f"{said}. It lists 97% of the labels that the audit replaced to test it"


def test_planted_labels_come_first() -> None:
    labels, probabilities, places = noisy(0, least=7)
    first = find_issues(labels, probabilities).places[:PLANTED]
    assert len(np.intersect1d(first, places)) >= 0.9 * PLANTED


def test_a_class_without_images_reaches_no_threshold_and_ties_stay_in_their_order() -> None:
    labels = np.array([0, 0, 0, 1, 1, 1])
    probabilities = np.array([[0.1, 0.6, 0.3]] + [[0.7, 0.2, 0.1]] * 2 + [[0.8, 0.1, 0.1]] * 2 + [[0.1, 0.8, 0.1]])
    assert thresholds(labels, probabilities).tolist() == pytest.approx([0.5, 1 / 3, np.inf])
    found = find_issues(labels, probabilities)
    assert (found.places.tolist(), found.suggested.tolist()) == ([0, 3, 4], [1, 0, 0])


def test_probabilities_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match="probabilities of image 1 are not finite"):
        find_issues(np.array([0, 1]), np.array([[0.5, 0.5], [np.nan, 0.5]]))


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
        scores = Ridge(settings["l2"], fit_intercept=False).fit(inputs[others], targets).predict(inputs[[image]])[0]
        expected = np.exp(scores / settings["temperature"])
        np.testing.assert_allclose(probabilities[image, [0, 1, 3]], expected / expected.sum(), rtol=1e-4)
    features[3, 2] = np.nan
    with pytest.raises(UserError, match=r"labelled features: value nan at \[3, 2\]"):
        left_out_probabilities(features, labels, 4)


def test_probabilities_and_issues_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, probabilities, _ = noisy(1)
    ids = [f"id{number}" for number in range(IMAGES)]
    index = pa.table({"sample_id": ids, "key": ids, "split": ["train"] * IMAGES, "label": pa.array(labels, pa.int32())})
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
