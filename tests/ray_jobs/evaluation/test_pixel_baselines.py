"""Baselines against scikit-learn called directly, and choosing by folds."""

from typing import get_args

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from pipelines.spec.stages.baselines import Method
from ray_jobs.evaluation import pixel_baselines as baselines
from ray_jobs.evaluation.multi_label import mean_ap
from ray_jobs.evaluation.supports import draw_labels, stratified_folds
from tests.support.digits import ink

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def digits() -> Split:
    x, y = ink()
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[540:], order[:540]
    support = train[draw_labels(y[train], 10, seed=0, draw=0)]
    return x[support] / 16, y[support], x[test] / 16, y[test]


def test_svm_equals_scikit_learns_with_gamma_scale(digits: Split) -> None:
    x, y, x_test, _ = digits
    # gamma="scale" is 1 / (d var over all values); ours is 1 / (sum of the pixels' variances).
    gamma = 1 / x.var(axis=0).sum()
    expected = SVC(C=10.0, gamma=gamma).fit(x, y).predict(x_test)
    np.testing.assert_array_equal(baselines.fit_predict("RBF SVM", {"C": 10.0, "gamma": 1.0}, x, y, x_test), expected)


def test_nearest_neighbours_equal_scikit_learns(digits: Split) -> None:
    x, y, x_test, _ = digits
    expected = KNeighborsClassifier(3).fit(x, y).predict(x_test)
    np.testing.assert_array_equal(baselines.fit_predict("k-NN", {"n_neighbors": 3}, x, y, x_test), expected)


def test_logistic_regression_equals_scikit_learns(digits: Split) -> None:
    x, y, x_test, _ = digits
    # Scaling the inputs by 1 / s is scaling the penalty: C for scaled inputs is C / s^2 for plain ones.
    c = 10.0 / x.var(axis=0).sum()
    expected = LogisticRegression(C=c, max_iter=10_000, tol=1e-8).fit(x - x.mean(0), y).predict(x_test - x.mean(0))
    ours = baselines.fit_predict("logistic regression", {"C": 10.0}, x, y, x_test)
    assert np.mean(ours == expected) > 0.995


def test_majority_predicts_the_most_frequent_label(digits: Split) -> None:
    x, _, x_test, _ = digits
    y = np.where(np.arange(len(x)) < 60, 7, 3)
    assert set(baselines.fit_predict("majority", {}, x, y, x_test).tolist()) == {7}
    y = np.arange(len(x)) % 4  # equally many of each
    predicted = np.bincount(baselines.fit_predict("majority", {}, x[:80], y[:80], x_test))
    assert len(predicted) == 4 and predicted.max() - predicted.min() <= 1


def test_the_settings_with_the_best_fold_accuracy_are_chosen(digits: Split) -> None:
    x, y, _, _ = digits
    folds = stratified_folds(y, 5, seed=0)
    by_neighbours = [
        cross_val_score(KNeighborsClassifier(int(s["n_neighbors"])), x, y, cv=folds).mean()
        for s in baselines.GRIDS["k-NN"]
    ]
    assert baselines.choose("k-NN", x, y, folds) == baselines.GRIDS["k-NN"][int(np.argmax(by_neighbours))]
    # Noise on which a smooth boundary is best: the choice follows the folds, not the order of the grid.
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 2
    noisy = rng.normal(size=(300, 2)) + 0.8 * labels[:, None]
    assert baselines.choose("k-NN", noisy, labels, stratified_folds(labels, 5, seed=0))["n_neighbors"] == 10


@pytest.mark.parametrize(
    ("method", "least"),
    [("RBF SVM", 0.90), ("logistic regression", 0.86), ("k-NN", 0.87), ("majority", 0.05)],
)
def test_accuracy_on_digits_with_100_labels(digits: Split, method: str, least: float) -> None:
    x, y, x_test, y_test = digits
    settings = baselines.choose(method, x, y, stratified_folds(y, 5, seed=0))
    assert settings in baselines.GRIDS[method]
    predictions = baselines.fit_predict(method, settings, x, y, x_test)
    assert np.mean(predictions == y_test) > least
    np.testing.assert_array_equal(predictions, baselines.fit_predict(method, settings, x, y, x_test))


