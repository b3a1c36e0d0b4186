"""Linear classifiers of frozen features: regularised least squares to {-1, +1}^K, in closed form.

In: features [n, d] and labels [n] of the labelled images, features of test. Out: the L2 strength, what it was selected
on, and the predicted labels of test. Pure numpy in float64 on one thread, which gives the same output on any number of
cores and is faster on problems of this size.

This is the evaluation of "An Image is Worth 16x16 Words" (section 4.1), with the details of big_vision's `fewshot_lsr`:
features standardised by the support's statistics, a constant feature for the bias, and sums of squares, not means, so
L2 is not divided by the number of images. The protocols differ in how L2 is chosen (`Protocol`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from vit_model.errors import UserError

# Wide enough for pixels divided by 255 (best near 2^-5 on scikit-learn's 0-16 digits) up to standardised
# features of a thousand dimensions.
L2_GRID = tuple(2.0**exponent for exponent in range(-10, 16))
# big_vision's constant. With one image per class the accuracy hardly depends on it: digits' pixels in [0, 1]
# give .622 at 2^2, .618 at 2^10 and .619 at 2^14.
FIXED_L2 = 2.0**10
# scenic's grid: 2^-10 to 2^19
SCENIC_GRID = tuple(2.0**exponent for exponent in range(-10, 20))
# big_vision's bias feature. The intercept is 100 times its weight, so its penalty is L2 / 10^4, negligible over
# the grid. That holds for unstandardised pixels too: on digits in [0, 1], [-1, 1] and [0, 16/255] the accuracy at
# 5, 10 and 25 shots agreed with exact centring (no penalty on the intercept) to .0002, before and after selecting L2.
BIAS_FEATURE = 100.0
# Test images in float64 at once. All 70,000 images of 3,072 pixels would take 1.7 GB, and as much again in each step.
TEST_BLOCK = 8192


class Fitted(NamedTuple):
    """A classifier's predictions for test, and how its settings were chosen."""

    predictions: NDArray[np.int64]
    """labels [n_test]"""
    selected_on: str
    settings: dict[str, float]
    probabilities: pa.Table | None = None
    """table of PROBABILITIES [n_test]; None: the classifier has none, or was not fitted on some test image's label"""


