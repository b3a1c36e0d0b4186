"""Methods on images with several labels: results by class, and the worst images.

In: a table of `ray_jobs.evaluation.multi_label.SCORES` with the artifact of each row. Out: `ScoredEntry`s, and lines of
report.json. Needs numpy and pyarrow only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.identity import sha256
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.multi_label import METRICS, Scored, class_precisions, f1_by_class
from ray_jobs.evaluation.rows import is_apart
from ray_jobs.reporting.measures import METHOD, ScoredEntry, about
from ray_jobs.reporting.verdicts import kind

SHOWN = 24  # images with wrong labels
Line = dict[str, Any]


def entries(scores: pa.Table) -> list[ScoredEntry]:
    """Return the entries of a table of SCORES with artifact and stage."""
    found: dict[tuple[str, str, str, str, str], dict[int, list[Line]]] = {}
    for row in sorted(scores.to_pylist(), key=itemgetter("sample_id")):
        found.setdefault(itemgetter(*METHOD)(row), {}).setdefault(row["draw"], []).append(row)
    return [
        ScoredEntry(
            *key,
            metrics=METRICS,
            sample_ids=tuple(row["sample_id"] for row in next(iter(draws.values()))),
            draws=tuple(sorted(draws)),
            scored=tuple(_scored(draws[draw]) for draw in sorted(draws)),
            truth=sha256(json.dumps([row["labels"] for row in next(iter(draws.values()))])),
        )
        for key, draws in found.items()
    ]


def _scored(images: Sequence[Line]) -> Scored:
    scores = np.array([image["scores"] for image in images], np.float32)
    flags = np.zeros((2, *scores.shape), bool)
    for truth, predicted, image in zip(*flags, images, strict=True):
        truth[image["labels"]], predicted[image["predicted"]] = True, True
    return Scored(flags[0], scores, flags[1])


def results(scored: Sequence[ScoredEntry], tested: Mapping[str, Dataset]) -> list[Line]:
    """Return the classes and the worst images of each model that was scored on all of test, by their first draw.

    Without models, of each reference.
    """
    models = [entry for entry in scored if kind(entry) != "pixels"]
    return [
        about(entry)
        | {"draws": len(entry.draws), "num_images": len(entry.sample_ids)}
        | _of_draw(entry.sample_ids, entry.scored[0], tested.get(entry.artifact))
        for entry in models or scored
        if not is_apart(entry.method)
    ]


def _of_draw(sample_ids: Sequence[str], scored: Any, dataset: Dataset | None) -> Line:
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
