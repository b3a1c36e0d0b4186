"""Measurements of the evaluations, as lines of a table.

In: the rows and predictions of artifacts (`ray_jobs.evaluation.rows`). Out: the same rows with the artifact of each,
and `Entry`s: one per protocol, number of labels, method and artifact, with its predictions as an array. Needs numpy and
pyarrow only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.identity import sha256
from pipelines.store import Manifest
from ray_jobs.evaluation.intervals import (
    FEWEST,
    Interval,
    mean_difference,
    mean_interval,
    paired_difference,
)
from ray_jobs.evaluation.metrics import COMPUTED, Pixels, computed, contributions
from ray_jobs.evaluation.rows import ACCURACY, MEAN_IOU, REAL, is_apart
from vit_model.errors import UserError

_FROM = [pa.field("artifact", pa.string(), nullable=False), pa.field("stage", pa.string(), nullable=False)]
METHOD = ("artifact", "stage", "task", "protocol", "method")
_ENTRY = (*METHOD, "labels_per_class")
_Draw = dict[str, np.ndarray]
"""One draw's test images: the arrays of `_COLUMNS`, `in_top5`, and `places`, the ascending indices of their ids."""
_COLUMNS = {
    "labels": "label",
    "predictions": "prediction",
    "correct": "correct",
    "probabilities": "probability",
    "nll": "nll",
    "calibrated_probabilities": "calibrated_probability",
    "calibrated_nll": "calibrated_nll",
}
_ALWAYS = ("predictions", "correct", "probabilities")  # fields that every `Entry` has; others may be missing
_PERHAPS = ("nll", "in_top5", "calibrated_probabilities", "calibrated_nll")
_ORDER = {"few-shot linear": 0, "linear probe": 1, "fine-tuning": 2, "baseline": 3}


@dataclass(frozen=True)
class Entry:
    """One line of the table: a method under one protocol, with `labels_per_class` labels (None: all).

    `predictions`, `correct` (bool) and `probabilities` (of the predictions; NaN if the method has none) are [draws, n]
    and `labels` is [n], in the order of `sample_ids`, which is sorted. `draw_seed` is the seed of the label draws; two
    draws with the same number and seed have the same labelled images. `settings` and `selected_on` are the distinct
    values over the draws. `nll`, `in_top5` (0 or 1), and, after temperature scaling, `calibrated_probabilities` and
    `calibrated_nll` are [draws, n], or None if they were not measured.
    """

    metric: ClassVar[str] = ACCURACY
    """What comparisons are by."""
    truth: ClassVar[str] = ""
    """`correct` says how the predictions compare with the labels."""
    artifact: str
    stage: str
    task: str
    protocol: str
    method: str
    labels_per_class: int | None
    draw_seed: int | None
    draws: tuple[int, ...]
    sample_ids: tuple[str, ...]
    labels: np.ndarray = field(repr=False)
    predictions: np.ndarray = field(repr=False)
    correct: np.ndarray = field(repr=False)
    probabilities: np.ndarray = field(repr=False)
    selected_on: tuple[str, ...]
    settings: tuple[str, ...]
    nll: np.ndarray | None = field(default=None, repr=False)
    in_top5: np.ndarray | None = field(default=None, repr=False)
    calibrated_probabilities: np.ndarray | None = field(default=None, repr=False)
    calibrated_nll: np.ndarray | None = field(default=None, repr=False)

    @cached_property
    def accuracy(self) -> Interval:
        """The mean accuracy over draws and images, with its 95% interval."""
        return mean_interval(self.correct)

    @cached_property
    def metrics(self) -> dict[str, Interval]:
        """The metrics that are computed from predictions, by name; none with ReaL, where images have several labels."""
        if self.task.endswith(REAL):
            return {}
        return {metric.name: self.interval(metric.name) for metric in COMPUTED}

    def of_images(self, sample_ids: Sequence[str]) -> Entry:
        """Return the same for some of the images, given in their order."""
        places = np.searchsorted(np.array(self.sample_ids), np.array(sample_ids))
        arrays = {name: getattr(self, name) for name in (*_ALWAYS, *_PERHAPS)}
        fewer: dict[str, Any] = {name: None if array is None else array[:, places] for name, array in arrays.items()}
        return replace(self, sample_ids=tuple(sample_ids), labels=self.labels[places], **fewer)

    def interval(self, metric: str) -> Interval:
        """Return the mean of a metric over draws and images with its 95% interval."""
        return self.accuracy if metric == ACCURACY else mean_interval(self._table(metric))

    def minus(self, other: Entry, metric: str, comparisons: int = 1) -> Interval:
        """Return the difference to another entry of the same images, with its interval, paired by image.

        It is also paired by draw if these are the same; otherwise it is the difference of the means over all draws.
        """
        if metric == ACCURACY and self.draws == other.draws:
            return paired_difference(self.correct, other.correct, comparisons=comparisons)
        tables, same_draws = (self._table(metric), other._table(metric)), self.draws == other.draws
        return mean_difference(*tables, same_draws=same_draws, comparisons=comparisons)

    def _table(self, metric: str) -> np.ndarray:
        """Return each image's contribution to a metric, [draws, n]; the mean over images is the metric of a draw."""
        if metric == ACCURACY:
            return self.correct.astype(np.float64)
        return contributions(computed(metric), self.labels, self.predictions)


