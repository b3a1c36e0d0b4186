"""The main model's errors: the test images that it most often gets wrong, and the classes that it confuses.

In: `Entry`s. Out: records with class numbers, and counts. Needs numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_jobs.evaluation.rows import MOST_FREQUENT, REAL
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.verdicts import kind

SHOWN = 24


@dataclass(frozen=True)
class Mistake:
    """A test image that the main model got wrong in `wrong_draws` of `draws`.

    `prediction` is the most common wrong label, `probability` the mean probability that the model gave it (None if the
    method has no probabilities). `methods` counts the methods with the same number of labels, including the main one,
    but not the most frequent class; `methods_right` of them got the image right in most draws.
    """

    sample_id: str
    label: int
    prediction: int
    probability: float | None
    wrong_draws: int
    draws: int
    methods_right: int
    methods: int


def main_entry(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry to show mistakes of; None if no entry covers all of test.

    Pretrained models come first, then models trained from scratch, then the rest. Within each, fine-tuning comes before
    few-shot, few labels (more of them first) before all labels, the authors' labels, which have names, before ReaL's,
    and then the higher accuracy.
    """

    def rank(entry: Entry) -> tuple[object, ...]:
        kind_rank = {"trained": 0, "scratch": 1}.get(kind(entry), 2)
        labels = entry.labels_per_class
        real = entry.task.endswith(REAL)
        protocol = entry.protocol != "fine-tuning"
        return (kind_rank, protocol, labels is None, -(labels or 0), real, -entry.accuracy.value)

    whole = [entry for entry in entries if kind(entry) != "apart"]
    return min(whole, key=rank, default=None)


def worst(main: Entry, entries: Sequence[Entry]) -> list[Mistake]:
    """Return the images that `main` gets wrong in the most draws, the most confident mistakes first.

    Without probabilities, images that fewer methods get right come first.
    """
    setting = main.task, main.labels_per_class, main.sample_ids
    peers = [
        entry
        for entry in entries
        if (entry.task, entry.labels_per_class, entry.sample_ids) == setting
        and (entry is main or not entry.method.startswith(MOST_FREQUENT))
    ]
    methods_right = np.sum([peer.correct.mean(axis=0) > 0.5 for peer in peers], axis=0)
    wrong = (~main.correct).sum(axis=0)
    usual = {image: _usual_mistake(main, image) for image in np.flatnonzero(wrong).tolist()}
    order = sorted(usual, key=lambda image: (-wrong[image], -(usual[image][1] or 0.0), methods_right[image], image))
    return [
        Mistake(
            sample_id=main.sample_ids[image],
            label=int(main.labels[image]),
            prediction=usual[image][0],
            probability=usual[image][1],
            wrong_draws=int(wrong[image]),
            draws=len(main.draws),
            methods_right=int(methods_right[image]),
            methods=len(peers),
        )
        for image in order[:SHOWN]
    ]


@dataclass(frozen=True)
class ClassResult:
    """The main model's results on one class, over all draws.

    `recall` is the share of its test images that are classified correctly, `precision` the share of its predictions
    that are correct (None if it was never predicted). `confused_with` is the most common wrong label for its images
    (None if all are correct), and `confused` their share.
    """

    label: int
    num_images: int
    recall: float
    precision: float | None
    confused_with: int | None
    confused: float


def per_class(entry: Entry, classes: int) -> list[ClassResult]:
    """Return the results on each class that has test images, the lowest recall first."""
    predicted = np.bincount(entry.predictions.ravel(), minlength=classes)
    order = np.argsort(entry.labels, kind="stable")
    starts = np.flatnonzero(np.diff(entry.labels[order], prepend=-1))
    results = []
    for images in np.split(order, starts[1:]):
        label, correct = int(entry.labels[images[0]]), entry.correct[:, images]
        wrong = np.bincount(entry.predictions[:, images][~correct], minlength=classes)
        results.append(
            ClassResult(
                label=label,
                num_images=len(images),
                recall=float(correct.mean()),
                precision=float(correct.sum() / predicted[label]) if predicted[label] else None,
                confused_with=int(wrong.argmax()) if wrong.any() else None,
                confused=float(wrong.max() / correct.size),
            )
        )
    return sorted(results, key=lambda result: (result.recall, result.label))


def _usual_mistake(entry: Entry, image: int) -> tuple[int, float | None]:
    predictions = entry.predictions[:, image]
    usual = int(np.bincount(predictions[~entry.correct[:, image]]).argmax())
    probability = float(entry.probabilities[predictions == usual, image].mean())
    return usual, None if math.isnan(probability) else probability