@dataclass(frozen=True)
class Standardised:
    """The inputs X [n, d + 1] and the targets Y [n, k] of a support, and how test features become inputs."""

    inputs: NDArray[np.float64]
    targets: NDArray[np.float64]
    classes: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """the index of each image's label in `classes`"""
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @classmethod
    def of(cls, support: NDArray[np.floating], labels: NDArray[np.integer], standardise: bool) -> Standardised:
        """Make them from a support [n, d] with labels [n]; without `standardise`, features are not scaled."""
        support = np.asarray(support, np.float64)
        mean, deviation = np.zeros(support.shape[1]), np.ones(support.shape[1])
        if standardise:
            mean, deviation = support.mean(axis=0), support.std(axis=0) + 1e-5
        classes, numbers = np.unique(labels, return_inverse=True)
        inputs = np.hstack([(support - mean) / deviation, np.full((len(support), 1), BIAS_FEATURE)])
        return cls(inputs, 2.0 * np.eye(len(classes))[numbers] - 1.0, classes, numbers, mean, deviation)

    def of_features(self, weights: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (slopes [d, k], intercepts [k]) for unscaled features, from weights [d + 1, k] of the inputs."""
        slopes = weights[:-1] / self.deviation[:, None]
        return slopes, BIAS_FEATURE * weights[-1] - self.mean @ slopes

    def predict(self, weights: NDArray[np.float64], test: NDArray[np.floating]) -> NDArray[np.int64]:
        """Return the labels [n_test] of test features [n_test, d], predicted by weights [d + 1, k] of the inputs."""
        # standardising the weights costs less than standardising every test image
        slopes, intercepts = self.of_features(weights)
        return self.classes[np.concatenate([_highest(part, slopes, intercepts) for part in parts(test)])]


def _highest(
    features: NDArray[np.floating], slopes: NDArray[np.float64], intercepts: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return the index [n] of the highest score, features [n, d] @ slopes [d, k] + intercepts [k], in float64.

    A product in float32 takes half the time or less. It decides if its two highest scores are farther apart than twice
    the rounding error of a score: (d + 8) u (|x| |slopes| + |intercept|), after Higham, "Accuracy and Stability of
    Numerical Algorithms", section 3.1. The other images, a few in a thousand, are scored again in float64.
    """
    width, unit, smallest = features.shape[1], np.finfo(np.float32).eps / 2, np.finfo(np.float32).tiny
    with np.errstate(over="ignore", invalid="ignore"):  # values beyond float32 are scored in float64
        single = np.asarray(features, np.float32)
        scores = single @ slopes.astype(np.float32) + intercepts.astype(np.float32)
        rows = np.arange(len(scores))
        best = scores.argmax(axis=1)
        margin = scores[rows, best]
        scores[rows, best] = -np.inf
        margin = margin - scores.max(axis=1)
        length = np.sqrt(np.einsum("ij,ij->i", single, single) + width * smallest)  # squares may be 0
        bound = unit * (length * np.linalg.norm(slopes, axis=0).max() + np.abs(intercepts).max()) + smallest
        close = np.flatnonzero(~(margin > 2 * (width + 8) * bound))
    exact = np.asarray(features[close], np.float64) @ slopes + intercepts
    best[close] = exact.argmax(axis=1)
    return best


def parts(test: NDArray[np.floating]) -> Iterator[NDArray[np.floating]]:
    """Yield `TEST_BLOCK` test features at a time, so that computing with them needs little memory."""
    for start in range(0, len(test), TEST_BLOCK):
        yield test[start : start + TEST_BLOCK]


def blocks(test: NDArray[np.floating]) -> Iterator[NDArray[np.float64]]:
    """Yield test features in float64, so that few are in memory at once."""
    for part in parts(test):
        yield np.asarray(part, np.float64)


def leave_one_out(
    support: NDArray[np.floating], labels: NDArray[np.integer], test: NDArray[np.floating], standardise: bool
) -> Fitted:
    """Choose L2 from `L2_GRID` by leave-one-out on the support, never on test images.

    If every class has a single image, leave-one-out is undefined and `FIXED_L2` is used.
    """
    standardised = Standardised.of(support, labels, standardise)
    path = RidgePath.fit(standardised.inputs, standardised.targets)
    selected = select_l2(path, standardised.numbers, L2_GRID)
    l2 = FIXED_L2 if selected is None else selected
    selected_on = "fixed" if selected is None else "leave-one-out on the support"
    return Fitted(standardised.predict(path.weights(l2), test), selected_on, {"l2": l2})


def chosen_on_dev(
    support: NDArray[np.floating],
    labels: NDArray[np.integer],
    test: NDArray[np.floating],
    standardise: bool,
    is_dev: NDArray[np.bool_],
) -> Fitted:
    """Choose L2 from `L2_GRID` by the accuracy on dev after a fit to the others; then fit to the whole support.

    The largest wins a tie, as in `select_l2`. For VTAB-1k: train800, val200, and a fit to all 1,000.

    Args:
        is_dev: [n], whether an image of the support is from dev.
    """
    standardised = Standardised.of(support[~is_dev], labels[~is_dev], standardise)
    path = RidgePath.fit(standardised.inputs, standardised.targets)

    def correct(l2: float) -> int:
        return int(np.sum(standardised.predict(path.weights(l2), support[is_dev]) == labels[is_dev]))

    l2 = max(sorted(L2_GRID, reverse=True), key=correct)
    return fixed(support, labels, test, standardise, l2)._replace(selected_on="dev")


def fixed(
    support: NDArray[np.floating],
    labels: NDArray[np.integer],
    test: NDArray[np.floating],
    standardise: bool,
    l2: float = FIXED_L2,
) -> Fitted:
    """Use a fixed L2, as big_vision does: W = (XᵀX + l2 I)⁻¹ XᵀY if n >= d, else Xᵀ (XXᵀ + l2 I)⁻¹ Y."""
    standardised = Standardised.of(support, labels, standardise)
    x, y = standardised.inputs, standardised.targets
    dual = len(x) < len(x.T)
    gram = x @ x.T if dual else x.T @ x
    gram[np.diag_indices_from(gram)] += l2
    factor = cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)
    weights = x.T @ cho_solve(factor, y, check_finite=False) if dual else cho_solve(factor, x.T @ y, check_finite=False)
    return Fitted(standardised.predict(weights, test), "fixed", {"l2": l2})


