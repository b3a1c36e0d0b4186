"""The closed form against normal equations and n refits."""

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from ray_jobs.evaluation.linear_probe import (
    BIAS_FEATURE,
    L2_GRID,
    SCENIC_GRID,
    RidgePath,
    Standardised,
    best_on_test,
    chosen_on_dev,
    fixed,
    leave_one_out,
    select_l2,
)


def problem(n: int, d: int, k: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([n, d])
    labels = np.arange(n) % k
    inputs = np.hstack([rng.normal(size=(n, d - 1)) + labels[:, None], np.full((n, 1), 100.0)])
    return inputs, labels, 2.0 * np.eye(k)[labels] - 1.0


def normal_equations(x: np.ndarray, y: np.ndarray, l2: float) -> np.ndarray:
    return np.asarray(np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y))


SIZES = [(12, 30), (30, 12), (20, 20), (200, 5)]


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 2.0**15])
def test_weights_solve_the_normal_equations(n: int, d: int, l2: float) -> None:
    x, _, y = problem(n, d)
    path = RidgePath.fit(x, y)
    assert path.dual == (n < d)
    np.testing.assert_allclose(x @ path.weights(l2), x @ normal_equations(x, y, l2), rtol=1e-5, atol=1e-6)
    residual = x.T @ (y - x @ path.weights(l2)) - l2 * path.weights(l2)
    np.testing.assert_allclose(residual, 0.0, atol=1e-5)


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("l2", [2.0**-10, 1.0, 2.0**15])
def test_leave_one_out_equals_n_refits(n: int, d: int, l2: float) -> None:
    x, _, y = problem(n, d)
    kept = [np.arange(n) != i for i in range(n)]
    refitted = np.stack([x[i] @ normal_equations(x[keep], y[keep], l2) for i, keep in enumerate(kept)])
    np.testing.assert_allclose(RidgePath.fit(x, y).leave_one_out(l2), refitted, rtol=1e-5, atol=1e-5)


def test_selection_is_by_leave_one_out_accuracy_and_the_largest_of_equals() -> None:
    x, labels, y = problem(24, 40)
    path = RidgePath.fit(x, y)
    accuracy = {l2: np.mean(path.leave_one_out(l2).argmax(1) == labels) for l2 in L2_GRID}
    expected = max(l2 for l2, value in accuracy.items() if value == max(accuracy.values()))
    assert list(accuracy.values()).count(max(accuracy.values())) > 1
    assert select_l2(path, labels, L2_GRID) == select_l2(path, labels, L2_GRID[::-1]) == expected


def test_images_alone_in_their_class_do_not_choose() -> None:
    x, _, _ = problem(6, 10)
    alone = np.arange(6)
    assert select_l2(RidgePath.fit(x, 2.0 * np.eye(6) - 1.0), alone, L2_GRID) is None
    pair = np.array([0, 0, 1, 2, 3, 4])
    assert select_l2(RidgePath.fit(x, 2.0 * np.eye(5)[pair] - 1.0), pair, L2_GRID) in L2_GRID


def test_the_largest_l2_still_leaves_the_bias_nearly_free() -> None:
    x, labels, _ = problem(60, 8)
    test = np.random.default_rng(0).normal(size=(500, 7)) + 1.0
    for l2 in (1.0, 2.0**10):
        centred = RidgeClassifier(alpha=l2).fit(x[:, :-1], labels).predict(test)
        assert np.mean(centred == fixed(x[:, :-1], labels, test, False, l2).predictions) > 0.99


