"""The tables of a store in DuckDB, for SQL: their columns, and their rows from manifests and Parquet files.

DuckDB reads the Parquet files of the tables that are asked for in place (for S3, in the checked local cache).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.engine.runs import run_status, runs
from pipelines.spec.vtab import GROUPS
from pipelines.store import Manifest, Store, all_manifests

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class Column(NamedTuple):
    """A column of a table: its name, its type in DuckDB, and its meaning."""

    name: str
    type: str
    meaning: str


_ORIGIN = (
    Column("artifact", "VARCHAR", "key of the artifact that contains the row"),
    Column("job", "VARCHAR", "the job that made it: evaluate, segment, baselines, finetune, audit, ingest"),
    Column("stage", "VARCHAR", "its stage's name in the recipe"),
    Column("run", "VARCHAR", "the run that made it"),
    Column("finished", "TIMESTAMP", "when it was committed, UTC"),
    Column(
        "vtab_group", "VARCHAR", "natural, specialized or structured if the task is one of VTAB's; else NULL"
    ),
)
_RESULT = Column(
    "result",
    "VARCHAR",
    "the result's name, for GROUP BY: its task, labels, protocol, method, stage, artifact, and metric if not accuracy",
)
# The columns that `rows`, `predictions` and `confusion` share.
_SHARED = (
    *_ORIGIN,
    _RESULT,
    Column("task", "VARCHAR", "the dataset's name; a name that ends in ' (ReaL)': scored by ReaL's labels"),
    Column("protocol", "VARCHAR", "few-shot linear, linear probe, fine-tuning, baseline, retrieval, ..."),
    Column("method", "VARCHAR", "what was measured, such as 'ViT, pretrained'"),
    Column("labels_per_class", "INTEGER", "labels per class that it learned from; NULL: all"),
    Column("draw", "INTEGER", "number of the draw of these labels, from 0"),
)
# Rows with the same result are its draws or test images. The method alone does not identify a result, because several
# protocols have methods of the same name.
_RESULT_SQL = """concat(
    task, ', ',
    CASE WHEN labels_per_class IS NULL THEN 'all labels' WHEN labels_per_class = 1 THEN '1 label per class'
         ELSE labels_per_class || ' labels per class' END,
    ', ', protocol, ': ', method, ' (', stage, ' ', artifact[:8], ')')"""
_METRIC_SQL = "CASE WHEN metric = 'accuracy' THEN '' ELSE ', ' || metric END"
_FILES = ("rows", "predictions", "confusion", "label_issues", "quarantine")
# Their columns after `result` are those of ray_jobs.evaluation.rows, and of ray_jobs.segment.
TABLES = {
    "rows": (
        *_SHARED,
        Column("split", "VARCHAR", "the images that it was measured on: test"),
        Column("metric", "VARCHAR", "accuracy, mAP or mIoU"),
        Column("value", "DOUBLE", "the measured number, a fraction"),
        Column("num_images", "INTEGER", "number of images that it was measured on"),
        Column("selected_on", "VARCHAR", "what the settings were selected on"),
        Column("settings", "VARCHAR", "the settings, a JSON object"),
    ),
    "predictions": (
        *_SHARED,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("label", "INTEGER", "its class"),
        Column("prediction", "INTEGER", "the predicted class"),
        Column(
            "correct", "BOOLEAN", "whether the prediction is right; for a task '... (ReaL)' by ReaL's labels"
        ),
        Column(
            "probability",
            "FLOAT",
            "the model's probability of its prediction; NULL if the method has no probabilities",
        ),
        Column("nll", "FLOAT", "negative log-likelihood of the label, nats"),
        Column("top5", "INTEGER[]", "the five most probable classes, the most probable first"),
        Column("top5_probabilities", "FLOAT[]", "their probabilities"),
        Column(
            "calibrated_probability",
            "FLOAT",
            "probability of the prediction after temperature scaling on held-out images; NULL if none were",
        ),
        Column("calibrated_nll", "FLOAT", "nll after temperature scaling"),
    ),
    "confusion": (
        *_SHARED,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("label", "VARCHAR", "the class of pixels in its mask"),
        Column("prediction", "VARCHAR", "their predicted class"),
        Column("pixels", "BIGINT", "how many of the image's pixels have this label and this prediction"),
    ),
    "label_issues": (
        *_ORIGIN,
        Column("rank", "INTEGER", "1: the most likely wrong label of its audit"),
        Column("sample_id", "VARCHAR", "the image, as `ingest: exclude` takes it"),
        Column("file", "VARCHAR", "its name in the source"),
        Column("split", "VARCHAR", "train or dev"),
        Column("label", "VARCHAR", "its class"),
        Column("suggested", "VARCHAR", "the class that the audit suggests"),
        Column("label_probability", "FLOAT", "the probability of its class, out of sample"),
        Column("suggested_probability", "FLOAT", "that of the suggested class"),
    ),
    "quarantine": (
        *_ORIGIN,
        Column("key", "VARCHAR", "the image's name in the source"),
        Column("reason", "VARCHAR", "why it cannot be used"),
        Column("file", "VARCHAR", "the source's file that contains it"),
    ),
    "artifacts": (
        Column("artifact", "VARCHAR", "key"),
        Column("job", "VARCHAR", "the job that made it"),
        Column("kind", "VARCHAR", "dataset, model, evaluation, audit or report"),
        Column("stage", "VARCHAR", "its stage's name in the recipe"),
        Column("run", "VARCHAR", "the run that made it"),
        Column("attempt", "INTEGER", "the attempt that succeeded, from 1"),
        Column("started", "TIMESTAMP", "UTC"),
        Column("finished", "TIMESTAMP", "when it was committed, UTC"),
        Column("user", "VARCHAR", "who ran it, user@host"),
        Column("bytes", "BIGINT", "size of its files"),
        Column("content_digest", "VARCHAR", "digest of its content"),
        Column("config", "JSON", "the stage's fields"),
        Column("inputs", "JSON", "field -> the artifacts that the stage used"),
        Column("metrics", "JSON", "the metrics that the stage recorded"),
        Column("code", "JSON", "version, digest and commit of its code"),
        Column("environment", "JSON", "machine and versions of packages"),
    ),
    "runs": (
        Column("run", "VARCHAR", "id"),
        Column("pipeline", "VARCHAR", "the recipe's name"),
        Column("status", "VARCHAR", "RUNNING (also if its driver is gone), SUCCEEDED, FAILED or STOPPED"),
        Column("created", "TIMESTAMP", "UTC"),
        Column("stages", "INTEGER", "number of stages"),
    ),
}


def define_tables(connection: DuckDBPyConnection, store: Store, named: set[str]) -> list[str]:
    """Define TABLES, empty unless named; return the paths of their files, which the connection must be able to read."""
    manifests = list(all_manifests(store)) if named - {"runs"} else []
    groups = _vtab_groups(manifests)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    paths: list[str] = []
    if "artifacts" in named:
        records["artifacts"] = [_artifact(manifest) for manifest in manifests]
    if "runs" in named:
        records["runs"] = _runs(store)
    for name in _FILES:
        files = _files(store, manifests, f"{name}.parquet") if name in named else {}
        if files:
            _define_view(connection, name, files, groups)
            paths += files
        else:
            _define_table(connection, name, [])
    for name in ("artifacts", "runs"):
        _define_table(connection, name, records[name])
    return paths


def _vtab_groups(manifests: list[Manifest]) -> dict[str, str | None]:
    """Return, for each artifact whose `data` is one of VTAB's tasks, the group of that task."""
    tasks = {manifest.key: _vtab_task(manifest.config.get("source")) for manifest in manifests}
    data_tasks = {
        manifest.key: tasks.get(data[0].key)
        for manifest in manifests
        if (data := manifest.inputs.get("data"))
    }
    return {key: GROUPS.get(task) for key, task in data_tasks.items() if task is not None}


