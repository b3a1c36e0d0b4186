"""Fits of a fine-tuning that are killed: they continue from their checkpoints, to the same bytes."""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from pipelines.errors import Superseded
from pipelines.spec import Finetune, Labels
from pipelines.store import Checkpoint, Layout, checkpoints, open_store
from ray_jobs import finetune
from ray_jobs.process.context import Context
from ray_jobs.training.task import Evaluation, at_point, make_task
from ray_jobs.training.workers import ALONE, Worker
from ray_jobs.tuning import fits
from ray_jobs.tuning.ledger import open_ledger
from tests.support import datasets
from tests.support.finetuning import SIZE, attempt, configuration, context, kill_at, put_halves, save_backbone
from tests.support.interrupted import Kill, arm, logged
from tests.support.workers import run_workers
from vit_model.weights import load_model

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16, Muon": {"optimizer": {"name": "muon", "layer_decay": 0.8}},
    "bf16, dropout": {
        "model": SIZE.model_copy(update={"depth": 2, "dropout": 0.1, "stochastic_depth": 0.1}),
        "augment": "shift",
        "mixup": 0.2,
        "optimizer": {"name": "sgd", "ema": 0.9},
    },
}
STEPS, FIT = 60, "refit-0-0"


@pytest.fixture(scope="module", autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def refitting(**fields: Any) -> Finetune:
    """A refit on 80 images that saves its state every seven steps; its curve has a point every three."""
    base = {"labels": Labels(), "learning_rates": (1e-2,), "steps": STEPS, "checkpoint_every": {"steps": 7}}
    return configuration(**base | fields)


def put_store(root: Path) -> Path:
    """A store with the dataset, one of whose images is damaged."""
    put_halves(root / "dataset")
    datasets.damage(context(root / "store", root / "dataset", refitting()).dataset(), (7,))
    return root / "store"


def run(
    given: Context[Any],
    rate: int = 0,
    worker: Worker = ALONE,
    report: Any = None,
    backbone: Path | None = None,
) -> None:
    """Do what the stage and its task for draw 0 do, with this rate of the configuration; or the trial that may stop."""
    dataset, task = given.dataset(), make_task(given.config, given.dataset(), backbone)
    pools, supports = finetune.labelled(given.config, dataset)
    task = task._replace(attempts=open_ledger(given).attempts)
    rates = given.config.learning_rates or (1e-2,)
    task = at_point(task, rate, {"learning_rate": rates[rate]}, dataset)
    if report is not None:
        fits.trial(given, task, pools[0], supports.folds, 0, report, worker)
    elif given.config.early_stopping is not None:
        fits.trial(given, task, pools[0], supports.folds, 0, worker=worker)
    else:
        fits.refit(given, task, pools[0], 0, worker=worker)


def run_killed(root: Path, config: Finetune, number: int, kill: Kill) -> None:
    """Run it in a process that is killed."""
    with pytest.raises(ProcessExitedException) as ended:
        run_workers(1, _worker, root, config, number, kill)
    assert ended.value.signal_name == "SIGKILL"


def _worker(rank: int, root: Path, config: Finetune, number: int, kill: Kill) -> None:
    arm(kill)
    run(attempt(root, config, number))


def run_until(
    patch: pytest.MonkeyPatch, step: int, given: Context[Any], rate: int = 0, backbone: Path | None = None
) -> None:
    """Run it in this process until a step."""
    kill_at(step, patch, lambda: run(given, rate, backbone=backbone))


def saved(root: Path) -> list[Checkpoint]:
    return checkpoints(open_store(str(root)), "finetune", "k", FIT)


def result(root: Path, number: int) -> dict[str, Any]:
    """What an attempt recorded: scores, predictions, curve, substitutes, the sha256 of its model."""
    path = root / Layout.ledger("finetune", "k", number) / "refit-0.json"
    entry: dict[str, Any] = json.loads(path.read_text())
    del entry["name"], entry["sha256"]
    lines = logged(open_store(str(root)), "finetune")
    return entry | {"log": [line for line in lines if line["fit"] == FIT]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The result of each case without checkpoints."""
    results = {}
    for case, fields in CASES.items():
        root = put_store(tmp_path_factory.mktemp("undisturbed"))
        run(attempt(root, refitting(**fields, checkpoint_every={"minutes": 10}), 1))
        assert not [*root.rglob("checkpoints")]
        results[case] = result(root, 1)
    assert [each["substitutes"] for each in results.values()] == [STEPS * 8 // 80] * len(CASES)
    assert [line["step"] for line in results["fp32"]["log"]] == [*range(3, STEPS + 1, 3)]
    return results


@pytest.mark.parametrize("case", CASES)
def test_killed_twice_at_random_it_continues_to_the_same_bytes(case, undisturbed, tmp_path, capsys):
    config, root, rng = refitting(**CASES[case]), put_store(tmp_path), random.Random(case)
    for number in (1, 2):
        first = saved(root)[0].step if saved(root) else 0
        kill = Kill(0, rng.randrange(first + 15, first + 20), rng.uniform(0, 0.01))
        run_killed(root, config, number, kill)
        assert saved(root)[0].step > first and len(saved(root)) <= 2
    newest = saved(root)[0]
    capsys.readouterr()
    run(attempt(root, config, 3))
    said = f"refit, step {newest.step}: continuing from the checkpoint of attempt 2"
    assert said in capsys.readouterr().out
    assert result(root, 3) == undisturbed[case]
    assert not [*root.rglob("checkpoints")]


def test_a_killed_trial_that_may_stop_stops_where_it_would_have(tmp_path, monkeypatch, capsys):
    """The evaluations before the kill count, also the best one."""
    config = refitting(learning_rates=(1.0,), early_stopping={"evaluations": 20, "patience": 5})

    def result_of(attempts: int) -> dict[str, Any]:
        path = root / Layout.ledger("finetune", "k", attempts) / "trial-0-0.json"
        entry = json.loads(path.read_text())
        lines = [line for line in logged(open_store(str(root)), "finetune") if line["fit"] == "trial-0-0"]
        return {name: entry[name] for name in ("accuracy", "loss", "step")} | {"log": lines}

    root = put_store(tmp_path / "undisturbed")
    run(attempt(root, config, 1))
    undisturbed = result_of(1)
    last = undisturbed["step"] + 5 * 3
    assert last == undisturbed["log"][-1]["step"] < STEPS
    root = put_store(tmp_path / "killed")
    run_until(monkeypatch, last - 2, attempt(root, config, 1))
    (newest,) = checkpoints(open_store(str(root)), "finetune", "k", "trial-0-0")
    assert newest.step >= undisturbed["step"], "its best is before the checkpoint"
    run(attempt(root, config, 2))
    assert "continuing from the checkpoint of attempt 1" in capsys.readouterr().out
    assert result_of(2) == undisturbed


@pytest.mark.parametrize(
    "fields",
    [{"lora": {"rank": 2, "dropout": 0.1}, "optimizer": {"ema": 0.9}}, {"freeze": "all_but_biases"}],
    ids=["lora", "biases"],
)
def test_with_few_trained_weights_it_continues_to_the_same_bytes(fields, tmp_path, monkeypatch, capsys):
    """The merged model is the same, and the frozen weights are the backbone's."""
    config = refitting(backbone="vit", model=None, resolution=None, **fields)
    backbone = tmp_path / "vit"
    save_backbone(backbone)
    monkeypatch.setattr(fits, "fetched", lambda context, task: task)
    undisturbed, killed = (put_store(tmp_path / name) for name in ("undisturbed", "killed"))
    run(attempt(undisturbed, config, 1), backbone=backbone)
    run_until(monkeypatch, 50, attempt(killed, config, 1), backbone=backbone)
    assert saved(killed)[0].step == 49
    run(attempt(killed, config, 2), backbone=backbone)
    assert "step 49: continuing from the checkpoint of attempt 1" in capsys.readouterr().out
    assert result(killed, 2) == result(undisturbed, 1)
    model, start = (
        dict(load_model(path)[0].named_parameters()) for path in (killed / Layout.files("finetune", "k", 2), backbone)
    )
    kept = {name for name in start if not name.startswith("head.") and torch.equal(model[name], start[name])}
    moved = {"blocks.0.attn.qkv.weight"} if "lora" in fields else {name for name in start if name.endswith(".bias")}
    assert kept == start.keys() - moved - {"head.weight", "head.bias"}


WIDER = {"model": SIZE.model_copy(update={"width": 24})}
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "truncated": ({}, r"safetensors is damaged: it has [\d,]+ bytes, its manifest says .*; it is not used"),
    "of another architecture": (
        WIDER,
        r"cannot be used: it has \d+ values of weights of .*, but this training needs \d+, .*; it is not used",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_without_a_checkpoint_of_its_own_it_starts_anew_and_says_why(kind, undisturbed, tmp_path, monkeypatch, capsys):
    (fields, said), root, config = UNUSABLE[kind], put_store(tmp_path), refitting(dtype="float32")
    run_until(monkeypatch, 50, attempt(root, refitting(dtype="float32", **fields), 1))
    (checkpoint,) = saved(root)
    assert checkpoint.step == 49
    if kind == "truncated":
        (file,) = checkpoint.files
        os.truncate(root / checkpoint.folder / file.path, file.size - 100)
    run(attempt(root, config, 2))
    out = capsys.readouterr().out
    assert re.search(said, out) and "continuing" not in out
    assert result(root, 2) == undisturbed["fp32"]
    assert not [*root.rglob("checkpoints")]


def test_a_refit_with_another_rate_is_another_fit(undisturbed, tmp_path, monkeypatch, capsys):
    """On GPUs, the trials of the next attempt may choose another rate."""
    config, root = refitting(dtype="float32", learning_rates=(1e-2, 3e-3)), put_store(tmp_path)
    run_until(monkeypatch, 50, attempt(root, config, 1), rate=1)
    run(attempt(root, config, 2), rate=0)
    assert "continuing" not in capsys.readouterr().out
    assert result(root, 2) == undisturbed["fp32"]


def test_an_attempt_ends_when_it_commits_a_checkpoint_after_a_newer_attempt_began(tmp_path, monkeypatch):
    root, config = put_store(tmp_path), refitting()
    first = attempt(root, config, 1)
    run_until(monkeypatch, 20, first)
    attempt(root, config, 2)
    with pytest.raises(Superseded, match=r"attempt 2 .* has taken over"):
        run(first)
    assert [(each.attempt, each.step) for each in saved(root)] == [(1, 14)]


def test_no_checkpoint_is_later_than_a_gradient_that_is_not_finite(tmp_path):
    root = put_store(tmp_path)
    config = refitting(steps=200, learning_rates=(1e30,), checkpoint_every={"steps": 1})
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"nan at step 2, .*; the last checkpoint is of step 2"):
            run(attempt(root, config, number))
        assert saved(root)[0].step == 2, "two steps are done"


TWO: dict[str, Any] = {**CASES["bf16, dropout"], "gradient_accumulation_steps": 2}
# without dropout, whose masks are a worker's own; AdamW scales rounding differences up
SAME: dict[str, Any] = {
    "model": SIZE.model_copy(update={"depth": 2, "stochastic_depth": 0.5}),
    "dtype": "float32",
    "optimizer": {"name": "sgd"},
    "augment": "shift",
    "mixup": 0.5,
    "class_weights": {"left": 3.0},
    "gradient_accumulation_steps": 2,
}


def _member(rank: int, meeting: str, root: Path, config: Finetune, number: int, kill: Kill | None) -> None:
    """Do what a worker of Ray Train does in a refit or a trial."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=config.workers)
    if kill is not None and kill.rank == rank:
        arm(kill)
    worker = Worker(rank, config.workers, rank, number)
    run(attempt(root, config, number), worker=worker)
    dist.destroy_process_group()


def run_group(root: Path, config: Finetune, number: int, kill: Kill | None = None) -> None:
    attempt(root, config, number)  # once, before both write it
    meeting = f"file://{root.parent}/meeting-{number}"
    try:
        run_workers(config.workers, _member, meeting, root, config, number, kill)
    except (ProcessExitedException, ProcessRaisedException) as error:  # the other may be seen first to end
        if kill is None or not ("SIGKILL" in str(error) or "by peer" in str(error)):
            raise
    else:
        assert kill is None, "the kill came too late"


@pytest.fixture(scope="module")
def undisturbed_group(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = put_store(tmp_path_factory.mktemp("undisturbed"))
    run_group(root, refitting(**TWO, workers=2, checkpoint_every={"minutes": 10}), 1)
    return result(root, 1)


def test_a_killed_group_of_workers_continues_to_the_same_bytes(undisturbed_group, tmp_path):
    root, config, rng = put_store(tmp_path), refitting(**TWO, workers=2), random.Random(0)
    for number in (1, 2):
        first = saved(root)[0].step if saved(root) else 0
        run_group(root, config, number, Kill(2 - number, first + 16, rng.uniform(0, 0.01)))
        assert saved(root)[0].step > first
        assert len(saved(root)[0].files) == 2
    run_group(root, config, 3)
    assert result(root, 3) == undisturbed_group
    assert undisturbed_group["substitutes"] == STEPS * 8 // 80, "of both"
    assert not [*root.rglob("checkpoints")]


def test_two_workers_fit_what_one_does_and_either_continues_the_other(tmp_path):
    """The same images, pixels and classes' weights: only the order of the sums differs."""
    results = []
    for name, workers in {"one": (1,), "two": (2,), "two, then one": (2, 1), "one, then two": (1, 2)}.items():
        root = put_store(tmp_path / name)
        for number, count in enumerate(workers, 1):
            config = refitting(**SAME, workers=count)
            kill = Kill(0, 40, 0.0) if number < len(workers) else None
            if count > 1:
                run_group(root, config, number, kill)
            elif kill is not None:
                run_killed(root, config, number, kill)
            else:
                run(attempt(root, config, number))
        weights = load_file(root / Layout.files("finetune", "k", len(workers)) / "model.safetensors")
        results.append((weights, result(root, len(workers))))
    weights, expected = results[0]
    for others, found in results[1:]:
        torch.testing.assert_close(others, weights, rtol=1e-4, atol=1e-5)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["substitutes"] == expected["substitutes"]
        for one, other in zip(expected["log"], found["log"], strict=True):
            assert (one["step"], one["loss"]) == (other["step"], pytest.approx(other["loss"], rel=1e-4))


def test_a_trial_of_two_workers_stops_early_alike_in_both(tmp_path):
    config = refitting(**SAME, learning_rates=(1.0,), early_stopping={"evaluations": 20, "patience": 5})
    found = []
    for workers in (1, 2):
        root = put_store(tmp_path / str(workers))
        given = config.model_copy(update={"workers": workers})
        run(attempt(root, given, 1)) if workers == 1 else run_group(root, given, 1)
        found.append(json.loads((root / Layout.ledger("finetune", "k", 1) / "trial-0-0.json").read_text()))
    assert found[1]["step"] == found[0]["step"] and found[1]["accuracy"] == found[0]["accuracy"]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-3)


def test_a_trial_that_asha_ends_is_recorded_and_leaves_no_checkpoints(tmp_path):
    search = {"kind": "asha", "trials": 2, "evaluations": 6, "over": {"learning_rate": [0.01, 0.1]}}
    config = refitting(**SAME, learning_rates=(), search=search, checkpoint_every={"steps": 10})
    root = put_store(tmp_path)

    def give_up(evaluation: Evaluation) -> None:
        if evaluation.step >= 30:
            raise SystemExit

    with pytest.raises(SystemExit):
        run(attempt(root, config, 1), report=give_up)
    entry = json.loads((root / Layout.ledger("finetune", "k", 1) / "trial-0-0.json").read_text())
    assert (entry["is_pruned"], entry["step"]) == (True, 30)
    assert [step for step, *_ in entry["evaluations"]] == [10, 20, 30]
    assert not [*root.rglob("checkpoints")]
