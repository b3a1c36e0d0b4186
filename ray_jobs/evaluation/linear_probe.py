"""Few-shot linear evaluation: regularised least squares from frozen features to {-1, +1}^K, in closed form.

In: features and labels of a train split (supports are drawn from it) and of a test split. Out: for each
(shots, draw), and for all labels at once, the accuracy, the predictions and the L2 strength with what it was
selected on. Pure numpy in float64 on one thread, which gives the same output on any number of cores and is faster
on problems of this size.

The evaluation of "An Image is Worth 16x16 Words" (section 4.1), with the details of big_vision's `fewshot_lsr`:
features standardised by the support's statistics, a constant feature for the bias, sums (not means) of
squares, so that L2 is not divided by the number of images. The difference: the L2 strength is selected per
support by leave-one-out, never on test images. Pixels, untrained and pretrained features use the same procedure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from threadpoolctl import threadpool_limits

from ray_jobs.evaluation.supports import draw_labels
from vit_model.errors import UserError

# Wide enough for pixels divided by 255 (best near 2^-5 on scikit-learn's 0-16 digits) up to standardised
# features of a thousand dimensions.
L2_GRID = tuple(2.0**exponent for exponent in range(-10, 16))
# big_vision's constant. With one image per class the accuracy hardly depends on it: digits' pixels in [0, 1]
# give .622 at 2^2, .618 at 2^10 and .619 at 2^14.
FIXED_L2 = 2.0**10
# big_vision's bias feature. The intercept is 100 times its weight, so its penalty is L2 / 10^4, negligible over
# the grid. That holds for unstandardised pixels too: on digits in [0, 1], [-1, 1] and [0, 16/255] the accuracy at
# 5, 10 and 25 shots agreed with exact centring (no penalty on the intercept) to .0002, before and after selecting L2.
BIAS_FEATURE = 100.0
# Test images in float64 at once. All 70,000 of 3,072 pixels would take 1.7 GB, and the same again in each step.
TEST_BLOCK = 8192


@dataclass(frozen=True)
class FewShotResult:
    """The result of one support: `predictions` [n_test] are labels, `accuracy` is a fraction of the test images.

    `shots` is None if the support is all of train.
    """

    shots: int | None
    draw: int
    accuracy: float
    l2: float
    selected_on: str
    predictions: np.ndarray


def few_shot(
    features_train: np.ndarray,
    labels_train: np.ndarray,
    features_test: np.ndarray,
    labels_test: np.ndarray,
    *,
    shots: Sequence[int],
    draws: int,
    seed: int,
    standardise: bool,
    linear_probe: bool = False,
    l2_grid: Sequence[float] = L2_GRID,
    fixed_l2: float = FIXED_L2,
) -> list[FewShotResult]:
    """Return a result for every (shots, draw), shots outermost, with draws 0 .. draws - 1 of `draw_labels`.

    Features are [n, d] floats, labels [n] integers. With `linear_probe` the last result uses all of train. L2 is
    selected by leave-one-out on the support; if every class has a single image, leave-one-out is undefined and
    `fixed_l2` is used. All test images of a class that the support lacks count as wrong. Raises ValueError for shapes
    that do not match, values that are not finite, and L2 strengths that are not positive.
    """
    train, test = np.asarray(features_train), np.asarray(features_test)
    _check_split("train", train, labels_train)
    _check_split("test", test, labels_test)
    _check_together(train, test, [*l2_grid, fixed_l2])
    if draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1")
    settings: list[tuple[int | None, int]] = [
        *product(shots, range(draws)),
        *([(None, 0)] if linear_probe else []),
    ]
    results = []
    with threadpool_limits(1):
        for num_shots, draw in settings:
            support = np.arange(len(labels_train))
            if num_shots is not None:
                support = draw_labels(labels_train, num_shots, seed, draw)
            l2, selected_on, predictions = fit_predict(
                train[support], labels_train[support], test, standardise, l2_grid, fixed_l2
            )
            accuracy = float(np.mean(predictions == labels_test))
            results.append(FewShotResult(num_shots, draw, accuracy, l2, selected_on, predictions))
    return results


def fit_predict(
    support: np.ndarray,
    labels: np.ndarray,
    test: np.ndarray,
    standardise: bool,
    l2_grid: Sequence[float],
    fixed_l2: float,
) -> tuple[float, str, np.ndarray]:
    """Return (L2, what it was selected on, predicted labels [n_test]) from one support [n, d] with labels [n]."""
    support = np.asarray(support, np.float64)
    mean, deviation = np.zeros(1), np.ones(1)
    if standardise:
        mean, deviation = support.mean(axis=0), support.std(axis=0) + 1e-5
    classes, targets = np.unique(labels, return_inverse=True)
    path = RidgePath.fit(_with_bias((support - mean) / deviation), 2.0 * np.eye(len(classes))[targets] - 1.0)
    selected = select_l2(path, targets, l2_grid)
    l2 = fixed_l2 if selected is None else selected
    selected_on = "fixed" if selected is None else "leave-one-out on the support"
    weights = path.weights(l2)
    blocks = (
        np.asarray(test[start : start + TEST_BLOCK], np.float64) for start in range(0, len(test), TEST_BLOCK)
    )
    best = [np.argmax(_with_bias((block - mean) / deviation) @ weights, axis=1) for block in blocks]
    return l2, selected_on, classes[np.concatenate(best)]


def select_l2(path: "RidgePath", targets: np.ndarray, l2_grid: Sequence[float]) -> float | None:
    """Return the L2 strength with the most correct leave-one-out predictions; the largest wins a tie.

    Ties are common (50 images give 51 possible accuracies), and the largest L2 is the simplest of the tied models.
    Images that are alone in their class are not counted, because nothing is left to predict them from; None if all
    are. Standardisation is not redone for each image left out.
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
    inputs: np.ndarray
    targets: np.ndarray
    eigenvalues: np.ndarray
    eigenvectors: np.ndarray
    basis: np.ndarray
    projected: np.ndarray

    @classmethod
    def fit(cls, inputs: np.ndarray, targets: np.ndarray) -> "RidgePath":
        """Decompose inputs X [n, d] (with their bias feature) for targets Y [n, k]."""
        dual = len(inputs) < len(inputs.T)
        eigenvalues, eigenvectors = np.linalg.eigh(inputs @ inputs.T if dual else inputs.T @ inputs)
        basis = eigenvectors if dual else inputs @ eigenvectors
        # Rounding can leave the zeros of a singular matrix slightly negative.
        return cls(dual, inputs, targets, eigenvalues.clip(min=0.0), eigenvectors, basis, basis.T @ targets)

    def weights(self, l2: float) -> np.ndarray:
        """Return W [d, k]."""
        solution = self.eigenvectors @ (self.projected / (self.eigenvalues + l2)[:, None])
        return self.inputs.T @ solution if self.dual else solution

    def leave_one_out(self, l2: float) -> np.ndarray:
        """Return the scores [n, k] of each image under the solution fitted to the n - 1 others.

        residual / (1 - leverage), with the hat matrix H = X (XᵀX + l2 I)⁻¹ Xᵀ. In the dual, where leverages come
        close to 1, the same without cancellation: (G Y)_i / G_ii with G = (XXᵀ + l2 I)⁻¹.
        """
        inverse = 1.0 / (self.eigenvalues + l2)
        product = self.basis @ (self.projected * inverse[:, None])
        diagonal = (self.basis**2 @ inverse)[:, None]
        residual = product / diagonal if self.dual else (self.targets - product) / (1.0 - diagonal)
        return self.targets - residual


def _with_bias(features: np.ndarray) -> np.ndarray:
    return np.hstack([features, np.full((len(features), 1), BIAS_FEATURE)])


def _check_split(split: str, features: np.ndarray, labels: np.ndarray) -> None:
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"{split} features have shape {features.shape} and labels {labels.shape}; "
            "they must be [n, d] and [n]"
        )
    if not np.isfinite(features).all():
        row, column = np.argwhere(~np.isfinite(features))[0]
        raise UserError(
            f"{split} features hold {features[row, column]} at [{row}, {column}]; all must be finite"
        )


def _check_together(train: np.ndarray, test: np.ndarray, l2s: Sequence[float]) -> None:
    if train.shape[1] != test.shape[1]:
        raise ValueError(
            f"train features have width {train.shape[1]}, test features {test.shape[1]}; they must be equal"
        )
    if len(l2s) < 2 or not all(np.isfinite(l2) and l2 > 0 for l2 in l2s):
        raise ValueError(
            f"l2_grid and fixed_l2 are {list(l2s)}; give at least one value for the grid, all positive and finite"
        )
