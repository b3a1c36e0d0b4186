"""The processes of a group of workers, forked from a server that has imported torch and DeepSpeed once."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing

# These, and what a first training step imports, take 5 s of each process otherwise.
multiprocessing.set_forkserver_preload(["ray_jobs.training.loop", "deepspeed", "torch._dynamo"])


def run_workers(world: int, worker: Callable[..., None], *arguments: Any) -> None:
    """Call `worker(rank, *arguments)` in `world` processes, and raise what one of them raises."""
    torch.multiprocessing.start_processes(worker, arguments, nprocs=world, start_method="forkserver")
