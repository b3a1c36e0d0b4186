"""Groups of Ray Train workers, for a pretraining or a fit of a fine-tuning, and their shares of a batch. No torch.

In: a function that can be sent to other processes, and its settings. Out: what the first worker returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from pipelines.scratch import scratch_folder
from pipelines.spec import Pretrain
from ray_jobs.process import cluster
from vit_model.errors import UserError


class Worker(NamedTuple):
    """This process's rank among the workers."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    group: int = 0
    """a number that is unique among the groups of workers of a training"""


ALONE = Worker()


def this_worker(group: int) -> Worker:
    """Return the rank of this process, which Ray Train has started as a worker."""
    import ray.train

    context = ray.train.get_context()
    return Worker(context.get_world_rank(), context.get_world_size(), context.get_local_rank(), group)


def micro_batch_size(config: Pretrain) -> int:
    """Return the images per micro-batch over all workers; the number of workers must divide it."""
    return config.batch_size // config.gradient_accumulation_steps


def micro_batch_share(config: Pretrain, world: int) -> int:
    """Return the images of one micro-batch on one of `world` workers.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    images = micro_batch_size(config)
    if world < 1 or images % world:
        divisors = [n for n in range(1, images + 1) if images % n == 0]
        steps = config.gradient_accumulation_steps
        what = f"batch_size {config.batch_size}"
        what += f" / gradient_accumulation_steps {steps} = {images}" if steps > 1 else ""
        raise UserError(
            f"{what} is not a multiple of the {world} workers; use one of {', '.join(map(str, divisors))} workers"
        )
    return images // world


def run_group(
    function: Callable[[dict[str, Any]], Any],
    settings: dict[str, Any],
    workers: int,
    threads: int,
    name: str,
    start_seconds: float,
    starts: int = 1,
) -> Any:
    """Call `function(settings)` in each of a group of workers, and return what the first one returns.

    Args:
        threads: the number of threads of each worker.
        name: the group's name; unique, because Ray Train resumes a run of the same name.
        start_seconds: how long to wait for resources that other groups hold.
        starts: how often to try to start the group.
    """
    os.environ.update(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",  # with the default, starts and ends are noticed a second later
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(start_seconds),
        RAY_TRAIN_V2_ENABLED="1",
        RAY_TRAIN_METRICS_ENABLED="0",
        RAY_TRAIN_ENABLE_PRINT_PATCH="0",  # it prints every line twice
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    )
    from ray.train import FailureConfig, LoggingConfig, RunConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from ray_jobs.training.workers.process_group import LocalTorchConfig

    with scratch_folder() as scratch:
        trainer = DataParallelTrainer(
            function,
            train_loop_config=settings,
            backend_config=LocalTorchConfig(),
            scaling_config=cluster.scaling(workers, threads),
            run_config=RunConfig(
                name=name,
                storage_path=str(scratch),  # not kept: the workers write to the store
                # The caller handles failures: Ray Train would also retry user errors.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=starts - 1),
                # Lower levels log where each worker runs.
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
        )
        return trainer.fit().return_value
