"""Classifiers of frozen features against scikit-learn and the authors' formulas; the draws of each protocol."""

import warnings
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from pipelines.spec import Evaluate
from ray_jobs.evaluation import frozen
from ray_jobs.evaluation.supports import draw_as_big_vision, draw_labels
from tests.support.digits import ink
from vit_model.errors import UserError

NO_ROWS = np.zeros(0, np.int64)
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def digits() -> Split:
    x, y = ink()
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[540:], order[:540]
    return x[train] / 16, y[train], x[test] / 16, y[test]


def stage(**fields: Any) -> Evaluate:
    return Evaluate(job="evaluate", data="d", backbone="m", **fields)


def run(digits: Split, config: Evaluate, dev: np.ndarray = NO_ROWS) -> list[frozen.Result]:
    train, labels, test, truth = digits
    return [*frozen.results(config, [(train, test)], labels, truth, standardise=False, dev=dev)]


def test_labels_may_be_any_integers_and_results_repeat(digits: Split) -> None:
    train, labels, test, truth = digits
    probes = ("least squares", "k-NN", "nearest class mean")
    plain, renamed, again = (
        run((train, a * labels + b, test, a * truth + b), stage(shots=(2,), draws=2, classifiers=probes))
        for a, b in [(1, 0), (3, -4), (1, 0)]
    )
    for p, r, s in zip(plain, renamed, again, strict=True):
        np.testing.assert_array_equal(3 * p.fitted.predictions - 4, r.fitted.predictions)
        np.testing.assert_array_equal(p.fitted.predictions, s.fitted.predictions)


def test_big_visions_draws_and_constant(digits: Split) -> None:
    """`fewshot_lsr`: one generator per seed permutes the images of one class after the other."""
    train, labels, test, _ = digits
    config = stage(protocol="big_vision", shots=(1, 5), seed=2)
    results = run(digits, config)
    assert [(each.shots, each.draw) for each in results] == [(k, draw) for k in (1, 5) for draw in range(3)]
    generator = np.random.default_rng(3)
    chosen = np.concatenate([generator.permutation(np.where(labels == k)[0])[:5] for k in range(10)])
    np.testing.assert_array_equal(draw_as_big_vision(labels, 5, 3), chosen)
    inputs, test_inputs = (np.hstack([part, np.full((len(part), 1), 100.0)]) for part in (train[chosen], test))
    targets = 2.0 * np.eye(10)[labels[chosen]] - 1
    weights = np.linalg.solve(inputs.T @ inputs + 1024 * np.eye(65), inputs.T @ targets)
    fifth = results[4]
    np.testing.assert_array_equal(fifth.fitted.predictions, (test_inputs @ weights).argmax(1))
    assert fifth.protocol == "few-shot linear, big_vision"
    assert (fifth.fitted.settings, fifth.fitted.selected_on) == ({"l2": 1024.0}, "fixed")


def test_big_vision_and_scenic_prepare_images_as_their_authors() -> None:
    for protocol, draws in (("big_vision", 3), ("scenic", 1)):
        config = stage(protocol=protocol)
        assert config.draws == draws
        assert config.eval_crop is not None
        assert config.eval_crop.model_dump() == {
            "crop": "squash",
            "crop_fraction": 224 / 256,
            "interpolation": "bilinear_aliased",
        }
    assert stage(protocol="big_vision", draws=5, eval_crop=None).draws == 5
    assert stage(protocol="big_vision", eval_crop=None).eval_crop is None


def test_scenic_takes_the_first_images_of_each_class_and_its_l2_from_test(digits: Split) -> None:
    _, labels, _, _ = digits
    (result,) = run(digits, stage(protocol="scenic", shots=(3,)))
    chosen = np.concatenate([np.where(labels == k)[0][:3] for k in range(10)])
    np.testing.assert_array_equal(frozen.drawn(stage(protocol="scenic"), labels, 3, 0), chosen)
    assert result.fitted.selected_on == "test"


@pytest.mark.parametrize("shots", [None, 5])
def test_neighbours_and_means_are_scikit_learns(digits: Split, shots: int | None) -> None:
    train, labels, test, _ = digits
    fields: dict[str, Any] = {"linear_probe": True} if shots is None else {}
    config = stage(shots=(5,), draws=1, classifiers=("k-NN", "nearest class mean"), **fields)
    found = {each.protocol.removeprefix("few-shot "): each for each in run(digits, config) if each.shots == shots}
    chosen = np.arange(len(labels)) if shots is None else draw_labels(labels, shots, 0, 0)
    with warnings.catch_warnings(action="ignore"):  # some pixels are always empty
        means = NearestCentroid().fit(train[chosen], labels[chosen]).predict(test)
    np.testing.assert_array_equal(found["nearest class mean"].fitted.predictions, means)
    # of equal votes, scikit-learn takes the lowest label
    votes = KNeighborsClassifier(20, metric="cosine").fit(train[chosen], labels[chosen]).predict_proba(test)
    top = np.sort(votes, axis=1)
    is_clear = top[:, -1] > top[:, -2] + 1e-9
    assert is_clear.mean() > 0.5
    found_labels = found["k-NN"].fitted.predictions
    np.testing.assert_array_equal(found_labels[is_clear], votes.argmax(1)[is_clear])
    assert (votes[np.arange(len(test)), found_labels] >= top[:, -1] - 1e-9).all(), "it is among the most frequent"


