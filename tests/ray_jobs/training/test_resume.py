"""Pretraining that is killed and continues: the same bytes with as many workers, nearly the same with more or fewer."""

import json
import random
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from pipelines.spec import ModelSize
from pipelines.store import StoreDamaged, checkpoints, open_store
from ray_jobs.training.checkpoint import Saved
from tests.support.interrupted import (
    CASES,
    Kill,
    configuration,
    files_below,
    run_attempt,
    run_with_kills,
    world_of,
    write_noise,
)
from vit_model.weights import load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise(tmp_path_factory.mktemp("dataset"))


@pytest.mark.parametrize("case", CASES)
def test_killed_workers_continue_to_the_same_bytes(dataset, tmp_path, case):
    config, rng = configuration(**CASES[case]), random.Random(case)
    undisturbed, killed = (open_store(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    assert run_attempt(config, dataset, undisturbed, tmp_path / "a", world=world_of(case))
    record = run_with_kills(config, dataset, killed, tmp_path / "b", 2, rng, world_of(case))
    assert len(record) == 2
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")
    assert "checkpoints/10/model.safetensors" in files_below(tmp_path / "a")
    left = [checkpoint.step for checkpoint in checkpoints(killed, "pretrain", "k")]
    assert len(left) <= 5, "two latest, the best, step 10 and the one that the last attempt started from"


@pytest.mark.parametrize(
    "case", ["ZeRO-1 fp32", "ZeRO-2 bf16 masked patches", "ZeRO-3 fp32", "ZeRO-1 bf16 MoCo"]
)
@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_workers_continues_to_nearly_the_same_weights(dataset, tmp_path, case, world):
    """It sees the same images with the same augmentation, so only the order of additions differs."""
    config = configuration(**CASES[case], steps=30)
    undisturbed, killed = (open_store(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    assert run_attempt(config, dataset, undisturbed, tmp_path / "a")
    assert not run_attempt(config, dataset, killed, tmp_path / "b", kill=Kill(1, 14, 0.0))
    assert run_attempt(config, dataset, killed, tmp_path / "b", number=2, world=world)
    limit = 1e-5 if config.dtype == "float32" else 5e-3
    ours, theirs = (load_model(tmp_path / name)[0].state_dict() for name in ("a", "b"))
    for name, weight in ours.items():
        print(case, world, name, ((weight - theirs[name]).norm() / weight.norm().clamp(min=1e-3)).item())
        assert (weight - theirs[name]).norm() <= limit * weight.norm().clamp(min=1e-3), name
    curves = [json.loads((tmp_path / name / "curve.json").read_text()) for name in ("a", "b")]
    for one, other in zip(*curves, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4 if config.dtype == "float32" else 2e-2)


def test_a_checkpoint_that_does_not_fit_is_refused_before_training(dataset, tmp_path):
    config, store = configuration(steps=14), open_store(str(tmp_path / "s"))
    assert not run_attempt(config, dataset, store, tmp_path / "a", kill=Kill(0, 8, 0.0))
    wider = config.model_copy(update={"model": ModelSize(patch_size=4, width=32, depth=2, num_heads=2)})
    with pytest.raises(
        ProcessRaisedException, match=r"cannot be used: it has .* values of weights of .* delete this folder"
    ):
        run_attempt(wider, dataset, store, tmp_path / "b", number=2)
    (checkpoint, *_) = checkpoints(store, "pretrain", "k")
    path = tmp_path / "s" / checkpoint.folder / checkpoint.files[0].path
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreDamaged, match=r"rank-00000\.safetensors is damaged"):
        Saved(store, checkpoint)
