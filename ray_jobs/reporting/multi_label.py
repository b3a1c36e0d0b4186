"""Methods on images with several labels: intervals of their metrics, results by class, and the worst images.

In: a table of `ray_jobs.evaluation.multi_label.SCORES` with the artifact of each row. Out: `Entry`s, and lines of
report.json. Needs numpy and pyarrow only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.intervals import Interval, mean_difference, mean_interval
from ray_jobs.evaluation.multi_label import METRICS, Scored, class_precisions, f1_by_class
from ray_jobs.evaluation.rows import MEAN_AP, is_apart

SHOWN = 24  # images with wrong labels
_ENTRY = ("artifact", "stage", "task", "protocol", "method")
Line = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A method's results on n test images, whose `sample_ids` are sorted, with all labels: one `Scored` per draw."""

    metric: ClassVar[str] = MEAN_AP
    """What comparisons are by."""
    metrics: ClassVar[tuple[str, ...]] = METRICS
    artifact: str
    stage: str
    task: str
    protocol: str
    method: str
    sample_ids: tuple[str, ...]
    draws: tuple[int, ...]
    scored: tuple[Scored, ...] = field(repr=False)
    labels_per_class: None = None
    draw_seed: None = None

    def of_draws(self, draws: Sequence[int]) -> Entry:
        """Return the same for some of the draws."""
        scored = tuple(self.scored[self.draws.index(draw)] for draw in draws)
        return replace(self, draws=tuple(draws), scored=scored)

    def _table(self, metric: str) -> np.ndarray:
        """Return each image's contribution to a metric, [draws, n]; the mean over images is the metric of a draw."""
        return np.stack([draw.contributions(metric) for draw in self.scored])

    def interval(self, metric: str) -> Interval:
        """Return the mean of a metric over draws with its 95% interval over draws and images."""
        return mean_interval(self._table(metric))

    def minus(self, other: Entry, metric: str, comparisons: int = 1) -> Interval:
        """Return the paired difference to another entry of the same draws and images, with its interval."""
        return mean_difference(self._table(metric), other._table(metric), comparisons=comparisons)


def entries(scores: pa.Table) -> list[Entry]:
    """Return the entries of a table of SCORES with artifact and stage."""
    found: dict[tuple[str, str, str, str, str], dict[int, list[Line]]] = {}
    for row in sorted(scores.to_pylist(), key=itemgetter("sample_id")):
        key = row["artifact"], row["stage"], row["task"], row["protocol"], row["method"]
        found.setdefault(key, {}).setdefault(row["draw"], []).append(row)
    return [
        Entry(
            *key,
            sample_ids=tuple(row["sample_id"] for row in next(iter(draws.values()))),
            draws=tuple(sorted(draws)),
            scored=tuple(_scored(draws[draw]) for draw in sorted(draws)),
        )
        for key, draws in found.items()
    ]


def _scored(images: Sequence[Line]) -> Scored:
    scores = np.array([image["scores"] for image in images], np.float32)
    flags = np.zeros((2, *scores.shape), bool)
    for truth, predicted, image in zip(*flags, images, strict=True):
        truth[image["labels"]], predicted[image["predicted"]] = True, True
    return Scored(flags[0], scores, flags[1])


def results(scored: Sequence[Entry], tested: Mapping[str, Dataset]) -> list[Line]:
    """Return the classes and the worst images of each method that was scored on all of test, by their first draw."""
    return [
        {name: getattr(entry, name) for name in _ENTRY}
        | {"draws": len(entry.draws), "num_images": len(entry.sample_ids)}
        | _of_draw(entry.sample_ids, entry.scored[0], tested.get(entry.artifact))
        for entry in scored
        if not is_apart(entry.method)
    ]


def _of_draw(sample_ids: Sequence[str], scored: Scored, dataset: Dataset | None) -> Line:
    truth, _, predicted = scored
    names = dataset.info.class_names if dataset else [f"class {number}" for number in range(truth.shape[1])]
    files = (
        dict(zip(dataset.sample_ids("test"), dataset.index("test")["key"].to_pylist(), strict=True)) if dataset else {}
    )
    hits, labelled, said = (truth & predicted).sum(0), truth.sum(0), predicted.sum(0)
    precisions, f1 = class_precisions(truth, scored.scores), f1_by_class(hits, labelled, said)
    wrong = (truth != predicted).sum(axis=1)
    distance = np.abs(truth - scored.scores).sum(axis=1)  # among equally many wrong labels, the surest first

    def named(flags: np.ndarray) -> list[str]:
        return [names[number] for number in np.flatnonzero(flags)]

    return {
        "wrong": int(np.count_nonzero(wrong)),
        "classes": [
            {
                "name": names[number],
                "num_images": int(labelled[number]),
                "average_precision": float(precisions[number]),
                "F1": float(f1[number]),
                "recall": float(hits[number] / labelled[number]),
                "precision": float(hits[number] / said[number]) if said[number] else None,
            }
            for number in np.argsort(precisions, kind="stable")
            if labelled[number]
        ],
        "worst": [
            {
                "sample_id": sample_ids[image],
                "file": files.get(sample_ids[image]),
                "right": named(truth[image] & predicted[image]),
                "missed": named(truth[image] & ~predicted[image]),
                "extra": named(predicted[image] & ~truth[image]),
            }
            for image in np.lexsort((-distance, -wrong))[:SHOWN]
            if wrong[image]
        ],
    }