class _Scored(Protocol):
    """What a draw scored, of which every image has a contribution to each metric."""

    def contributions(self, metric: str) -> np.ndarray: ...


@dataclass(frozen=True)
class ScoredEntry:
    """A method's results on n test images, whose `sample_ids` are sorted, with all labels, by other metrics.

    A draw is a training, or untrained weights.
    """

    artifact: str
    stage: str
    task: str
    protocol: str
    method: str
    metrics: tuple[str, ...]
    sample_ids: tuple[str, ...]
    draws: tuple[int, ...]
    scored: tuple[_Scored, ...] = field(repr=False)
    truth: str
    """A digest of the images' annotations: results are comparable only with the same ones."""
    labels_per_class: None = None
    draw_seed: None = None

    @property
    def has_interval(self) -> bool:
        """Whether there are enough images."""
        return len(self.sample_ids) >= FEWEST

    @property
    def metric(self) -> str:
        """What comparisons are by: the first of `metrics`."""
        return self.metrics[0]

    def interval(self, metric: str) -> Interval:
        """Return the mean of a metric over draws with its 95% interval over draws and images."""
        return mean_interval(self._tables[metric])

    def minus(self, other: ScoredEntry, metric: str, comparisons: int = 1) -> Interval:
        """Return the difference to another entry of the same images, with its interval, paired by image.

        It is also paired by draw if these are the same.
        """
        tables, same_draws = (self._tables[metric], other._tables[metric]), self.draws == other.draws
        return mean_difference(*tables, same_draws=same_draws, comparisons=comparisons)

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Each image's contribution to each metric, [draws, n]; the mean over images is the metric of a draw."""
        return {metric: np.stack([draw.contributions(metric) for draw in self.scored]) for metric in self.metrics}


def about(entry: Any) -> dict[str, Any]:
    """Return what a line says of an entry's origin: METHOD."""
    return {name: getattr(entry, name) for name in METHOD}


def join_tables(parts: Iterable[tuple[str, Manifest, Path]], name: str, schema: Any) -> Any:
    """Join the Parquet tables `name` of all (stage, manifest, folder) that have one, adding the artifact of each row.

    Texts are dictionary-encoded: the 20 million predictions of VTAB's test splits take 1 GB instead of 5 GB.

    Raises:
        UserError: a table has other columns than `schema`.
    """
    joined_schema = pa.schema([_coded(column) for column in [*_FROM, *schema]])
    texts = [column.name for column in schema if column.type == pa.string()]
    tables = [joined_schema.empty_table()]
    for stage, manifest, folder in parts:
        if not (path := folder / name).is_file():
            continue
        if not (stored := pq.read_schema(path)).equals(schema):
            raise UserError(f"{path} has the columns {stored.names}; expected {schema.names}")
        with pq.ParquetFile(path, read_dictionary=texts) as file:
            table = file.read()
        zeros = pa.array(np.zeros(len(table), np.int32))
        origin = [pa.DictionaryArray.from_arrays(zeros, [value]) for value in (manifest.key, stage)]
        tables.append(pa.Table.from_arrays([*origin, *table.columns], schema=joined_schema))
    return pa.concat_tables(tables).unify_dictionaries()


def _coded(column: Any) -> Any:
    """Return the column, dictionary-encoded if it holds texts."""
    text = column.type == pa.string()
    return column.with_type(pa.dictionary(pa.int32(), pa.string())) if text else column


def draw_seed(manifest: Manifest) -> int | None:
    """Return the seed of a stage's label draws."""
    labels = manifest.config.get("labels")
    seed = labels.get("seed") if isinstance(labels, dict) else manifest.config.get("seed")
    return seed if isinstance(seed, int) else None


