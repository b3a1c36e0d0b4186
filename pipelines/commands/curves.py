"""The commands tensorboard and mlflow: the training curves of a run, live, or in an MLflow server."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.commands.common import (
    DEFAULT_STORE,
    Commands,
    RunArgument,
    StoreOption,
    console,
    named_run,
    open_,
    plain,
    say,
)
from pipelines.engine.runs import run_status
from pipelines.engine.trainings import Trainings
from pipelines.scratch import scratch_folder
from pipelines.spec import RecipeError
from pipelines.store import Store, wait_for_store

if TYPE_CHECKING:
    from pipelines.results.event_files import EventFiles

SECONDS = 2.0  # between looks at the logs, and between TensorBoard's at the files
_PASSWORD = re.compile(r"//[^/@\s]*@")  # of a URL, with the user
app = Commands()


@app.command("tensorboard")
def tensorboard(
    run: RunArgument = None,
    store: StoreOption = DEFAULT_STORE,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="0 for any free one; default: the first free one from 6006 on"),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            file_okay=False,
            help="keep the event files in FOLDER/RUN; by default they are temporary",
        ),
    ] = None,
) -> None:
    """Show the training curves of a run in TensorBoard, live and on this machine only, until Ctrl-C."""
    try:
        from pipelines.results.event_files import EventFiles
    except ImportError as error:
        remedy = "Install vitflow again, or only this: pip install tensorboard"
        raise RecipeError(f"{error.name} is not installed. {remedy}") from None
    opened = open_(store, create=False)
    run_id = named_run(opened, run)
    trainings = Trainings(opened, run_id)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    place = scratch_folder() if to is None else nullcontext(_folder(to, run_id))
    with place as folder, EventFiles(folder) as files:
        try:
            shown = _update(opened, run_id, trainings, files)
            url = serve(folder, port)
            console.print(f"{run_id}: {plain(url)} (Ctrl-C ends it)", soft_wrap=True)
            if not shown:
                console.print("no training of this run has a log yet")
            while True:
                time.sleep(SECONDS)
                wait_for_store(lambda: _update(opened, run_id, trainings, files), say)
        except KeyboardInterrupt:
            return


@app.command("mlflow")
def mlflow(
    run: RunArgument = None,
    store: StoreOption = DEFAULT_STORE,
    to: Annotated[
        str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="the tracking server, such as http://HOST:5000")
    ] = "",
) -> None:
    """Write the training curves of a run to an MLflow server. Run it again to add what is new."""
    if not to:
        raise RecipeError("--to: no tracking server given; expected an address such as http://HOST:5000")
    # Otherwise MLflow reports its use to its authors.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow.exceptions import MlflowException

        from pipelines.results.mlflow_runs import MlflowRuns
    except ImportError as error:
        raise RecipeError(f"{error.name} is not installed: pip install 'vitflow[mlflow]'") from None
    opened = open_(store, create=False)
    run_id = named_run(opened, run)
    status = run_status(opened, run_id)
    try:
        runs = MlflowRuns(to, status["pipeline"])
        for training in Trainings(opened, run_id).of(status):
            for fit, name, lines in training.fits(opened):
                tags = {"vitflow.run": run_id, "vitflow.stage": training.stage, "vitflow.key": training.key}
                new = runs.update(f"{training.key}/{fit or ''}", name, training.config, tags, lines)
                say(f"{name}: {new} new of {len(lines)} lines")
    except MlflowException as error:
        raise RecipeError(_PASSWORD.sub("//***@", f"--to {to}: {error}")) from None


def serve(folder: Path, port: int | None) -> str:
    """Serve TensorBoard on loopback in threads of this process, and return its address.

    Raises:
        RecipeError: the port is taken.
    """
    from tensorboard import program

    board = program.TensorBoard()
    # load_fast would start another process, which serves the files on a separate port.
    argv = ["tensorboard", f"--logdir={folder}", "--host=127.0.0.1", "--load_fast=false"]
    argv += [f"--reload_interval={SECONDS:g}", "--samples_per_plugin=scalars=100000"]
    board.configure(argv=argv + ([] if port is None else [f"--port={port}"]))
    try:
        url: str = board.launch()
    except program.TensorBoardServerException as error:
        raise RecipeError(f"--port: {error}") from None
    return url


def _update(store: Store, run: str, trainings: Trainings, files: EventFiles) -> int:
    """Write the new lines of the logs; return the number of trainings with a log."""
    fits = [fit for training in trainings.of(run_status(store, run)) for fit in training.fits(store)]
    for _, name, lines in fits:
        files.update(name, lines)
    return len(fits)


def _folder(to: Path, run: str) -> Path:
    """Return the folder in `to` for the event files of a run, and create it."""
    folder = to / run
    try:
        str(folder).encode()  # TensorBoard's threads would fail
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"--to {to}: cannot create {folder}: {error.strerror}") from None
    return folder
