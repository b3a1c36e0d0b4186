"""Detectors in a report: COCO's AP with intervals, and the differences between detectors on the same images.

In: a table of `ray_jobs.detection.tables.DETECTIONS` with the artifact of each row. Out: lines of report.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.spec import quantity
from ray_jobs.data.shards import Dataset
from ray_jobs.detection.average_precision import SIZES, Boxes, Detected, Matches, average_precisions, match
from ray_jobs.detection.intervals import ap_interval, difference_interval
from ray_jobs.detection.mistakes import KINDS, named
from ray_jobs.detection.tables import MEDIAN_BOX, detected_of, truths_of
from ray_jobs.evaluation.rows import is_apart
from ray_jobs.randomness import Purpose
from ray_jobs.reporting.drawing.pictures import detected_urls
from ray_jobs.reporting.verdicts import percent, points

METRICS = ("AP", "AP50", "AP75", *(f"AP {size}" for size in SIZES[1:]))
FEWEST = 10  # test images with boxes of which an interval is shown
PICTURES = 12
SURE = 0.5  # the least score of a detection that puts a box in doubt
DOUBTS = {"class": "wrong class", "place": "wrong place", "background": "missing box"}
_OF = ("artifact", "stage", "task", "protocol", "method")
Line = dict[str, Any]


class Detector(NamedTuple):
    """A detector's results on some test images."""

    about: dict[str, str]
    """its artifact, stage, task, protocol and method"""
    sample_ids: tuple[str, ...]
    truths: list[Boxes]
    detected: list[Detected]
    """what the first training detected"""
    draws: list[dict[str, list[Matches]]]
    """of each training, see `average_precision.match`"""
    means: dict[str, float | None]
    """the mean of each of METRICS over trainings; None for a size without boxes"""

    @property
    def is_reference(self) -> bool:
        """Whether it has learned nothing from pixels."""
        return self.about["method"] == MEDIAN_BOX

    @property
    def all(self) -> list[list[Matches]]:
        """The matches of boxes of all sizes, of each training."""
        return [draw["all"] for draw in self.draws]


def detectors(detections: pa.Table) -> dict[str, list[Detector]]:
    """Return the detectors of each data set, from a table of DETECTIONS with artifact and stage."""
    parts: dict[str, dict[tuple[str, ...], dict[int, list[int]]]] = {}
    ids, names = detections["sample_id"].to_pylist(), [detections[name].to_pylist() for name in (*_OF, "draw")]
    for row, (*about, draw) in enumerate(zip(*names, strict=True)):
        by_detector = parts.setdefault(about[_OF.index("task")], {})
        by_detector.setdefault(tuple(about), {}).setdefault(draw, []).append(row)
    found: dict[str, list[Detector]] = {}
    for task, by_detector in parts.items():
        classes = 0  # the same for all detectors, so that their APs can be compared class by class
        read, references = [], set()
        for of, draws in by_detector.items():
            tested = tuple(sorted(ids[row] for row in draws[min(draws)]))
            if of[_OF.index("method")] == MEDIAN_BOX:
                if tested in references:
                    continue  # every stage says the same about it
                references.add(tested)
            tables = [detections.take(sorted(draws[draw], key=ids.__getitem__)) for draw in sorted(draws)]
            truths, detected = truths_of(tables[0]), [detected_of(table) for table in tables]
            labels = [*(each.classes for each in truths), *(each.classes for each in chain(*detected))]
            classes = max(classes, *(1 + int(part.max(initial=-1)) for part in labels))
            read.append((dict(zip(_OF, of, strict=True)), tested, truths, detected))
        found[task] = []
        for named_by, tested, truths, detected in read:
            matched = [match(truths, each, classes) for each in detected]
            found[task].append(Detector(named_by, tested, truths, detected[0], matched, _means(matched)))
    return found


def lines(found: Mapping[str, Sequence[Detector]]) -> list[Line]:
    """Return a line per detector, the best of each data set first, with its difference from that one.

    `low` and `high`, the ends of AP's interval, are None if too few test images have boxes; so are the difference and
    its ends for the best itself, and for one that was tested on other images.
    """
    return [
        _line(each, ordered[0])
        for _, some in sorted(found.items())
        for ordered in [_best_first(some)]
        for each in ordered
    ]


def _best_first(some: Sequence[Detector]) -> list[Detector]:
    """Return the detectors of a data set by AP, after them those tested on a part of test, and then the references."""

    def place(each: Detector) -> tuple[bool, bool, float]:
        return each.is_reference, is_apart(each.about["method"]), -(each.means["AP"] or 0.0)

    return sorted(some, key=place)


