"""Intervals: their coverage on simulated draws and images, and what pairing gains."""

from typing import NamedTuple

import numpy as np
import pytest
import scipy

from ray_jobs.evaluation.intervals import (
    accuracy_interval,
    detectable_difference,
    half_width,
    paired_difference,
)


def simulate(rng: np.random.Generator, draws: int, images: int) -> np.ndarray:
    """Correctness [draws, images] where both draws and images differ in difficulty."""
    logits = 1.0 + 0.6 * rng.normal(size=(draws, 1)) + 1.5 * rng.normal(size=images)
    return np.asarray(rng.random((draws, images)) < 1 / (1 + np.exp(-logits)))


def true_accuracy() -> float:
    normal = np.random.default_rng(0).normal(scale=np.hypot(0.6, 1.5), size=1_000_000)
    return float(np.mean(1 / (1 + np.exp(-1.0 - normal))))


@pytest.mark.slow
def test_about_95_percent_of_intervals_hold_the_true_accuracy() -> None:
    truth, rng = true_accuracy(), np.random.default_rng(1)
    held = 0
    for _ in range(300):
        interval = accuracy_interval(simulate(rng, 20, 120), replicates=400)
        held += interval.low <= truth <= interval.high
    # 300 trials at .95: standard deviation .013
    assert 0.90 < held / 300 <= 0.99


def test_resampling_images_alone_would_miss_the_draws() -> None:
    correct = simulate(np.random.default_rng(2), 20, 2000)
    interval = accuracy_interval(correct)
    binomial = 2 * 1.96 * np.sqrt(correct.mean() * (1 - correct.mean()) / correct.size)
    assert interval.high - interval.low > 3 * binomial


def test_one_draw_gives_the_binomial_interval() -> None:
    correct = np.arange(5000)[None] < 4000
    interval = accuracy_interval(correct, replicates=8000)
    assert interval.value == 0.8
    # The 95 % interval is .0111 to either side, a 90 % interval would be .0093.
    wilson = scipy.stats.binomtest(4000, 5000).proportion_ci(0.95, method="wilson")
    assert interval.low == pytest.approx(wilson.low, abs=0.0008)
    assert interval.high == pytest.approx(wilson.high, abs=0.0008)


@pytest.mark.slow
def test_its_shape_is_of_the_bootstrap_that_resamples_every_image() -> None:
    rng = np.random.default_rng(4)
    correct = simulate(rng, 10, 150)
    means = [correct[rng.integers(10, size=10)][:, rng.integers(150, size=150)].mean() for _ in range(20_000)]
    interval = accuracy_interval(correct, replicates=20_000)
    stretch = half_width(correct, 0.05) / (1.96 * np.std(means))
    expected = correct.mean() + stretch * (np.quantile(means, (0.025, 0.975)) - correct.mean())
    assert (interval.low, interval.high) == pytest.approx(expected, abs=0.003)


def test_where_only_draws_differ_it_is_the_t_interval_of_their_accuracies() -> None:
    """The case that the percentiles of a bootstrap get wrong: five draws are .56 of a t interval wide there."""
    accuracies = np.array([0.62, 0.55, 0.71, 0.58, 0.66])
    correct = np.random.default_rng(0).random((5, 40_000)) < accuracies[:, None]
    low, high = scipy.stats.t.interval(
        0.95, 4, loc=correct.mean(), scale=scipy.stats.sem(correct.mean(axis=1))
    )
    interval = accuracy_interval(correct)
    assert interval.high - interval.low == pytest.approx(high - low, rel=0.05)


def test_where_only_images_differ_draws_add_nothing() -> None:
    """The same answers in each of five draws are one draw's."""
    correct = np.random.default_rng(0).random((1, 3000)) < 0.8
    one, five = accuracy_interval(correct), accuracy_interval(np.repeat(correct, 5, axis=0))
    assert five.high - five.low == pytest.approx(one.high - one.low, rel=0.05)


def test_a_family_of_comparisons_has_the_widths_of_bonferroni() -> None:
    """Of 20 the t quantile is that of 1 - .05 / 20 on either side together."""
    a, b = (np.random.default_rng(seed).random((1, 3000)) < 0.8 for seed in (0, 1))
    alone, of_20 = paired_difference(a, b), paired_difference(a, b, comparisons=20)
    wider = scipy.stats.t.isf(0.05 / 20 / 2, 2999) / scipy.stats.t.isf(0.025, 2999)
    assert of_20.high - of_20.low == pytest.approx(wider * (alone.high - alone.low))
    assert of_20.value == alone.value


