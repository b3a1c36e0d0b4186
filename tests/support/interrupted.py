"""A pretraining whose workers are killed, and attempt after attempt continues it, without Ray and without a driver."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

from pipelines.spec import Pretrain
from pipelines.store import Store, checkpoints, choose_start, open_store
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import loop, optim
from ray_jobs.training.checkpoint import Saved, Saver
from tests.support.records import make_attempt
from tests.support.workers import run_workers

_LAST = 12  # steps, which take longer than a kill may come late


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a worker, this long after it has begun a step."""

    rank: int
    step: int
    seconds: float


def draw_kill(rng: random.Random, world: int, first: int, steps: int) -> Kill:
    """Return a kill at a random moment from step `first` on: within a step, between two, while a checkpoint is written.

    Not in the last steps, which may end before it comes.
    """
    return Kill(
        rng.randrange(world), rng.randrange(first, max(first + 1, steps - _LAST)), rng.uniform(0, 0.02)
    )


def run_attempt(
    config: Pretrain,
    dataset: Path,
    store: Store,
    output: Path,
    number: int = 1,
    world: int = 2,
    kill: Kill | None = None,
) -> bool:
    """Train in `world` processes, from the last checkpoint on; return False if the kill has ended them."""
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (world, f"file://{meeting}/store", config, dataset, store.uri, output, number, kill)
        try:
            run_workers(world, _worker, *arguments)
        except ProcessExitedException as error:
            if kill is None or error.signal_name != "SIGKILL":
                raise
            return False
    return True


def run_with_kills(
    config: Pretrain,
    dataset: Path,
    store: Store,
    output: Path,
    kills: int,
    rng: random.Random,
    world: int = 2,
) -> list[tuple[Kill, int]]:
    """Train with at most so many kills; return each with the step at which the next attempt continued."""
    record: list[tuple[Kill, int]] = []
    while len(record) < kills and (first := _saved_step(store)) < config.steps - _LAST:
        kill = draw_kill(rng, world, first, config.steps)
        assert not run_attempt(config, dataset, store, output, len(record) + 1, world, kill), (
            "the kill came too late"
        )
        record.append((kill, _saved_step(store)))
    assert run_attempt(config, dataset, store, output, len(record) + 1, world)
    return record


def _saved_step(store: Store) -> int:
    there = checkpoints(store, "pretrain", "k")
    return there[0].step if there else 0


def _worker(
    rank: int,
    world: int,
    meeting: str,
    config: Pretrain,
    dataset: Path,
    uri: str,
    output: Path,
    number: int,
    kill: Kill | None,
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    store, attempt = open_store(uri), make_attempt("pretrain", number=number, store_uri=uri)
    start = choose_start(store, attempt)
    if kill is not None and kill.rank == rank:
        _arm(kill)
    saver = Saver(store, attempt, config, rank, world, start=start)
    saved = None if start is None else Saved(store, start)
    place = loop.Worker(rank, world, rank)
    loop.train(config, open_dataset(dataset), None if rank else output, place, saver, saved)
    dist.destroy_process_group()


def _arm(kill: Kill) -> None:
    """Have this process killed during a step, which begins by asking for its learning rate."""
    rate_of = optim.learning_rate

    def learning_rate(step: int, *arguments: object) -> float:
        if step == kill.step:
            threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return rate_of(step, *arguments)  # type: ignore[arg-type]

    optim.learning_rate = learning_rate