def _vtab_task(source: Any) -> Any:
    """Return the VTAB task of a dataset's source; None if it has none, or another version wrote it differently."""
    return source.get("task") if isinstance(source, dict) and source.get("kind") == "vtab" else None


def _files(store: Store, manifests: list[Manifest], name: str) -> dict[str, Manifest]:
    """Return {local path: manifest} of all files with this name, except those of reports, which are copies."""
    entries, origins = [], []
    for manifest in manifests:
        folder = manifest.folder.removeprefix("artifacts/")
        for file in manifest.files:
            if file.path == name and manifest.kind != "report":
                entries.append(file.model_copy(update={"path": f"{folder}/{name}"}))
                origins.append(manifest)
    root = store.local("artifacts", entries)
    return {f"{root}/{entry.path}": manifest for entry, manifest in zip(entries, origins, strict=True)}


def _define_view(
    connection: DuckDBPyConnection, name: str, files: dict[str, Manifest], groups: dict[str, str | None]
) -> None:
    """Define a view of Parquet files; the `_ORIGIN` columns of each file are looked up by its number."""
    origins = [
        {"artifact": origin.key, "vtab_group": groups.get(origin.key)}
        | origin.model_dump(include={"job", "stage", "run", "finished"})
        for origin in files.values()
    ]
    _set_records(connection, f"{name}_origins", _ORIGIN, origins)
    connection.execute(f"SET VARIABLE {name}_paths = $paths", {"paths": list(files)})
    origin = [
        f'getvariable(\'{name}_origins\')[file_index::BIGINT + 1]."{column.name}" AS "{column.name}"'
        for column in _ORIGIN
    ]
    has_result = _RESULT in TABLES[name]
    written = TABLES[name][len(_ORIGIN) + has_result :]
    own = [f'"{column.name}"::{column.type} AS "{column.name}"' for column in written]
    sql = f"concat({_RESULT_SQL}, {_METRIC_SQL})" if name == "rows" else _RESULT_SQL
    result = [f"{sql} AS {_RESULT.name}"] if has_result else []
    shown = ", ".join([*origin, *result, *own])
    # A file written by an earlier version may lack a newer column, which is then NULL.
    empty = ", ".join(f'NULL::{column.type} AS "{column.name}"' for column in written)
    files_read = (
        f"(SELECT *, file_index FROM read_parquet(getvariable('{name}_paths'), union_by_name = true)"  # noqa: S608
        f" UNION ALL BY NAME SELECT {empty} WHERE false)"  # (names of ours, here and below)
    )
    view = f"SELECT * FROM (SELECT {shown} FROM {files_read}){_left_out(name)}"  # noqa: S608 (names of ours)
    connection.execute(f"CREATE VIEW {name} AS {view}")


