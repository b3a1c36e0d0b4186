"""The pretrain stage: train a new model on a dataset.

In: a dataset artifact and a model size. Out: model.safetensors, config.json and curve.json, written by
`ray_jobs.training.loop`, which every worker of Ray Train runs.

    python -m ray_jobs.pretrain --spec STORE/artifacts/pretrain/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from pipelines.spec import Pretrain
from pipelines.store import FileEntry
from ray_jobs.process import devices
from ray_jobs.process.alive import count_steps
from ray_jobs.process.stage import Context, Result, model_digest, run_stage

# How long to wait for a busy cluster. Resources that it will never have are refused earlier.
_START_TIMEOUT_SECONDS = 900


def main(context: Context[Pretrain]) -> Result:
    """Run `config.workers` workers under Ray Train."""
    outcome = run_workers(context)
    files: tuple[FileEntry, ...] = outcome["files"]
    return Result(content_digest=model_digest(files), files=files, metrics=outcome["metrics"])


def run_workers(context: Context[Pretrain]) -> dict[str, Any]:
    """Train under Ray Train and return {files, metrics} of rank 0."""
    os.environ.update(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",  # with the default, starts and ends are noticed a second later
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(_START_TIMEOUT_SECONDS),
        RAY_TRAIN_METRICS_ENABLED="0",
        RAY_TRAIN_ENABLE_PRINT_PATCH="0",  # it prints every line twice
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    )
    from ray.train import FailureConfig, LoggingConfig, RunConfig
    from ray.train.torch import TorchTrainer

    from ray_jobs.training.process_group import LocalTorchConfig

    attempt = context.attempt
    workers = context.config.workers or devices.default_workers(context.config.batch_size)
    with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
        trainer = TorchTrainer(
            _ray_worker,
            train_loop_config={"context": context},
            torch_config=LocalTorchConfig(),
            scaling_config=devices.scaling(workers, context.config.threads),
            run_config=RunConfig(
                name=attempt.submission_id,  # unique, because Ray Train resumes a run of the same name
                storage_path=scratch,  # not kept: the workers write to the store
                # A failed worker fails the attempt; the pipeline's driver decides about the next one.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
                # Lower levels log where each worker runs.
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
        )
        outcome: dict[str, Any] = trainer.fit().return_value
    return outcome


def _ray_worker(settings: dict[str, Any]) -> dict[str, Any]:
    import ray.train

    from ray_jobs.training.loop import Worker, train

    context: Context[Pretrain] = settings["context"]
    group = ray.train.get_context()
    worker = Worker(group.get_world_rank(), group.get_world_size(), group.get_local_rank())
    if worker.rank:
        train(context.config, context.dataset(context.config.cache_gib), None, worker)
        return {}
    with context.staging() as staging, count_steps(context) as steps:
        metrics = train(
            context.config, context.dataset(context.config.cache_gib), staging.path, worker, steps
        )
    return {"files": staging.files, "metrics": metrics}


if __name__ == "__main__":
    run_stage("pretrain")
