"""SQL over everything committed in a store: `report query`, and the rows of other listings.

DuckDB reads the Parquet files of the tables that the SQL names in place (for S3, in the checked local cache). The SQL
is not trusted, and DuckDB calls `WITH x AS (COPY ... TO 'file') SELECT ...` a SELECT. So:
- before anything runs, `_named_tables` checks the statement's syntax tree, from DuckDB's own parser, against lists of
  what is allowed: queries that only read, tables in TABLES, and no functions that read files;
- the database is in memory and locked: no files except those of the tables, no extensions, no settings, no variables of
  this program;
- time and memory are limited, and nothing is spilled to disk. DuckDB works in a thread, because it can be interrupted
  only while it executes, not while it plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.results.tables import TABLES, define_tables
from pipelines.spec import RecipeError, nearest
from pipelines.store import Store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Value = TypeVar("Value")
SECONDS = 60.0  # limit for one query
GRACE_SECONDS = 2.0  # until an interrupted query ends
MOST_CHARACTERS = 100_000  # in the SQL: while DuckDB parses, nothing else in this process runs
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


@dataclass(frozen=True)
class Answer:
    """The result of a query: columns with their DuckDB types, and rows of None, bool, int, float and str.

    Lists and structs are JSON; decimals, with all their digits, and other types are text as DuckDB writes it.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


class Unfinished(RecipeError):  # noqa: N818 (named after the state of the query)
    """A query took too long, and its thread still runs; only the end of the process ends it."""


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

    if len(sql) > MOST_CHARACTERS:
        raise RecipeError(f"the SQL has {len(sql):,} characters; at most {MOST_CHARACTERS:,} are allowed")
    is_busy = False
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
            named = _within(seconds, connection, lambda: _named_tables(connection, sql))
            _lock(connection, define_tables(connection, store, named))
            described = _within(seconds, connection, lambda: _execute(connection, sql, parameters))
        columns, types = tuple(row[0] for row in described), tuple(row[1] for row in described)
        yield Answer(columns, types, _fetch(connection))
    except Unfinished:
        is_busy = True  # closing the connection would wait for the thread
        raise
    finally:
        if not is_busy:
            connection.close()


def _execute(connection: DuckDBPyConnection, sql: str, parameters: Sequence[Any]) -> list[tuple[str, str]]:
    """Start the answer's rows, and return the name and the type of each column."""
    # into a table: the limits then hold for all rows, and every column gets a unique name
    connection.execute(f"{_INTO}{sql}", list(parameters))
    described = [(name, kind) for name, kind, *_ in connection.execute("DESCRIBE answer").fetchall()]
    shown = ", ".join(_as_plain(name, kind) for name, kind in described)
    connection.execute(f"SELECT {shown} FROM answer")  # noqa: S608 (quoted names)
    return described


def _as_plain(name: str, kind: str) -> str:
    """Return the SQL for a column as a type that Python has."""
    quoted = '"' + name.replace('"', '""') + '"'
    if kind in _PLAIN:
        return quoted
    if kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION")):
        return f"to_json({quoted})"
    return f"{quoted}::VARCHAR"


def _lock(connection: DuckDBPyConnection, paths: list[str]) -> None:
    """Restrict the database to these files from now on."""
    connection.execute("SET VARIABLE paths = $paths", {"paths": paths})
    connection.execute("SET allowed_paths = getvariable('paths')")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _fetch(connection: DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while rows := connection.fetchmany(CHUNK):
        yield from rows


def _within(seconds: float, connection: DuckDBPyConnection, work: Callable[[], Value]) -> Value:
    """Do DuckDB's work in a thread, and interrupt it after `seconds`.

    Raises:
        Unfinished: it goes on nevertheless. duckdb.InterruptException: it ended.
    """
    future: Future[Value] = Future()

    def settle() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=settle, daemon=True).start()
    try:
        wait([future], seconds)
    finally:  # also after Ctrl-C
        if not future.done():
            connection.interrupt()
            wait([future], GRACE_SECONDS)
            if not future.done():
                raise Unfinished(_STOPPED.format(seconds))
    return future.result()


@contextmanager
def translate_errors(duckdb: Any, seconds: float) -> Iterator[None]:
    """Turn DuckDB's errors into one message about the SQL."""
    try:
        yield
    except duckdb.InterruptException:
        raise RecipeError(_STOPPED.format(seconds)) from None
    except duckdb.PermissionException:
        raise RecipeError(f"the SQL reads or writes files: {_ONLY}") from None
    except duckdb.OutOfMemoryException:
        raise RecipeError(f"the SQL needs more than {MEMORY} of memory; select fewer rows") from None
    except duckdb.Error as error:
        # The line in the user's SQL, padded so that DuckDB's marker below it stays in place.
        text = _LINE.sub(lambda match: f"LINE {int(match[1]) - 1}:".ljust(len(match[0])), str(error))
        raise RecipeError(f"the SQL failed: {text}") from None


_STOPPED = "the SQL was stopped after {:g} s; select fewer rows or columns"
_INTO = (
    "CREATE TABLE answer AS\n"  # on a line of its own, so that DuckDB's messages quote only the user's lines
)
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)


_ONLY = f"expected one SELECT that reads the tables {', '.join(TABLES)}"


def _named_tables(connection: DuckDBPyConnection, sql: str) -> set[str]:
    """Return the names in TABLES that the SQL reads. Raises RecipeError if it is not one query that only reads them."""
    sql.encode()  # DuckDB's error does not name what is not UTF-8
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
