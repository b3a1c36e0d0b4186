"""SQL over everything that a store ever committed: `report query`, and what other listings ask of the rows.

DuckDB reads the Parquet files of the tables that the SQL names, where they lie (on S3: in the checked local cache).
SQL is hostile until shown otherwise, and DuckDB calls `WITH x AS (COPY ... TO 'file') SELECT ...` a SELECT. So:
- before anything runs, the statement's syntax tree, as DuckDB's own parser gives it, is held against lists of what may
  stand in it (`_named_tables`): queries that only read, of tables that are in TABLES, and no function that reads files;
- the database is in memory and locked: no files but those of the tables, no extensions, no settings, no variables of
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

SECONDS = 60.0  # that DuckDB may take for one answer
MEMORY = "2GiB"
CHUNK = 10_000  # rows that are fetched at once

# queries that only read; `INSERT_QUERY_NODE`, `COPY_QUERY_NODE` and others stand for what writes
_QUERIES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_PLAIN = (
    {"BOOLEAN", "VARCHAR", "JSON", "FLOAT", "DOUBLE"}
    | {f"{sign}{size}INT" for sign in ("", "U") for size in ("TINY", "SMALL", "BIG", "HUGE")}
    | {"INTEGER", "UINTEGER"}
)
_FUNCTIONS = {"range", "generate_series", "unnest", "json_each", "json_tree"}


class Column(NamedTuple):
    """A column of a table: its name, its type in DuckDB, and what it means."""

    name: str
    type: str
    meaning: str


_ORIGIN = (
    Column("artifact", "VARCHAR", "key of the artifact that the row is from"),
    Column("job", "VARCHAR", "the job that made it: evaluate, baselines, finetune"),
    Column("stage", "VARCHAR", "its stage's name in the recipe"),
    Column("run", "VARCHAR", "the run that made it"),
    Column("finished", "TIMESTAMP", "when it was committed, UTC"),
    Column("vtab_group", "VARCHAR", "natural, specialized or structured, on a task of VTAB's; else NULL"),
)
_RESULT = Column(
    "result",
    "VARCHAR",
    "the result's name, for GROUP BY: its task, labels, protocol, method, stage and artifact",
)
_WHAT = (
    Column("task", "VARCHAR", "the dataset's name; with ' (ReaL)' behind it scored by ReaL's labels"),
    Column("protocol", "VARCHAR", "few-shot linear, linear probe, fine-tuning or baseline"),
    Column("method", "VARCHAR", "what was measured, such as 'ViT, pretrained'"),
    Column("labels_per_class", "INTEGER", "labels of each class that it learned from; NULL: all"),
    Column("draw", "INTEGER", "number of the draw of these labels, from 0"),
)
# Rows with the same name are the draws or test images of one result. A method's name alone occurs in several protocols.
_RESULT_SQL = """concat(
    task, ', ',
    CASE WHEN labels_per_class IS NULL THEN 'all labels' WHEN labels_per_class = 1 THEN '1 label per class'
         ELSE labels_per_class || ' labels per class' END,
    ', ', protocol, ': ', method, ' (', stage, ' ', artifact[:8], ')')"""
# The columns of `rows` and `predictions` after `result` are those of ray_jobs.evaluation.rows.
TABLES = {
    "rows": (
        *_ORIGIN,
        _RESULT,
        *_WHAT,
        Column("split", "VARCHAR", "the images that it was measured on: test"),
        Column("metric", "VARCHAR", "accuracy"),
        Column("value", "DOUBLE", "the measured number; accuracies are fractions"),
        Column("num_images", "INTEGER", "how many images it was measured on"),
        Column("selected_on", "VARCHAR", "what the settings were selected on"),
        Column("settings", "VARCHAR", "the settings, a JSON object"),
    ),
    "predictions": (
        *_ORIGIN,
        _RESULT,
        *_WHAT,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("label", "INTEGER", "its class"),
        Column("prediction", "INTEGER", "the class that was predicted"),
        Column("correct", "BOOLEAN", "it is right; on a task '... (ReaL)' by ReaL's labels"),
        Column(
            "probability",
            "FLOAT",
            "the model's probability of its prediction; NULL if the method has no probabilities",
        ),
    ),
    "artifacts": (
        Column("artifact", "VARCHAR", "key"),
        Column("job", "VARCHAR", "the job that made it"),
        Column("kind", "VARCHAR", "dataset, model, evaluation or report"),
        Column("stage", "VARCHAR", "its stage's name in the recipe"),
        Column("run", "VARCHAR", "the run that made it"),
        Column("attempt", "INTEGER", "the attempt that succeeded, from 1"),
        Column("started", "TIMESTAMP", "UTC"),
        Column("finished", "TIMESTAMP", "when it was committed, UTC"),
        Column("user", "VARCHAR", "who ran it, user@host"),
        Column("bytes", "BIGINT", "size of its files"),
        Column("content_digest", "VARCHAR", "digest of what it holds"),
        Column("config", "JSON", "the stage's fields"),
        Column("inputs", "JSON", "field -> the artifacts that it took"),
        Column("metrics", "JSON", "what the stage says of itself"),
        Column("code", "JSON", "version, digest and commit of its code"),
        Column("environment", "JSON", "machine and versions of packages"),
    ),
    "runs": (
        Column("run", "VARCHAR", "id"),
        Column("pipeline", "VARCHAR", "the recipe's name"),
        Column("status", "VARCHAR", "RUNNING (also where its driver is gone), SUCCEEDED, FAILED or STOPPED"),
        Column("created", "TIMESTAMP", "UTC"),
        Column("stages", "INTEGER", "how many it has"),
    ),
}


@dataclass(frozen=True)
class Answer:
    """What a query gave: columns with their types in DuckDB, and rows of None, bool, int, float and str.

    What has no such value in Python is text as DuckDB writes it; lists and structs are JSON.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def query(
    store: Store, sql: str, parameters: Sequence[Any] = (), seconds: float = SECONDS
) -> Iterator[Answer]:
    """The answer to one SELECT over TABLES, complete when the block begins; its rows are read inside it.

    Raises:
        RecipeError: SQL that is wrong, does more than read the tables, or takes too long or too much memory.
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
                # as a table: under the limits to its last row, with a name of its own for every column
                connection.execute(f"{_INTO}{sql}", list(parameters))
            described = connection.execute("DESCRIBE answer").fetchall()
            shown = ", ".join(_as_plain(name, kind) for name, kind, *_ in described)
            connection.execute(f"SELECT {shown} FROM answer")  # noqa: S608 (quoted names)
        columns, types = tuple(row[0] for row in described), tuple(row[1] for row in described)
        yield Answer(columns, types, _fetch(connection))
    finally:
        connection.close()


def _as_plain(name: str, kind: str) -> str:
    """A column as a type that Python has."""
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
    """What runs in the block is interrupted after so many seconds."""
    timer = Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def translate_errors(duckdb: Any, seconds: float) -> Iterator[None]:
    """What DuckDB raises, as one message for the person who wrote the SQL."""
    try:
        yield
    except duckdb.InterruptException:
        raise RecipeError(f"the SQL was stopped after {seconds:g} s: ask for less") from None
    except duckdb.PermissionException:
        raise RecipeError(f"the SQL reads or writes files: {_ONLY}") from None
    except duckdb.OutOfMemoryException:
        raise RecipeError(f"the SQL needs more than {MEMORY} of memory: ask for less") from None
    except duckdb.Error as error:
        raise RecipeError(f"the SQL can't be answered: {_LINE.sub(_own_line, str(error))}") from None


_INTO = "CREATE TABLE answer AS\n"  # a line of its own, so that the lines that DuckDB shows are the user's
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)


def _own_line(found: re.Match[str]) -> str:
    """The user's number of a line; the marker below the line stays in its column."""
    return f"LINE {int(found[1]) - 1}:".ljust(len(found[0]))


