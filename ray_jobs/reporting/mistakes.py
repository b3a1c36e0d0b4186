"""Where the main model goes wrong: the test images that it gets wrong most often, and which classes it confuses.

In: `Entry`s. Out: records with class numbers, and counts. numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_jobs.evaluation.rows import REAL
from ray_jobs.reporting.measures import Entry
from ray_jobs.reporting.verdicts import kind

SHOWN = 24


@dataclass(frozen=True)
class Mistake:
    """A test image that the main model got wrong in `wrong_draws` of `draws`.

    `prediction` is the most common wrong answer, `probability` the mean that the model gave it (None: the method has no
    probabilities). Of the `methods` that had as many labels (the main one included)
    `methods_right` got it right in most draws.
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
    """The line that the mistakes are shown of: the trained model, fine-tuned before few-shot, few labels before all, of
    these the most labels; where nothing was pretrained, the one from scratch, and without that the best of the rest.
    With the authors' labels, which have names to show, before ReaL's."""

    def place(entry: Entry) -> tuple[object, ...]:
        sort = {"trained": 0, "scratch": 1}.get(kind(entry), 2)
        few = entry.labels_per_class
        real = entry.task.endswith(REAL)
        return (sort, entry.protocol != "fine-tuning", few is None, -(few or 0), real, -entry.accuracy.value)

    whole = [entry for entry in entries if kind(entry) != "apart"]
    return min(whole, key=place, default=None)


def worst(main: Entry, entries: Sequence[Entry]) -> list[Mistake]:
    """The images that were wrong in most draws of `main`, of equals those that fewer methods got right."""
    peers = [entry for entry in entries if entry.task == main.task and entry.labels_per_class == main.labels_per_class
             and entry.sample_ids == main.sample_ids]  # fmt: skip
    methods_right = np.sum([peer.correct.mean(axis=0) > 0.5 for peer in peers], axis=0)
    wrong = (~main.correct).sum(axis=0)
    order = np.lexsort((np.arange(len(wrong)), methods_right, -wrong))
    return [
        Mistake(main.sample_ids[i], int(main.labels[i]), *_usual_mistake(main, i), int(wrong[i]), len(main.draws),
                int(methods_right[i]), len(peers))
        for i in order[:SHOWN] if wrong[i]
    ]  # fmt: skip


@dataclass(frozen=True)
class ClassResult:
    """The main model's results on one class: `recall` is the share of its test images predicted correctly, `precision`
    the share of correct predictions of this class (None: it was never predicted), over all draws.

    `confused_with` is the most common wrong answer for its images and `confused` their share (None: all are right).
    """

    label: int
    num_images: int
    recall: float
    precision: float | None
    confused_with: int | None
    confused: float


def per_class(entry: Entry, classes: int) -> list[ClassResult]:
    """A line for each class that has test images, the lowest recall first."""
    predicted = np.bincount(entry.predictions.ravel(), minlength=classes)
    order = np.argsort(entry.labels, kind="stable")
    starts = np.flatnonzero(np.diff(entry.labels[order], prepend=-1))
    found = []
    for images in np.split(order, starts[1:]):
        label, correct = int(entry.labels[images[0]]), entry.correct[:, images]
        wrong = np.bincount(entry.predictions[:, images][~correct], minlength=classes)
        found.append(
            ClassResult(
                label=label,
                num_images=len(images),
                recall=float(correct.mean()),
                precision=float(correct.sum() / predicted[label]) if predicted[label] else None,
                confused_with=int(wrong.argmax()) if wrong.any() else None,
                confused=float(wrong.max() / correct.size),
            )
        )
    return sorted(found, key=lambda one: (one.recall, one.label))


def confusion(entry: Entry, classes: int) -> np.ndarray:
    """Counts [label, prediction], summed over the draws."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (np.broadcast_to(entry.labels, entry.predictions.shape), entry.predictions), 1)
    return counts


def _usual_mistake(entry: Entry, image: int) -> tuple[int, float | None]:
    answers = entry.predictions[:, image]
    usual = int(np.bincount(answers[~entry.correct[:, image]]).argmax())
    probability = float(entry.probabilities[answers == usual, image].mean())
    return usual, None if math.isnan(probability) else probability