@pytest.mark.parametrize(("n", "d"), SIZES)
@pytest.mark.parametrize("standardise", [True, False])
def test_what_is_predicted_is_what_the_normal_equations_predict(n: int, d: int, standardise: bool) -> None:
    """Also scores: labels alone could agree by luck."""
    x, labels, y = problem(n, d)
    support, test = x[:, :-1] * 3 + 1, np.random.default_rng(0).normal(size=(50, d - 1)) * 3 + 2
    mean, deviation = (support.mean(0), support.std(0) + 1e-5) if standardise else (0.0, 1.0)
    inputs, test_inputs = (
        np.hstack([(part - mean) / deviation, np.full((len(part), 1), BIAS_FEATURE)]) for part in (support, test)
    )
    expected = test_inputs @ normal_equations(inputs, y, 64.0)
    given = Standardised.of(support, 10 * labels, standardise)
    slopes, intercepts = given.of_features(RidgePath.fit(given.inputs, given.targets).weights(64.0))
    np.testing.assert_allclose(test @ slopes + intercepts, expected, rtol=1e-8, atol=1e-8)
    found = fixed(support, 10 * labels, test, standardise, 64.0)
    np.testing.assert_array_equal(found.predictions, 10 * expected.argmax(1))
    assert (found.selected_on, found.settings) == ("fixed", {"l2": 64.0})


@pytest.mark.parametrize(
    ("scale", "offset", "k"), [(1.0, 0.0, 7), (1.0, 1e5, 7), (1e-30, 0.0, 7), (1e39, 0.0, 7), (1.0, 0.0, 1)]
)
def test_labels_are_those_of_scores_in_float64(scale: float, offset: float, k: int) -> None:
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(500, 64)) + offset) * scale
    weights = np.vstack([rng.normal(size=(64, k)), np.zeros((1, k))]) / scale
    given = Standardised.of(features, np.arange(500) % k, standardise=False)
    near = weights.copy()  # the last class is as good as the first, but for less than float32 can tell
    near[:, -1] = near[:, 0] * (1 + 1e-8 * rng.normal(size=65))
    for each in (weights, near):
        scores = np.hstack([features, np.full((500, 1), BIAS_FEATURE)]) @ each
        np.testing.assert_array_equal(given.predict(each, features), scores.argmax(axis=1))


def test_leave_one_out_never_sees_test_and_scenics_choice_does() -> None:
    x, labels, _ = problem(30, 12)
    rng = np.random.default_rng(1)
    test, truth = rng.normal(size=(200, 12)) + 1, rng.integers(0, 3, 200)
    chosen = best_on_test(x, labels, test, True, truth)
    at = {l2: np.mean(fixed(x, labels, test, True, l2).predictions == truth) for l2 in SCENIC_GRID}
    assert chosen.selected_on == "test"
    assert np.mean(chosen.predictions == truth) == max(at.values()) > min(at.values())
    ours = leave_one_out(x, labels, test, True)
    assert ours.selected_on == "leave-one-out on the support"
    assert ours.settings == leave_one_out(x, labels, test[::-1] * 5, True).settings
    alone = leave_one_out(x[:3], labels[:3], test, True)
    assert (alone.selected_on, alone.settings) == ("fixed", {"l2": 1024.0})


def test_l2_by_dev_is_from_train_alone_and_the_fit_from_both() -> None:
    x, labels, _ = problem(120, 12)
    features, test = x[:, :-1], np.random.default_rng(1).normal(size=(300, 11)) + 1
    is_dev = np.arange(120) % 5 == 0
    # many features say nothing, so the strength matters
    noise = np.random.default_rng(2).normal(size=(420, 60)) * 3
    features, test = np.hstack([features, noise[:120]]), np.hstack([test, noise[120:]])
    found = chosen_on_dev(features, labels, test, False, is_dev)

    def correct(l2: float) -> int:
        ridge = RidgeClassifier(alpha=l2).fit(features[~is_dev], labels[~is_dev])
        return int(np.sum(ridge.predict(features[is_dev]) == labels[is_dev]))

    counts = {l2: correct(l2) for l2 in L2_GRID}
    assert len(set(counts.values())) > 1
    chosen = found.settings["l2"]
    assert counts[chosen] == max(counts.values())
    assert chosen == max(l2 for l2, count in counts.items() if count == max(counts.values()))
    np.testing.assert_array_equal(found.predictions, fixed(features, labels, test, False, chosen).predictions)
    assert found.selected_on == "dev"