_ONLY = f"it can only be one SELECT that reads the tables {', '.join(TABLES)}"


def _named_tables(connection: DuckDBPyConnection, sql: str) -> set[str]:
    """The names in TABLES that the SQL reads. Raises RecipeError where it is anything but one query that reads them."""
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
    # a name that is an identifier is never a file's path, which begins with a slash
    known = {entry["key"].lower() for node in nodes for entry in _ctes(node) if entry["key"].isidentifier()}
    named = set()
    for node in nodes:
        kind = str(node.get("type"))
        if kind.endswith("_NODE") and kind not in _QUERIES:
            raise RecipeError(f"the SQL holds {kind.split('_')[0]}: {_ONLY}")
        if kind == "TABLE_FUNCTION" and (called := str(node["function"]["function_name"])) not in _FUNCTIONS:
            raise RecipeError(f"the SQL calls {called}(): {_ONLY}, and the functions {', '.join(_FUNCTIONS)}")
        if kind == "BASE_TABLE":
            name = str(node["table_name"]).lower()
            if name not in known | TABLES.keys():
                raise RecipeError(f"the SQL reads {name!r}, which is no table{nearest(name, TABLES)}")
            named.add(name)
    return named & TABLES.keys()


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every object in a tree of JSON."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _ctes(node: dict[str, Any]) -> list[Any]:
    found = node.get("cte_map")
    return found["map"] if isinstance(found, dict) else []


