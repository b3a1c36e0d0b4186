"""A full disk, or a store that refuses to write, costs a checkpoint and never the one before."""

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.store import Store, StoreError, checkpoints, choose_start, open_store
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import checkpoint as module
from ray_jobs.training import loop
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.engine import WEIGHTS, StateShard
from ray_jobs.training.state import TrainState, WorkerState
from tests.support.interrupted import configuration
from tests.support.records import make_attempt
from tests.support.workers import run_workers

STATE = WorkerState(loader={}, points=(), loss_sum=0.0, summed=0)
FULL = OSError(errno.ENOSPC, "No space left on device")


def state_shards(step: int) -> list[StateShard]:
    """What a checkpoint of this step has: 400 KB."""
    return [StateShard(WEIGHTS, "w", 0, torch.full((100_000,), float(step)))]


def steps_of(store: Store) -> list[int]:
    """The checkpoints that are listed, each of which is complete and its own."""
    there = checkpoints(store, "pretrain", "k")
    for each in there:
        assert TrainState(store, each).read(WEIGHTS, "w", 99_999, 1).item() == each.step
    return [each.step for each in there]


def fail_at(store: Store, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Have one thing go wrong: a worker's file, moving it into the store, or the manifest."""
    if what == "file":
        monkeypatch.setattr(module, "save_file", lambda *_: (_ for _ in ()).throw(FULL))
    elif what == "rename":
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(FULL))
    else:
        create = store.create

        def refuse(name: str, data: bytes) -> bool:
            if name.endswith("manifest.json"):
                raise StoreError(f"{store.uri}: cannot write {name}: No space left on device")
            return create(name, data)

        monkeypatch.setattr(store, "create", refuse)


@pytest.mark.parametrize("what", ["file", "rename", "manifest"])
def test_the_checkpoint_before_remains_and_the_next_one_is_another_try(tmp_path, monkeypatch, capfd, what):
    store = open_store(str(tmp_path / "s"))
    attempt = make_attempt("pretrain", store_uri=store.uri)
    manager = CheckpointManager(store, attempt, configuration(keep_steps=()))
    for step in (3, 6):
        manager.save(step, None, state_shards(step), STATE)
    manager.wait()
    with monkeypatch.context() as patch:
        fail_at(store, patch, what)
        manager.save(9, None, state_shards(9), STATE)
        manager.wait()
    assert manager.newest == 6 and steps_of(store) == [6, 3]
    said = capfd.readouterr().err
    assert "cannot write the checkpoint of step 9: " in said
    assert "; the last checkpoint is of step 6, and training continues" in said
    assert "No space left on device" in said
    start = choose_start(store, make_attempt("pretrain", number=2, store_uri=store.uri))
    assert start is not None and start.step == 6, "the one that another attempt would start from"
    manager.save(12, None, state_shards(12), STATE)
    manager.wait()
    assert steps_of(store) == [12, 6]
    assert not (tmp_path / "s" / start.folder).with_name("9").exists(), "what was half written is removed"


@pytest.mark.parametrize(("step", "best"), [(10, None), (9, 9)], ids=["a kept step", "the best on dev"])
def test_a_checkpoint_that_the_result_needs_ends_the_training(tmp_path, monkeypatch, step, best):
    """So that another attempt, from the checkpoint before, makes it."""
    store = open_store(str(tmp_path / "s"))
    manager = CheckpointManager(store, make_attempt("pretrain", store_uri=store.uri), configuration(keep_steps=(10,)))
    manager.save(6, None, state_shards(6), STATE)
    manager.wait()
    fail_at(store, monkeypatch, "file")
    manager.save(step, best, state_shards(step), STATE)
    with pytest.raises(StoreError, match=rf"cannot write .*/{step}: .*No space left on device"):
        manager.wait()
    assert steps_of(store) == [6]


def test_a_disk_that_is_really_full(tmp_path, capfd):
    """No file may be larger than 100 KB, which is what the system says with another number than ENOSPC."""
    store = open_store(str(tmp_path / "s"))
    manager = CheckpointManager(store, make_attempt("pretrain", store_uri=store.uri), configuration(keep_steps=()))
    manager.save(3, None, state_shards(3), STATE)
    manager.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        manager.save(6, None, state_shards(6), STATE)
        manager.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps_of(store) == [3]
    assert "cannot write the checkpoint of step 6: " in capfd.readouterr().err


def _train(rank: int, meeting: Path, uri: str, dataset: Path, failing: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2)
    store, config = open_store(uri), configuration(steps=12, workers=2, keep_steps=(), **SMALL)
    save_file: Any = module.save_file
    if rank == failing:

        def fail_once(copies: Any, path: Path, metadata: Any) -> None:
            if path.parents[1].name == "6":
                raise FULL
            save_file(copies, path, metadata)

        module.save_file = fail_once  # type: ignore[assignment]
    manager = CheckpointManager(store, make_attempt("pretrain", store_uri=uri), config, loop.Worker(rank, 2, rank))
    loop.train(config, open_dataset(dataset), None, loop.Worker(rank, 2, rank), manager)
    if rank == 0:
        (meeting / "steps").write_text(str([each.step for each in checkpoints(store, "pretrain", "k")]))
    dist.destroy_process_group()


SMALL: dict[str, Any] = {"dtype": "float32", "zero_stage": 0, "keep_checkpoints": 10}


@pytest.mark.parametrize("failing", [0, 1])
def test_with_several_workers_none_waits_for_a_part_that_will_not_come(tmp_path, dataset, failing):
    store = open_store(str(tmp_path / "s"))
    run_workers(2, _train, tmp_path, store.uri, dataset, failing)
    # 3 and 9 by the clock of steps, and perhaps the best on dev
    steps = (tmp_path / "steps").read_text()
    assert "3" in steps and "9" in steps and "6" not in steps
    assert not list((tmp_path / "s").glob("artifacts/pretrain/k/attempts/1/checkpoints/6"))