def entries(rows: Any, predictions: Any, seeds: dict[str, int | None]) -> list[Entry]:
    """Return the lines of the table, ordered by task, protocol, number of labels and method.

    Args:
        rows: a table of ROWS with artifact and stage; only test accuracies are used.
        predictions: a table of PREDICTIONS with artifact and stage.
        seeds: artifact -> the seed of its label draws.
    """
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows.to_pylist():
        if row["metric"] == ACCURACY and row["split"] == "test":
            measured.setdefault(tuple(row[name] for name in _ENTRY), {})[row["draw"]] = row
    ids_at, predicted = _by_draw(predictions)
    lines = [_entry(key, draws, ids_at, predicted, seeds.get(key[0])) for key, draws in measured.items()]
    return sorted(lines, key=_sort_key)


def other_metrics(rows: Any) -> list[dict[str, Any]]:
    """Return a line per method and metric other than accuracy: the mean on test over its draws, the best first.

    Lines have task, protocol, method, labels_per_class, metric, value, draws, num_images, stage, artifact, apart
    (`is_apart`), and the distinct selected_on and settings.

    Args:
        rows: a table of ROWS with artifact and stage.
    """
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in rows.to_pylist():
        if row["metric"] != ACCURACY and row["split"] == "test":
            setting = tuple(row[name] for name in (*_ENTRY, "metric"))
            measured.setdefault(setting, {})[row["draw"]] = row
    lines = [
        dict(zip((*_ENTRY, "metric"), setting, strict=True))
        | {
            "value": float(np.mean([row["value"] for row in draws.values()])),
            "draws": len(draws),
            "num_images": next(iter(draws.values()))["num_images"],
            "apart": is_apart(setting[_ENTRY.index("method")]),
            "selected_on": list(_distinct(draws, "selected_on")),
            "settings": [json.loads(settings) for settings in _distinct(draws, "settings")],
        }
        for setting, draws in measured.items()
    ]

    def place(line: dict[str, Any]) -> tuple[Any, ...]:
        setting = line["task"], line["protocol"], line["labels_per_class"] or 0, line["metric"]
        return *setting, line["apart"], -line["value"]

    return sorted(lines, key=place)


def _by_draw(predictions: Any) -> tuple[Callable[[bytes], tuple[str, ...]], dict[tuple[Any, ...], _Draw]]:
    """Return the ids at the bytes of some places, and (entry's columns, draw) -> its test images, sorted by id."""
    names = [*_ENTRY, "draw"]
    groups = _groups(predictions, names)
    codes, ids = _codes(predictions["sample_id"])
    order = np.array(pc.array_sort_indices(ids))
    rank = np.empty(len(ids), np.int32)
    rank[order] = np.arange(len(ids), dtype=np.int32)
    columns = {name: predictions[column].to_numpy() for name, column in _COLUMNS.items()}
    columns["in_top5"] = _in_top5(predictions["top5"].combine_chunks(), columns["labels"])
    columns["places"] = rank[codes]
    rows = np.lexsort((columns["places"], groups))
    starts = np.flatnonzero(np.diff(groups[rows], prepend=-1))
    keys = predictions.select(names).take(rows[starts]).to_pylist()
    by_draw = {
        tuple(key.values()): {name: column[group] for name, column in columns.items()}
        for key, group in zip(keys, np.split(rows, starts)[1:], strict=True)
    }

    @cache  # entries of one test split share a tuple of ids, which saves memory
    def ids_at(places: bytes) -> tuple[str, ...]:
        return tuple(ids.take(order[np.frombuffer(places, np.int32)]).to_pylist())

    return ids_at, by_draw


def _groups(table: Any, names: Sequence[str]) -> np.ndarray:
    """Return a number for each row [n], the same for rows with the same values of these columns."""
    groups = np.zeros(len(table), np.int64)
    for name in names:
        codes, values = _codes(table[name])
        groups = groups * (len(values) + 1) + codes + 1  # a null has the code -1
    return groups


def of_pixels(confusion: Any) -> list[ScoredEntry]:
    """Return the entries of a table of CONFUSION with artifact and stage."""
    classes = classes_of_pixels(confusion)
    number = {name: place for place, name in enumerate(classes)}
    labels, predictions = (
        np.array([number[name] for name in values.to_pylist()], np.int64)[codes]
        for codes, values in (_codes(confusion[column]) for column in ("label", "prediction"))
    )
    pixels, ids = confusion["pixels"].to_numpy(), np.array(confusion["sample_id"].to_pylist())
    found: dict[tuple[Any, ...], dict[int, tuple[tuple[str, ...], Pixels]]] = {}
    groups = _groups(confusion, [*METHOD, "draw"])
    for group in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero(groups == group)
        *key, draw = confusion.select([*METHOD, "draw"]).slice(int(rows[0]), 1).to_pylist()[0].values()
        sample_ids, images = np.unique(ids[rows], return_inverse=True)
        counts = np.zeros((3, len(sample_ids), len(number)), np.int64)
        own, said, of = labels[rows], predictions[rows], pixels[rows]
        np.add.at(counts[0], (images, own), np.where(own == said, of, 0))
        np.add.at(counts[1], (images, own), of)
        np.add.at(counts[2], (images, said), of)
        found.setdefault(tuple(key), {})[draw] = tuple(sample_ids.tolist()), Pixels(*counts)
    return [
        ScoredEntry(
            **dict(zip(METHOD, key, strict=True)),
            metrics=(MEAN_IOU,),
            sample_ids=next(iter(draws.values()))[0],
            draws=tuple(sorted(draws)),
            scored=tuple(draws[draw][1] for draw in sorted(draws)),
            truth=_labelled(next(iter(draws.values()))[1], classes),
        )
        for key, draws in found.items()
    ]


