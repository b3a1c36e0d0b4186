"""The command line. Exit codes: 0 done, 1 a stage failed, 2 the request was wrong and nothing started, 130 Ctrl-C.

Only what every command needs is imported here: a run with nothing to do takes a fraction of a second.
"""

from __future__ import annotations

import sys

import typer

from pipelines.commands import images, looking, models, reports, running, schedules
from pipelines.commands.common import errors, plain
from pipelines.spec import RecipeError
from pipelines.store import StoreError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Vision Transformers on Ray: image archives to reports, as a reproducible DAG.",
)
for command in (
    running.run,
    running.submit,
    running.plan,
    looking.status,
    looking.list_,
    looking.lineage,
    looking.logs,
    running.stop,
    images.init,
    images.predict,
    models.import_,
    models.export,
    looking.verify,
    looking.doctor,
    looking.schema,
):
    app.command(command.__name__.rstrip("_"))(command)
app.command("drive", hidden=True)(running.drive)
app.add_typer(reports.app, name="report")
app.add_typer(schedules.app, name="schedule")


def main() -> None:
    """Entry point: a wrong request is one message and exit code 2."""
    try:
        app()
    except (RecipeError, StoreError) as error:
        errors.print(f"[red]error:[/] {plain(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
