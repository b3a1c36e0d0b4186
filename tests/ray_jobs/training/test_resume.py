"""Pretraining that is killed and continues: the same bytes with as many workers, nearly the same with more or fewer."""

import json
import random

import pytest
import torch

from pipelines.store import StoreUnreachable, checkpoints, choose_start, open_store
from ray_jobs.data.shards import open_dataset
from ray_jobs.training import loop
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.state import TrainState
from tests.support.interrupted import (
    CASES,
    SIZE,
    Kill,
    configuration,
    files_below,
    logged,
    run_attempt,
    run_with_kills,
    world_of,
    write_inputs,
)
from tests.support.records import flip, make_attempt
from vit_model.weights import load_model

pytestmark = pytest.mark.slow


ALWAYS = (
    "plain bf16, dropout",
    "contrastive, ZeRO-1 bf16",
    "dino, ZeRO-2 bf16",
    "ZeRO-3 fp32",
    "ZeRO-1 bf16, continued",
)
KILLED = [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.full) for case in CASES]


@pytest.mark.parametrize("case", KILLED)
def test_killed_workers_continue_to_the_same_bytes(dataset, tmp_path, case):
    config, rng = configuration(**CASES[case]), random.Random(case)
    undisturbed, killed = (open_store(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    init_from = write_inputs(config, tmp_path / "first", dataset)
    assert run_attempt(config, dataset, undisturbed, tmp_path / "a", world=world_of(case), init_from=init_from)
    record = run_with_kills(config, dataset, killed, tmp_path / "b", 2, rng, world_of(case), init_from)
    assert len(record) == 2
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")
    assert "checkpoints/10/model.safetensors" in files_below(tmp_path / "a")
    assert logged(killed, "pretrain") == logged(undisturbed, "pretrain")
    assert [line["step"] for line in logged(killed, "pretrain")] == [*range(1, 41)]
    left = [checkpoint.step for checkpoint in checkpoints(killed, "pretrain", "k")]
    assert len(left) <= 5, "two latest, the best, step 10 and the one that the last attempt started from"


@pytest.mark.parametrize(("which", "what"), [("the furthest", "file"), ("the best", "manifest"), ("step 20", "file")])
def test_a_damaged_checkpoint_costs_steps_and_changes_no_byte(dataset, tmp_path, which, what):
    """Whether the training continues from it, or its result needs it."""
    config = configuration(**CASES["plain fp32"], keep_steps=(10, 20))
    undisturbed, killed = (open_store(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    assert run_attempt(config, dataset, undisturbed, tmp_path / "a", world=1)
    assert not run_attempt(config, dataset, killed, tmp_path / "b", world=1, kill=Kill(0, 35, 0.0))
    there = {checkpoint.step: checkpoint for checkpoint in checkpoints(killed, "pretrain", "k")}
    furthest = max(there)
    damaged = there[{"the furthest": furthest, "the best": there[furthest].best, "step 20": 20}[which]]
    folder = tmp_path / "killed" / damaged.folder
    if what == "manifest":
        (folder / "manifest.json").write_text('{"job": "pre')
    else:
        flip(folder / damaged.files[0].path)
    assert run_attempt(config, dataset, killed, tmp_path / "b", number=2, world=1)
    start = choose_start(killed, make_attempt("pretrain", number=2, store_uri=killed.uri))
    assert start is None or start.step < damaged.step
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")


def test_a_kept_step_is_the_result_of_a_training_that_ends_there(dataset, tmp_path):
    """The moving average of its weights, not the weights. The schedule is one that does not depend on the length."""
    fields = {"zero_stage": 1, "optimizer": {"schedule": "constant", "warmup_steps": 3, "ema": 0.9}}
    for name, steps in {"short": 10, "long": 40}.items():
        store = open_store(str(tmp_path / name / "store"))
        assert run_attempt(configuration(steps=steps, **fields), dataset, store, tmp_path / name / "out")
    kept = tmp_path / "long/out/checkpoints/10/model.safetensors"
    assert kept.read_bytes() == (tmp_path / "short/out/model.safetensors").read_bytes()


def test_all_workers_save_when_the_clock_of_the_first_says_so(dataset, tmp_path):
    store = open_store(str(tmp_path / "store"))
    config = configuration(zero_stage=0, keep_steps=(), checkpoint_every={"minutes": 1e-6})
    assert not run_attempt(config, dataset, store, tmp_path / "a", kill=Kill(1, 25, 0.0))
    saved = TrainState(store, checkpoints(store, "pretrain", "k")[0])
    assert len(saved.states) == 2
    assert 20 <= saved.step <= 25, "each step, the latest of which may not be written yet"


@pytest.mark.parametrize(("case", "world"), [("ZeRO-1 fp32", 3), ("ZeRO-3 fp32", 1)])
def test_another_number_of_workers_continues_to_nearly_the_same_weights(dataset, tmp_path, case, world):
    """It sees the same images with the same augmentation and leaves out the same blocks for each of them, so only the
    order of additions differs."""
    model = {**SIZE, "stochastic_depth": 0.5}
    config = configuration(**{**CASES[case], "steps": 30, "model": model})
    undisturbed, killed = (open_store(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    assert run_attempt(config, dataset, undisturbed, tmp_path / "a")
    assert not run_attempt(config, dataset, killed, tmp_path / "b", kill=Kill(1, 14, 0.0))
    assert run_attempt(config, dataset, killed, tmp_path / "b", number=2, world=world)
    # All weights as one vector: some biases have no effect, and AdamW scales up their rounding errors.
    ours, theirs = (
        torch.cat([weight.flatten() for weight in load_model(tmp_path / name)[0].parameters()]) for name in ("a", "b")
    )
    assert (ours - theirs).norm() <= 1e-4 * ours.norm()
    curves = [json.loads((tmp_path / name / "curve.json").read_text()) for name in ("a", "b")]
    for one, other in zip(*curves, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_an_outage_of_the_store_only_delays_a_checkpoint(dataset, tmp_path, monkeypatch):
    config, store = configuration(steps=14, workers=1), open_store(str(tmp_path / "s"))
    outages, create = [StoreUnreachable("no answer")] * 2, store.create

    def unreliable(name: str, data: bytes) -> bool:
        if outages and name.endswith("/manifest.json"):
            raise outages.pop()
        return create(name, data)

    monkeypatch.setattr(store, "create", unreliable)
    manager = CheckpointManager(store, make_attempt("pretrain", store_uri=store.uri), config)
    loop.train(config, open_dataset(dataset), tmp_path / "a", loop.ALONE, manager)
    assert not outages
    assert checkpoints(store, "pretrain", "k")
