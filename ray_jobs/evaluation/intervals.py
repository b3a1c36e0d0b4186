"""95% intervals of accuracies and of paired differences, over label draws and test images together.

In: which test images were classified correctly, [draws, n_test], the same images in every draw. Out: (value, low, high)
as fractions. Needs numpy and scipy only.

An interval says how far the number could move with other labelled images and other test images from the same sources.
It does not cover another pretraining seed, another data set, or a setting that was picked by looking at these results.
Each 95% interval is for its own comparison; `comparisons` widens the intervals of a family (Bonferroni), so that all of
them hold together with 95%.

Width: the mean of a two-way table has the variance s2 / draws + b2 / n_test. s2 is the variance of the draws'
accuracies, and b2 the variance of the images beyond what differs from draw to draw. Both are estimated without bias
from the mean squares of the two-way analysis of variance. s2 is estimated from few draws, so each term gets its own
quantile of Student's t: half width^2 = t(draws - 1)^2 s2 / draws + t(n_test - 1)^2 b2 / n_test (Banerjee, Sankhya 22,
1960: such an interval holds a sum of independent normal means at least 95% of the time). With one draw only the images
vary; if all values are equal, the interval has no width.

Shape: from the two-way "pigeonhole" bootstrap (Owen, Annals of Applied Statistics 2007), which resamples draws and,
independently, images; near an accuracy of 1 the interval is longer on its lower side. Its percentiles alone are too
narrow with few draws: they correspond to normal quantiles instead of t's, and the variance of d resampled draws is
(d - 1) / d of what it should be.

Coverage of the nominal 95% in simulations with the quickstart's variances and 539 images (see
tests/ray_jobs/evaluation/test_intervals.py; 600 trials each):

| draws                                       | 2   | 3   | 5   | 10  | 20  |
|---------------------------------------------|-----|-----|-----|-----|-----|
| accuracy                                    | .96 | .96 | .96 | .95 | .95 |
| paired difference                           | .96 | .96 | .95 | .95 | .95 |
| accuracy, the bootstrap's percentiles alone | .86 | .91 | .93 | .95 | .95 |
| paired difference, percentiles alone        | .86 | .91 | .92 | .95 | .96 |
"""

from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

_BOOTSTRAP = 2  # separates this module's random numbers from other uses of the same seed
POWER = 0.8  # of the detectable difference
_CHUNK_VALUES = 4_000_000  # replicates are made in chunks of about 32 MB


class Interval(NamedTuple):
    """A measured value (a fraction, or a difference of two) and its interval."""

    value: float
    low: float
    high: float


def accuracy_interval(correct: np.ndarray, *, seed: int = 0, replicates: int = 2000) -> Interval:
    """Return the accuracy over draws and test images with its interval, for correct [draws, n_test] (bool or 0/1)."""
    table = _checked("correct", correct)
    return _interval(table, seed, replicates, (0.0, 1.0))


def paired_difference(
    correct_a: np.ndarray,
    correct_b: np.ndarray,
    *,
    comparisons: int = 1,
    seed: int = 0,
    replicates: int = 2000,
) -> Interval:
    """Return the accuracy of a minus that of b with its interval; both are [draws, n_test], paired by draw and image.

    What makes a draw or an image hard for both cancels out. An interval without 0 is a difference at the 5% level; with
    several `comparisons`, at the 5% level for all of them together. Raises ValueError if the shapes differ.
    """
    a, b = _checked("correct_a", correct_a), _checked("correct_b", correct_b)
    if a.shape != b.shape:
        raise ValueError(
            f"correct_a has shape {a.shape}, correct_b {b.shape}; both need the same draws and test images"
        )
    return _interval(a - b, seed, replicates, (-1.0, 1.0), comparisons)


def detectable_difference(correct_a: np.ndarray, correct_b: np.ndarray) -> float:
    """Return the smallest difference that these draws and test images would have shown with a probability of 80%.

    Shown means that the 95% interval of `paired_difference` excludes 0. By the usual formula for the power of a test of
    two-sided level 5%, (z(0.975) + z(0.8)) standard errors, with the standard error behind the interval's half width
    (Card et al., "With Little Power Comes Great Responsibility", 2020, do the same for McNemar's test). The variance is
    that of the observed differences; two methods that agree on most images can be told apart more easily.
    """
    a, b = _checked("correct_a", correct_a), _checked("correct_b", correct_b)
    return half_width(a - b, 0.05) * float(1 + ndtri(POWER) / ndtri(0.975))


def _interval(
    table: np.ndarray, seed: int, replicates: int, possible: tuple[float, float], comparisons: int = 1
) -> Interval:
    if replicates < 100:
        raise ValueError(
            f"replicates is {replicates}; the 2.5 and 97.5 percentiles need at least 100, better 2000"
        )
    means = _bootstrap_means(table, np.random.default_rng([seed, _BOOTSTRAP]), replicates)
    value, spread = table.mean(), ndtri(0.975) * means.std()
    stretch = half_width(table, 0.05 / comparisons) / spread if spread else 0.0
    low, high = value + stretch * (np.quantile(means, [0.025, 0.975]) - value)
    return Interval(float(value), float(max(low, possible[0])), float(min(high, possible[1])))


def half_width(table: np.ndarray, alpha: float) -> float:
    """Return half the width of a symmetric 1 - alpha interval of the mean of a table [draws, n_test] (see above)."""
    draws, images = table.shape
    by_draw, by_image = (stdtrit(max(1, count - 1), 1 - alpha / 2) ** 2 for count in (draws, images))
    rows, columns = table.mean(axis=1), table.mean(axis=0)
    interaction = ((table - rows[:, None] - columns + table.mean()) ** 2).sum() / max(
        1, (draws - 1) * (images - 1)
    )
    among_images = max(0.0, _variance(columns) - interaction / draws)
    return float(np.sqrt(by_draw * _variance(rows) / draws + by_image * among_images / images))


def _variance(values: np.ndarray) -> float:
    """Return the unbiased variance; 0 for a single value."""
    return float(values.var(ddof=1)) if len(values) > 1 else 0.0


def _bootstrap_means(table: np.ndarray, rng: np.random.Generator, replicates: int) -> np.ndarray:
    """Return the means [replicates] of the table [draws, n] with rows and columns resampled."""
    num_draws, num_images = table.shape
    # Images with equal columns are one kind, and only the number drawn of each kind matters: few draws give few kinds,
    # however many images there are. The kinds keep the order of the images, so that a - b and b - a draw alike.
    kinds, first, sizes = np.unique(table, axis=1, return_index=True, return_counts=True)
    order = np.argsort(first)
    kinds, sizes = kinds[:, order], sizes[order]
    row_weights = rng.multinomial(num_draws, np.full(num_draws, 1 / num_draws), size=replicates) / num_draws
    chunk = max(1, _CHUNK_VALUES // len(sizes))
    means = []
    for weights in np.split(row_weights, range(chunk, replicates, chunk)):
        drawn = rng.multinomial(num_images, sizes / num_images, size=len(weights))
        means.append(((weights @ kinds) * drawn).sum(axis=1) / num_images)
    return np.concatenate(means)


def _checked(name: str, correct: np.ndarray) -> np.ndarray:
    if correct.ndim != 2 or correct.size == 0:
        raise ValueError(f"{name} has shape {correct.shape}; it must be [draws, n_test], both at least 1")
    if not np.isin(correct, (0, 1)).all():
        raise ValueError(
            f"{name} holds values other than 0 and 1; give 1 for a correct prediction and 0 for a wrong one"
        )
    return correct.astype(np.float64)
