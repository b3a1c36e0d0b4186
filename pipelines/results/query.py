"""SQL over everything committed in a store: `report query`, and the rows of other listings.

DuckDB reads the Parquet files of the tables that the SQL names in place (for S3, in the checked local cache). The SQL
is not trusted, and DuckDB calls `WITH x AS (COPY ... TO 'file') SELECT ...` a SELECT. So:
- before anything runs, `_named_tables` checks the statement's syntax tree, from DuckDB's own parser, against lists of
  what is allowed: queries that only read, tables in TABLES, and no functions that read files;
- the database is in memory and locked: no files except those of the tables, no extensions, no settings, no variables of
  this program;
- time and memory are limited, and nothing is spilled to disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.engine.runs import run_status, runs
from pipelines.spec import RecipeError, nearest
from pipelines.spec.vtab import GROUPS
from pipelines.store import Manifest, Store, all_manifests

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SECONDS = 60.0  # limit for one query
MEMORY = "2GiB"
CHUNK = 10_000  # rows per fetch

# The queries that only read. `INSERT_QUERY_NODE`, `COPY_QUERY_NODE` and others write.
_QUERIES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_PLAIN = (
    {"BOOLEAN", "VARCHAR", "JSON", "FLOAT", "DOUBLE"}
    | {f"{sign}{size}INT" for sign in ("", "U") for size in ("TINY", "SMALL", "BIG", "HUGE")}
    | {"INTEGER", "UINTEGER"}
)
_FUNCTIONS = {"range", "generate_series", "unnest", "json_each", "json_tree"}


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


@dataclass(frozen=True)
class Answer:
    """The result of a query: columns with their DuckDB types, and rows of None, bool, int, float and str.

    Lists and structs are JSON; other types are text as DuckDB writes it.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def query(
    store: Store, sql: str, parameters: Sequence[Any] = (), seconds: float = SECONDS
) -> Iterator[Answer]:
    """Run one SELECT over TABLES and yield its answer; read the rows inside the block.

    Raises:
        RecipeError: the SQL is invalid, does more than read the tables, or needs too much time or memory.
        StoreDamaged: a file of a table that the SQL names does not match its manifest.
    """
    import duckdb

    connection = duckdb.connect(
        ":memory:",
        config={
            "memory_limit": MEMORY,
            "temp_directory": "",
            "python_enable_replacements": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_persistent_secrets": False,
        },
    )
    try:
        with translate_errors(duckdb, seconds):
            _lock(connection, define_tables(connection, store, _named_tables(connection, sql)))
            with _interrupted(connection, seconds):
                # into a table: the limits then hold for all rows, and every column gets a unique name
                connection.execute(f"{_INTO}{sql}", list(parameters))
            described = connection.execute("DESCRIBE answer").fetchall()
            shown = ", ".join(_as_plain(name, kind) for name, kind, *_ in described)
            connection.execute(f"SELECT {shown} FROM answer")  # noqa: S608 (quoted names)
        columns, types = tuple(row[0] for row in described), tuple(row[1] for row in described)
        yield Answer(columns, types, _fetch(connection))
    finally:
        connection.close()


def _as_plain(name: str, kind: str) -> str:
    """Return the SQL for a column as a type that Python has."""
    quoted = '"' + name.replace('"', '""') + '"'
    if kind in _PLAIN:
        return quoted
    if kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION")):
        return f"to_json({quoted})"
    if kind.startswith("DECIMAL"):
        return f"{quoted}::DOUBLE"
    return f"{quoted}::VARCHAR"


def _fetch(connection: DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := connection.fetchmany(CHUNK):
        yield from rows


@contextmanager
def _interrupted(connection: DuckDBPyConnection, seconds: float) -> Iterator[None]:
    """Interrupt the connection if the block takes longer than `seconds`."""
    timer = Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def translate_errors(duckdb: Any, seconds: float) -> Iterator[None]:
    """Turn DuckDB's errors into one message about the SQL."""
    try:
        yield
    except duckdb.InterruptException:
        raise RecipeError(f"the SQL was stopped after {seconds:g} s; select fewer rows") from None
    except duckdb.PermissionException:
        raise RecipeError(f"the SQL reads or writes files: {_ONLY}") from None
    except duckdb.OutOfMemoryException:
        raise RecipeError(f"the SQL needs more than {MEMORY} of memory; select fewer rows") from None
    except duckdb.Error as error:
        raise RecipeError(f"the SQL failed: {_LINE.sub(_own_line, str(error))}") from None


_INTO = (
    "CREATE TABLE answer AS\n"  # on a line of its own, so that DuckDB's messages quote only the user's lines
)
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)


def _own_line(match: re.Match[str]) -> str:
    """Return the line number in the user's SQL, padded so that DuckDB's marker below the line stays in place."""
    return f"LINE {int(match[1]) - 1}:".ljust(len(match[0]))


_ONLY = f"expected one SELECT that reads the tables {', '.join(TABLES)}"


def _named_tables(connection: DuckDBPyConnection, sql: str) -> set[str]:
    """Return the names in TABLES that the SQL reads. Raises RecipeError if it is not one query that only reads them."""
    statements = connection.extract_statements(sql)
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        hint = " (a PIVOT needs its values: IN ('a', 'b'))" if kinds == ["MULTI"] else ""
        raise RecipeError(f"the SQL is {' and '.join(kinds) or 'empty'}: {_ONLY}{hint}")
    (text,) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone() or ("",)
    try:
        nodes = list(_nodes(json.loads(text)))
    except RecursionError:
        raise RecipeError("the SQL is nested too deeply") from None
    # an identifier is never the path of a file, which begins with a slash
    ctes = {entry["key"].lower() for node in nodes for entry in _ctes(node) if entry["key"].isidentifier()}
    named = set()
    for node in nodes:
        kind = str(node.get("type"))
        if kind.endswith("_NODE") and kind not in _QUERIES:
            raise RecipeError(f"the SQL contains {kind.split('_')[0]}: {_ONLY}")
        if kind == "TABLE_FUNCTION" and (name := str(node["function"]["function_name"])) not in _FUNCTIONS:
            raise RecipeError(f"the SQL calls {name}(): {_ONLY}, and the functions {', '.join(_FUNCTIONS)}")
        if kind == "BASE_TABLE":
            name = str(node["table_name"]).lower()
            if name not in ctes | TABLES.keys():
                raise RecipeError(f"the SQL reads {name!r}, which is not a table{nearest(name, TABLES)}")
            named.add(name)
    return named & TABLES.keys()


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON tree."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _ctes(node: dict[str, Any]) -> list[Any]:
    cte_map = node.get("cte_map")
    return cte_map["map"] if isinstance(cte_map, dict) else []


# ------------------------------------------------------------------------------------------------- filling


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


def _lock(connection: DuckDBPyConnection, paths: list[str]) -> None:
    """Restrict the database to these files from now on."""
    connection.execute("SET VARIABLE paths = $paths", {"paths": paths})
    connection.execute("SET allowed_paths = getvariable('paths')")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


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
    connection.execute(f"CREATE VIEW {name} AS SELECT {shown} FROM {files_read}")  # noqa: S608 (names of ours)


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
