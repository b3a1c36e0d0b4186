"""Intervals: their coverage on simulated draws and images, and what pairing gains."""

from typing import NamedTuple

import numpy as np
import pytest
import scipy

from ray_jobs.evaluation.intervals import (
    Moments,
    bounds,
    detectable_difference,
    mean_interval,
    moments_of,
    paired_difference,
)


def simulate(rng: np.random.Generator, draws: int, images: int) -> np.ndarray:
    """Correctness [draws, images] where both draws and images differ in difficulty."""
    logits = 1.0 + 0.6 * rng.normal(size=(draws, 1)) + 1.5 * rng.normal(size=images)
    return np.asarray(rng.random((draws, images)) < 1 / (1 + np.exp(-logits)))


@pytest.mark.parametrize(("right_ones", "images"), [(60, 60), (0, 30), (59, 60), (4000, 5000)])
def test_one_draw_gives_wilsons_interval(right_ones: int, images: int) -> None:
    correct = np.arange(images)[None] < right_ones
    wilson = scipy.stats.binomtest(right_ones, images).proportion_ci(0.95, method="wilson")
    expected = pytest.approx((right_ones / images, wilson.low, wilson.high))
    assert mean_interval(correct) == expected
    assert mean_interval(np.repeat(correct, 5, axis=0)) == expected, "the same answers in all draws are one draw's"


@pytest.mark.parametrize(("gains", "losses", "images"), [(12, 2, 50), (0, 0, 60), (1, 0, 300), (30, 45, 90)])
def test_one_draw_gives_tangos_interval(gains: int, losses: int, images: int) -> None:
    """Where the score test with the likeliest of all shares that have this difference is at the 5% level."""
    a = np.arange(images) >= losses
    b = (np.arange(images) < losses) | (np.arange(images) >= losses + gains)
    interval = paired_difference(a[None], b[None])
    assert interval.value == pytest.approx((gains - losses) / images)
    for end in interval[1:]:

        def unlikelihood(lost: float, end: float = end) -> float:
            shares = lost + end, lost, 1 - 2 * lost - end
            return float(-scipy.special.xlogy((gains, losses, images - gains - losses), shares).sum())

        limits = max(0.0, -end), (1 - end) / 2
        lost = scipy.optimize.minimize_scalar(unlikelihood, bounds=limits, method="bounded", options={"xatol": 1e-10}).x
        error = np.sqrt((2 * lost + end - end**2) / images)
        assert abs(interval.value - end) / error == pytest.approx(1.96, abs=2e-3)


def test_where_only_draws_differ_it_is_the_t_interval_of_their_accuracies() -> None:
    """The case that the percentiles of a bootstrap get wrong: five draws are .56 of a t interval wide there."""
    accuracies = np.array([0.62, 0.55, 0.71, 0.58, 0.66])
    correct = np.random.default_rng(0).random((5, 40_000)) < accuracies[:, None]
    low, high = scipy.stats.t.interval(0.95, 4, loc=correct.mean(), scale=scipy.stats.sem(correct.mean(axis=1)))
    interval = mean_interval(correct)
    assert interval.high - interval.low == pytest.approx(high - low, rel=0.05)


def test_a_family_of_comparisons_has_the_widths_of_bonferroni() -> None:
    """Of 20 the quantile is that of 1 - .05 / 20 on either side together."""
    a, b = (np.random.default_rng(seed).random((1, 3000)) < 0.8 for seed in (0, 1))
    alone, of_20 = paired_difference(a, b), paired_difference(a, b, comparisons=20)
    wider = scipy.stats.norm.isf(0.05 / 20 / 2) / scipy.stats.norm.isf(0.025)
    assert of_20.high - of_20.low == pytest.approx(wider * (alone.high - alone.low), rel=0.01)
    assert of_20.value == alone.value


def test_an_interval_stays_within_what_is_possible() -> None:
    nearly = np.ones((2, 50), bool)
    nearly[0, :5] = False
    assert 0.999 < mean_interval(nearly).high <= 1
    assert 0.99 < paired_difference(nearly, ~nearly).high <= 1
    assert -1 <= paired_difference(~nearly, nearly).low < -0.99


class Varying(NamedTuple):
    """How images and draws differ in difficulty: their parts of the variance of a normal variable, whose sign says
    whether an image is right in a draw."""

    images: float
    draws: float


# In the quickstart of 2026-11-22, images have .4 to .55 and draws .015 to .025. The last: nearly the same in all draws.
VARYING = (Varying(0.4, 0.02), Varying(0.6, 0.02), Varying(0.9, 0.01))
LEVELS, SHARES = np.polynomial.hermite_e.hermegauss(9)
"""Images have one of these difficulties, with these frequencies."""
SHARES /= SHARES.sum()
OWN = 0.3  # the part of the images' variance that two methods do not share
FINE, WEIGHTS = np.polynomial.hermite_e.hermegauss(61)


