"""Tasks of an evaluation: one Ray task, which computes in others, as many as the cluster can run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray_jobs.process.cluster import fit_resources
from ray_jobs.process.context import Context, Result

Run = Callable[[Callable[..., Any], list[tuple[Any, ...]]], list[Any]]
"""Call a function with each of these arguments, here or on the cluster; return the results in order."""


def on_cluster(stage: Callable[..., Result], context: Context[Any], **settings: Any) -> Result:
    """Run `stage(context, run, **settings)` in a Ray task, with a `Run` that computes in others."""
    import ray

    resources, _ = fit_resources(context.config.threads)
    options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}

    def run(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> list[Any]:
        remote = ray.remote(**options)(function)
        done: list[Any] = ray.get([remote.remote(*arguments) for arguments in tasks])
        return done

    result: Result = ray.get(ray.remote(num_cpus=resources["CPU"])(stage).remote(context, run, **settings))
    return result


def here(function: Callable[..., Any], tasks: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each of these arguments in this process."""
    return [function(*arguments) for arguments in tasks]