def test_an_interval_stays_within_what_is_possible() -> None:
    nearly = np.ones((2, 50), bool)
    nearly[0, :5] = False
    assert accuracy_interval(nearly).high == 1.0
    assert paired_difference(nearly, ~nearly).high == 1.0
    assert paired_difference(~nearly, nearly).low == -1.0


class Measured(NamedTuple):
    """Two methods with the same draws of labels and the same test images: their accuracies, and variances and
    covariances (first, between, second) of draws and of images, and the covariance in a cell of both together."""

    accuracies: tuple[float, float]
    draws: tuple[float, float, float]
    images: tuple[float, float, float]
    together: float


# From the predictions of a quickstart of 2026-11-22, 539 test images, by the mean squares of the two-way analysis of
# variance: the pretrained ViT and pixels under the few-shot protocol, 20 draws; the fine-tuned ViT and the SVM, 5.
QUICKSTART = {
    "1 label": Measured((0.7546, 0.6365), (0.00242, 0.00184, 0.00249), (0.0452, 0.0373, 0.0592), 0.0947),
    "5 labels": Measured((0.9191, 0.8309), (0.000448, 0.000151, 0.000706), (0.0209, 0.0200, 0.0530), 0.0376),
    "10 labels": Measured((0.9625, 0.9276), (4.45e-5, -1.93e-4, 2.60e-4), (0.00865, 0.00914, 0.0227), 0.0166),
}


class Simulation:
    """Tables with such moments: a prediction is right where a normal variable, made of a part for the draw, one for the
    image and a rest, is above a threshold."""

    def __init__(self, measured: Measured) -> None:
        self.thresholds = scipy.stats.norm.isf(measured.accuracies)
        draws, images = (self._correlations(given) for given in (measured.draws, measured.images))
        total = np.eye(2) + self._correlation(0, 1, measured.together) * (1 - np.eye(2))
        self.roots = [_root(matrix) for matrix in (draws, images, total - draws - images)]

    def _correlations(self, covariances: tuple[float, float, float]) -> np.ndarray:
        first, between, second = (
            self._correlation(i, j, value)
            for (i, j), value in zip(((0, 0), (0, 1), (1, 1)), covariances, strict=True)
        )
        return np.array([[first, between], [between, second]])

    def _correlation(self, i: int, j: int, covariance: float) -> float:
        """The correlation of two normal variables that gives their signs this covariance."""
        limits = -self.thresholds[[i, j]]
        independent = np.prod(scipy.stats.norm.cdf(limits))

        def excess(r: float) -> float:
            both = scipy.stats.multivariate_normal.cdf(limits, cov=[[1, r], [r, 1]], allow_singular=True)
            return float(both - independent - covariance)

        return float(scipy.optimize.brentq(excess, -0.5, 0.999, xtol=1e-4))

    def tables(self, rng: np.random.Generator, draws: int, images: int) -> tuple[np.ndarray, np.ndarray]:
        sizes = ((draws, 1), (1, images), (draws, images))
        parts = (rng.normal(size=(*size, 2)) @ root for size, root in zip(sizes, self.roots, strict=True))
        first, second = np.moveaxis(sum(parts) > self.thresholds, 2, 0)
        return first, second


