"""95% intervals of accuracies and of paired differences, over label draws and test images together.

In: which test images were classified correctly, [draws, n_test], the same images in every draw. Out: (value, low, high)
as fractions. Needs numpy and scipy only.

An interval says how far the number could move with other labelled images and other test images from the same sources.
It does not cover another pretraining seed, another data set, or a setting that was picked by looking at these results.
Each 95% interval is for one comparison; `comparisons` widens the intervals of a family (Bonferroni), so that all of
them hold together with 95% probability.

One draw: the score intervals of Wilson (1927) for an accuracy, and of Tango (Statistics in Medicine, 1998) for a paired
difference. Their width is positive even if all images are right, or if both methods agree on all of them. The draw is
fixed, so only the images vary.

Several draws: the same intervals, from more images and with a term for the draws. The mean over draws of an image's
result varies less than a single result, by the factor `design`, so n images count as n / design. With few errors that
factor is unknown; `UNKNOWN`, a part of an error that could be the same in all draws, moves it to 1 then. To z^2 times
the variance from images, the interval adds t(draws - 1)^2 / draws times the variance of the draws' accuracies beyond
the noise from images. If few images are wrong, draws also differ by less, so in the interval of an accuracy this term
is proportional to p (1 - p), where p is the bound in question.

Coverage in simulations (tests/ray_jobs/evaluation/test_intervals.py) for accuracies from .5 to .999, 30 to 10,000
images and 1, 5 or 20 draws, with draws and images that vary as in the quickstart: at least .93; at most .98 if at least
five errors, or five images on which the methods disagree, are expected in a draw. With two or three draws it is up to
.99. Two limits: Wilson's interval covers .84 if about 0.2 errors are expected; and near an accuracy of 1, draws that
differ much more than the quickstart's have a skewed distribution, which five draws do not reveal.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

POWER = 0.8  # the probability of detecting the detectable difference
UNKNOWN = {"accuracy": 0.5, "difference": 0.25}  # errors, and images on which the methods disagree; see above
_BISECTIONS = 40


class Interval(NamedTuple):
    """A measured value (a fraction, or a difference of two) and its interval."""

    value: float
    low: float
    high: float


def rules_out(low: float, high: float, max_loss: float) -> bool | None:
    """Whether an interval of a difference, new - old, rules out a loss of more than `max_loss`; None: not shown.

    False: the loss is shown. This is the rule of the stage `promote` and of `report compare --gate`.
    """
    return True if low > -max_loss else False if high < -max_loss else None


class Moments(NamedTuple):
    """The moments of a table [draws, images] that an interval needs; for several such tables, they may be arrays."""

    draws: int
    images: int
    mean: Any
    square: Any
    """The mean of the squares of all values."""
    among_draws: Any
    """The unbiased variance of the draws' means; 0 for one draw."""
    among_images: Any
    """The variance of the images' means."""


FEWEST = 10
"""Test images from which on mAP, AP and mIoU have intervals, which come from how single images influence them."""


def mean_interval(table: np.ndarray) -> Interval:
    """Return the mean of a table [draws, n_test] with its interval, over draws and test images.

    Values say what is right, as bool or 0 and 1, or are contributions to a metric.
    """
    moments = moments_of(table)
    return Interval(float(moments.mean), *map(float, bounds(moments, 0.05)))


def mean_difference(a: np.ndarray, b: np.ndarray, *, same_draws: bool, comparisons: int = 1) -> Interval:
    """Return the difference a - b of a metric's means over draws, from contributions [draws, n_test], paired by image.

    With the same draws, it is also paired by draw; otherwise their numbers may differ. The interval is symmetric; for
    counts of correct images, `paired_difference` has a better one.
    """
    level = 1 - 0.025 / comparisons
    z, images = float(ndtri(level)), a.mean(axis=0) - b.mean(axis=0)
    square = z**2 * images.var() / len(images)
    if same_draws and len(a) > 1:
        square += _by_draws(moments_of(a - b), z, float(stdtrit(len(a) - 1, level)))
    for table in () if same_draws else (a, b):
        if (draws := len(table)) > 1:
            square += float(stdtrit(draws - 1, level)) ** 2 * table.mean(axis=1).var(ddof=1) / draws
    return Interval(value := float(images.mean()), value - float(square**0.5), value + float(square**0.5))


def paired_difference(correct_a: np.ndarray, correct_b: np.ndarray, *, comparisons: int = 1) -> Interval:
    """Return the difference a - b of accuracies with its interval; both are [draws, n_test], paired by draw and image.

    The difficulty of a draw or an image for both methods cancels out. An interval without 0 is a difference at the 5%
    level; with several `comparisons`, at the 5% level for all of them together.
    """
    moments = moments_of(correct_a - correct_b.astype(np.float64))
    return Interval(float(moments.mean), *map(float, bounds(moments, 0.05 / comparisons, paired=True)))


