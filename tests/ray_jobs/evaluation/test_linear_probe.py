"""The closed form against normal equations and n refits; the protocol on scikit-learn's digits."""

import numpy as np
import pytest

from ray_jobs.evaluation.linear_probe import (
    BIAS_FEATURE,
    L2_GRID,
    RidgePath,
    few_shot,
    fit_predict,
    select_l2,
)
from ray_jobs.evaluation.supports import draw_labels
from tests.support.digits import ink


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


def test_primal_and_dual_agree() -> None:
    x, _, y = problem(12, 30)
    # Rows of zeros change no sum, but make n larger than d.
    padded = RidgePath.fit(np.vstack([x, np.zeros((40, 30))]), np.vstack([y, np.zeros((40, 3))]))
    dual = RidgePath.fit(x, y)
    assert dual.dual and not padded.dual
    for l2 in (2.0**-6, 1.0, 2.0**10):
        np.testing.assert_allclose(padded.weights(l2), dual.weights(l2), rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(
            padded.leave_one_out(l2)[:12], dual.leave_one_out(l2), rtol=1e-5, atol=1e-6
        )


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
    from sklearn.linear_model import RidgeClassifier

    for l2 in (1.0, 2.0**10):
        centred = RidgeClassifier(alpha=l2).fit(x[:, :-1], labels).predict(test)
        _, _, ours = fit_predict(x[:, :-1], labels, test, False, [l2], l2)
        assert np.mean(centred == ours) > 0.99


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    x, y = ink()
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[540:], order[:540]
    return x[train] / 16, y[train], x[test] / 16, y[test]


def test_standardisation_and_bias_are_those_of_the_support(digits) -> None:  # type: ignore[no-untyped-def]
    train, labels, test, labels_test = digits
    (result,) = few_shot(*digits, shots=[5], draws=1, seed=7, standardise=True, l2_grid=[64.0], fixed_l2=1.0)
    support = draw_labels(labels, 5, seed=7, draw=0)
    mean, deviation = train[support].mean(0), train[support].std(0) + 1e-5
    x, x_test = ((part - mean) / deviation for part in (train[support], test))
    x, x_test = (np.hstack([part, np.full((len(part), 1), BIAS_FEATURE)]) for part in (x, x_test))
    weights = normal_equations(x, 2.0 * np.eye(10)[labels[support]] - 1.0, 64.0)
    np.testing.assert_array_equal(result.predictions, (x_test @ weights).argmax(1))
    assert result.accuracy == np.mean(result.predictions == labels_test)


def test_digit_pixels_reach_what_ridge_reaches(digits) -> None:  # type: ignore[no-untyped-def]
    results = few_shot(*digits, shots=[1, 5, 25], draws=10, seed=0, standardise=False)
    mean = {k: np.mean([r.accuracy for r in results if r.shots == k]) for k in (1, 5, 25)}
    # Chosen by leave-one-out at 5 shots; the best L2 in hindsight gives .845.
    assert 0.81 < mean[5] < 0.86
    assert mean[1] < mean[5] < mean[25]
    assert {(r.l2, r.selected_on) for r in results if r.shots == 1} == {(1024.0, "fixed")}
    assert {r.selected_on for r in results if r.shots > 1} == {"leave-one-out on the support"}
    assert [(r.shots, r.draw) for r in results] == [(k, draw) for k in (1, 5, 25) for draw in range(10)]


def test_labels_may_be_any_integers_and_results_repeat(digits) -> None:  # type: ignore[no-untyped-def]
    train, labels, test, labels_test = digits
    plain, renamed, again = (
        few_shot(
            train, a * labels + b, test, a * labels_test + b, shots=[2], draws=2, seed=0, standardise=True
        )
        for a, b in [(1, 0), (3, -4), (1, 0)]
    )
    for p, r, s in zip(plain, renamed, again, strict=True):
        np.testing.assert_array_equal(3 * p.predictions - 4, r.predictions)
        np.testing.assert_array_equal(p.predictions, s.predictions)
        assert p.accuracy == r.accuracy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features_test": np.zeros((4, 3))}, "width 2, test features 3"),
        ({"labels_train": np.zeros(3, int)}, "train features have shape"),
        ({"features_train": np.array([[0, 1], [1, 0], [np.nan, 1], [1, 1]])}, r"nan at \[2, 0\]"),
        ({"l2_grid": []}, "at least one"),
        ({"l2_grid": [0.0]}, "positive"),
        ({"draws": 0}, "draws is 0"),
    ],
)
def test_wrong_input_is_named(change: dict[str, object], message: str) -> None:
    good = {
        "features_train": np.eye(4)[:, :2],
        "labels_train": np.array([0, 0, 1, 1]),
        "features_test": np.zeros((4, 2)),
        "labels_test": np.array([0, 0, 1, 1]),
        "shots": [1],
        "draws": 1,
        "seed": 0,
        "standardise": False,
    }
    with pytest.raises(ValueError, match=message):
        few_shot(**(good | change))  # type: ignore[arg-type]