def right(threshold: float, levels: np.ndarray, draws: np.ndarray, varying: Varying) -> np.ndarray:
    """The probability that images of these levels are right in these draws."""
    signal = np.sqrt(varying.images) * levels + np.sqrt(varying.draws) * draws - threshold
    return np.asarray(scipy.special.ndtr(signal / np.sqrt(1 - sum(varying))))


def threshold(accuracy: float, levels: np.ndarray, shares: np.ndarray, varying: Varying) -> float:
    """The threshold that gives this accuracy over all images and draws."""
    weights = shares[:, None] * WEIGHTS / WEIGHTS.sum()

    def excess(at: float) -> float:
        return float((weights * right(at, levels[:, None], FINE, varying)).sum()) - accuracy

    return float(scipy.optimize.brentq(excess, -12, 12, xtol=1e-12))


def simulate_moments(
    rng: np.random.Generator, images: int, shares: np.ndarray, plus: np.ndarray, minus: np.ndarray
) -> Moments:
    """Moments of as many tables as `plus` and `minus` have, the probabilities of 1 and -1 [tables, draws, levels].

    Only the number of images with each level and sum over the draws so far is followed, so that the number of images
    costs nothing.
    """
    tables, draws, levels = plus.shape
    counts = np.zeros((tables, levels, 2 * draws + 1), np.int64)
    counts[:, :, draws] = rng.multinomial(images, shares, size=tables)
    means, squares = np.zeros((tables, draws)), np.zeros(tables)
    for draw in range(draws):
        known = slice(draws - draw, draws + draw + 1)
        now = counts[:, :, known]
        up = rng.binomial(now, plus[:, draw, :, None])
        down = rng.binomial(now - up, (minus / np.maximum(1 - plus, 1e-300)).clip(max=1)[:, draw, :, None])
        counts[:, :, known] = now - up - down
        counts[:, :, known.start + 1 : known.stop + 1] += up
        counts[:, :, known.start - 1 : known.stop - 1] += down
        gains, losses = up.sum(axis=(1, 2)), down.sum(axis=(1, 2))
        means[:, draw], squares = (gains - losses) / images, squares + (gains + losses) / images / draws
    values, mean = np.arange(-draws, draws + 1) / draws, means.mean(axis=1)
    among_images = counts.sum(axis=1) @ values**2 / images - mean**2
    among_draws = means.var(axis=1, ddof=1) if draws > 1 else 0.0
    return Moments(draws, images, mean, squares, among_draws, among_images)


class Found(NamedTuple):
    """How many intervals hold the truth, and how many errors or images on which methods disagree a draw has."""

    coverage: float
    errors: float


def of_accuracy(
    rng: np.random.Generator, accuracy: float, images: int, draws: int, varying: Varying, trials: int
) -> Found:
    varying = varying._replace(draws=0.0) if draws == 1 else varying  # the draw's own accuracy is the truth
    at = threshold(accuracy, LEVELS, SHARES, varying)
    correct = right(at, LEVELS, rng.normal(size=(trials, draws, 1)), varying)
    low, high = bounds(simulate_moments(rng, images, SHARES, correct, np.zeros_like(correct)), 0.05)
    held = (low - 1e-9 <= accuracy) & (accuracy <= high + 1e-9)
    return Found(float(held.mean()), images * (1 - accuracy))


def of_difference(
    rng: np.random.Generator,
    accuracies: tuple[float, float],
    images: int,
    draws: int,
    varying: Varying,
    trials: int,
) -> Found:
    """Methods that share half of the variance of draws, and the images' but for OWN, which prefers one of them."""
    varying = varying._replace(draws=0.0) if draws == 1 else varying
    nodes, shares = np.polynomial.hermite_e.hermegauss(5)
    levels, own = np.repeat(nodes, 2), np.tile([-1, 1], 5)
    shares = np.repeat(shares / shares.sum(), 2) / 2
    shared, correct = rng.normal(size=(trials, draws, 1)), []
    for sign, accuracy in zip((1, -1), accuracies, strict=True):
        levels_of = np.sqrt(1 - OWN) * levels + sign * np.sqrt(OWN) * own
        drawn = np.sqrt(0.5) * (shared + rng.normal(size=shared.shape))
        correct.append(right(threshold(accuracy, levels_of, shares, varying), levels_of, drawn, varying))
    a, b = correct
    moments = simulate_moments(rng, images, shares, a * (1 - b), b * (1 - a))
    low, high = bounds(moments, 0.05, paired=True)
    difference = accuracies[0] - accuracies[1]
    held = (low - 1e-9 <= difference) & (difference <= high + 1e-9)
    return Found(float(held.mean()), images * float(moments.square.mean()))


