"""A pretraining whose workers are killed, and attempt after attempt continues it, without Ray and without a driver."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from pipelines.spec import Pretrain
from pipelines.store import Store, checkpoints, choose_start, open_store, running_log
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import log, loop, optim
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.contract import model_contract
from ray_jobs.training.log import LogWriter
from ray_jobs.training.model_ref import ModelRef
from tests.support import objectives
from tests.support.records import make_attempt
from tests.support.vits import randomised
from tests.support.workers import run_workers
from vit_model.weights import save_model

SIZE = {"patch_size": 4, "width": 16, "depth": 2, "num_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain fp32": {"zero_stage": 0, "dtype": "float32"},
    "plain bf16, dropout": {
        "zero_stage": 0,
        "model": {**SIZE, "dropout": 0.1, "stochastic_depth": 0.1},
        "optimizer": {"ema": 0.9},
    },
    "plain bf16 Muon": {"zero_stage": 0, "optimizer": {"name": "muon", "layer_decay": 0.8, "ema": 0.9}},
    "ZeRO-1 bf16": {"zero_stage": 1},
    "ZeRO-2 bf16 MoCo": {"zero_stage": 2, **objectives.MOCO},
    "ZeRO-1 fp32": {"zero_stage": 1, "dtype": "float32"},
    "ZeRO-2 fp32": {"zero_stage": 2, "dtype": "float32", "fewshot": {"shots": (1, 3)}},
    "ZeRO-3 fp32": {
        "zero_stage": 3,
        "dtype": "float32",
        "optimizer": {"name": "sgd", "layer_decay": 0.8, "ema": 0.9},
    },
    "alone, bf16": {},
    "alone, fp32": {"dtype": "float32"},
    "alone, fp32 Muon": {"dtype": "float32", "zero_stage": 0, "optimizer": {"name": "muon"}},
    "ZeRO-1 bf16, continued": {"zero_stage": 1, "init_from": "first", "objective": "masked_patches"},
}
CASES |= {
    f"{name}, ZeRO-{case.zero_stage} bf16": {"zero_stage": case.zero_stage, **case.fields}
    for name, case in objectives.CASES.items()
}
_APART = 8  # steps at most between two kills, so that a training has several
_LAST = 12  # steps, which take longer than a kill may come late


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a worker, this long after it has begun a step."""

    rank: int
    step: int
    seconds: float


def configuration(**fields: Any) -> Pretrain:
    """Return a pretraining of 40 steps on the noise that saves its state after every third."""
    base = {
        "job": "pretrain",
        "data": "noise",
        "resolution": 8,
        "steps": 40,
        "batch_size": 12,
        "learning_rate": 3e-3,
        "augment": "shift",
        "model": SIZE,
        "checkpoint_every": {"steps": 3},
        "keep_steps": (10,),
    }
    return Pretrain.model_validate(base | fields)


def write_model(folder: Path, dataset: Path, resolution: int = 16) -> ModelRef:
    """Write a model of 16x16 images with random weights, positions included, as if a pretraining had made it."""
    config = configuration(resolution=resolution)
    assert config.model is not None
    contract = model_contract(config.model, config.resolution, open_dataset(dataset).info)
    save_model(folder, randomised(contract.architecture), contract)
    return ModelRef(folder, "first (pretrain 0123456789ab)")


def write_inputs(config: Pretrain, folder: Path, dataset: Path) -> ModelRef | None:
    """Write the model that a case starts from, or imitates, if it names one."""
    if config.teacher is not None:
        return write_model(folder, dataset, resolution=config.resolution)
    return write_model(folder, dataset) if config.init_from else None


def files_below(folder: Path) -> dict[str, bytes]:
    """Return {relative path: bytes}."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logged(store: Store, job: str) -> list[dict[str, Any]]:
    """Return the log of a training without what depends on the clock."""
    timed = {"time", "images_per_second", "data_wait", "mfu", "seconds_left"}
    return [line.model_dump(exclude=timed) for line in running_log(store, job, "k")]


def world_of(case: str) -> int:
    return 1 if case.startswith("alone") else 2


def draw_kill(rng: random.Random, world: int, first: int, steps: int) -> Kill:
    """Return a kill at a random moment from step `first` on: within a step, between two, while a checkpoint is written.

    Not in the last steps, which may end before it comes.
    """
    last = min(first + _APART, steps - _LAST)
    return Kill(rng.randrange(world), rng.randrange(first, max(first + 1, last)), rng.uniform(0, 0.02))


def run_attempt(
    config: Pretrain,
    dataset: Path,
    store: Store,
    output: Path,
    number: int = 1,
    world: int = 2,
    kill: Kill | None = None,
    init_from: ModelRef | None = None,
) -> bool:
    """Train in `world` processes, from the last checkpoint on; return False if the kill has ended them."""
    with tempfile.TemporaryDirectory() as meeting:
        meeting_place = f"file://{meeting}/store"
        arguments = (world, meeting_place, config, dataset, store.uri, output, number, kill, init_from)
        try:
            run_workers(world, _worker, *arguments)
        except ProcessExitedException as error:
            if kill is None or error.signal_name != "SIGKILL":
                raise
            return False
        except ProcessRaisedException as error:  # the other worker may be seen first to end
            if kill is None or "by peer" not in str(error):
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
    init_from: ModelRef | None = None,
) -> list[tuple[Kill, int]]:
    """Train with at most so many kills; return each with the step at which the next attempt continued."""
    record: list[tuple[Kill, int]] = []
    while len(record) < kills and (first := _saved_step(store)) < config.steps - _LAST:
        kill = draw_kill(rng, world, first, config.steps)
        assert not run_attempt(config, dataset, store, output, len(record) + 1, world, kill, init_from), (
            "the kill came too late"
        )
        record.append((kill, _saved_step(store)))
    assert run_attempt(config, dataset, store, output, len(record) + 1, world, init_from=init_from)
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
    init_from: ModelRef | None,
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    store, attempt = open_store(uri), make_attempt("pretrain", number=number, store_uri=uri)
    start = choose_start(store, attempt, config.keep_steps)
    if kill is not None and kill.rank == rank:
        arm(kill)
    place = loop.Worker(rank, world, rank)
    manager = CheckpointManager(store, attempt, config, place, start)
    given: dict[str, Any] = {"teacher" if config.teacher else "init_from": init_from}
    log.SEGMENT_SECONDS = 0.02  # a part of the lines is in the store when a worker dies
    if rank:
        loop.train(config, open_dataset(dataset), None, place, manager, **given)
    else:
        with LogWriter(store, attempt) as writer:
            loop.train(config, open_dataset(dataset), output, place, manager, writer=writer, **given)
    dist.destroy_process_group()


def arm(kill: Kill) -> None:
    """Have this process killed during a step, which begins by asking for its learning rate."""
    rate_of = optim.learning_rate

    def learning_rate(step: int, *arguments: object) -> float:
        if step == kill.step:
            threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return rate_of(step, *arguments)  # type: ignore[arg-type]

    optim.learning_rate = learning_rate
