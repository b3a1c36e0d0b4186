"""Classifiers of frozen features: the labelled images that each one sees, and its predictions for test.

In: features of the labelled images and of test, labels, and the stage's settings. Out: a `Result` for each classifier,
number of labels and draw. `linear_probe` has least squares; the others are here:

    k-NN                 a majority of the 20 images with the highest cosine similarity
    DINO k-NN            the same, weighted by exp(similarity / 0.07) (Caron et al. 2021, `eval_knn.py`)
    nearest class mean   by Euclidean distance
    logistic regression  L-BFGS over DINOv2's grid of C (Oquab et al. 2024, `log_regression.py`), with all labels

`support` [n, d] and `test` [n_test, d] are features, `labels` [n] are integers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from pipelines.spec import Evaluate
from ray_jobs.evaluation import linear_probe, supports
from ray_jobs.evaluation.calibration import probability_table
from ray_jobs.evaluation.linear_probe import Fitted, blocks
from ray_jobs.evaluation.supports import draw_as_big_vision, draw_labels, first_of_each, permutation
from ray_jobs.randomness import Purpose

NEIGHBOURS = 20
TEMPERATURE = 0.07
C_GRID = tuple(10.0**power for power in np.linspace(-6, 5, 45).tolist())
ITERATIONS = 1_000  # of L-BFGS, as in DINOv2
Labels = NDArray[np.integer]
Features = NDArray[np.floating]


class Result(NamedTuple):
    """A classifier's results on test after one draw of labels."""

    protocol: str
    shots: int | None
    """None: all labels"""
    draw: int
    fitted: Fitted


def drawn(config: Evaluate, labels: Labels, shots: int, draw: int) -> NDArray[np.int64]:
    """Return the indices [m] of the labelled images of a draw, by the rule of the stage's protocol."""
    match config.protocol:
        case "big_vision":
            return draw_as_big_vision(labels, shots, config.seed + draw)
        case "scenic":
            return first_of_each(labels, shots)
        case _:
            return draw_labels(labels, shots, config.seed, draw)


def results(
    config: Evaluate,
    features: Sequence[tuple[Features, Features]],
    labels: Labels,
    truth: Labels,
    standardise: bool,
    dev: NDArray[np.int64],
) -> Iterator[Result]:
    """Yield a result for each classifier, number of shots and draw; with `linear_probe`, also for all labels.

    Args:
        features: pairs (support, test). If there are several, as from several untrained models, draw i uses pair i
            modulo their number, and all labels are used with each pair.
        dev: the indices of the labelled images from dev.

    Raises:
        ValueError: features and labels have different shapes.
        UserError: features are not finite.
    """
    for support, test in features:
        linear_probe.check_features("train", support)
        linear_probe.check_features("test", test)
    few = [(shots, draw, draw % len(features)) for shots, draw in product(config.shots, range(config.draws))]
    every = [(None, place, place) for place in range(len(features))] if config.linear_probe else []
    with threadpool_limits(1):
        for name in config.classifiers:
            for shots, draw, place in [*(() if name == "logistic regression" else few), *every]:
                chosen = np.arange(len(labels)) if shots is None else drawn(config, labels, shots, draw)
                support, test = features[place]
                classify = _classifier(config, name, standardise, truth, np.isin(chosen, dev))
                fitted = classify(support[chosen], labels[chosen], test)
                yield Result(_protocol(config, name, shots), shots, draw, fitted)


def _protocol(config: Evaluate, name: str, shots: int | None) -> str:
    if name == "least squares":
        sort = "linear probe" if shots is None else "few-shot linear"
        return sort if config.protocol == "leave_one_out" else f"{sort}, {config.protocol}"
    return name if shots is None else f"few-shot {name}"


def _classifier(
    config: Evaluate, name: str, standardise: bool, truth: Labels, is_dev: NDArray[np.bool_]
) -> Callable[[Features, Labels, Features], Fitted]:
    match name, config.protocol:
        case "k-NN", _:
            return partial(nearest_neighbours, temperature=None)
        case "DINO k-NN", _:
            return partial(nearest_neighbours, temperature=TEMPERATURE)
        case "nearest class mean", _:
            return nearest_class_mean
        case "logistic regression", _:
            return partial(logistic_regression, is_held_out=is_dev, seed=config.seed, truth=truth)
        case _, "dev":
            return partial(linear_probe.chosen_on_dev, standardise=standardise, is_dev=is_dev)
        case _, "big_vision":
            return partial(linear_probe.fixed, standardise=standardise)
        case _, "scenic":
            return partial(linear_probe.best_on_test, standardise=standardise, truth=truth)
        case _:
            return partial(linear_probe.leave_one_out, standardise=standardise)