def _left_out(name: str) -> str:
    """Return the condition that leaves out the old "majority", the lowest of equally frequent classes."""
    if name not in ("rows", "predictions"):
        return ""
    drawn = "(job = 'evaluate' OR job = 'baselines' AND labels_per_class IS NOT NULL)"
    return f" WHERE NOT (method = 'majority' AND {drawn})"


def _define_table(connection: DuckDBPyConnection, name: str, records: list[dict[str, Any]]) -> None:
    _set_records(connection, f"{name}_records", TABLES[name], records)
    connection.execute(
        f"CREATE TABLE {name} AS SELECT unnest(getvariable('{name}_records'), recursive := true)"
    )


def _set_records(
    connection: DuckDBPyConnection, variable: str, columns: tuple[Column, ...], records: list[dict[str, Any]]
) -> None:
    """Set a variable to a list of structs with these columns."""
    shape = json.dumps([{column.name: column.type for column in columns}])
    values = [{column.name: record[column.name] for column in columns} for record in records]
    connection.execute(
        f"SET VARIABLE {variable} = from_json($records, $shape)",
        {"records": json.dumps(values), "shape": shape},
    )


def _artifact(manifest: Manifest) -> dict[str, Any]:
    size = sum(file.size for file in manifest.files)
    return manifest.model_dump(exclude={"files"}) | {"artifact": manifest.key, "bytes": size}


def _runs(store: Store) -> list[dict[str, Any]]:
    statuses = [run_status(store, run) for run in runs(store)]
    return [status | {"stages": len(status["stages"])} for status in statuses]
