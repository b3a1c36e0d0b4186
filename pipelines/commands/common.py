"""What the commands share: options, consoles, tables, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipelines.store import Store

console = Console()
errors = Console(stderr=True)

StoreOption = Annotated[
    str,
    typer.Option("--store", envvar="VITFLOW_STORE", help="the folder or s3://bucket/prefix of all results"),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", envvar="VITFLOW_ADDRESS", help="a Ray cluster's dashboard, http://HOST:8265"),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="RAY_AUTH_TOKEN_PATH", help="a file with the cluster's token"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="a recipe file, or a shipped recipe's name")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="change one field")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="STAGE", help="this stage (of a matrix: all, or STAGE@AXIS=VALUE) and what it needs"
    ),
]
ForceOption = Annotated[
    list[str] | None, typer.Option("--force", metavar="STAGE", help="run it again, cached or not")
]
DEFAULT_STORE = "runs"


def open_(uri: str, *, create: bool = True) -> Store:
    """The store, opened late: boto3 is for those who are on S3."""
    from pipelines.store import open_store

    return open_store(uri, create=create)


def width(names: tuple[str, ...]) -> int:
    """Of the longest name."""
    return max(len(name) for name in names)


def plain(text: str) -> str:
    """Text from outside, shown as it is."""
    from rich.markup import escape

    return escape(text)


def print_json(value: Any) -> None:
    """To stdout, for machines."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def print_table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """To stdout, for people; keys are cut to what tells them apart."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(plain(_cell(column, row.get(column))) for column in columns))
    console.print(table)


def _cell(column: str, value: Any) -> str:
    text = "" if value is None else str(value)
    return text[:12] if column == "key" else text