def test_simulated_moments_are_those_of_tables() -> None:
    """The means over many of a table's moments, which is made image by image."""
    rng, images, draws = np.random.default_rng(0), 40, 3
    plus, minus = rng.uniform(0, 0.5, (1, draws, 2)), rng.uniform(0, 0.5, (1, draws, 2))
    many = [np.repeat(each, 20_000, axis=0) for each in (plus, minus)]
    simulated = simulate_moments(rng, images, np.array([0.3, 0.7]), *many)
    tables = []
    for _ in range(4_000):
        levels = (rng.random(images) < 0.7).astype(int)
        drawn = rng.random((draws, images))
        tables.append(moments_of((drawn < plus[0][:, levels]) - 1.0 * (drawn > 1 - minus[0][:, levels])))
    for field in ("mean", "square", "among_draws", "among_images"):
        expected = np.array([getattr(each, field) for each in tables])
        given = getattr(simulated, field)
        assert given.mean() == pytest.approx(expected.mean(), abs=5 * expected.std() / 4_000**0.5)
        assert given.std() == pytest.approx(expected.std(), rel=0.06)


LONG = (pytest.mark.slow, pytest.mark.full)


@pytest.mark.parametrize(
    ("draws", "accuracy", "images"),
    [
        (1, 0.5, 60),
        (1, 0.99, 60),
        (5, 0.9, 60),
        (5, 0.999, 60),
        *(
            pytest.param(*case, marks=LONG)
            for case in ((1, 0.999, 30), (5, 0.5, 300), (20, 0.98, 30), (20, 0.99, 10_000))
        ),
    ],
)
def test_about_95_percent_of_intervals_hold_the_truth(draws: int, accuracy: float, images: int) -> None:
    """2 standard deviations of 3,000 trials at .93 are .009, of 1,500 at .98 are .007."""
    for varying in VARYING[: 1 if draws == 1 else 3]:
        seed = [draws, int(1000 * accuracy), images]
        found = of_accuracy(np.random.default_rng(seed), accuracy, images, draws, varying, 3000)
        assert 0.93 <= found.coverage <= (0.98 if found.errors >= 4.999 else 1), varying
        for other in (accuracy, 1.5 * accuracy - 0.5):  # no difference, and half as many errors again
            rng = np.random.default_rng([*seed, int(1000 * other)])
            found = of_difference(rng, (accuracy, other), images, draws, varying, 1500)
            assert 0.93 <= found.coverage <= (0.98 if found.errors >= 5 else 1), (varying, other)


def test_pairing_narrows_the_interval_of_a_difference() -> None:
    rng = np.random.default_rng(3)
    difficulty = 1.5 * rng.normal(size=400) + 0.6 * rng.normal(size=(20, 1))
    b = difficulty + rng.logistic(size=(20, 400)) * 0.2 > 0
    a = difficulty + 0.2 + rng.logistic(size=(20, 400)) * 0.2 > 0
    paired = paired_difference(a, b)
    one, other = mean_interval(a), mean_interval(b)
    unpaired = np.hypot(one.high - one.low, other.high - other.low)
    assert paired.high - paired.low < 0.5 * unpaired
    assert 0 < paired.low < paired.value < paired.high
    assert paired.value == pytest.approx(one.value - other.value)


@pytest.mark.parametrize("draws", [1, 5])
def test_a_difference_changes_sign_with_its_order_and_has_a_width_with_itself(draws: int) -> None:
    a, b = (simulate(np.random.default_rng(seed), draws, 100) for seed in (0, 1))
    forward, backward = paired_difference(a, b), paired_difference(b, a)
    assert forward == pytest.approx((-backward.value, -backward.high, -backward.low))
    width = 1.96**2 / (100 + 1.96**2)
    assert paired_difference(a, a) == pytest.approx((0, -width, width), abs=1e-5)
    assert detectable_difference(paired_difference(a, a)) == pytest.approx(width * 2.802 / 1.96, rel=1e-3), "never zero"


def test_the_detectable_difference_is_found_four_times_of_five() -> None:
    """Two methods that disagree on 20% of 800 images, whose accuracies differ by what is detectable."""
    rng = np.random.default_rng(0)

    def outcomes(difference: float) -> tuple[np.ndarray, np.ndarray]:
        drawn = rng.random(800)
        only_a, only_b = drawn < 0.1 + difference / 2, drawn > 0.9 + difference / 2
        both = (rng.random(800) < 0.8) & ~only_a & ~only_b
        return (both | only_a)[None], (both | only_b)[None]

    detectable = float(np.mean([detectable_difference(paired_difference(*outcomes(0.0))) for _ in range(50)]))
    assert detectable == pytest.approx(2.8 * (0.2 / 800) ** 0.5, rel=0.02), "the textbook's, for proportions"
    shown = np.mean([paired_difference(*outcomes(detectable)).low > 0 for _ in range(600)])
    assert 0.75 < shown < 0.85