def classes_of_pixels(confusion: Any) -> list[str]:
    """Return the names of the classes in a table of CONFUSION, in the order of `Pixels`."""
    return sorted({name for column in ("label", "prediction") for name in _codes(confusion[column])[1].to_pylist()})


def by_class(entry: ScoredEntry, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return {name, IoU, share of the pixels} of each class in the masks of test, over draws; the worst first."""
    draws: Sequence[Any] = entry.scored
    sums = np.array([[part.sum(axis=0) for part in pixels] for pixels in draws])  # [draws, 3, classes]
    right, labelled, predicted = sums.swapaxes(0, 1)
    ious = (right / np.maximum(1, labelled + predicted - right)).mean(axis=0)
    shares = labelled[0] / labelled[0].sum()
    return [
        {"name": names[place], "IoU": float(ious[place]), "share": float(shares[place])}
        for place in np.argsort(ious, kind="stable").tolist()
        if shares[place]
    ]


def _labelled(pixels: Pixels, names: Sequence[str]) -> str:
    """Return a digest of how many pixels of each image have which label."""
    used = np.flatnonzero(pixels.labelled.any(axis=0))
    return sha256("\n".join([*(names[place] for place in used.tolist()), pixels.labelled[:, used].tobytes().hex()]))


def _codes(column: Any) -> tuple[np.ndarray, Any]:
    """Return a column's distinct values and its codes [n] into them, -1 for null."""
    coded = column.combine_chunks()
    if not pa.types.is_dictionary(coded.type):
        coded = coded.dictionary_encode()
    return np.asarray(coded.indices.fill_null(-1)), coded.dictionary


def _in_top5(top5: Any, labels: np.ndarray) -> np.ndarray:
    """Return whether each label is in its list, 0 or 1, float32 [n]; NaN for an image without a list."""
    is_listed = np.where(top5.is_valid(), np.float32(0), np.float32(np.nan))
    images = pc.list_parent_indices(top5).to_numpy()
    is_listed[images[pc.list_flatten(top5).to_numpy() == labels[images]]] = 1
    return is_listed


def _entry(
    key: tuple[Any, ...],
    measured: dict[int, dict[str, Any]],
    ids_at: Callable[[bytes], tuple[str, ...]],
    predicted: dict[tuple[Any, ...], _Draw],
    seed: int | None,
) -> Entry:
    draws = tuple(sorted(measured))
    parts = [predicted[(*key, draw)] for draw in draws]
    tables: dict[str, Any] = {name: np.stack([part[name] for part in parts]) for name in _ALWAYS}
    tables |= {name: _stacked([part[name] for part in parts]) for name in _PERHAPS}
    return Entry(
        **dict(zip(_ENTRY, key, strict=True)),
        draw_seed=seed,
        draws=draws,
        sample_ids=ids_at(parts[0]["places"].tobytes()),
        labels=parts[0]["labels"],
        selected_on=_distinct(measured, "selected_on"),
        settings=_distinct(measured, "settings"),
        **tables,
    )


def _stacked(draws: list[np.ndarray]) -> np.ndarray | None:
    """Return the values of all draws, [draws, n]; None, which takes no memory, if values are missing (NaN)."""
    return None if any(np.isnan(draw).any() for draw in draws) else np.stack(draws)


def _distinct(measured: dict[int, dict[str, Any]], column: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(measured[draw][column] for draw in sorted(measured)))


def _sort_key(entry: Entry) -> tuple[Any, ...]:
    labels = entry.labels_per_class
    protocol = (_ORDER.get(entry.protocol, 9), entry.protocol)
    is_last = not entry.protocol.startswith("few-shot"), labels is None
    return entry.task, *is_last, labels or 0, *protocol, entry.method, entry.artifact
