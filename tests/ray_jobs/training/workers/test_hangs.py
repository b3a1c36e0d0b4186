"""Workers stop waiting for one that hangs, and say which one it is."""

import os
import re
import signal
import subprocess
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from ray_jobs.process.heartbeat import Steps
from ray_jobs.training.workers.hangs import describe, limit_collectives, named_hangs
from tests.support.workers import run_workers

SECONDS = 3.0


def spin() -> None:
    while True:
        pass


def stop() -> None:
    # A process that is stopped does not end by SIGTERM, with which the test would end it.
    subprocess.Popen(["sh", "-c", f"sleep {3 * SECONDS}; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def work(rank: int, meeting: Path, hang: str) -> None:
    """Three steps with an operation of all workers each, in a group of its own; rank 1 hangs in step 2."""
    limit_collectives(SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=3)
    group, steps = dist.new_group(), Steps()
    said = (meeting / f"said-{rank}").open("w")
    with redirect_stdout(said), named_hangs(rank, 3, steps, SECONDS):
        for step in range(3):
            if rank == 1 and step == 2:
                {"spin": spin, "stop": stop}[hang]()
            dist.all_reduce(torch.ones(1), group=group)
            steps.done = step + 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("hang", "where"), [("spin", r"at workers/test_hangs.py:\d+ in spin"), ("stop", "not answer")])
def test_the_error_of_the_others_names_the_worker_that_hangs(tmp_path, hang, where):
    with pytest.raises(ProcessRaisedException) as ended:
        run_workers(3, work, tmp_path, hang)
    said = r"step 2 has lasted for \d s and the others wait for rank 1: rank 0 is at .*; rank 1 (is|does) " + where
    assert re.search(f"RuntimeError: {said}.*gloo.*Timed out", str(ended.value)), "a message with gloo is a death"
    printed = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 2)]
    assert ["has lasted for" in text for text in printed] == [True, False], "one says it for all"


def test_a_group_gets_the_limit(tmp_path, monkeypatch):
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name, None), raising=False)
    limit_collectives(7)
    for backend in ("gloo", "nccl"):
        assert distributed_c10d._get_default_timeout(backend) == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            {0: "*a.py:1 in f", 1: "b.py:2 in g"},
            "the others wait for rank 1: rank 0 is at a.py:1 in f; rank 1 is at b",
        ),
        ({0: "*a.py:1 in f", 1: "*a.py:1 in f"}, "no worker goes on: rank 0"),
        ({0: "a.py:1 in f", 1: "b.py:1 in f"}, "no worker goes on: rank 0"),
        (
            {0: None, 1: "b.py:1 in f", 2: None},
            "the others wait for rank 0, 2: rank 0 does not answer; rank 1 is at b",
        ),
    ],
)
def test_those_who_are_silent_are_missing_or_else_those_who_do_not_wait(places, said):
    assert said in describe(5, 480.0, places)
