"""Trials of several Ray Train workers inside Ray Tune, on a real Ray: none waits forever, and resources are freed."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipelines.spec import Finetune, Labels
from pipelines.store import Layout
from ray_jobs import finetune
from ray_jobs.process import cluster
from ray_jobs.process.stage import join_ray
from ray_jobs.training.task import at_point, make_task
from ray_jobs.tuning.runner import run_trial
from tests.support.clusters import ray_cluster
from tests.support.finetuning import attempt, configuration, context, put_halves
from tests.support.workers import run_workers

CORES = 4


def searching() -> Finetune:
    over = {"learning_rate": {"low": 1e-5, "high": 0.1, "scale": "log"}}
    search = {"kind": "random", "trials": 3, "over": over}
    return configuration(labels=Labels(), learning_rates=(), search=search, steps=16, workers=2)


def wait_until_free() -> None:
    """Wait until all cores are free and no placement group is left; a Ray that counts slowly gets half a minute."""
    import ray
    from ray.util.placement_group import placement_group_table

    deadline = time.monotonic() + 30
    while True:
        left = [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
        free = ray.available_resources().get("CPU")
        if not left and free == CORES:
            return
        assert time.monotonic() < deadline, f"groups: {left}; free cores: {free}"
        time.sleep(0.2)


class Process:
    """The process of a trial, which holds no resources itself."""

    def run(self, root: Path, config: Finetune) -> None:
        given = attempt(root / "store", config, 2)
        task = make_task(config, given.dataset(), None)
        task = at_point(task, 0, {"learning_rate": 1e-3}, given.dataset())
        pools, supports = finetune.labelled(config, given.dataset())
        run_trial(given, task, pools[0], supports.folds, 0)


def _search_and_kill(rank: int, root: Path, environment: dict[str, str]) -> None:
    """In a process of its own, as a stage's, because its Ray has other resources than the other tests'."""
    os.environ.update(environment)
    import ray
    from ray.util.placement_group import placement_group_table

    join_ray()
    put_halves(root / "dataset")
    given = context(root / "store", root / "dataset", searching())
    assert cluster.fit_resources(1, workers=2) == ({"CPU": 0.0, "memory": 1.0}, 2)
    (root / "metrics.json").write_text(json.dumps(finetune.main(given).metrics))
    wait_until_free()

    config = searching().model_copy(update={"search": None, "learning_rates": (1e-3,), "steps": 10**6})
    process: Any = ray.remote(num_cpus=0)(Process).remote()
    running = process.run.remote(root, config)
    while not given.open_store().names(Layout.log("finetune", "k", 2)):  # it trains
        ended, _ = ray.wait([running], timeout=0.1)
        assert not ended, ray.get(ended)
    assert sum(group["state"] == "CREATED" for group in placement_group_table().values()) == 1
    ray.kill(process)
    wait_until_free()
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
def test_a_search_with_two_workers_per_trial_ends_and_frees_what_its_trials_held(tmp_path):
    """Also those of one that is killed (ray#54305)."""
    with ray_cluster([CORES]) as cluster:
        run_workers(1, _search_and_kill, tmp_path, cluster.environment(0) | {"RAY_ADDRESS": cluster.gcs})
    folder = tmp_path / "store" / Layout.files("finetune", "k", 1)
    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert [trial["number"] for trial in trials] == [0, 1, 2], "later ones got to run"
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["test_accuracy"] >= 0.5, "the refit"