# ------------------------------------------------------------------------------------------------- filling


def define_tables(connection: DuckDBPyConnection, store: Store, named: set[str]) -> list[str]:
    """Define TABLES, with content where they are named; the files behind them, which must stay readable."""
    manifests = list(all_manifests(store)) if named - {"runs"} else []
    groups = _vtab_groups(manifests)
    records: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    paths: list[str] = []
    if "artifacts" in named:
        records["artifacts"] = [_artifact(manifest) for manifest in manifests]
    if "runs" in named:
        records["runs"] = _runs(store)
    for name in ("rows", "predictions"):
        found = _files(store, manifests, f"{name}.parquet") if name in named else {}
        if found:
            _define_view(connection, name, found, groups)
            paths += found
        else:
            _define_table(connection, name, [])
    for name in ("artifacts", "runs"):
        _define_table(connection, name, records[name])
    return paths


def _lock(connection: DuckDBPyConnection, paths: list[str]) -> None:
    """From now on the database sees these files and nothing else."""
    connection.execute("SET VARIABLE paths = $paths", {"paths": paths})
    connection.execute("SET allowed_paths = getvariable('paths')")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _vtab_groups(manifests: list[Manifest]) -> dict[str, str | None]:
    """Artifact -> what group of VTAB's tasks its `data` is of; others are left out."""
    tasks = {manifest.key: _vtab_task(manifest.config.get("source")) for manifest in manifests}
    data = {
        manifest.key: tasks.get(given[0].key)
        for manifest in manifests
        if (given := manifest.inputs.get("data"))
    }
    return {key: GROUPS.get(task) for key, task in data.items() if task is not None}


def _vtab_task(source: Any) -> Any:
    """The task that a dataset's source is; None also for a source that another version described in its own way."""
    return source.get("task") if isinstance(source, dict) and source.get("kind") == "vtab" else None


def _files(store: Store, manifests: list[Manifest], name: str) -> dict[str, Manifest]:
    """Local path -> manifest of all files of that name, but for reports, whose rows are copies."""
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
    """A view of Parquet files; what is known of each file is looked up by its number."""
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
    written = TABLES[name][len(_ORIGIN) + 1 :]
    own = [f'"{column.name}"::{column.type} AS "{column.name}"' for column in written]
    shown = ", ".join([*origin, f"{_RESULT_SQL} AS {_RESULT.name}", *own])
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
    """A variable that is a list of structs with these columns."""
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

    found = [run_status(store, run) for run in runs(store)]
    return [run | {"stages": len(run["stages"])} for run in found]