def pictures(found: Mapping[str, Sequence[Detector]], tested: Mapping[str, Dataset]) -> dict[str, list[str]]:
    """Return test images, drawn at random, with what the best detector of each data set detected, by its artifact."""
    shown = {}
    for some in found.values():
        best = _best_first(some)[0]
        if (dataset := tested.get(best.about["artifact"])) is None:
            continue
        rng = np.random.default_rng([0, Purpose.CONTACT_SHEET])
        places = np.sort(rng.permutation(len(best.sample_ids))[:PICTURES])
        rows = {sample_id: row for row, sample_id in enumerate(dataset.sample_ids("test"))}
        chosen = [(best.truths[place], best.detected[place]) for place in places]
        shown[best.about["artifact"]] = detected_urls(
            dataset, [rows[best.sample_ids[place]] for place in places], chosen
        )
    return shown


def _line(detector: Detector, best: Detector) -> Line:
    has_interval = _images_with_boxes(detector) >= FEWEST
    interval = ap_interval(detector.all) if has_interval else None
    line: Line = detector.about | detector.means
    line |= {"draws": len(detector.draws), "num_images": len(detector.sample_ids)}
    line |= {"boxes": sum(int((~truth.ignored).sum()) for truth in detector.truths), "errors": _errors(detector)}
    line |= {"low": interval and interval.low, "high": interval and interval.high, "apart": is_apart(line["method"])}
    line |= {"is_reference": detector.is_reference}
    is_compared = has_interval and detector is not best and detector.sample_ids == best.sample_ids
    difference = difference_interval(best.all, detector.all) if is_compared else None
    return line | {
        "behind": difference and difference.value,
        "behind_low": difference and difference.low,
        "behind_high": difference and difference.high,
    }


def doubted(found: Mapping[str, Sequence[Detector]], tested: Mapping[str, Dataset]) -> list[Line]:
    """Return boxes of test images that are likely wrong, because the best detector is sure of something else.

    Of a box of another class, its class is in doubt; where it overlaps a little with a box of its own class, this one's
    place; and where there is no box, one may be missing. The surest of each data set come first.
    """
    lines: list[Line] = []
    for task, some in sorted(found.items()):
        best = _best_first(some)[0]
        if (dataset := tested.get(best.about["artifact"])) is None:
            continue
        keys = dict(zip(dataset.sample_ids("test"), dataset.index("test")["key"].to_pylist(), strict=True))
        of_task: list[Line] = []
        for sample_id, truth, detected in zip(best.sample_ids, best.truths, best.detected, strict=True):
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
                if kind in DOUBTS and detected.scores[number] >= SURE
            ]
        lines += sorted(of_task, key=lambda line: -line["score"])[:PICTURES]
    return lines


def _errors(detector: Detector) -> dict[str, int]:
    """Count the first training's detections by what is wrong about them, and the boxes that it missed."""
    all_named = [named(*each) for each in zip(detector.truths, detector.detected, strict=True)]
    counts = Counter(kind for each in all_named for kind in each.kinds)
    return {kind: counts[kind] for kind in KINDS} | {"missed": sum(int(each.is_missed.sum()) for each in all_named)}


def _images_with_boxes(detector: Detector) -> int:
    return int(np.count_nonzero(np.sum([each.boxes for each in detector.all[0]], axis=0)))


def _means(draws: Sequence[dict[str, list[Matches]]]) -> dict[str, float | None]:
    values = [average_precisions(draw) for draw in draws]
    means = {metric: float(np.mean([each[metric] for each in values])) for metric in METRICS}
    return {metric: None if np.isnan(mean) else mean for metric, mean in means.items()}


def headline(found: Sequence[Line]) -> str:
    """Say how good the best detector of each data set is, and how far it is ahead of the next one."""
    said = []
    for task in dict.fromkeys(line["task"] for line in found):
        best, *others = [line for line in found if line["task"] == task]
        interval = "" if best["low"] is None else f" (95% interval {percent(best['low'])} to {percent(best['high'])})"
        sentence = (
            f"{best['stage']} detects the objects of {task} with AP {percent(best['AP'] or 0.0)}{interval},"
            f" on {quantity(best['num_images'], 'test image')}"
        )
        if others and others[0]["behind"] is not None:
            ends = f"{points(others[0]['behind_low'])} to {points(others[0]['behind_high'])}"
            gap = f"{points(others[0]['behind'], sign='')} points ({ends})"
            other = others[0]["method"] if others[0]["is_reference"] else others[0]["stage"]
            is_shown = others[0]["behind_low"] > 0
            sentence += f", {gap} more than {other}"
            sentence += "" if is_shown else "; that it is better is not shown, because the interval includes zero"
        said.append(f"{sentence}.")
    return " ".join(said)
