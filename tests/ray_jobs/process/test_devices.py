"""The hardware, as it is detected at run time, and threads."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch.distributed as dist
import yaml

from pipelines.spec import Pretrain
from pipelines.store import open_store
from ray_jobs import pretrain
from ray_jobs.process import devices, stage
from ray_jobs.process.cluster import fit_resources, room_for
from tests.support.paths import TINY
from tests.support.records import make_context
from vit_model.errors import UserError


def gloo_threads() -> list[int]:
    """The threads of this process that serve gloo's sockets."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().startswith("gloo_tcp_loop")]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_gloo_does_not_preempt(group):
    devices.let_gloo_yield()
    assert gloo_threads(), "gloo has renamed its threads: change let_gloo_yield"
    assert {os.sched_getscheduler(thread) for thread in gloo_threads()} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What Ray says of a cluster whose machines have these resources."""
    machines = request.param
    total = {name: sum(each.get(name, 0) for each in machines) for name in ("CPU", "GPU")}
    monkeypatch.setattr(ray, "cluster_resources", lambda: total)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": each} for each in machines])


@pytest.mark.parametrize(
    ("cluster", "workers", "threads", "message"),
    [
        (
            [{"CPU": 2}],
            64,
            1,
            "workers is 64, but the cluster has 2 CPUs; use workers: 2, or at most 8, which",
        ),
        ([{"CPU": 2}], 9, 1, "workers is 9, but the cluster has 2 CPUs"),
        ([{"CPU": 1}], 64, 1, "workers is 64, but the cluster has 1 CPU; use workers: 1"),
        ([{"CPU": 64, "GPU": 4}], 64, 1, "workers is 64, but the cluster has 4 GPUs; use workers: 4"),
        ([{"CPU": 3}, {"CPU": 1}], 2, 2, "workers is 2 with threads 2, .* have room for only 1;"),
    ],
    indirect=["cluster"],
)
def test_workers_that_the_cluster_has_no_room_for_are_refused(
    cluster: None, workers: int, threads: int, message: str, tmp_path: Path
) -> None:
    """A pretraining with 64 workers on two cores started, and waited."""
    with pytest.raises(UserError, match=message):
        fit_resources(threads, workers)
    settings = {"batch_size": 576, "workers": workers, "threads": threads}
    given = Pretrain.model_validate(yaml.safe_load(TINY.read_text())["stages"]["pretrain"] | settings)
    with pytest.raises(UserError, match=message):
        pretrain._train(make_context(open_store(str(tmp_path / "store")), given))


@pytest.mark.parametrize("cluster", [[{"CPU": 2}], [{"CPU": 1}, {"CPU": 1}]], indirect=True)
@pytest.mark.parametrize("workers", [2, 8])
def test_workers_may_share_cores(cluster: None, workers: int) -> None:
    assert room_for(workers, 2) == workers


@pytest.mark.parametrize(
    ("cluster", "threads"),
    [
        ([{"CPU": 64}], 1),
        ([{"CPU": 16, "GPU": 1}], 12),
        ([{"CPU": 4}, {"CPU": 96, "GPU": 4}, {"CPU": 12, "GPU": 2}], 4),
        ([{"CPU": 96, "GPU": 4}], 12),
        ([{"CPU": 2, "GPU": 4}], 1),
    ],
    indirect=["cluster"],
)
def test_a_gpus_worker_has_the_cores_of_its_machine(cluster: None, threads: int, tmp_path: Path) -> None:
    fields = yaml.safe_load(TINY.read_text())["stages"]["pretrain"]
    store = open_store(str(tmp_path / "store"))
    for given, expected in ((None, threads), (3, 3)):
        context = make_context(store, Pretrain.model_validate(fields | {"threads": given}))
        assert stage._with_threads(context).config.threads == expected
