"""The report's section about detectors: AP with intervals, errors by kind, pictures, and boxes that are likely wrong.

In: `ray_jobs.detection.entries.Entry`s. Out: lines of report.json, and pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ray_jobs.data.shards import Dataset
from ray_jobs.detection.entries import Entry
from ray_jobs.detection.mistakes import KINDS, named
from ray_jobs.evaluation.rows import MEDIAN_BOX, is_apart, is_reference
from ray_jobs.randomness import Purpose
from ray_jobs.reporting.drawing.pictures import detected_urls
from ray_jobs.reporting.measures import about
from ray_jobs.reporting.verdicts import comparable

PICTURES = 12
DOUBTS = {"class": "wrong class", "place": "wrong place", "background": "missing box"}
Line = dict[str, Any]
ByTask = Mapping[str, Sequence[Entry]]


def by_task(entries: Sequence[Entry]) -> ByTask:
    """Return the detectors of each data set: the best first, then those tested on a part of test, then references.

    Every stage says the same about the median box, so it is there once.
    """
    found: dict[str, list[Entry]] = {}
    references = set()
    for entry in entries:
        if entry.method == MEDIAN_BOX:
            if (entry.task, entry.sample_ids) in references:
                continue
            references.add((entry.task, entry.sample_ids))
        found.setdefault(entry.task, []).append(entry)

    def place(entry: Entry) -> tuple[bool, bool, float]:
        return is_reference(entry.method), is_apart(entry.method), -(entry.means["AP"] or 0.0)

    return {task: sorted(some, key=place) for task, some in sorted(found.items())}


def lines(found: ByTask) -> list[Line]:
    """Return a line per detector, in order, with its difference from the best of its data set.

    `low` and `high`, the ends of AP's interval, are None if too few test images have boxes; so are the difference and
    its ends for the best itself, and for one that was tested on other images. `spread` is the standard deviation of AP
    over several trainings.
    """
    return [_line(each, some[0]) for some in found.values() for each in some]


def pictures(found: ByTask, tested: Mapping[str, Dataset]) -> dict[str, list[str]]:
    """Return test images, drawn at random, with what the best detector of each data set detected, by its artifact."""
    shown = {}
    for best, *_ in found.values():
        if (dataset := tested.get(best.artifact)) is None:
            continue
        rng = np.random.default_rng([0, Purpose.CONTACT_SHEET])
        places = np.sort(rng.permutation(len(best.sample_ids))[:PICTURES])
        rows = {sample_id: row for row, sample_id in enumerate(dataset.sample_ids("test"))}
        chosen = [(best.truths[place], best.detected[0][place]) for place in places]
        shown[best.artifact] = detected_urls(dataset, [rows[best.sample_ids[place]] for place in places], chosen)
    return shown


def _line(entry: Entry, best: Entry) -> Line:
    interval = entry.interval(entry.metric) if entry.has_interval else None
    is_compared = entry.has_interval and entry is not best and comparable(entry, best)
    behind = best.minus(entry, entry.metric) if is_compared else None
    return {
        **about(entry),
        "labels_per_class": None,
        "metric": entry.metric,
        "value": entry.means[entry.metric],
        "low": interval and interval.low,
        "high": interval and interval.high,
        "behind": behind and behind.value,
        "behind_low": behind and behind.low,
        "behind_high": behind and behind.high,
        **{name: mean for name, mean in entry.means.items() if name != entry.metric},
        "draws": len(entry.draws),
        "spread": float(entry.halves.draws.std(ddof=1)) if len(entry.draws) > 1 and entry.has_interval else None,
        "num_images": len(entry.sample_ids),
        "boxes": sum(int((~truth.ignored).sum()) for truth in entry.truths),
        "errors": _errors(entry),
        "precisions": [round(float(value), 4) for value in entry.precisions],
        "apart": is_apart(entry.method),
    }


def doubted(found: ByTask, tested: Mapping[str, Dataset]) -> list[Line]:
    """Return boxes of test images that are likely wrong, because the best detector is sure of something else.

    Of a box of another class, its class is in doubt; where it overlaps a little with a box of its own class, this one's
    place; and where there is no box, one may be missing. The surest of each data set come first.
    """
    lines: list[Line] = []
    for task, (best, *_) in found.items():
        if (dataset := tested.get(best.artifact)) is None:
            continue
        keys = dict(zip(dataset.sample_ids("test"), dataset.index("test")["key"].to_pylist(), strict=True))
        of_task: list[Line] = []
        for sample_id, truth, detected in zip(best.sample_ids, best.truths, best.detected[0], strict=True):
            result = named(truth, detected)
            of_task += [
                {
                    "task": task,
                    "sample_id": sample_id,
                    "file": keys[sample_id],
                    "doubt": DOUBTS[kind],
                    "said": dataset.info.class_names[int(detected.classes[number])],
                    "score": float(detected.scores[number]),
                    "box": [round(float(side), 1) for side in detected.boxes[number]],
                }
                for number, kind in zip(result.shown, result.kinds, strict=True)
                if kind in DOUBTS
            ]
        lines += sorted(of_task, key=lambda line: -line["score"])[:PICTURES]
    return lines


def _errors(entry: Entry) -> dict[str, int]:
    """Count the first draw's detections by what is wrong about them, and the boxes that it missed."""
    all_named = [named(*each) for each in zip(entry.truths, entry.detected[0], strict=True)]
    counts = Counter(kind for each in all_named for kind in each.kinds)
    return {kind: counts[kind] for kind in KINDS} | {"missed": sum(int(each.is_missed.sum()) for each in all_named)}
