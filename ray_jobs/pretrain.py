"""The pretrain stage: train a model on a dataset, from new weights or from another model's weights.

In: a dataset artifact, a model size, and optionally a model to start from and a teacher. Out: model.safetensors,
config.json, curve.json [{step, learning_rate, loss, dev_accuracy}], checkpoints.json {best, steps} and
checkpoints/<step>/model.safetensors, written by `ray_jobs.training.loop`, which every worker of Ray Train runs;
log.jsonl (`pipelines.store.training_log`).

    python -m ray_jobs.pretrain --spec STORE/artifacts/pretrain/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import re
import time
from typing import Any

from pipelines.errors import StoreError, Superseded
from pipelines.spec import Pretrain
from pipelines.store import Checkpoint, FileEntry, Layout, checkpoints, choose_start, furthest, read_attempt
from ray_jobs.process import cluster
from ray_jobs.process.context import Context, Result, model_digest
from ray_jobs.process.stage import causes, run_stage
from ray_jobs.training.workers import micro_batch_size, run_group
from vit_model.errors import UserError

# How long to wait for a busy cluster. Resources that it will never have are refused earlier.
_START_TIMEOUT_SECONDS = 900
# The same after a death: Ray may still count a lost machine's resources for some seconds, so they are counted again.
_RESTART_TIMEOUT_SECONDS = 20
_NODE_SECONDS = 900.0  # for a machine that takes the place of the last one with a GPU
_LOOK_SECONDS = 10.0  # between two looks for it
_DEATHS = 3  # the attempt fails when so many groups in a row died without a new checkpoint
_DEATH_NAMES = ("WorkerHealthCheck", "WorkerGroupStartup", "ActorDied", "ActorUnavailable")  # Ray's errors
_CONNECTION = re.compile("gloo|NCCL|DistBackendError|Connection (closed|reset)")


def main(context: Context[Pretrain]) -> Result:
    """Run groups of workers under Ray Train until one has trained to the end.

    When workers die, the next group continues from the last checkpoint with as many workers, or, if machines are gone,
    with as many as the remaining machines have room for.
    """
    from ray_jobs.training.workers.preemption import save_on_notice

    with save_on_notice(context):
        outcome = _train(context)
    files: tuple[FileEntry, ...] = outcome["files"]
    return Result(content_digest=model_digest(files), files=files, metrics=outcome["metrics"])


def _train(context: Context[Pretrain]) -> dict[str, Any]:
    start = choose_start(context.open_store(), context.attempt, context.config.keep_steps)
    if (named := context.config.from_store().get("init_from")) and "init_from" not in context.inputs:
        print(f"init_from {named}: there is no such model yet; starting with new weights", flush=True)
    if start is not None:
        print(f"continuing from step {start.step}, which attempt {start.attempt} saved", flush=True)
        earlier = read_attempt(context.open_store(), Layout.attempt(start.job, start.key, start.attempt))
        if earlier is not None and earlier.code_digest != context.attempt.code_digest:
            print("note: the code has changed since then; --strict-code makes it a part of the key", flush=True)
    wanted = workers = context.config.workers or cluster.default_workers(micro_batch_size(context.config))
    cluster.room_for(workers, context.config.threads or 1)
    kind = "GPU" if cluster.units_in_cluster("GPU") else "CPU"
    units, group, deaths = cluster.units_in_cluster(kind), 0, 0
    while True:
        group += 1
        try:
            return run_workers(context, workers, group, start)
        except Exception as error:
            if not _is_death(error):
                raise
            before, start = start, _latest(context, start)
            deaths = deaths + 1 if start == before else 1
            if deaths == _DEATHS:
                raise
            step = 0 if start is None else start.step
            workers = _workers_left(context.config, wanted, units, _units_left(kind))
            print(f"workers died; continuing from step {step} with {workers} workers", flush=True)


def run_workers(context: Context[Pretrain], workers: int, group: int, start: Checkpoint | None) -> dict[str, Any]:
    """Train under Ray Train and return {files, metrics} of rank 0. `group` is the group's number in the attempt."""
    outcome: dict[str, Any] = run_group(
        _ray_worker,
        {"context": context, "group": group, "start": start},
        workers,
        context.config.threads or 1,
        f"{context.attempt.submission_id}-{group}",
        _START_TIMEOUT_SECONDS if group == 1 else _RESTART_TIMEOUT_SECONDS,
        starts=3 if group == 1 else 1,
    )
    return outcome


def _ray_worker(settings: dict[str, Any]) -> dict[str, Any]:
    from ray_jobs.training.loop import work  # imports torch, which the entry process does not need

    return work(**settings)


def _is_death(error: Exception) -> bool:
    """Return whether workers have died or could not be started on the remaining machines, so that a new group can help.

    It cannot help if a user error is among the failures.
    """
    if any(isinstance(cause, UserError | StoreError | Superseded) for cause in causes(error)):
        return False
    failures = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", None)]
    # A worker that dies breaks the connections of the others, and these errors may arrive first.
    return any(
        type(failure).__name__.startswith(_DEATH_NAMES) or _CONNECTION.search(str(failure)) for failure in failures
    )


def _latest(context: Context[Pretrain], start: Checkpoint | None) -> Checkpoint | None:
    """Return the furthest checkpoint to continue from: this attempt's, or the one that it started from."""
    store, attempt = context.open_store(), context.attempt
    existing = checkpoints(store, attempt.job, attempt.key)
    usable = [entry for entry in existing if entry.attempt == attempt.number or entry == start]
    return furthest(store, usable, context.config.keep_steps, existing)


def _units_left(kind: str) -> int:
    """Return how many GPUs or CPUs are left; wait if there are none, because a node may be on its way.

    Raises:
        UserError: there are none after 15 minutes. A training that began on GPUs would take weeks on CPUs.
    """
    deadline = time.monotonic() + _NODE_SECONDS
    while not (units := cluster.units_in_cluster(kind)):
        if time.monotonic() > deadline:
            raise UserError(
                f"the cluster has no {kind} any more, for {_NODE_SECONDS / 60:.0f} minutes; rerun when it has one:"
                " the training continues from its last checkpoint"
            )
        print(f"waiting for a machine with a {kind}", flush=True)
        time.sleep(_LOOK_SECONDS)
    return units


def _workers_left(config: Pretrain, wanted: int, units_before: int, units: int) -> int:
    """Return the most workers, at least `min_workers`, that divide the batch and fit on the remaining machines.

    `units_before`: GPUs (or CPUs) that the cluster had when it had room for `wanted` workers; `units`: those left.
    """
    if units >= units_before:
        return wanted
    possible = [
        number
        for number in range(min(config.min_workers, wanted), wanted + 1)
        if micro_batch_size(config) % number == 0
    ]
    return max((number for number in possible if number <= wanted * units // units_before), default=possible[0])


if __name__ == "__main__":
    run_stage("pretrain")
