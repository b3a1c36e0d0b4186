"""The GPUs and CPUs of the Ray cluster that this process has joined, and the tasks and workers that use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ray_jobs.process.context import Result
from ray_jobs.process.progress import Progress
from vit_model.errors import UserError

_WORKERS_PER_CPU = 4  # that may share a CPU: more would use memory and mostly wait for each other

Run = Callable[[Callable[..., Any], list[tuple[Any, ...]]], list[Any]]
"""Call a function with each of these arguments, here or on the cluster; return the results in order."""


def cluster_resources() -> dict[str, float]:
    """Return the resources of the Ray cluster that this process has joined, including busy ones."""
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return resources


def cpus_in_cluster() -> int:
    """Return the number of CPUs of the Ray cluster that this process has joined, including busy ones."""
    return int(cluster_resources().get("CPU", 1))


def units_in_cluster(kind: str) -> int:
    """Return the number of GPUs or CPUs ("GPU", "CPU") that the cluster has now, including busy ones."""
    return int(cluster_resources().get(kind, 0))


def scaling(workers: int, threads: int) -> Any:
    """Return the resources of each Ray Train worker: one GPU if the cluster has any, and one CPU per thread.

    If the cluster has fewer CPUs, the workers share them. That is slower but gives the same numbers.

    Raises:
        UserError: the cluster has GPUs, but fewer than workers.
    """
    from ray.train import ScalingConfig  # takes seconds, so only trainings on several workers import it

    gpus = units_in_cluster("GPU")
    if 0 < gpus < workers:
        raise UserError(f"workers is {workers}, but the cluster has {gpus} GPUs; use workers: {gpus}")
    cpus = min(float(threads), cpus_in_cluster() / workers)
    resources = {"CPU": cpus, "GPU": 1.0} if gpus else {"CPU": cpus}
    return ScalingConfig(num_workers=workers, use_gpu=gpus > 0, resources_per_worker=resources)


def default_threads() -> int:
    """Return the default number of threads of a worker: 1; with GPUs three quarters of the cores per GPU, at most 12.

    The other cores are for other stages of the run. A thread decodes about 1,000 images of ImageNet per second,
    and an H100 trains a B/16 on 3,200 (benchmarks/results/gpu.md).
    """
    shares = [0.75 * machine["CPU"] / machine["GPU"] for machine in _machines() if machine.get("GPU")]
    return max(1, int(min(12, *shares))) if shares else 1


def default_workers(batch_size: int) -> int:
    """Return the default number of workers: the most GPUs that divide the batch evenly; on CPUs 2, or 1."""
    most = units_in_cluster("GPU") or 2
    return next(workers for workers in range(most, 0, -1) if batch_size % workers == 0)


def room_for(workers: int, threads: int) -> int:
    """Return how many workers with so many threads the cluster's machines have room for.

    Raises:
        UserError: there is room for fewer than `workers`, or each would have less than a quarter of a CPU.
    """
    resources = scaling(workers, threads).resources_per_worker
    if "GPU" not in resources and workers > _WORKERS_PER_CPU * (cpus := cpus_in_cluster()):
        raise UserError(
            f"workers is {workers}, but the cluster has {cpus} CPU{'s' * (cpus > 1)}; use workers: {cpus}, or at most"
            f" {_WORKERS_PER_CPU * cpus}, which share them"
        )
    room = _room(resources)
    if room < workers:
        raise UserError(
            f"workers is {workers} with threads {threads}, but the machines of the cluster have room for only {room};"
            " use fewer workers or threads"
        )
    return room


def fit_resources(threads: int, workers: int = 1) -> tuple[dict[str, float], int]:
    """Return (the Ray resources of a fit's controlling process, how many fits the cluster can run in parallel).

    With several workers that process holds one byte of memory: the workers' placement group gets all of its resources
    at once or waits without any, so fits cannot deadlock.

    Raises:
        UserError: the machines of the cluster do not have room for so many workers with so many threads.
    """
    if workers > 1:
        room = room_for(workers, threads)
        # Tune cannot place a trial without resources, and the workers could not use a core that it holds.
        return {"CPU": 0.0, "memory": 1.0}, room // workers
    cpus, gpus = cpus_in_cluster(), units_in_cluster("GPU")
    share = float(min(threads, cpus))
    if gpus:
        return {"CPU": share, "GPU": 1.0}, gpus
    return {"CPU": share}, max(1, int(cpus / share))


def remote(function: Callable[..., Any], threads: int, workers: int = 1) -> Any:
    """Return a function as a Ray task with the resources of a fit (with several workers, of its first process)."""
    import ray

    resources, _ = fit_resources(threads, workers)
    return ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(function).remote


def in_tasks(
    function: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    threads: int = 1,
    unit: str | None = None,
) -> list[Any]:
    """Call a function with each of the arguments in Ray tasks with the resources of a fit; return the results.

    Args:
        unit: what a task computes; then the number of finished tasks is shown.
    """
    run = remote(function, threads)
    return results_of([run(*values) for values in arguments], unit)


def results_of(tasks: list[Any], unit: str | None) -> list[Any]:
    """Wait for Ray tasks and return their results; with a unit, show how many are finished."""
    import ray

    progress, pending = Progress(len(tasks)), tasks
    while pending and unit is not None:
        _, pending = ray.wait(pending, timeout=1.0)
        done = len(tasks) - len(pending)
        if done and progress.due(done):
            progress.show(done, unit)
    return list(ray.get(tasks))


def here(function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each of the arguments in this process."""
    return [function(*values) for values in arguments]


def in_task(function: Callable[..., Result], *arguments: Any, threads: int = 1) -> Result:
    """Run a stage in a Ray task on CPUs alone."""
    import ray

    cpus = min(threads, cpus_in_cluster())
    result: Result = ray.get(ray.remote(num_cpus=cpus)(function).remote(*arguments))
    return result


def on_cluster(stage: Callable[..., Result], context: Any, unit: str | None = None) -> Result:
    """Call `stage(context, run)` in a Ray task, with a `Run` that computes in other tasks, see `in_tasks`."""
    threads = context.config.threads or 1
    return in_task(stage, context, partial(in_tasks, threads=threads, unit=unit), threads=threads)


def _room(resources: dict[str, float]) -> int:
    """Return how many workers with these resources the cluster's machines have room for."""
    return sum(
        int(min(machine.get(name, 0) / amount for name, amount in resources.items()) + 1e-6) for machine in _machines()
    )


def _machines() -> list[dict[str, float]]:
    """Return the resources of each of the cluster's machines."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]
