"""The command line.

Exit codes:
0    done
1    a stage failed, the run was stopped, the store or the cluster is damaged or does not answer, `doctor` or `verify`
     found a problem, or `predict` could not read an image
2    the request is wrong and nothing was started: the same request will fail again
130  Ctrl-C

The module of a command is imported when the command is given: a run with nothing to do takes a fraction of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.commands.common import Commands, Group, errors, plain
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
    "stop": "running",
    "init": "images",
    "predict": "images",
    "import": "models",
    "export": "models",
    "verify": "inspect",
    "doctor": "inspect",
    "schema": "inspect",
    "drive": "running",
    "report": "queries",
    "schedule": "schedules",
}
"""Command -> its module, in the order of the help."""


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
    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": _Modules()})


app = Commands(
    _AllCommands,
    pretty_exceptions_enable=False,
    help="Vision Transformers on Ray: image archives to reports, as a reproducible DAG.",
)


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import version  # only here

    from pipelines.identity import git_state

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
    """Only `--version`."""


def main() -> None:
    """Run a command; any failure becomes one message and an exit code, never a traceback."""
    try:
        app(prog_name="vitflow")
    except (UserError, StoreAbsent) as error:
        _fail(error, 2)
    except (StoreError, ClusterUnreachable) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> NoReturn:
    errors.print(f"[red]error:[/] {plain(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(code)
