"""Digits: the images are scikit-learn's, the split is exact, stratified and a function of ids alone."""

from collections import Counter
from hashlib import sha256

import numpy as np

from pipelines.files.sources import source_files
from pipelines.spec import DigitsSource
from ray_jobs.data.images import sample_id
from ray_jobs.sources.readers import digits

[PATH] = source_files(DigitsSource(kind="digits")).values()


def test_images_and_labels_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    images, labels, keys = digits.read(PATH)
    bunch = load_digits()
    np.testing.assert_array_equal(labels, bunch.target)
    np.testing.assert_array_equal(np.round(images[..., 0] / 255 * 16), bunch.images)
    assert images.min() == 0 and images.max() == 255 and len(set(keys)) == len(keys) == 1797


def test_split_is_stratified_and_does_not_depend_on_the_order_of_samples() -> None:
    images, labels, keys = digits.read(PATH)
    ids = [sample_id(sha256(image.tobytes()).digest(), key) for image, key in zip(images, keys, strict=True)]
    splits = digits.assign_splits(ids, labels.tolist(), "salt")
    counts = Counter(splits)
    assert abs(counts["test"] - 540) <= 5 and abs(counts["dev"] - (1797 - counts["test"]) / 5) <= 5
    for digit in range(10):
        of_digit = Counter(split for split, label in zip(splits, labels, strict=True) if label == digit)
        assert abs(of_digit["test"] / of_digit.total() - 0.3) < 0.01
    order = np.random.default_rng(0).permutation(1797)
    shuffled = digits.assign_splits([ids[i] for i in order], labels[order].tolist(), "salt")
    assert shuffled == [splits[i] for i in order]
    assert digits.assign_splits(ids, labels.tolist(), "pepper") != splits