def test_weighted_neighbours_are_dinos(digits: Split) -> None:
    """`eval_knn.py`: cosine similarity, the 20 nearest, votes weighted by exp(similarity / 0.07)."""
    train, labels, test, _ = digits
    known, asked = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (train, test))
    expected = []
    for image in asked:
        similar = known @ image
        nearest = np.argsort(-similar, kind="stable")[:20]
        votes = [np.exp(similar[nearest][labels[nearest] == k] / 0.07).sum() for k in range(10)]
        expected.append(np.argmax(votes))
    config = stage(shots=(1,), draws=1, linear_probe=True, classifiers=("DINO k-NN",))
    np.testing.assert_array_equal(run(digits, config)[-1].fitted.predictions, expected)


def test_logistic_regression_chooses_c_on_dev_and_then_fits_everything(
    digits: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, labels, test, truth = digits
    monkeypatch.setattr(frozen, "C_GRID", (1e-4, 1.0, 1e4))
    dev = np.arange(200)
    config = stage(linear_probe=True, classifiers=("logistic regression",))
    (result,) = run(digits, config, dev)
    rest = np.setdiff1d(np.arange(len(labels)), dev)
    right = [
        LogisticRegression(C=c, max_iter=1000, tol=1e-6).fit(train[rest], labels[rest]).score(train[dev], labels[dev])
        for c in frozen.C_GRID
    ]
    best = frozen.C_GRID[int(np.argmax(right))]
    assert (result.fitted.settings, result.fitted.selected_on) == ({"C": best}, "dev")
    expected = LogisticRegression(C=best, max_iter=1000, tol=1e-6).fit(train, labels)
    assert np.mean(expected.predict(test) == result.fitted.predictions) > 0.995
    table, probabilities = result.fitted.probabilities, expected.predict_proba(test)
    assert table is not None
    nll = -np.log(probabilities[np.arange(len(truth)), truth])
    np.testing.assert_allclose(table["nll"].to_numpy(), nll, atol=1e-3)
    ranked = np.sort(probabilities, axis=1)[:, ::-1]
    np.testing.assert_allclose(table["top5_probabilities"].to_pylist(), ranked[:, :5], atol=1e-3)
    assert table["calibrated_nll"].null_count == len(truth)
    known = labels != 3  # so no likelihood of a 3 is known
    (other,) = run((train[known], labels[known], test, truth), config)
    assert other.fitted.probabilities is None
    (without_dev,) = run(digits, config)
    assert without_dev.fitted.selected_on == "a tenth of train"


def test_the_most_frequent_class_of_the_labelled_images() -> None:
    """Of all of them, and not of a draw, which has equally many of each class."""
    few, everything = frozen.most_frequent(stage(shots=(1,), linear_probe=True), np.array([3, 3, 1, 7, 7, 7]), 4)
    assert (few.shots, everything.shots) == (1, None)
    assert few.fitted.predictions.tolist() == everything.fitted.predictions.tolist() == [7] * 4


@pytest.mark.parametrize("first", [10, 500])
def test_classes_that_are_equally_frequent_are_chance(first: int) -> None:
    """Whatever share of test the class has that sorts first."""
    truth = np.repeat([0, 1, 2, 3], [first, 100, 100, 100])
    results = [*frozen.most_frequent(stage(shots=(1, 5), draws=40), np.repeat(range(4), 30), len(truth))]
    assert len(results) == 80
    assert np.mean([each.fitted.predictions == truth for each in results]) == pytest.approx(1 / 4, abs=0.01)


def test_several_initialisations_take_turns(digits: Split) -> None:
    train, labels, test, truth = digits
    pairs = [(train * scale, test * scale) for scale in (1.0, np.zeros(64))]
    config = stage(shots=(5,), draws=4, linear_probe=True)
    results = [*frozen.results(config, pairs, labels, truth, standardise=True, dev=NO_ROWS)]
    is_blind = [np.mean(each.fitted.predictions == truth) < 0.2 for each in results]
    assert is_blind == [False, True, False, True, False, True]
    assert [each.draw for each in results] == [0, 1, 2, 3, 0, 1]


def test_wrong_features_are_named(digits: Split) -> None:
    train, labels, test, truth = digits
    damaged = train.copy()
    damaged[2, 5] = np.nan
    with pytest.raises(UserError, match=r"train features: value nan at \[2, 5\]; all must be finite"):
        run((damaged, labels, test, truth), stage(shots=(1,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "scenic", "draws": 2}, "draws 2: with protocol scenic it must be 1"),
        ({"classifiers": ["logistic regression"]}, "takes all labels; add linear_probe: true"),
        ({"classifiers": []}, "at least 1"),
        ({"shots": []}, "give at least one"),
        ({"protocol": "dev", "shots": [5]}, "protocol dev needs"),
        ({"protocol": "dev", "support": "train"}, "protocol dev needs"),
        ({"protocol": "timm"}, "leave_one_out"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        stage(**fields)
