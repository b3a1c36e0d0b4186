"""A checkpoint that is not the state of this training is refused before it starts."""

from pathlib import Path

import pytest
import torch

from pipelines.spec import Pretrain
from pipelines.store import Checkpoint, Store, StoreDamaged, checkpoints, open_store
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import loop
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.engine import Engine
from ray_jobs.training.methods import make_method
from ray_jobs.training.model_ref import make_contract
from ray_jobs.training.state import TrainState, WorkerState
from tests.support.interrupted import SIZE, configuration
from tests.support.records import make_attempt

CPU = torch.device("cpu")


def start(config: Pretrain, dataset: Path, saved: TrainState | None = None) -> Engine:
    method = make_method(config, make_contract(config, open_dataset(dataset).info), CPU)
    return loop.start(method, loop.ALONE, saved)


def save(config: Pretrain, dataset: Path, store: Store) -> Checkpoint:
    """Make one step and save the state."""
    engine = start(config, dataset)
    engine.backward(engine(torch.ones(2, 1, 8, 8)).square().sum())
    engine.step(1e-3)
    manager = CheckpointManager(store, make_attempt("pretrain", store_uri=store.uri), config)
    manager.save(1, None, engine.state_shards(), WorkerState(loader={}, points=(), loss_sum=0.0, summed=0))
    manager.wait()
    return checkpoints(store, "pretrain", "k")[0]


SGD = {"optimizer": {"name": "sgd"}}
MUON = {"optimizer": {"name": "muon"}, "zero_stage": 0}


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (SGD, "no values of momentum_buffer of blocks.0.attn.proj.bias, .* needs 16"),
        (MUON, "256 values of exp_avg of blocks.0.attn.proj.weight, .* needs none"),
        ({"optimizer": {"ema": 0.9}}, "no values of ema of blocks.0.attn.proj.bias, .* needs 16"),
        ({"model": SIZE | {"width": 32}}, "16 values of weights of blocks.0.attn.proj.bias, .* needs 32"),
        ({"model": SIZE | {"depth": 1}}, "16 values of weights of blocks.1.attn.proj.bias, .* needs none"),
    ],
    ids=["SGD from AdamW", "Muon from AdamW", "averaged", "wider", "less deep"],
)
def test_a_state_of_another_optimizer_or_architecture_is_refused(dataset, tmp_path, monkeypatch, now, problem):
    store = open_store(str(tmp_path / "s"))
    config = configuration(dtype="float32")
    saved = TrainState(store, save(config, dataset, store))
    start(config, dataset, saved)
    monkeypatch.setattr(loop, "make_engine", lambda *_: pytest.fail("training has started"))
    with pytest.raises(StoreDamaged, match=rf"cannot be used: it has {problem}") as refused:
        start(configuration(dtype="float32", **now), dataset, saved)
    assert "delete this folder" in str(refused.value)


def test_a_damaged_file_is_refused(dataset, tmp_path):
    store = open_store(str(tmp_path / "s"))
    checkpoint = save(configuration(dtype="float32"), dataset, store)
    path = tmp_path / "s" / checkpoint.folder / checkpoint.files[0].path
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreDamaged, match=r"rank-00000\.safetensors is damaged"):
        TrainState(store, checkpoint)
