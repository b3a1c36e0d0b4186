"""Did it pay? Paired differences between what was trained and what it must beat.

In: `Entry`s. Out: `Verdict`s, one a comparison, and a headline. The same label draws and the same test images on both
sides; which of several references is the best is taken from the test accuracies, which can only favour the reference.

The comparisons of one report are a family. Each has its own 95% interval; of 20 differences that are truly zero, one
interval would exclude zero. So each has a second, wider interval: these hold for all comparisons at once with 95%
(Bonferroni: each at 1 - 0.05 / number of comparisons), and the headline says how many differences are above zero by
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_jobs.evaluation.intervals import Interval, paired_difference
from ray_jobs.evaluation.rows import is_apart
from ray_jobs.reporting.measures import Entry

_IN_WORDS = {
    "above zero": "all of it above zero",
    "below zero": "all of it BELOW zero",
    "not told from zero": "which includes zero: no difference is shown",
}
SHOTS = 5  # the number of shots that the verdict is about, where it was measured


@dataclass(frozen=True)
class Verdict:
    """`method` against `reference`: a difference of accuracies (fractions) with its 95% interval.

    `adjusted` is the interval of the same difference that holds together with those of the report's other comparisons.
    """

    method: Entry
    reference: Entry
    accuracy: float
    reference_accuracy: float
    difference: Interval
    adjusted: Interval
    draws: int

    @property
    def conclusion(self) -> str:
        """Where the whole interval lies."""
        if self.difference.low > 0:
            return "above zero"
        return "below zero" if self.difference.high < 0 else "not told from zero"


def kind(entry: Entry) -> str:
    """ "trained" for what is to be judged, else which sort of reference it is; a backbone that has seen the labels of
    the support ("trained on these images") is neither, nor is a row of a part of test ("apart")."""
    if is_apart(entry.method):
        return "apart"
    if entry.protocol == "baseline" or entry.method.startswith("pixels"):
        return "pixels"
    return next(
        (word for word in ("scratch", "untrained", "trained on these") if word in entry.method), "trained"
    )


def verdicts(entries: Sequence[Entry]) -> list[Verdict]:
    """Every trained method against the best pixel row and the best trained from scratch of the same setting.

    A setting is a task, a number of labels and a `sort_of_learning`; of the few-shot ones the number of shots nearest
    to SHOTS counts. Where nothing was pretrained, what was trained from scratch is judged against the pixels.
    """
    settings: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        if not _is_few_shot(entry) or entry.labels_per_class == _shots(entries, entry.task):
            learning = sort_of_learning(entry.protocol)
            settings.setdefault((entry.task, learning, entry.labels_per_class), []).append(entry)
    pairs = []
    for candidates in settings.values():
        judged = [entry for entry in candidates if kind(entry) == "trained"]
        judged = judged or [entry for entry in candidates if kind(entry) == "scratch"]
        for method in judged:
            for sort in ("scratch", "pixels"):
                rivals = [entry for entry in candidates if kind(entry) == sort and entry not in judged]
                if rivals := [entry for entry in rivals if comparable(method, entry)]:
                    pairs.append((method, rivals))
    return [_against_best(method, rivals, comparisons=len(pairs)) for method, rivals in pairs]


def sort_of_learning(protocol: str) -> str:
    """What may be compared with one another: probes of one protocol; fine-tuning and baselines, which have the same
    labels and choose their settings alike."""
    return protocol if protocol in {"few-shot linear", "linear probe"} else "fine-tuning and baselines"


def comparable(a: Entry, b: Entry) -> bool:
    """Whether both were scored on the same images, with some label draws in common."""
    same_labels = a.labels_per_class is None or (a.draw_seed is not None and a.draw_seed == b.draw_seed)
    return same_labels and a.sample_ids == b.sample_ids and bool(set(a.draws) & set(b.draws))


def question(found: Sequence[Verdict]) -> str:
    """What the verdicts answer."""
    pretrained = any(kind(verdict.method) == "trained" for verdict in found)
    return "Did pretraining pay?" if pretrained else "Does the model beat simple classifiers on pixels?"


def headline(found: Sequence[Verdict]) -> str:
    """The answer in a few sentences: what was seen with few labels, then with all labels, then of all of it at once."""
    if not found:
        return "Nothing to compare: no two methods were scored on the same test images with the same labels."
    few = [verdict for verdict in found if verdict.method.labels_per_class is not None]
    everything = [verdict for verdict in found if verdict.method.labels_per_class is None]
    parts = [("With few labels", few), ("With all labels", everything)]
    answers = [f"{words}: {_answer(some)}." for words, some in parts if some]
    return " ".join(answers + ([_together(found)] if len(found) > 1 else []))


def sentence(verdict: Verdict, classes: int | None) -> str:
    """The comparison in words, with its numbers."""
    method, reference = verdict.method, verdict.reference
    value, low, high = verdict.difference
    return (
        f"{method.task}, {labels_text(method.labels_per_class, classes)}: {method.method} ({method.protocol}) "
        f"is right on {percent(verdict.accuracy)} of the test images, {reference.method} ({reference.protocol}) on "
        f"{percent(verdict.reference_accuracy)}: {points(value)} points, 95 % interval {points(low)} to "
        f"{points(high)}, {_IN_WORDS[verdict.conclusion]}."
    )


def labels_text(labels_per_class: int | None, classes: int | None) -> str:
    """'5 labels a class (50 in all)'."""
    if labels_per_class is None:
        return "all labels"
    total = "" if classes is None else f" (up to {labels_per_class * classes:,} in all)"
    return f"{labels_per_class} label{'s' if labels_per_class > 1 else ''} a class{total}"


def percent(fraction: float) -> str:
    """'91.2 %'."""
    return f"{100 * fraction:.1f} %"


def points(difference: float) -> str:
    """'+7.1', with a real minus sign."""
    return f"{100 * difference:+.1f}".replace("-", "−")


def _is_few_shot(entry: Entry) -> bool:
    return entry.protocol == "few-shot linear"


def _shots(entries: Sequence[Entry], task: str) -> int:
    shots = {entry.labels_per_class or 0 for entry in entries if _is_few_shot(entry) and entry.task == task}
    return min(shots, key=lambda shot: (abs(shot - SHOTS), shot))


def _against_best(method: Entry, rivals: list[Entry], comparisons: int) -> Verdict:
    """Compare with the best rival over the draws in common; the intervals are adjusted for `comparisons`."""
    tables = [_paired(method, rival) for rival in rivals]
    best = int(np.argmax([theirs.mean() for _, theirs in tables]))
    ours, theirs = tables[best]
    difference = paired_difference(ours, theirs)
    adjusted = paired_difference(ours, theirs, comparisons=comparisons)
    accuracies = float(ours.mean()), float(theirs.mean())
    return Verdict(method, rivals[best], *accuracies, difference, adjusted, draws=len(ours))


def _paired(a: Entry, b: Entry) -> tuple[np.ndarray, np.ndarray]:
    common = sorted(set(a.draws) & set(b.draws))
    return a.correct[[a.draws.index(draw) for draw in common]], b.correct[
        [b.draws.index(draw) for draw in common]
    ]


def _answer(found: Sequence[Verdict]) -> str:
    above = sum(verdict.conclusion == "above zero" for verdict in found)
    below = sum(verdict.conclusion == "below zero" for verdict in found)
    answer = "yes" if above == len(found) else "partly" if above else "no"
    only = "the difference is" if above else "the difference is not"
    count = only if len(found) == 1 else f"{above} of {len(found)} differences"
    less = f", {below} wholly below" if below else ""
    return f"{answer}, {count} above zero with the whole 95 % interval{less}"


def _together(found: Sequence[Verdict]) -> str:
    """Say how many differences lie above zero by the intervals adjusted for all comparisons."""
    above = sum(verdict.adjusted.low > 0 for verdict in found)
    still = "still " if above == sum(verdict.difference.low > 0 for verdict in found) else ""
    return (
        f"With intervals adjusted for all {len(found)} comparisons (Bonferroni), {above} of {len(found)} differences "
        f"{still}{'lies' if above == 1 else 'lie'} above zero."
    )
