"""Options, consoles, tables and JSON that the commands share."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Signature, signature
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from pipelines import terminal
from pipelines.results.lookup import find_artifact, find_run, score
from pipelines.spec import WEIGHTS, RecipeError
from pipelines.store import (
    Manifest,
    Store,
    StoreAbsent,
    StoreDamaged,
    StoreError,
    StoreUnreachable,
    open_store,
)

console = terminal.console()
if not console.is_terminal and not os.environ.get("COLUMNS"):
    console.width = 1 << 16  # a program reads the output: fold no line
errors = terminal.console(stderr=True)


Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")


class _FlagsWithoutType:
    """Help that shows no type beside a flag: `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _Command(_FlagsWithoutType, TyperCommand):
    pass


class Group(_FlagsWithoutType, TyperGroup):
    pass


class Commands(typer.Typer):
    """A `typer.Typer` with `_FlagsWithoutType` in every command and group."""

    def __init__(self, group: type[Group] = Group, **settings: Any) -> None:
        super().__init__(cls=group, no_args_is_help=True, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=_Command, **settings)


def with_options(record: Callable[..., Record]) -> Callable[[Callable[[Record], None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as its arguments and options."""
    hints = get_type_hints(record, include_extras=True)
    parameters = [parameter.replace(annotation=hints[name]) for name, parameter in signature(record).parameters.items()]

    def decorate(command: Callable[[Record], None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            command(record(**values))

        call.__doc__, call.__name__ = command.__doc__, command.__name__
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {}
        return call

    return decorate


StoreOption = Annotated[
    str,
    typer.Option("--store", envvar="VITFLOW_STORE", help="a folder or s3://bucket/prefix for all results"),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", envvar="VITFLOW_ADDRESS", help="the URL of a Ray cluster's dashboard, http://HOST:8265"),
]
TokenOption = Annotated[
    Path | None,
    typer.Option("--token-file", envvar="RAY_AUTH_TOKEN_PATH", help="a file with the cluster's token"),
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        "--checkpoint", metavar="last|best|step:N", help="of a pretraining; `vitflow list --kind checkpoints`"
    ),
]
ARTIFACT = "a key or unique key prefix, RUN/STAGE, RUN or @ALIAS"
_RUN = "a run id, the name of a recipe (its newest run), or a prefix"
RunArgument = Annotated[str | None, typer.Argument(help=f"{_RUN}; default: the last run")]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help=_RUN)]
JsonOption = Annotated[bool, typer.Option("--json", help="machine-readable output")]
PipelineArgument = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="a recipe file, or the name of a shipped recipe")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="STAGE.FIELD=VALUE", help="change one field")]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="STAGE",
        help="run only this stage and its inputs; for a matrix, all its stages, or some: STAGE@AXIS=VALUE",
    ),
]
ForceOption = Annotated[
    list[str] | None, typer.Option("--force", metavar="STAGE", help="rerun this stage even if it is cached")
]
DEFAULT_STORE = "runs"


def open_(uri: str, *, create: bool = True) -> Store:
    """Open the store of a command.

    Raises:
        RecipeError: the address is invalid, or access is denied.
        StoreAbsent, StoreDamaged, StoreUnreachable: there is no store; it cannot be read; it does not answer.
    """
    try:
        return open_store(uri, create=create)
    except StoreAbsent as error:
        raise StoreAbsent(f"{error}. Name the store of your results with --store or VITFLOW_STORE") from None
    except (StoreDamaged, StoreUnreachable):
        raise
    except StoreError as error:
        raise RecipeError(str(error)) from None


def named_run(store: Store, name: str | None) -> str:
    """Return the run that an argument names; say on stderr which one it is if that is not its id."""
    run = find_run(store, name)
    if name not in (None, run):
        errors.print(f"{plain(str(name))}: the newest run is {run}", soft_wrap=True)
    return run


def named_weights(store: Store, name: str, kinds: Iterable[str] = WEIGHTS) -> Manifest:
    """Return the model or the detector that an argument names; say on stderr which one it is if that is not its key."""
    manifest = find_artifact(store, name, *kinds)
    if not manifest.key.startswith(name):
        which = f"{manifest.kind} {manifest.key[:12]} of run {manifest.run}"
        errors.print(plain(", ".join(filter(None, [f"{name}: {which}", score(manifest)]))), soft_wrap=True)
    return manifest


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder, which gets the name `output` if the block succeeds and is removed otherwise.

    Raises:
        RecipeError: `output` exists, or cannot be written.
    """
    if output.is_symlink() or (output.exists() and not (output.is_dir() and not any(output.iterdir()))):
        raise RecipeError(f"--output {output}: already exists; use a new name or an empty folder")
    if not output.parent.is_dir():
        raise RecipeError(f"--output {output}: {output.parent} is not a folder")
    temporary = output.parent / f".{output.name}.{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(output)  # replaces an empty folder, and nothing else
    except OSError as error:
        if error.filename and not Path(str(error.filename)).is_relative_to(temporary):
            raise  # of a file that the block reads
        raise RecipeError(f"--output {output}: cannot write to it: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def store_option(uri: str) -> str:
    """Return " --store URI" for a command to print; nothing for the store that commands use without the option."""
    default = os.environ.get("VITFLOW_STORE", DEFAULT_STORE)
    return "" if uri in (default, str(Path(default).absolute())) else f" --store {shlex.quote(uri)}"


def plain(text: str) -> str:
    """Escape untrusted text, so that rich does not read it as markup."""
    return escape(text)


def say(text: str) -> None:
    """Print a line of possibly untrusted text, not wrapped."""
    console.print(plain(text), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON to stdout."""
    terminal.write(json.dumps(value, indent=1, ensure_ascii=False))


def print_csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print CSV as in RFC 4180."""
    writer = csv.writer(SimpleNamespace(write=partial(terminal.write, end="")))
    writer.writerow(columns)
    writer.writerows(rows)


def print_rows(rows: list[dict[str, Any]], columns: tuple[str, ...], as_json: bool) -> None:
    """Print rows as JSON, or these columns of them as a table."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows, columns)


def print_table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    """Print a table to stdout; keys are shortened to 12 characters, and fractions have four digits.

    On a narrow terminal, values that all rows share are printed once, above the table. If that is not enough, text is
    folded, but never ids.
    """
    cells = [{column: _cell(column, row.get(column)) for column in columns} for row in rows]
    shown = list(columns)
    if len(cells) > 1 and sum(width for _, width in _widths(cells, shown)) > console.width:
        common = [column for column in columns if len({row[column] for row in cells}) == 1]
        shown = [column for column in columns if column not in common]
        shared = ", ".join(f"{column} {cells[0][column]}" for column in common if cells[0][column])
        console.print(plain(shared), soft_wrap=True)
    widths = _widths(cells, shown)
    texts = [
        [column.replace("_", " ") for column in shown],
        *([row[column] for column in shown] for row in cells),
    ]
    if sum(width for _, width in widths) <= console.width and all(map(str.isprintable, chain(*texts))):
        # rich's tables take 0.4 ms per row
        head, *lines = (_line(row, widths) for row in texts)
        console.print(Text(head, "table.header"), Text("\n".join(lines)), sep="\n" if lines else "", soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False)
    for column in shown:
        table.add_column(column.replace("_", " "), overflow="fold", no_wrap=column in WHOLE)
    for row in cells:
        table.add_row(*(plain(row[column]) for column in shown))
    min_width = sum(width if column in WHOLE else min(width, FOLDED) for column, width in _widths(cells, shown))
    (console if min_width <= console.width else terminal.console(width=min_width)).print(table)


# Columns that are never folded: ids to copy, numbers, states.
WHOLE = ("key", "recipe/stage", "alias", "run", "last run", "stage", "job", "mean", "draws", "status", "state", "took")
FOLDED = 12  # minimum width of the other columns, in characters


def _line(texts: list[str], widths: list[tuple[str, int]]) -> str:
    cells = zip(texts, widths, strict=True)
    return "".join(text + " " * (width - cell_len(text)) for text, (_, width) in cells)[:-2]


def _widths(cells: list[dict[str, str]], columns: list[str]) -> list[tuple[str, int]]:
    """Return each column and its width without folding, including the space after it."""
    return [(column, 2 + max(map(cell_len, [column, *(row[column] for row in cells)]))) for column in columns]


def _cell(column: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{round(value, 4) + 0.0:.4f}"  # + 0.0: not -0.0000
    text = "" if value is None else str(value)
    return text[:12] if column == "key" else text
