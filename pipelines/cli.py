"""The command line.

Exit codes:
0    done
1    a stage failed, the run was stopped, the store or the cluster is damaged or does not answer, `doctor` or `verify`
     found a problem, or `predict` could not read an image
2    the request is wrong and nothing was started: the same request will fail again
130  Ctrl-C

Only what every command needs is imported here: a run with nothing to do takes a fraction of a second.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from pipelines.cluster.jobs_client import ClusterUnreachable
from pipelines.commands import images, inspect, models, reports, running, schedules
from pipelines.commands.common import Commands, errors, plain
from pipelines.store import StoreAbsent, StoreError
from vit_model.errors import UserError

app = Commands(
    pretty_exceptions_enable=False,
    help="Vision Transformers on Ray: image archives to reports, as a reproducible DAG.",
)
for command in (
    running.run,
    running.submit,
    running.plan,
    inspect.status,
    inspect.list_,
    inspect.lineage,
    inspect.logs,
    running.stop,
    images.init,
    images.predict,
    models.import_,
    models.export,
    inspect.verify,
    inspect.doctor,
    inspect.schema,
):
    app.command(command.__name__.rstrip("_"))(command)
app.command("drive", hidden=True)(running.drive)
app.add_typer(reports.app, name="report")
app.add_typer(schedules.app, name="schedule")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import version

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
