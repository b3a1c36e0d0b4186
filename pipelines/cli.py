"""The command line.

Exit codes:
0    done
1    a stage failed, the run was stopped, the store is damaged, the store or the cluster does not answer, `doctor` or
     `verify` found a problem, `report compare --gate` refused, `verify-protocol` found another accuracy, or `predict`
     could not read an image
2    the request is invalid and nothing was started; the same request will fail again
130  Ctrl-C, or the terminal was closed

The module of a command is imported only when that command is used, so that a cached rerun takes a fraction of a second.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from pipelines import terminal
from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.commands.common import Commands, Group, errors, plain
from pipelines.identity import git_state
from pipelines.spec import RecipeError
from pipelines.store import StoreAbsent, StoreError
from vit_model.errors import UserError

COMMANDS = {
    "run": "running",
    "submit": "running",
    "plan": "running",
    "status": "inspect",
    "list": "inspect",
    "lineage": "inspect",
    "logs": "inspect",
    "tensorboard": "curves",
    "mlflow": "curves",
    "stop": "running",
    "init": "images",
    "predict": "images",
    "import": "models",
    "export": "models",
    "push": "models",
    "verify": "inspect",
    "doctor": "inspect",
    "gc": "gc",
    "schema": "inspect",
    "drive": "running",
    "report": "queries",
    "site": "site",
    "alias": "aliases",
    "explain": "protocols",
    "verify-protocol": "protocols",
    "schedule": "schedules",
}
"""Command -> its module, in the order of the help."""
MEANT = {
    **dict.fromkeys(("train", "fit", "pretrain", "finetune", "evaluate", "eval", "resume"), "run PIPELINE"),
    **dict.fromkeys(("infer", "classify"), "predict"),
    "compare": "report compare",
    "query": "report query",
    **dict.fromkeys(("show", "results"), "report show"),
    **dict.fromkeys(("cancel", "kill"), "stop"),
    "ls": "list",
    "ps": "status",
    **dict.fromkeys(("clean", "prune"), "gc"),
}
"""Other programs' name of a command -> the command here."""


class _Modules(Mapping[str, Any]):
    """Each command by name, imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        group = typer.main.get_group(import_module(f"pipelines.commands.{COMMANDS[name]}").app)
        return group if group.name == name else group.commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _AllCommands(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": _Modules()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if meant := MEANT.get(args[0]):
            raise RecipeError(f"no such command {args[0]!r}; did you mean `vitflow {meant}`?")
        if args[0] == "list" and args[1:] and not args[1].startswith("-"):
            raise RecipeError(f"unexpected argument {args[1]!r}; did you mean `vitflow list --kind {args[1]}`?")
        return super().resolve_command(ctx, args)


app = Commands(
    _AllCommands,
    pretty_exceptions_enable=False,
    help="Vision Transformers on Ray: image archives to reports, as a reproducible DAG.",
)


def _show_version(requested: bool) -> None:
    if not requested:
        return
    from importlib.metadata import version  # only `--version` needs it

    git = git_state()
    commit = f" (commit {git['git'][:12]}{', modified' if git['dirty'] else ''})" if git else ""
    print(f"vitflow {version('vitflow')}{commit}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="show the version and exit"),
    ] = False,
) -> None:
    """Accept `--version`, the only option of all commands."""


def main() -> None:
    """Run a command; a failure becomes one message and an exit code, not a traceback."""
    terminal.escape_invalid_text()
    try:
        app(prog_name="vitflow")
    except (UserError, StoreAbsent) as error:
        _fail(error, 2)
    except (StoreError, ClusterUnreachable) as error:
        _fail(error, 1)
    except UnicodeEncodeError as error:
        # Python reads the other bytes of an argument, or of a file's name, as surrogates, which no text may have.
        if not "\ud800" <= error.object[error.start] <= "\udfff":
            raise
        _fail(f"{_name_in(error.object, error.start)}: not UTF-8; rename it", 2)


def _name_in(text: str, index: int) -> str:
    """Return the path or word of a text at an index."""
    before, after = re.search(r"[^\s\"']*$", text[:index]), re.match(r"[^\s\"']*", text[index:])
    assert before and after
    return before[0] + after[0]


def _fail(error: Exception | str, code: int) -> NoReturn:
    errors.print(f"[red]error:[/] {plain(str(error))}", soft_wrap=True)
    sys.exit(code)
