"""Draws and folds: nested, disjoint, deterministic, and fair to rare classes."""

import numpy as np
import pytest

from ray_jobs.evaluation.supports import draw_labels, stratified_folds
from vit_model.errors import UserError

LABELS = np.random.default_rng(3).permutation(np.repeat([2, 5, 9], [40, 30, 6]))


def test_smaller_draws_are_nested_in_larger_ones() -> None:
    draws = [set(draw_labels(LABELS, k, seed=0, draw=4).tolist()) for k in (1, 5, 10, 25)]
    assert draws[0] < draws[1] < draws[2] < draws[3]


def test_a_draw_is_balanced_without_repeats_and_takes_all_of_a_rare_class() -> None:
    drawn = draw_labels(LABELS, 10, seed=0, draw=0)
    assert len(set(drawn.tolist())) == len(drawn)
    assert np.unique(LABELS[drawn], return_counts=True)[1].tolist() == [10, 10, 6]
    assert set(np.flatnonzero(LABELS == 9)) <= set(drawn)


def test_draws_depend_on_seed_and_number_and_on_nothing_else() -> None:
    again = [draw_labels(LABELS, 5, seed, draw).tolist() for seed in (0, 1) for draw in (0, 1) for _ in (0, 1)]
    assert again[0::2] == again[1::2]
    assert len({tuple(drawn) for drawn in again}) == 4


def test_every_image_of_a_class_is_equally_likely() -> None:
    labels = np.repeat([0, 1], 10)
    times = np.bincount(np.concatenate([draw_labels(labels, 3, 0, draw) for draw in range(1000)]))
    # 300 expected, standard deviation 14.5
    assert np.abs(times - 300).max() < 60


def test_folds_partition_the_images_with_balanced_classes() -> None:
    folds = stratified_folds(LABELS, 5, seed=1)
    assert sorted(np.concatenate([validation for _, validation in folds])) == list(range(len(LABELS)))
    for train, validation in folds:
        assert sorted([*train, *validation]) == list(range(len(LABELS)))
        assert np.bincount(LABELS[validation])[[2, 5, 9]].tolist() in ([8, 6, 1], [8, 6, 2])


def test_folds_are_deterministic_and_follow_the_seed() -> None:
    first, same, other = (stratified_folds(LABELS, 5, seed)[0][1].tolist() for seed in (1, 1, 2))
    assert first == same != other


def test_folds_accept_a_class_rarer_than_the_folds() -> None:
    labels = np.array([0] * 8 + [1] * 2)
    assert sum(1 in labels[validation] for _, validation in stratified_folds(labels, 4, seed=0)) == 2


def test_a_number_of_folds_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match="num_folds is 5; it must be from 2 to 1"):
        stratified_folds(np.arange(10), 5, 0)
    with pytest.raises(UserError, match="num_folds is 1"):
        stratified_folds(LABELS, 1, 0)