def best_on_test(
    support: NDArray[np.floating],
    labels: NDArray[np.integer],
    test: NDArray[np.floating],
    standardise: bool,
    truth: NDArray[np.integer],
) -> Fitted:
    """Choose L2 from `SCENIC_GRID` by the accuracy on test, as scenic does; the smallest wins a tie.

    scenic chooses one L2 per number of shots for all its data sets, by mean rank; here each data set gets its own L2.
    """
    standardised = Standardised.of(support, labels, standardise)
    path = RidgePath.fit(standardised.inputs, standardised.targets)
    predictions = {l2: standardised.predict(path.weights(l2), test) for l2 in SCENIC_GRID}
    l2 = max(predictions, key=lambda l2: np.mean(predictions[l2] == truth))
    return Fitted(predictions[l2], "test", {"l2": l2})


def select_l2(path: RidgePath, targets: NDArray[np.integer], l2_grid: Sequence[float]) -> float | None:
    """Return the L2 strength with the most correct leave-one-out predictions; the largest wins a tie.

    Ties are common (50 images give 51 possible accuracies), and the largest L2 is the simplest of the tied models.
    Images that are alone in their class do not count, because nothing is left to predict them from; None if all images
    are. Features are not standardised anew for each image left out.
    """
    countable = np.bincount(targets)[targets] > 1
    if not countable.any():
        return None
    descending = sorted(l2_grid, reverse=True)
    correct = [np.sum((path.leave_one_out(l2).argmax(axis=1) == targets)[countable]) for l2 in descending]
    return descending[int(np.argmax(correct))]


@dataclass(frozen=True)
class RidgePath:
    """W(l2) = (XᵀX + l2 I)⁻¹ XᵀY and its leave-one-out scores, at any l2 > 0 from one eigendecomposition.

    It decomposes XᵀX = V S Vᵀ (primal) if n >= d, else XXᵀ = U S Uᵀ (dual: W = Xᵀ (XXᵀ + l2 I)⁻¹ Y).
    `basis` [n, r] is XV or U, r = min(n, d); `projected` [r, k] is basisᵀ Y.
    """

    dual: bool
    inputs: NDArray[np.float64]
    targets: NDArray[np.float64]
    eigenvalues: NDArray[np.float64]
    eigenvectors: NDArray[np.float64]
    basis: NDArray[np.float64]
    projected: NDArray[np.float64]

    @classmethod
    def fit(cls, inputs: NDArray[np.float64], targets: NDArray[np.float64]) -> RidgePath:
        """Decompose inputs X [n, d] (with their bias feature) for targets Y [n, k]."""
        dual = len(inputs) < len(inputs.T)
        eigenvalues, eigenvectors = np.linalg.eigh(inputs @ inputs.T if dual else inputs.T @ inputs)
        basis = eigenvectors if dual else inputs @ eigenvectors
        # Rounding can leave the zeros of a singular matrix slightly negative.
        return cls(dual, inputs, targets, eigenvalues.clip(min=0.0), eigenvectors, basis, basis.T @ targets)

    def weights(self, l2: float) -> NDArray[np.float64]:
        """Return W [d, k]."""
        solution = self.eigenvectors @ (self.projected / (self.eigenvalues + l2)[:, None])
        return self.inputs.T @ solution if self.dual else solution

    def leave_one_out(self, l2: float) -> NDArray[np.float64]:
        """Return the scores [n, k] of each image under the solution fitted to the n - 1 others.

        residual / (1 - leverage), with the hat matrix H = X (XᵀX + l2 I)⁻¹ Xᵀ. In the dual, where leverages come
        close to 1, the same without cancellation: (G Y)_i / G_ii with G = (XXᵀ + l2 I)⁻¹.
        """
        inverse = 1.0 / (self.eigenvalues + l2)
        product = self.basis @ (self.projected * inverse[:, None])
        diagonal = (self.basis**2 @ inverse)[:, None]
        residual = product / diagonal if self.dual else (self.targets - product) / (1.0 - diagonal)
        return self.targets - residual


def check_features(split: str, features: NDArray[np.floating]) -> None:
    """Raise UserError if the features [n, d] of a split are not finite."""
    if not np.isfinite(features).all():
        row, column = np.argwhere(~np.isfinite(features))[0]
        raise UserError(f"{split} features: value {features[row, column]} at [{row}, {column}]; all must be finite")
