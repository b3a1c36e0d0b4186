"""SQL over everything committed in a store: `report query`, and the rows of other listings.

DuckDB reads the Parquet files of the tables that the SQL names in place (for S3, in the checked local cache). The SQL
is not trusted, and DuckDB calls `WITH x AS (COPY ... TO 'file') SELECT ...` a SELECT. So:
- before anything runs, `_named_tables` checks the statement's syntax tree, from DuckDB's own parser: one query that
  only reads, and calls only listed table functions;
- the database is in memory and locked: no files except the tables', no extensions, no settings, no variables of this
  program;
- time and memory are limited, and nothing is spilled to disk. DuckDB plans a query before it looks at either limit; the
  length of the SQL is limited for that.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import TYPE_CHECKING, Any

from pipelines.results.sql.columns import TABLES
from pipelines.results.sql.tables import define_tables
from pipelines.spec import RecipeError
from pipelines.store import Store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

SECONDS = 60.0  # limit for one query
MOST_CHARACTERS = 20_000  # in the SQL; 10,000 columns take 6 s to plan
MEMORY = "2GiB"
CHUNK = 10_000  # rows per fetch

# The queries that only read. `INSERT_QUERY_NODE`, `COPY_QUERY_NODE` and others write.
_QUERIES = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}
_PLAIN = (
    {"BOOLEAN", "VARCHAR", "JSON", "FLOAT", "DOUBLE"}
    | {f"{sign}{size}INT" for sign in ("", "U") for size in ("TINY", "SMALL", "BIG", "HUGE")}
    | {"INTEGER", "UINTEGER"}
)
_FUNCTIONS = {"range()", "generate_series()", "unnest()", "json_each()", "json_tree()"}


@dataclass(frozen=True)
class Answer:
    """The result of a query: columns with their DuckDB types, and rows of None, bool, int, float and str.

    Lists and structs are JSON; decimals, with all their digits, and other types are text as DuckDB writes it.
    """

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def query(store: Store, sql: str, seconds: float = SECONDS) -> Iterator[Answer]:
    """Run one SELECT over TABLES and yield its answer; read the rows inside the block.

    Raises:
        RecipeError: the SQL is invalid, does more than read the tables, or needs too much time or memory.
        StoreDamaged: a file of a table that the SQL names does not match its manifest.
    """
    import duckdb

    if len(sql) > MOST_CHARACTERS:
        raise RecipeError(f"the SQL has {len(sql):,} characters; at most {MOST_CHARACTERS:,} are allowed")
    with duckdb.connect(
        ":memory:",
        config={
            "memory_limit": MEMORY,
            "temp_directory": "",
            "enable_external_file_cache": False,  # a query reads each file once
            "python_enable_replacements": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "allow_persistent_secrets": False,
        },
    ) as connection:
        with translate_errors(duckdb, seconds):
            _lock(connection, define_tables(connection, store, _named_tables(connection, sql)))
            timer = Timer(seconds, connection.interrupt)
            timer.start()
            try:
                described = _execute(connection, sql)
            finally:
                timer.cancel()
        columns, types = tuple(row[0] for row in described), tuple(row[1] for row in described)
        yield Answer(columns, types, _fetch(connection))


def _execute(connection: DuckDBPyConnection, sql: str) -> list[tuple[str, str]]:
    """Start the answer's rows, and return the name and the type of each column."""
    # into a table: the limits then hold for all rows, and every column gets a unique name
    connection.execute(f"{_INTO}{sql}")
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


@contextmanager
def translate_errors(duckdb: Any, seconds: float) -> Iterator[None]:
    """Turn DuckDB's errors into one message about the SQL."""
    try:
        yield
    except duckdb.InterruptException:
        raise RecipeError(f"the SQL was stopped after {seconds:g} s; select fewer rows or columns") from None
    except duckdb.PermissionException:
        raise RecipeError(f"the SQL reads or writes files: {_ONLY}") from None
    except duckdb.OutOfMemoryException:
        raise RecipeError(f"the SQL needs more than {MEMORY} of memory; select fewer rows") from None
    except duckdb.Error as error:
        # The line in the user's SQL, padded so that DuckDB's marker below it stays in place.
        text = _LINE.sub(lambda match: f"LINE {int(match[1]) - 1}:".ljust(len(match[0])), str(error))
        raise RecipeError(f"the SQL failed: {text}") from None


# on a line of its own, so that DuckDB's messages quote only the user's lines
_INTO = "CREATE TABLE answer AS\n"
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)


_ONLY = f"expected one SELECT that reads the tables {', '.join(TABLES)}"


def _named_tables(connection: DuckDBPyConnection, sql: str) -> set[str]:
    """Return the names in TABLES that the SQL reads. Raises RecipeError if it is not one query that only reads."""
    sql.encode()  # fails with the text that is not UTF-8, which DuckDB's error does not name
    statements = connection.extract_statements(sql)
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        hint = " (a PIVOT needs its values: IN ('a', 'b'))" if kinds == ["MULTI"] else ""
        raise RecipeError(f"the SQL is {' and '.join(kinds) or 'empty'}: {_ONLY}{hint}")
    (text,) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchone() or ("",)
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def collect(node: dict[str, Any]) -> dict[str, Any]:
        nodes[str(node.get("type"))].append(node)
        return node

    try:
        json.loads(text, object_hook=collect)
    except RecursionError:
        raise RecipeError("the SQL is nested too deeply") from None
    writes = {kind.removesuffix("_QUERY_NODE") for kind in nodes if kind.endswith("_NODE")} - _QUERIES
    calls = {f"{node['function']['function_name']}()" for node in nodes["TABLE_FUNCTION"]} - _FUNCTIONS
    if refused := writes | calls:
        allowed = ", ".join(sorted(_FUNCTIONS))
        raise RecipeError(f"the SQL contains {', '.join(sorted(refused))}: {_ONLY}, and the functions {allowed}")
    return {str(node["table_name"]).lower() for node in nodes["BASE_TABLE"]} & TABLES.keys()