def detectable_difference(difference: Interval) -> float:
    """Return the smallest difference that these draws and test images detect with a probability of 80%.

    Detected means that the 95% interval of a paired difference excludes 0. By the usual formula for the power of a test
    of two-sided level 5%, this is (z(0.975) + z(0.8)) standard errors, with the standard error behind the interval's
    half width (Card et al., "With Little Power Comes Great Responsibility", 2020, do the same for McNemar's test). The
    variance is taken from the observed differences: the more images two methods agree on, the smaller the result.
    """
    return float((difference.high - difference.low) / 2 * (1 + ndtri(POWER) / ndtri(0.975)))


def bounds(moments: Moments, alpha: float, paired: bool = False) -> tuple[Any, Any]:
    """Return both ends of the 1 - alpha interval of the mean, see the module's docstring.

    Args:
        paired: values are differences from -1 to 1; otherwise from 0 to 1.
    """
    draws, images, mean = moments.draws, moments.images, moments.mean
    z = float(ndtri(1 - alpha / 2))
    unknown = UNKNOWN["difference" if paired else "accuracy"]
    # for values of 0 and 1, the mean is also the mean square; contributions to a metric are compared with such values
    single = (moments.square if paired else mean) - mean**2
    design = (images * moments.among_images + unknown) / (images * single + unknown)
    by_images = z**2 * design / images
    by_draws = _by_draws(moments, z, float(stdtrit(draws - 1, 1 - alpha / 2))) if draws > 1 else 0.0
    if paired:
        return _tango(moments, by_images, by_draws)
    centre = (images * mean + z**2 / 2) / (images + z**2)  # centre of Wilson's interval; never 0 or 1
    return _wilson(mean, by_images + by_draws / (centre * (1 - centre)))


def _by_draws(moments: Moments, z: float, t: float) -> Any:
    """Return the part of the squared half width that comes from draws, beyond the noise from images."""
    draws, images, among_draws = moments.draws, moments.images, moments.among_draws
    rest = moments.square - moments.mean**2 - moments.among_images - among_draws * (draws - 1) / draws
    interaction = rest * draws * images / ((draws - 1) * max(1, images - 1))
    # With two or three draws, t^2 would subtract more noise than so few degrees of freedom justify.
    noise = min(t**2, 2 * z**2) * np.maximum(0, interaction) / images
    return np.maximum(0, t**2 * among_draws - noise) / draws


def _wilson(mean: Any, factor: Any) -> tuple[Any, Any]:
    """Return both solutions p of (mean - p)^2 = factor p (1 - p); for a binomial the factor is z^2 / n."""
    middle = mean + factor / 2
    root = np.sqrt(factor * mean * (1 - mean) + factor**2 / 4)
    return (middle - root) / (1 + factor), np.minimum(1, (middle + root) / (1 + factor))


def _tango(moments: Moments, factor: Any, by_draws: Any) -> tuple[Any, Any]:
    """Return both solutions d of (mean - d)^2 = factor variance(d) + by_draws, by bisection.

    variance(d) is the most likely variance of a pair if the true difference is d.
    """
    mean, discordant = moments.mean, moments.square

    def is_outside(difference: Any) -> Any:
        b = (2 - mean) * difference - discordant
        c = (discordant - mean) / 2 * difference * (1 - difference)
        losses = (np.sqrt(b**2 + 8 * c) - b) / 4  # the share of images that only the second method has right
        variance = 2 * losses + difference * (1 - difference)
        return (mean - difference) ** 2 > factor * np.maximum(0, variance) + by_draws

    inside = np.stack([mean, mean])
    outside = np.stack([-np.ones_like(mean), np.ones_like(mean)])
    for _ in range(_BISECTIONS):
        middle = (inside + outside) / 2
        beyond = is_outside(middle)
        inside, outside = np.where(beyond, inside, middle), np.where(beyond, middle, outside)
    return inside[0], inside[1]


def moments_of(table: np.ndarray) -> Moments:
    """Return the moments of a table [draws, images]."""
    table = np.asarray(table, np.float64)
    draws, images = table.shape
    rows, columns = table.mean(axis=1), table.mean(axis=0)
    among_draws = rows.var(ddof=1) if draws > 1 else 0.0
    return Moments(draws, images, table.mean(), (table**2).mean(), among_draws, columns.var())
