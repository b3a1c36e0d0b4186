"""Metrics of several labels per image against scikit-learn: values, thresholds, and what an image contributes."""

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import average_precision_score, f1_score

from ray_jobs.evaluation.multi_label import (
    METRICS,
    Scored,
    best_thresholds,
    class_precisions,
    mean_ap,
    reaches,
    scored,
)
from ray_jobs.evaluation.rows import ON_SEEN, ON_UNSEEN


def results(images: int = 90, classes: int = 5) -> Scored:
    """Probabilities with ties; the last class has no images, and some images have no labels."""
    rng = np.random.default_rng(3)
    truth = rng.random((images, classes)) < 0.3
    truth[:, -1] = truth[::7] = False
    scores = np.round(np.clip(rng.normal(0.3 + 0.25 * truth, 0.2), 0, 1), 2).astype(np.float32)
    return Scored(truth, scores, reaches(scores, (0.5, 0.4, 0.3, 0.6, 0.9)))


def peers(found: Scored, weights: np.ndarray | None = None) -> tuple[float, ...]:
    """The METRICS by scikit-learn, over the classes with images (F1: or predictions)."""
    truth, scores, predicted = found
    has, said = truth.any(axis=0), (truth | predicted).any(axis=0)
    return (
        average_precision_score(truth[:, has], scores[:, has], average="macro", sample_weight=weights),
        f1_score(truth[:, said], predicted[:, said], average="macro", sample_weight=weights),
        f1_score(truth, predicted, average="micro", sample_weight=weights),
    )


def test_values_are_scikit_learns() -> None:
    found = results()
    for metric, expected in zip(METRICS, peers(found), strict=True):
        assert found.contributions(metric).mean() == pytest.approx(expected, abs=1e-6)
    assert mean_ap(found.truth, found.scores) == pytest.approx(peers(found)[0], abs=1e-6)
    precisions = class_precisions(found.truth, found.scores)
    assert np.isnan(precisions[-1])
    assert precisions[0] == pytest.approx(average_precision_score(found.truth[:, 0], found.scores[:, 0]))


def test_a_contribution_is_the_metric_and_its_derivative_by_the_images_weight() -> None:
    found, step = results(), 1e-6
    for image in range(0, len(found.truth), 5):
        weights = np.ones(len(found.truth))
        weights[image] += step
        for metric, low, high in zip(METRICS, peers(found), peers(found, weights), strict=True):
            expected = low + len(found.truth) * (high - low) / step
            assert found.contributions(metric)[image] == pytest.approx(expected, abs=1e-3)


def test_no_other_threshold_has_a_higher_f1() -> None:
    truth, scores, _ = results()
    chosen = best_thresholds(truth, scores)
    assert chosen[-1] == 0.5
    for number in range(4):
        has, ranked = truth[:, number], scores[:, number]
        highest = max(f1_score(has, ranked >= threshold) for threshold in np.unique(ranked))
        assert f1_score(has, ranked >= chosen[number]) == pytest.approx(highest)
        assert chosen[number] not in ranked  # halfway between two images


def test_images_that_were_seen_in_training_are_scored_apart() -> None:
    found, seen = results(), np.arange(90) < 20
    common = {"task": "t", "protocol": "p", "method": "m", "labels_per_class": None, "draw": 0}
    rows, tables = scored(common, [f"id{place}" for place in range(90)], found, seen, "dev", {})
    table = pa.concat_tables(tables)
    assert [(row["method"], row["num_images"]) for row in rows[::3]] == [
        ("m" + ON_SEEN, 20),
        ("m" + ON_UNSEEN, 70),
    ]
    unseen = Scored(*(array[~seen] for array in found))
    assert [row["value"] for row in rows[3:]] == pytest.approx(peers(unseen), abs=1e-6)
    assert table["sample_id"].to_pylist() == [f"id{place}" for place in range(90)]
    assert table["predicted"][20].as_py() == np.flatnonzero(found.predicted[20]).tolist()
