"""Leave out listed images (`exclude` of an ingest), such as images with likely wrong labels from an audit.

In: the bytes of the list, and the images with their splits. Out: which images leave, and EXCLUDED, which has a row
for each listed image. Test images stay, because a test image never leaves test.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.spec import quantity
from ray_jobs.data.columns import large
from ray_jobs.sources.names import listed
from vit_model.errors import UserError

EXCLUDED = pa.schema(  # done is "left out" or "kept"
    pa.field(name, pa.string(), nullable=False)
    for name in ("key", "sample_id", "class_name", "split", "done", "reason")
)
COLUMN = "sample_id"
_LISTED, _TEST = "listed by exclude", "listed by exclude, but a test image stays in test"


def read_list(name: str, data: bytes) -> list[str]:
    """Return the ids of a list: the column `sample_id` of a CSV file, or the lines of a text file without that header.

    Args:
        name: the file's name, for messages.

    Raises:
        UserError: the file is neither.
    """
    try:
        text = data.decode("utf-8-sig")
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""), strict=True)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"exclude: {name} is not UTF-8 text or CSV: {error}") from None
    rows = [row for row in rows if any(row)]
    if rows and COLUMN in rows[0]:
        column = rows[0].index(COLUMN)
        rows = [row[column : column + 1] for row in rows[1:]]
    if wrong := [row for row in rows if len(row) != 1 or not row[0]]:
        raise UserError(
            f"exclude: {name}: {','.join(wrong[0])!r} is not a sample id; expected a CSV file with a column {COLUMN},"
            " or one id per line"
        )
    return [identity for (identity,) in rows]


def exclude(name: str, wanted: list[str], images: pa.Table, class_names: Sequence[str]) -> tuple[pa.Array, pa.Table]:
    """Return which images leave [n], and `large` EXCLUDED.

    Args:
        name: the list's name, for messages.
        wanted: sample ids.
        images: columns key, sample_id, label and split (train, dev or test).

    Raises:
        UserError: none of the images has one of the ids.
    """
    ids = images["sample_id"].combine_chunks()
    ids_wanted = pa.array(sorted(set(wanted)), pa.large_string())
    if unknown := ids_wanted.filter(pc.invert(pc.is_in(ids_wanted, ids))).to_pylist():
        raise UserError(
            f"exclude: {name} lists {len(unknown):,} ids that the source does not have:"
            f" {listed(unknown)}. Remove these lines; ids change when a file is renamed or edited"
        )
    is_listed = pc.is_in(ids, ids_wanted)
    is_test = pc.equal(images["split"], "test").combine_chunks()
    is_out = pc.and_not(is_listed, is_test)
    rows, tests = images.filter(is_listed), is_test.filter(is_listed)
    columns = {
        "key": rows["key"],
        "sample_id": rows["sample_id"],
        "class_name": pa.array(np.array(class_names, object)[rows["label"].to_numpy()], pa.string()),
        "split": rows["split"],
        "done": pc.if_else(tests, "kept", "left out"),
        "reason": pc.if_else(tests, _TEST, _LISTED),
    }
    return is_out, pa.table(columns, schema=large(EXCLUDED)).sort_by("key")


def check_classes(name: str, excluded: pa.Table, index: pa.Table, class_names: Sequence[str]) -> None:
    """Raise UserError if a class has no training image left, because its test images would leave test.

    Args:
        name: the list's name, for messages.
        excluded: EXCLUDED.
        index: the remaining images, without copies; columns label and split.
    """
    out = excluded.filter(pc.and_(pc.equal(excluded["done"], "left out"), pc.equal(excluded["split"], "train")))
    left = pc.unique(index.filter(pc.equal(index["split"], "train"))["label"]).to_pylist()
    if lost := sorted({*out["class_name"].to_pylist()} - {class_names[label] for label in left}):
        raise UserError(
            f"exclude: {name} leaves no training image of {listed(lost)}: it lists all of them except copies,"
            " which are left out. Remove at least one line of each class"
        )


def excluded_note(excluded: pa.Table) -> tuple[str, ...]:
    """Describe EXCLUDED in a line, without the name of the list, which is not in the key; no line if it is empty."""
    out = pc.sum(pc.equal(excluded["done"], "left out")).as_py() or 0
    kept = len(excluded) - out
    stay = f"; {kept:,} more that it lists are of test and stay there" if kept else ""
    note = f"{quantity(out, 'image')} left out of train and dev, because exclude lists them{stay}"
    return (note,) if len(excluded) else ()
