"""`vitflow` in the test's own process, which takes seconds less than processes of its own, for each job above all.

That jobs run as processes of a cluster, and what becomes of them there, is shown by tests/end_to_end/test_pipeline.py,
test_clusters.py and test_faults.py.
"""

import io
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipelines.cluster.jobs_client import JobState

NOWHERE = "/nonexistent"  # as VITFLOW_RAY_DIR: nothing can run


class Jobs:
    """A cluster whose jobs have ended, on the Ray that this process has joined, by the time that they are submitted."""

    address, session_name = "http://127.0.0.1:1", "here"

    def __init__(self) -> None:
        self.states: dict[str, JobState] = {}
        self.said: dict[str, str] = {}

    def submit(self, submission_id: str, entrypoint: str, *_: object) -> None:
        from ray_jobs.process import stage

        assert os.environ["VITFLOW_RAY_DIR"] != NOWHERE, "nothing was to run"
        *_, module, _, spec = shlex.split(entrypoint)
        code = 0
        with (
            tempfile.TemporaryFile("w+") as said,  # a file, as faulthandler wants one
            patch.object(sys, "argv", ["job", "--spec", spec]),
            patch.object(stage, "join_ray"),
            redirect_stdout(said),
            redirect_stderr(said),
            warnings.catch_warnings(action="ignore"),
        ):
            try:
                stage.run_stage(module.removeprefix("ray_jobs."))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except Exception:
                traceback.print_exc()
                code = 1
            said.seek(0)
            self.ended(submission_id, code, said.read())

    def ended(self, submission_id: str, code: int, said: str) -> None:
        status = "FAILED" if code else "SUCCEEDED"
        self.states[submission_id] = JobState(submission_id, status, "", code)
        self.said[submission_id] = said

    def job(self, submission_id: str) -> JobState | None:
        return self.states.get(submission_id)

    def stop(self, submission_id: str) -> None:
        """It has ended."""

    def logs(self, submission_id: str) -> str:
        return self.said.get(submission_id, "")

    def follow_logs(self, submission_id: str, write: Callable[[str], None], _: object) -> None:
        for line in self.logs(submission_id).splitlines():
            write(line)


def vitflow(
    *arguments: str | Path, check: int = 0, jobs: Jobs | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line; `check` is the exit code that is expected. Without `jobs`, jobs run on the local Ray."""
    from pipelines.cli import main
    from pipelines.cluster.local import LocalConnection
    from pipelines.commands import common, queries

    out, err = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment),  # what a command sets ends with it
        pytest.MonkeyPatch.context() as changed,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        if jobs is not None:
            changed.setattr(LocalConnection, "cluster", lambda _: jobs)
        for console in (common.console, common.errors):
            changed.setattr(console, "width", int(environment.get("COLUMNS", 160)))
        changed.setattr(queries, "_limit_process", lambda: None)  # it would bind this process
        changed.setattr(sys, "argv", ["vitflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    code: Any = ended.value.code or 0
    # as a process writes what is not UTF-8
    texts = [each.getvalue().encode(errors="backslashreplace").decode() for each in (out, err)]
    assert code == check, "\n".join([f"exit code {code}", *texts])
    return subprocess.CompletedProcess(sys.argv, code, *texts)
