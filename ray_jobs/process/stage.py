"""The process of a stage: read the attempt, check it, join Ray, run the stage's `main`, commit its result.

    python -m ray_jobs.<module> --spec STORE/artifacts/<job>/<key>/attempts/<n>/attempt.json

A job's module defines `main(context) -> Result`: open the inputs, compute in Ray tasks or actors, write into
`context.staging()`. The module ends with a call of `run_stage` with its own name (`pipelines.spec.module` of the job).
Exit codes: 0 committed, 2 user error (never retried), 3 source files changed or an input was removed (planned anew), 1
anything else. While it runs, the process writes heartbeats, and it ends without a commit if a later attempt has taken
over (`ray_jobs.process.heartbeat`). If the store does not answer, it waits before it begins and before it commits; the
driver decides for how long.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines import identity
from pipelines.spec import AnyStage
from pipelines.store import (
    Manifest,
    StoreError,
    StoreUnreachable,
    Superseded,
    check_newest,
    commit,
    is_committed,
    now,
    remove_progress,
    wait_for_store,
    warn,
    who,
)
from ray_jobs.process.cluster import cluster_resources, default_threads
from ray_jobs.process.context import Context, Result, SourceChangedError, read_context
from ray_jobs.process.heartbeat import earlier_seconds, show_heartbeat
from vit_model.errors import UserError

PACKAGES = ("torch", "ray", "deepspeed", "pyarrow", "numpy", "pillow", "scikit-learn", "matplotlib")


def run_stage(module: str) -> None:
    """Run `main` of `ray_jobs.<module>`, commit its result, and set the process's exit code."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--spec", required=True, help="the attempt.json of the attempt to run")
    spec: str = arguments.parse_args().spec
    # imported by name: objects that are sent to workers must not belong to __main__, which workers do not have
    main: Callable[[Context[AnyStage]], Result] = importlib.import_module(f"ray_jobs.{module}").main
    try:
        context = wait_for_store(lambda: read_context(spec), warn)
        if wait_for_store(lambda: is_done(context), warn):
            return
        started, earlier = now(), wait_for_store(lambda: earlier_seconds(context), warn)
        with show_heartbeat(context, earlier):
            join_ray()
            result = main(_with_threads(context))
            commit_result(context, result, started, earlier, _environment())
    except Exception as error:
        if superseded := [cause for cause in causes(error) if isinstance(cause, Superseded)]:
            print(f"error: {superseded[0]}", file=sys.stderr, flush=True)
            sys.exit(1)  # the driver follows the later attempt
        if (reason := for_the_user(error)) is None:
            raise  # a bug or a transient failure: another attempt may succeed
        print(f"error: {reason}", file=sys.stderr, flush=True)
        sys.exit(3 if any(isinstance(cause, SourceChangedError) for cause in causes(error)) else 2)


def is_done(context: Context[AnyStage]) -> bool:
    """Whether the artifact is committed, which then gets said; a submission may arrive late, or twice.

    Its files must not be written again: results of some stages depend on timing.
    """
    attempt = context.attempt
    done = is_committed(context.open_store(), attempt.job, attempt.key)
    if done:
        print(f"{attempt.job}/{attempt.key[:12]} is committed already", flush=True)
    return done


def for_the_user(error: BaseException) -> str | None:
    """Return the message of a user error; None if another attempt may succeed."""
    for cause in causes(error):
        match cause:
            case StoreUnreachable():
                continue
            case UserError() | StoreError():
                return str(cause)
            case OSError(errno=errno.ENOSPC | errno.EDQUOT, filename=name):
                place = name or "the store, temporary files or the cache"
                return f"no space for {place}: {cause}. Nothing was committed; free some space and rerun"
    return None


def causes(error: BaseException) -> list[BaseException]:
    """Return the exceptions from tasks, trials and workers that Ray wraps in `error`; otherwise `error` itself.

    Wrappers are recognised by their attributes and not by their classes, because importing Ray Train takes seconds.
    """
    failures = getattr(error, "worker_failures", {}).values()  # WorkerGroupError
    wrapped = [getattr(error, "cause", None), getattr(error, "controller_failure", None), *failures]
    return [cause for inner in wrapped if isinstance(inner, BaseException) for cause in causes(inner)] or [error]


def join_ray() -> None:
    """Connect to the cluster that the job runs on (RAY_ADDRESS)."""
    # ray reads it during its import
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    # child processes need it too: Ray Train's cleaner would otherwise connect to another Ray of the host
    runtime_env = {} if address == "auto" else {"env_vars": {"RAY_ADDRESS": address}}
    ray.init(address=address, runtime_env=runtime_env, log_to_driver=True, logging_level="warning")
    # Reinstall Ray's Python handler, which ends the process quietly; ray.init installed a C++ one that prints a stack.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def _with_threads(context: Context[AnyStage]) -> Context[AnyStage]:
    """Return the context with the cluster's default number of threads, if the stage does not say how many."""
    if getattr(context.config, "threads", 1) is not None:
        return context
    return replace(context, config=context.config.model_copy(update={"threads": default_threads()}))


def commit_result(
    context: Context[AnyStage], result: Result, started: str, earlier: float, environment: dict[str, Any]
) -> None:
    """Commit a stage's result, unless a later attempt has taken over; then remove the state that it continued from.

    Args:
        started: when this attempt began.
        earlier: seconds that earlier attempts took whose work is in the result.
        environment: the machine, for the manifest.

    Raises:
        Superseded: a later attempt has taken over.
    """
    attempt, store = context.attempt, context.open_store()
    manifest = Manifest(
        job=attempt.job,
        kind=context.config.KIND,
        key=attempt.key,
        content_digest=result.content_digest,
        stage=attempt.stage,
        run=attempt.run,
        attempt=attempt.number,
        nonce=attempt.nonce,
        files=result.files,
        inputs=attempt.inputs,
        config=attempt.config,
        source=attempt.source,
        metrics=result.metrics,
        timing_dependent=result.timing_dependent,
        code={
            "version": context.config.version,
            "scheme": identity.CODE_SCHEME,
            "digest": attempt.code_digest,
            **identity.git_state(),
        },
        environment=environment,
        started=started,
        finished=now(),
        user=who(),
        earlier_seconds=earlier,
    )

    def commit_unless_superseded() -> Manifest:
        check_newest(store, attempt)
        return commit(store, manifest)

    committed = wait_for_store(commit_unless_superseded, warn)
    if committed.nonce == attempt.nonce:
        print(f"committed {attempt.job}/{attempt.key[:12]}", flush=True)
    else:
        print(
            f"another attempt ({committed.attempt}) committed {attempt.job}/{attempt.key[:12]} first",
            flush=True,
        )
    remove_progress(store, attempt.job, attempt.key)


def _environment() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cluster": {name: amount for name, amount in cluster_resources().items() if name in {"CPU", "GPU"}},
        "packages": versions,
    }


def processor() -> str:
    """Return the processor's model name."""
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except FileNotFoundError:
        names = []
    return names[0] if names else platform.processor()
