"""The two tables that an evaluation writes: rows (one per measured number) and predictions (one per image).

In and out: rows as lists of dicts; predictions as tables of PREDICTIONS, because there may be millions. The same rows
in the same order give the same bytes (with the same pyarrow). Paths are local.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ray_jobs.data.shards import Dataset

Row = dict[str, Any]
REAL = " (ReaL)"  # after a task's name: scored with ReaL's labels of the same images
# After a method's name: scored on a part of test only, because the model was trained on some of its images.
ON_SEEN, ON_UNSEEN = ", on test images seen in training", ", on test images not seen in training"
CHOSEN_ON_TEST = ", settings chosen on test"  # after a method's name


def _column(name: str, kind: Any, nullable: bool = False) -> Any:
    return pa.field(name, kind, nullable=nullable)


ROWS = pa.schema(
    [
        _column("task", pa.string()),
        # "few-shot linear" | "linear probe" | "fine-tuning" | "baseline" | see `ray_jobs.evaluation.frozen`
        _column("protocol", pa.string()),
        _column("method", pa.string()),
        _column("labels_per_class", pa.int32(), nullable=True),  # null: all labels
        _column("draw", pa.int32()),
        _column("split", pa.string()),
        # ACCURACY, MEAN_AP, MEAN_IOU, AP, or see `ray_jobs.evaluation.multi_label`
        _column("metric", pa.string()),
        _column("value", pa.float64()),  # a fraction
        _column("num_images", pa.int32()),
        _column("selected_on", pa.string()),  # what the settings were selected on
        _column("settings", pa.string()),  # JSON object with sorted keys
    ]
)
# Null for methods without probabilities.
PROBABILITIES = pa.schema(
    [
        _column("probability", pa.float32(), nullable=True),  # softmax probability of the prediction
        _column("nll", pa.float32(), nullable=True),  # negative log-likelihood of the label, in nats
        # the five most probable classes (all classes if there are fewer), the most probable first
        _column("top5", pa.list_(pa.field("element", pa.int32())), nullable=True),
        _column("top5_probabilities", pa.list_(pa.field("element", pa.float32())), nullable=True),
        # after temperature scaling, see `ray_jobs.evaluation.calibration`
        _column("calibrated_probability", pa.float32(), nullable=True),
        _column("calibrated_nll", pa.float32(), nullable=True),
    ]
)
PREDICTIONS = pa.schema(
    [
        _column("task", pa.string()),
        _column("protocol", pa.string()),
        _column("method", pa.string()),
        _column("labels_per_class", pa.int32(), nullable=True),
        _column("draw", pa.int32()),
        _column("sample_id", pa.string()),
        _column("label", pa.int32()),
        _column("prediction", pa.int32()),
        _column("correct", pa.bool_()),  # the prediction is the label; with ReaL's labels: it is one of them
        *PROBABILITIES,
    ]
)
CONFUSION_FILE = "confusion.parquet"
CONFUSION = pa.schema(
    [
        *(PREDICTIONS.field(name) for name in ("task", "protocol", "method", "labels_per_class", "draw", "sample_id")),
        _column("label", pa.string()),
        _column("prediction", pa.string()),
        _column("pixels", pa.int64()),
    ]
)
"""How many pixels of a test image have this label and this prediction, of a segmentation."""
MOST_FREQUENT = "most frequent class"  # the baseline that ignores the images
CLASS_FREQUENCIES = "class frequencies"  # the same with several labels per image
MEDIAN_BOX = "the median box"  # detects the same in every image
ACCURACY, MEAN_AP, MEAN_IOU, AP = "accuracy", "mAP", "mIoU", "AP"  # only accuracies have rows in predictions.parquet
# Every draw repeats the ids of the test split, so they belong in one dictionary. 73,728 ids of 32 letters take 2.7 MB;
# beyond the default limit of 1 MB, Parquet writers drop the dictionary and write each id every time it occurs.
_DICTIONARY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Truth:
    """The truth that predictions of a test split are compared with: ids [n] and labels [n], n >= 1.

    `real`, if any, lists for each image all labels that count as correct (ReaL: Beyer et al., "Are we done with
    ImageNet?", 2020). An image with an empty list or null is not scored.
    `seen` [n] says which images the model was trained on; they are scored separately.
    """

    task: str
    ids: Sequence[str]
    labels: NDArray[Any]
    real: pa.ListArray | None = None
    seen: NDArray[np.bool_] | None = None


def truth_of(dataset: Dataset, seen: NDArray[np.bool_] | None = None) -> Truth:
    """Return the truth of a dataset's test split, in its order."""
    real = dataset.index("test")["labels"].combine_chunks()
    known = real if len(real.flatten()) else None
    return Truth(dataset.info.name, dataset.sample_ids("test"), dataset.labels("test"), known, seen)


def is_reference(method: str) -> bool:
    """Return whether a method is a reference, and not a model that could be chosen."""
    references = ("pixels", MOST_FREQUENT, CLASS_FREQUENCIES, MEDIAN_BOX)
    return method.startswith(references) or "untrained" in method


def is_apart(method: str) -> bool:
    """Return whether a method's row covers only a part of test, or its settings were chosen on test.

    Verdicts and lists of the best leave such rows out.
    """
    return method.endswith((ON_SEEN, ON_UNSEEN, CHOSEN_ON_TEST))


def scored(
    common: Row,
    truth: Truth,
    predictions: NDArray[Any],
    selected_on: str,
    settings: dict[str, Any],
    probabilities: pa.Table | None = None,
) -> list[tuple[Row, pa.Table]]:
    """Score predictions of test: a row of ROWS (the accuracy) and a table of PREDICTIONS with a row for each image.

    With ReaL's labels there is a second pair, as a separate task, as in the paper (table 5). If the model was trained
    on some of the images, each pair becomes two, for these images and for the others, as separate methods.

    Args:
        common: protocol, method, labels_per_class and draw.
        predictions: labels [n].
        probabilities: a table of PROBABILITIES with n rows; None if the method has none.
    """
    scorings = [(truth.task, np.arange(len(predictions)), predictions == truth.labels)]
    if truth.real is not None:
        scorings.append((truth.task + REAL, *_score_real(truth.real, predictions)))
    ids = pa.array(truth.ids, pa.string())
    pairs = []
    for task, method, places, correct in split_by_seen(scorings, common["method"], truth.seen):
        fixed = {"task": task} | common | {"method": method}
        row = measurement(fixed, ACCURACY, float(correct.mean()), len(places), selected_on, settings)
        columns = {
            "sample_id": ids.take(pa.array(places)),
            "label": truth.labels[places],
            "prediction": predictions[places],
            "correct": correct,
        }
        if probabilities is not None:
            columns |= {
                name: probabilities[name].combine_chunks().take(pa.array(places)) for name in PROBABILITIES.names
            }
        pairs.append((row, filled(PREDICTIONS, columns, fixed, len(places))))
    return pairs


def filled(schema: pa.Schema, columns: Mapping[str, Any], common: Row, count: int) -> pa.Table:
    """Return a table of `count` rows with these columns; each other column repeats the value in `common`, or null."""
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.repeat(pa.scalar(common.get(field.name), field.type), count)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def mean_ap_of_real(
    common: Row, truth: Truth, value: float | None, selected_on: str, settings: dict[str, Any]
) -> list[Row]:
    """Return a row with the mean average precision of ReaL's labels.

    There is no row without such labels, or if the model was trained on some of the images, because a ranking of all
    images cannot be divided.

    Args:
        common: protocol, method, labels_per_class and draw.
    """
    if value is None or truth.real is None or (truth.seen is not None and truth.seen.any()):
        return []
    count = int(np.count_nonzero(truth.real.value_lengths().fill_null(0).to_numpy()))
    return [measurement({"task": truth.task + REAL} | common, MEAN_AP, value, count, selected_on, settings)]


def measurement(
    common: Row, metric: str, value: float, num_images: int, selected_on: str, settings: dict[str, Any]
) -> Row:
    """Return a row of ROWS about test.

    Args:
        common: task, protocol, method, labels_per_class and draw.

    Raises:
        ValueError: the value is not from 0 to 1, or not finite.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"{metric} of {common['method']} is {value}; it must be a fraction from 0 to 1")
    return common | {
        "split": "test",
        "metric": metric,
        "value": value,
        "num_images": num_images,
        "selected_on": selected_on,
        "settings": json.dumps(settings, sort_keys=True),
    }


def split_by_seen(
    scorings: Iterable[tuple[str, NDArray[Any], NDArray[Any]]], method: str, seen: NDArray[np.bool_] | None
) -> Iterator[tuple[str, str, NDArray[Any], NDArray[Any]]]:
    """Yield (task, method, places, correct) for each scoring; two if the model was trained on some of the images."""
    for task, places, correct in scorings:
        if seen is None or not seen.any():
            yield task, method, places, correct
            continue
        for name, part in ((ON_SEEN, seen[places]), (ON_UNSEEN, ~seen[places])):
            if part.any():
                yield task, f"{method}{name}", places[part], correct[part]


def _score_real(real: pa.ListArray, predictions: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the indices of the images that have labels, and whether each prediction is among the image's labels."""
    sizes = real.value_lengths().fill_null(0).to_numpy()
    owners = np.repeat(np.arange(len(sizes)), sizes)
    correct = np.zeros(len(sizes), bool)
    correct[owners[real.flatten().to_numpy() == predictions[owners]]] = True
    places = np.flatnonzero(sizes)
    return places, correct[places]


def write_predictions(path: Path, parts: Sequence[pa.Table]) -> None:
    """Write tables of PREDICTIONS, one after the other, as Parquet."""
    write_parquet(path, pa.concat_tables([PREDICTIONS.empty_table(), *parts]))


def write_parquet(path: Path | pa.NativeFile, table: pa.Table) -> None:
    """Write a table as Parquet; dictionary-encoded texts are read back as plain texts."""
    pq.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=_DICTIONARY_BYTES)


def write_table(path: Path, rows: Sequence[Row], schema: Any) -> None:
    """Write the rows in their order as Parquet. Raises ValueError if a value does not fit its column."""
    write_parquet(path, pa.Table.from_pylist(rows, schema))


def digest_rows(rows: Sequence[Row], schema: Any) -> str:
    """Return the sha256 (hex) of the columns and rows, independent of the order of rows.

    Raises ValueError if a value does not fit its column or is not finite.
    """
    # Python writes the shortest decimal that parses to the same float, so different values give different lines.
    stored = pa.Table.from_pylist(rows, schema).to_pylist()
    lines = sorted(json.dumps(list(row.values()), allow_nan=False) for row in stored)
    columns = ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema)
    return hashlib.sha256("\n".join([columns, *lines]).encode()).hexdigest()
