"""Verdicts: paired differences between trained methods and their references.

In: `Entry`s. Out: `Verdict`s, one per comparison, and their sentences. A comparison pairs the same test images, and the
same draws if both have the same ones, by accuracy, by mAP if images have several labels, by AP of boxes, or by mIoU of
pixels. The best of several references is chosen on test, which can only favour the reference. Comparisons with the same
kind of model without pretraining (from scratch or untrained) show whether pretraining helped; comparisons with pixels
answer another question.

The comparisons of one report are a family. Each has a 95% interval, so about one of 20 intervals of true zeros excludes
zero. Each therefore has a second, wider interval; with 95% probability these hold for all comparisons together
(Bonferroni: each at 1 - 0.05 / number of comparisons), and the page says how many of them lie above zero.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from ray_jobs.detection import entries as detections
from ray_jobs.evaluation.intervals import Interval
from ray_jobs.evaluation.rows import ACCURACY, MEDIAN_BOX, MOST_FREQUENT, is_apart
from ray_jobs.reporting.measures import METHOD, Entry, ScoredEntry, about

AnyEntry = Entry | ScoredEntry | detections.Entry

REFERENCES = {  # methods are compared with the best entry of each of these kinds
    "scratch": "the model trained from scratch",
    "untrained": "the untrained model",
    "pixels": "the best classifier on pixels",
}
SHOTS = 5  # the verdict is about the number of shots nearest to this


@dataclass(frozen=True)
class Verdict:
    """The comparison of `method` with `reference`: a difference of their metric (fractions) with its 95% interval.

    `adjusted` is the wider interval; these hold for all comparisons of the report together.
    """

    method: AnyEntry
    reference: AnyEntry
    value: float
    reference_value: float
    difference: Interval
    adjusted: Interval
    draws: int
    others: dict[str, Interval]
    """The differences of further metrics, which no conclusion is drawn from."""

    @property
    def conclusion(self) -> str:
        """Where the interval lies, as report.json stores it."""
        if self.difference.low > 0:
            return "above zero"
        return "below zero" if self.difference.high < 0 else "not told from zero"


def kind(entry: AnyEntry) -> str:
    """Return "trained" for a method to judge, or the kind of reference: "scratch", "untrained" or "pixels".

    A backbone that was trained on the support's labels ("trained on these") and a row that covers only a part of test
    ("apart") are neither.
    """
    if is_apart(entry.method):
        return "apart"
    if entry.protocol == "baseline" or entry.method.startswith(("pixels", MOST_FREQUENT, MEDIAN_BOX)):
        return "pixels"
    return next((word for word in ("scratch", "untrained", "trained on these") if word in entry.method), "trained")


def verdicts(entries: Sequence[AnyEntry]) -> list[Verdict]:
    """Compare every pretrained method with the best entry of each kind of REFERENCES in the same setting.

    A setting is a task, a number of labels and a `sort_of_learning`; few-shot settings count only with the number of
    shots nearest to SHOTS. Without a pretrained method, methods trained from scratch are compared with pixels.
    """
    settings: dict[tuple[object, ...], list[AnyEntry]] = {}
    for entry in entries:
        if is_compared(entry, entries):
            learning = sort_of_learning(entry.protocol)
            settings.setdefault((entry.task, learning, entry.labels_per_class), []).append(entry)
    is_pretrained = any(kind(entry) == "trained" for entry in entries)
    judged, references = ("trained", tuple(REFERENCES)) if is_pretrained else ("scratch", ("pixels",))
    pairs = []
    for candidates in settings.values():
        for method in (entry for entry in candidates if kind(entry) == judged):
            for sort in references:
                rivals = [entry for entry in candidates if kind(entry) == sort and comparable(method, entry)]
                if rivals:
                    pairs.append((method, rivals))
    return [_against_best(method, rivals, comparisons=len(pairs)) for method, rivals in pairs]


def is_compared(entry: AnyEntry, entries: Sequence[AnyEntry]) -> bool:
    """Return whether comparisons include the entry; few-shot entries only with the shots nearest to SHOTS."""
    return not _is_few_shot(entry) or entry.labels_per_class == _shots(entries, entry.task)


def sort_of_learning(protocol: str) -> str:
    """Return the group of protocols that may be compared with each other.

    Probes are compared within their protocol. Fine-tuning is compared with baselines, because both have the same labels
    and select their settings in the same way.
    """
    return "fine-tuning and baselines" if protocol in {"fine-tuning", "baseline"} else protocol


def comparable(a: AnyEntry, b: AnyEntry) -> bool:
    """Return whether both were scored on the same images and annotations, with labels that were drawn alike."""
    same_labels = a.labels_per_class is None or (a.draw_seed is not None and a.draw_seed == b.draw_seed)
    return same_labels and (a.truth, a.sample_ids) == (b.truth, b.sample_ids)


def sentence(verdict: Verdict, classes: int | None, unknown: Container[str] = ()) -> str:
    """Describe a comparison in words, with its numbers; `unknown` artifacts have unknown training images."""
    method, reference = verdict.method, verdict.reference
    value, low, high = verdict.difference
    metric = of_metric(method.metric)
    images = " (its training images are unknown)" if method.artifact in unknown else ""
    digits = decimals(verdict.value, verdict.reference_value, value)
    position = {"above zero": "", "below zero": ", below zero"}.get(verdict.conclusion, ", includes zero")
    return (
        f"{method.task}, {labels_text(method.labels_per_class, classes)}: {method.method} ({method.protocol})"
        f"{images} reaches {percent(verdict.value, digits)}{metric}, {reference.method} ({reference.protocol}) "
        f"{percent(verdict.reference_value, digits)}: {points(value, digits=digits)} points (95% CI {points(low)} to "
        f"{points(high)}{position})."
    )


def labels_text(labels_per_class: int | None, classes: int | None) -> str:
    """Return '5 labels per class (up to 50 in total)'."""
    if labels_per_class is None:
        return "all labels"
    total = "" if classes is None else f" (up to {labels_per_class * classes:,} in total)"
    return f"{labels_per_class} label{'s' if labels_per_class > 1 else ''} per class{total}"


def of_metric(metric: str) -> str:
    """Return ' mAP' to follow a percentage; nothing for an accuracy."""
    return "" if metric == ACCURACY else f" {metric}"


def percent(fraction: float, digits: int = 1) -> str:
    """Return '91.2%'."""
    return f"{100 * fraction:.{digits}f}%"


def points(difference: float, sign: str = "+", digits: int = 1) -> str:
    """Return '+7.1', or without a sign '7.1', with a real minus sign, but not before 0.0."""
    return f"{100 * difference:{sign}z.{digits}f}".replace("-", "−")


def quoted(name: str) -> str:
    """Return a class name; one of digits, which reads as a count, in quotes."""
    return f"‘{name}’" if name.isdigit() else name


def decimals(value: float, reference: float, difference: float) -> int:
    """Return with how many decimals percentages show that `difference` is `value` minus `reference`: one, if it can."""

    def agree(digits: int) -> bool:
        shown = [round(round(100 * each, digits) * 10**digits) for each in (value, reference, difference)]
        return shown[0] - shown[1] == shown[2]

    return next(filter(agree, range(1, 5)), 1)


def _is_few_shot(entry: AnyEntry) -> bool:
    return entry.protocol.startswith("few-shot")


def _shots(entries: Sequence[AnyEntry], task: str) -> int:
    shots = {entry.labels_per_class or 0 for entry in entries if _is_few_shot(entry) and entry.task == task}
    return min(shots, key=lambda shot: (abs(shot - SHOTS), shot))


def _against_best(method: Any, rivals: list[Any], comparisons: int) -> Verdict:
    """Compare with the best rival, of the same kind of entry; `adjusted` holds for `comparisons` comparisons."""
    metric = method.metric
    reference = max(rivals, key=lambda rival: rival.interval(metric).value)
    further = method.metrics[1:] if isinstance(method, ScoredEntry) else ()
    return Verdict(
        method,
        reference,
        method.interval(metric).value,
        reference.interval(metric).value,
        method.minus(reference, metric),
        method.minus(reference, metric, comparisons),
        draws=len(method.draws),
        others={name: method.minus(reference, name) for name in further},
    )


def with_intervals(
    metrics: Sequence[dict[str, Any]], entries: Sequence[ScoredEntry | detections.Entry]
) -> list[dict[str, Any]]:
    """Return the lines of `measures.other_metrics` with the ends of their intervals, `low` and `high`, or None."""
    by_key = {tuple(about(entry).values()): entry for entry in entries}
    lines: list[dict[str, Any]] = []
    for line in metrics:
        entry = by_key.get(tuple(line[name] for name in METHOD))
        ends: tuple[float | None, ...] = (None, None)
        if entry is not None and line["metric"] in entry.metrics and entry.has_interval:
            ends = entry.interval(line["metric"])[1:]
        lines.append(line | dict(zip(("low", "high"), ends, strict=True)))
    return lines