@pytest.mark.parametrize("method", get_args(Method))
def test_scale_and_offset_of_the_pixels_do_not_matter(digits: Split, method: str) -> None:
    x, y, x_test, _ = digits
    settings = baselines.GRIDS[method][-1]
    plain = baselines.fit_predict(method, settings, x, y, x_test)
    assert np.mean(plain == baselines.fit_predict(method, settings, 16 * x - 3, y, 16 * x_test - 3)) > 0.995


@pytest.mark.parametrize("method", get_args(Method))
def test_one_label_a_class_and_constant_pixels_work(method: str) -> None:
    x, y = np.eye(4), np.arange(4)
    settings = baselines.choose(method, x, y, folds=[])
    assert settings == baselines.GRIDS[method][0]
    assert baselines.fit_predict(method, settings, np.ones((4, 3)), y, np.ones((2, 3))).shape == (2,)


@pytest.fixture(scope="module")
def several(digits: Split) -> Split:
    """Digits with six classes: at least 1, 3, 5 or 7, always, and never."""
    x, y, x_test, y_test = digits
    at_least = np.array([1, 3, 5, 7, 0, 10])
    return x, y[:, None] >= at_least, x_test, y_test[:, None] >= at_least


def scores_of_sklearn(method: str, value: float, x: np.ndarray, flags: np.ndarray, to: np.ndarray) -> np.ndarray:
    """The probabilities of the four classes that have images and lack others."""
    if method == "k-NN":
        each = KNeighborsClassifier(int(value)).fit(x, flags[:, :4]).predict_proba(to)
        return np.stack([shares[:, 1] for shares in each], axis=1)
    c = value / x.var(axis=0).sum()  # see test_logistic_regression_equals_scikit_learns
    regression = LogisticRegression(C=c, max_iter=10_000, tol=1e-6)
    return OneVsRestClassifier(regression).fit(x - x.mean(0), flags[:, :4]).predict_proba(to - x.mean(0))


@pytest.mark.parametrize(("method", "value"), [("k-NN", 10), ("logistic regression", 10.0)])
def test_probabilities_of_several_labels_are_scikit_learns(several: Split, method: str, value: float) -> None:
    x, y, x_test, truth = several
    settings = {"n_neighbors" if method == "k-NN" else "C": value}
    ours = baselines.fit_predict(method, settings, x, y, x_test)
    expected = scores_of_sklearn(method, value, x, y, x_test)
    assert np.mean(np.abs(ours[:, :4] - expected) < 0.01) > 0.995  # neighbours at equal distances may differ
    assert (ours[:, 4] == 1).all() and (ours[:, 5] == 0).all()
    average_precision = average_precision_score(truth[:, :5], np.c_[expected, ours[:, 4]])
    assert mean_ap(truth, ours) == pytest.approx(average_precision, abs=1e-3)


@pytest.mark.parametrize("method", ["k-NN", "logistic regression"])
def test_several_labels_choose_the_settings_with_the_highest_map_on_the_folds(several: Split, method: str) -> None:
    x, y, _, _ = several
    y = y[:, 1:3]
    folds = stratified_folds(np.zeros(len(x)), 2, seed=0)
    chosen = baselines.choose(method, x, y, folds)
    (value,) = chosen.values()

    def held_out(value: float) -> float:
        scores = [scores_of_sklearn(method, value, x[inside], y[inside], x[out]) for inside, out in folds]
        return sum(average_precision_score(y[out], each) for (_, out), each in zip(folds, scores, strict=True))

    tried = (1, 3, 10, 30) if method == "k-NN" else (0.1, 1.0, 10.0, 100.0, 1000.0)
    assert held_out(value) == pytest.approx(max(map(held_out, tried)), abs=1e-3)
    (inside, out), *_ = folds
    limits = baselines.thresholds(method, chosen, x, y, folds[:1])
    scores = baselines.fit_predict(method, chosen, x[inside], y[inside], x[out])
    for number, limit in enumerate(limits):
        highest = max(f1_score(y[out, number], scores[:, number] >= each) for each in scores[:, number])
        assert f1_score(y[out, number], scores[:, number] >= limit) == pytest.approx(highest)


def test_neighbours_never_exceed_the_images_of_a_fold() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 2)), np.repeat([0, 1], 3)
    assert baselines.choose("k-NN", x, y, stratified_folds(y, 3, seed=0))["n_neighbors"] <= 3
