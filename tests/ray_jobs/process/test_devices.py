"""The hardware, as it is detected at run time, and threads."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from ray_jobs.process import devices


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


@pytest.mark.parametrize(("limit", "share"), [(None, 1.0), (0.25, 0.25), (4.0, 1.0)])
def test_memory_is_the_machines_or_the_containers(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, share: float
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(devices, "cgroup_limits", lambda: (None, limit and int(limit * total)))
    assert devices.memory(torch.device("cpu")) == int(share * total)