def most_frequent(config: Evaluate, labels: Labels, images: int) -> Iterator[Result]:
    """Yield, for each number of shots and draw, the result of a baseline that ignores the `images` test images.

    It predicts the most frequent class of all labelled images; in a draw, all classes are equally frequent.
    """
    tied = supports.most_frequent(labels)
    for shots in [*config.shots, *([None] if config.linear_probe else [])]:
        for draw in range(1 if len(tied) == 1 else config.draws):
            places = permutation(images, config.seed, Purpose.DIVIDE_TIES, draw) % len(tied)
            fitted = Fitted(tied[places], "nothing", {"equally_frequent_classes": len(tied)})
            yield Result(_protocol(config, "least squares", shots), shots, draw, fitted)


def nearest_neighbours(support: Features, labels: Labels, test: Features, temperature: float | None) -> Fitted:
    """Let the `NEIGHBOURS` most similar images vote: equally, or weighted by exp(similarity / temperature).

    A tie goes to the label with the larger sum of similarities.
    """
    classes, numbers = np.unique(labels, return_inverse=True)
    count, known = min(NEIGHBOURS, len(support)), _of_length_one(np.asarray(support, np.float64))
    predictions = []
    for block in blocks(test):
        similar = _of_length_one(block) @ known.T
        nearest = np.argpartition(similar, -count, axis=1)[:, -count:]
        near = np.take_along_axis(similar, nearest, axis=1)
        # similarities are at most 1, so their sum divided by twice their number never outweighs a vote
        weights = 1 + near / (2 * count + 1) if temperature is None else np.exp(near / temperature)
        votes = np.zeros((len(block), len(classes)))
        for place in range(count):
            np.add.at(votes, (np.arange(len(block)), numbers[nearest[:, place]]), weights[:, place])
        predictions.append(votes.argmax(axis=1))
    settings = {"neighbours": float(count)} | ({} if temperature is None else {"temperature": temperature})
    return Fitted(classes[np.concatenate(predictions)], "nothing", settings)


def nearest_class_mean(support: Features, labels: Labels, test: Features) -> Fitted:
    """Predict the label with the nearest mean by Euclidean distance (Mensink et al. 2013, without a learned metric)."""
    classes, numbers = np.unique(labels, return_inverse=True)
    sums = np.zeros((len(classes), support.shape[1]))
    np.add.at(sums, numbers, np.asarray(support, np.float64))
    means = sums / np.bincount(numbers)[:, None]
    # |x - m|^2 without |x|^2, which all classes share
    offsets = (means**2).sum(axis=1)
    nearest = [np.argmin(offsets - 2 * block @ means.T, axis=1) for block in blocks(test)]
    return Fitted(classes[np.concatenate(nearest)], "nothing", {})


def logistic_regression(
    support: Features,
    labels: Labels,
    test: Features,
    is_held_out: NDArray[np.bool_],
    seed: int,
    truth: Labels,
) -> Fitted:
    """Fit multinomial logistic regression, with C of `C_GRID` chosen on held-out images; then refit on all images.

    The smallest of equally good values of C is taken.

    Args:
        truth: the labels of test, for the likelihoods.
        is_held_out: [n], the images of dev; if there are none, a random tenth is held out.
    """
    from sklearn import exceptions, linear_model

    support, selected_on = np.asarray(support, np.float64), "dev"
    if len(np.unique(labels)) == 1:  # scikit-learn's classifiers refuse a single class
        return Fitted(np.full(len(test), labels[0]), "nothing", {})
    if not is_held_out.any():
        selected_on = "a tenth of train"
        is_held_out = np.zeros(len(labels), bool)
        is_held_out[permutation(len(labels), seed, Purpose.SELECT_L2)[: max(1, len(labels) // 10)]] = True

    def fit(c: float, chosen: NDArray[np.bool_]) -> linear_model.LogisticRegression:
        with warnings.catch_warnings():
            # some fits reach the limit of iterations in DINOv2, too
            warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
            return linear_model.LogisticRegression(C=c, max_iter=ITERATIONS, tol=1e-6).fit(
                support[chosen], labels[chosen]
            )

    correct = [np.sum(fit(c, ~is_held_out).predict(support[is_held_out]) == labels[is_held_out]) for c in C_GRID]
    c = C_GRID[int(np.argmax(correct))]
    whole = fit(c, np.ones(len(labels), bool))
    known = np.concatenate([whole.predict_log_proba(block) for block in blocks(test)])
    log_probabilities = np.full((len(test), max(labels.max(), truth.max()) + 1), -np.inf)
    log_probabilities[:, whole.classes_] = known
    is_whole = bool(np.isin(truth, whole.classes_).all())
    return Fitted(
        whole.classes_[known.argmax(axis=1)],
        selected_on,
        {"C": c},
        probability_table(log_probabilities, truth) if is_whole else None,
    )


def _of_length_one(features: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.maximum(lengths, 1e-12)
