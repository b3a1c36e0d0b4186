"""Detectors' results on test images: what was detected, the matches with boxes, AP and its intervals.

In: a table of `ray_jobs.detection.tables.DETECTIONS` with the artifact of each row. Out: an `Entry` per detector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.identity import sha256
from ray_jobs.detection.average_precision import (
    RECALLS,
    SIZES,
    Boxes,
    Detected,
    Matches,
    average_precisions,
    match,
    precisions,
)
from ray_jobs.detection.intervals import Halves, ap_interval, difference_interval, halves
from ray_jobs.detection.tables import detected_of, truths_of
from ray_jobs.evaluation.intervals import FEWEST, Interval
from ray_jobs.evaluation.rows import AP

METRICS = (AP, "AP50", "AP75", *(f"AP {size}" for size in SIZES[1:]))
_OF = ("artifact", "stage", "task", "protocol", "method")


@dataclass(frozen=True)
class Entry:
    """A detector's results on test images, whose `sample_ids` are sorted: their boxes, and what each draw detected.

    A draw is a training. Only AP has intervals.
    """

    metric: ClassVar[str] = AP
    """What comparisons are by."""
    metrics: ClassVar[tuple[str, ...]] = (AP,)
    artifact: str
    stage: str
    task: str
    protocol: str
    method: str
    sample_ids: tuple[str, ...]
    draws: tuple[int, ...]
    truths: tuple[Boxes, ...] = field(repr=False)
    detected: tuple[tuple[Detected, ...], ...] = field(repr=False)
    """[draws][images]"""
    labels_per_class: None = None
    draw_seed: None = None

    @cached_property
    def matches(self) -> list[dict[str, list[Matches]]]:
        """The matches of each draw (`average_precision.match`), of the classes that have boxes in the images."""
        classes = 1 + max((int(truth.classes.max(initial=-1)) for truth in self.truths), default=-1)
        return [match(self.truths, draw, classes) for draw in self.detected]

    @cached_property
    def means(self) -> dict[str, float | None]:
        """The mean of each of METRICS over draws; None for a size without boxes."""
        values = [average_precisions(draw) for draw in self.matches]
        means = {metric: float(np.mean([each[metric] for each in values])) for metric in METRICS}
        return {metric: None if np.isnan(mean) else mean for metric, mean in means.items()}

    @cached_property
    def truth(self) -> str:
        """A digest of the boxes: results are comparable only with the same ones."""
        parts = (part.tobytes() for boxes in self.truths for part in (np.array(len(boxes.boxes)), *boxes))
        return sha256(b"".join(parts).hex())

    @property
    def precisions(self) -> NDArray[np.float64]:
        """Precision at 101 recalls from 0 to 1, at an IoU of 50%: the mean over classes with boxes, and over draws."""
        at_50 = [precisions(of_class)[0] for draw in self.matches for of_class in draw["all"] if of_class.boxes.any()]
        return np.mean(at_50, axis=0) if at_50 else np.zeros(len(RECALLS))

    @cached_property
    def halves(self) -> Halves:
        """AP of random halves of the images, from which intervals come."""
        return halves([draw["all"] for draw in self.matches])

    @property
    def has_interval(self) -> bool:
        """Whether enough images have boxes."""
        return sum(not truth.ignored.all() for truth in self.truths) >= FEWEST

    def interval(self, metric: str) -> Interval:
        """Return the mean AP over draws with its 95% interval over images and draws."""
        assert metric == AP
        return ap_interval(self.halves)

    def minus(self, other: Entry, metric: str, comparisons: int = 1) -> Interval:
        """Return the difference to another detector's AP on the same images, with its interval."""
        assert metric == AP
        return difference_interval(self.halves, other.halves, comparisons)


def entries(detections: pa.Table) -> list[Entry]:
    """Return the entries of a table of DETECTIONS with artifact and stage."""
    parts: dict[tuple[Any, ...], dict[int, list[int]]] = {}
    ids, names = detections["sample_id"].to_pylist(), [detections[name].to_pylist() for name in (*_OF, "draw")]
    for row, (*about, draw) in enumerate(zip(*names, strict=True)):
        parts.setdefault(tuple(about), {}).setdefault(draw, []).append(row)
    found = []
    for key, draws in parts.items():
        numbers = sorted(draws)
        tables = [detections.take(sorted(draws[draw], key=ids.__getitem__)) for draw in numbers]
        found.append(
            Entry(
                **dict(zip(_OF, key, strict=True)),
                sample_ids=tuple(tables[0]["sample_id"].to_pylist()),
                draws=tuple(numbers),
                truths=tuple(truths_of(tables[0])),
                detected=tuple(tuple(detected_of(table)) for table in tables),
            )
        )
    return found