def _root(covariance: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(covariance)
    root: np.ndarray = np.sqrt(values.clip(0))[:, None] * vectors.T
    return root


def coverage(draws: int, trials: int, images: int = 539) -> dict[str, float]:
    """How often intervals hold what they should, as a fraction of the trials of each simulation together."""
    held: dict[str, list[bool]] = {"accuracy": [], "difference": []}
    for number, measured in enumerate(QUICKSTART.values()):
        simulation, rng = Simulation(measured), np.random.default_rng([draws, number])
        first, second = measured.accuracies
        for _ in range(trials):
            a, b = simulation.tables(rng, draws, images)
            for truth, correct in ((first, a), (second, b)):
                interval = accuracy_interval(correct, replicates=200)
                held["accuracy"].append(interval.low <= truth <= interval.high)
            interval = paired_difference(a, b, replicates=200)
            held["difference"].append(interval.low <= first - second <= interval.high)
    return {name: float(np.mean(found)) for name, found in held.items()}


def test_simulated_tables_have_the_quickstarts_moments() -> None:
    measured = QUICKSTART["5 labels"]
    a, b = Simulation(measured).tables(np.random.default_rng(0), 400, 4000)
    assert (a.mean(), b.mean()) == pytest.approx(measured.accuracies, abs=0.01)
    rows = np.cov(a.mean(axis=1), b.mean(axis=1))
    columns = np.cov(a.mean(axis=0), b.mean(axis=0))
    assert rows[[0, 0, 1], [0, 1, 1]] == pytest.approx(measured.draws, rel=0.25)
    assert columns[[0, 0, 1], [0, 1, 1]] == pytest.approx(measured.images, rel=0.1)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("draws", [3, 5, 10, 20])
def test_about_95_percent_hold_the_truth_with_the_quickstarts_variances(draws: int) -> None:
    """The percentiles of the bootstrap alone hold .91 of both with 3 draws, .93 and .92 with 5."""
    found = coverage(draws, trials=250)
    # 1500 and 750 intervals at .95: standard deviations .006 and .008
    assert 0.94 <= found["accuracy"] <= 0.97
    assert 0.93 <= found["difference"] <= 0.975


def test_pairing_narrows_the_interval_of_a_difference() -> None:
    rng = np.random.default_rng(3)
    difficulty = 1.5 * rng.normal(size=400) + 0.6 * rng.normal(size=(20, 1))
    b = difficulty + rng.logistic(size=(20, 400)) * 0.2 > 0
    a = difficulty + 0.2 + rng.logistic(size=(20, 400)) * 0.2 > 0
    paired = paired_difference(a, b)
    one, other = accuracy_interval(a), accuracy_interval(b)
    unpaired = np.hypot(one.high - one.low, other.high - other.low)
    assert paired.high - paired.low < 0.5 * unpaired
    assert 0 < paired.low < paired.value < paired.high
    assert paired.value == pytest.approx(one.value - other.value)


def test_a_difference_changes_sign_with_its_order_and_is_nought_with_itself() -> None:
    a, b = (simulate(np.random.default_rng(seed), 5, 100) for seed in (0, 1))
    forward, backward = paired_difference(a, b), paired_difference(b, a)
    assert forward == pytest.approx((-backward.value, -backward.high, -backward.low))
    assert paired_difference(a, a) == (0.0, 0.0, 0.0)


def test_intervals_repeat_and_follow_the_seed_in_their_last_digits_only() -> None:
    correct = simulate(np.random.default_rng(0), 10, 300)
    first, same, other = (accuracy_interval(correct, seed=seed) for seed in (0, 0, 1))
    assert first == same != other
    assert first == pytest.approx(other, abs=0.01)


def test_chunks_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = simulate(np.random.default_rng(0), 10, 300)
    whole = accuracy_interval(correct)
    monkeypatch.setattr("ray_jobs.evaluation.intervals._CHUNK_VALUES", 700)
    assert accuracy_interval(correct) == whole


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accuracy_interval(np.ones(5)), r"shape \(5,\)"),
        (lambda: accuracy_interval(np.ones((0, 5))), "at least 1"),
        (lambda: accuracy_interval(np.full((2, 5), 0.5)), "other than 0 and 1"),
        (lambda: accuracy_interval(np.ones((2, 5)), replicates=10), "replicates is 10"),
        (lambda: paired_difference(np.ones((2, 5)), np.ones((3, 5))), "same draws"),
    ],
)
def test_wrong_input_is_named(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


def test_the_detectable_difference_is_found_four_times_of_five() -> None:
    """Two methods that disagree on 20% of 800 images, whose accuracies differ by what is detectable."""
    rng = np.random.default_rng(0)

    def outcomes(difference: float) -> tuple[np.ndarray, np.ndarray]:
        drawn = rng.random(800)
        only_a, only_b = drawn < 0.1 + difference / 2, drawn > 0.9 + difference / 2
        both = (rng.random(800) < 0.8) & ~only_a & ~only_b
        return (both | only_a)[None], (both | only_b)[None]

    detectable = float(np.mean([detectable_difference(*outcomes(0.0)) for _ in range(50)]))
    assert detectable == pytest.approx(2.8 * (0.2 / 800) ** 0.5, rel=0.02), "the textbook's, for proportions"
    trials = [outcomes(detectable) for _ in range(600)]
    differences = [a.astype(float) - b for a, b in trials]
    shown = np.mean([each.mean() > half_width(each, 0.05) for each in differences])
    assert 0.75 < shown < 0.85
