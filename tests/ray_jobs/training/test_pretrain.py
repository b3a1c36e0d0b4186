"""Pretraining: against torch without DeepSpeed, twice, with two workers, under Ray Train, and when it diverges."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from pipelines.spec import Finetune, ModelSize, Optimizer, Pretrain
from pipelines.store import Attempt, Store, checkpoints, now, open_store
from ray_jobs import pretrain
from ray_jobs.data import shards
from ray_jobs.evaluation.features import embed
from ray_jobs.training import loop
from ray_jobs.training.evaluators import predict
from ray_jobs.training.fit import fit
from ray_jobs.training.task import make_task, read_split
from tests.support import datasets
from tests.support.interrupted import files_below
from tests.support.local_runs import with_words
from tests.support.pretraining import pretraining
from tests.support.records import make_context, make_manifest
from tests.support.s3 import free_port
from tests.support.stores import repeated
from tests.support.workers import run_workers
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import load_model

CLASSES = ("left", "right", "top")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Grey noise of 8x8 with a bright half that says the class: 48 to train on, 25 to watch."""
    counts = {"train": 48, "dev": 25, "test": 0}
    return datasets.put_halves(tmp_path_factory.mktemp("dataset"), counts, CLASSES)


def configuration(**fields: object) -> Pretrain:
    return pretraining(**{"steps": 30, "workers": 1} | fields)


LEFT_OUT = ModelSize(patch_size=4, width=16, depth=2, num_heads=2, stochastic_depth=0.5)


def train(config: Pretrain, folder: Path, output: Path | None, *worker: loop.Worker) -> dict[str, object]:
    return loop.train(config, shards.open_dataset(folder), output, *worker)


def assert_same_model(ours: ViT, theirs: ViT) -> None:
    """Equal but for the order of additions. A key's bias has no effect, so that Adam scales up its rounding errors."""
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        keep = torch.ones(len(one), dtype=torch.bool)
        if name.endswith("qkv.bias"):
            keep[len(one) // 3 : 2 * len(one) // 3] = False
        torch.testing.assert_close(
            one[keep], other[keep], rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_learns_and_leaves_a_whole_model(dataset, tmp_path):
    metrics = train(configuration(steps=80, learning_rate=1e-2), dataset, tmp_path)
    model, contract = load_model(tmp_path)
    images = torch.from_numpy(shards.open_dataset(dataset).images("dev", contract.preprocessing))
    predicted = model(normalise(images, contract.preprocessing, torch.float32)).argmax(dim=1)
    right = (predicted.numpy() == shards.open_dataset(dataset).labels("dev")).mean()
    assert right > 0.9
    assert metrics["dev_accuracy"] == pytest.approx(right, abs=0.05)  # measured in bfloat16
    assert (contract.class_names, contract.training_data) == (
        CLASSES,
        shards.open_dataset(dataset).info.content_digest,
    )
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [point["step"] for point in curve] == list(range(1, 81))
    assert [point["step"] for point in curve if point["dev_accuracy"] is not None] == [16, 32, 48, 64, 80]
    assert curve[-1]["loss"] < 0.5 * curve[0]["loss"]


def test_says_what_it_will_take_before_it_begins(dataset, tmp_path, capsys):
    metrics = train(configuration(steps=8, threads=1), dataset, tmp_path)
    said = capsys.readouterr().out
    _, contract = load_model(tmp_path)
    # elsewhere it overlooks fused attention
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = ViT(contract.architecture)
        model.head(model.forward_features(torch.zeros(1, 1, 8, 8))[1])
    flops = counter.get_total_flops()
    assert said.index("batch: ") < said.index("compute: ") < said.index("progress {")
    parameters = sum(p.numel() for p in model.parameters())
    for part in (
        f"{parameters:,} parameters",
        f"{flops / 1e9:.4g} GFLOPs per image forward",
        "in 8 steps of 16 images",
    ):
        assert part in said
    assert metrics["exaflops"] == pytest.approx(3 * flops * 8 * 16 / 1e18)
    assert metrics["flops_per_second"] == pytest.approx(3 * flops * metrics["images_per_second"])


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_bytes_and_another_seed_does_not(dataset, tmp_path):
    config = configuration(augment="shift", steps=8)
    for name, changed in {"a": config, "b": config, "c": config.model_copy(update={"seed": 1})}.items():
        train(changed, dataset, tmp_path / name)
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")
    assert files_below(tmp_path / "a")["model.safetensors"] != files_below(tmp_path / "c")["model.safetensors"]


@pytest.mark.parametrize(
    "fields",
    [
        {"objective": "masked_patches", "augment": "shift"},
        {"objective": "mae", "mae": {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}},
        {"mixup": 0.5, "label_smoothing": 0.1},
        {"auxiliary": {"masked_patches": 0.5}},
    ],
    ids=["masked patches", "masked autoencoder", "mixup", "labels and patches"],
)
def test_micro_batches_are_parts_of_the_batch(dataset, tmp_path, capsys, fields):
    """What is mixed, what is masked and which blocks are left out does not depend on them."""
    config = configuration(dtype="float32", steps=6, optimizer=Optimizer(warmup_fraction=0.0), model=LEFT_OUT, **fields)
    train(config, dataset, tmp_path / "whole")
    train(config.model_copy(update={"gradient_accumulation_steps": 4}), dataset, tmp_path / "parts")
    assert "batch: 16 images = 1 worker x 4 micro-batches x 4 images\n" in capsys.readouterr().out
    (whole, _), (parts, _) = (load_model(tmp_path / name) for name in ("whole", "parts"))
    assert_same_model(parts, whole)
    losses = [
        [point["loss"] for point in json.loads((tmp_path / name / "curve.json").read_text())]
        for name in ("whole", "parts")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_activation_checkpointing_gives_the_same_bytes(dataset, tmp_path, zero_stage):
    """It is not in the key. With dropout, which is drawn again; float32 and one process at stage 0."""
    size = ModelSize(patch_size=4, width=16, depth=2, num_heads=2, dropout=0.1, stochastic_depth=0.1, pooling="gap")
    fields = {
        "model": size,
        "steps": 6,
        "zero_stage": zero_stage,
        "dtype": "bfloat16" if zero_stage else "float32",
    }
    for name, activation_checkpointing in {"kept": False, "again": True}.items():
        config = configuration(activation_checkpointing=activation_checkpointing, **fields)
        if zero_stage:
            run_workers(2, _worker, 2, free_port(), config, dataset, tmp_path / name)
        else:
            train(config, dataset, tmp_path / name)
    assert files_below(tmp_path / "kept") == files_below(tmp_path / "again")


SIZE = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"family": "resnet", "units": [1, 1]},
        {**SIZE, "patch_size": 8, "stem": [1]},
        {**SIZE, "pooling": "gap", "axial": True},
        {**SIZE, "residual": False},
    ],
    ids=["resnet", "hybrid", "axial", "no residual"],
)
def test_every_architecture_goes_the_same_way(dataset, tmp_path, model):
    """Pretrained in bfloat16, loaded, fine-tuned at another resolution, taken for its features; and it learns."""
    config = configuration(model=model, resolution=16, steps=40, learning_rate=1e-2)
    metrics = train(config, dataset, tmp_path)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert curve[-1]["loss"] < 0.5 * curve[0]["loss"]
    trained, contract = load_model(tmp_path)
    assert metrics["parameters"] == sum(parameter.numel() for parameter in trained.parameters())
    data = shards.open_dataset(dataset)
    start = {"data": "halves", "backbone": "pretrained", "resolution": 24}
    sweep = Finetune(job="finetune", **start, learning_rates=(1e-3,), steps=4, batch_size=8)
    task = make_task(sweep, data, tmp_path)
    assert type(task.contract.architecture) is type(contract.architecture)
    images = read_split(data, "train")
    tuned, *_ = fit(task, images, 1e-3, seed=0)
    assert predict(tuned, task.contract, images).shape[0] == 48
    features = embed(trained, contract, 1, data.images("dev", contract.preprocessing))
    assert features.shape == (25, contract.architecture.width) and np.isfinite(features).all()


def test_a_run_that_diverges_ends_with_advice(dataset, tmp_path):
    with pytest.raises(ValueError, match=r"(loss|gradient norm) is .* at step \d+.*: lower learning_rate"):
        train(configuration(learning_rate=1e30, optimizer=Optimizer(warmup_fraction=0.0)), dataset, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def _worker(rank: int, world: int, port: int, config: Pretrain, dataset: Path, output: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    metrics = train(config, dataset, None if rank else output, loop.Worker(rank, world, rank))
    output.with_name(f"{output.name}-{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_workers_agree_with_one_and_with_themselves(dataset, tmp_path):
    config = configuration(dtype="float32", steps=8, model=LEFT_OUT)
    alone = train(config, dataset, tmp_path / "one")
    for name in ("two", "again"):
        run_workers(2, _worker, 2, free_port(), config, dataset, tmp_path / name)
    assert files_below(tmp_path / "two") == files_below(tmp_path / "again")
    one, two = (load_model(tmp_path / name)[0] for name in ("one", "two"))
    assert_same_model(two, one)
    accuracies = [
        json.loads((tmp_path / name / "curve.json").read_text())[-1]["dev_accuracy"] for name in ("one", "two")
    ]
    assert accuracies[0] == accuracies[1]
    for rank in (0, 1):  # what each has read is told by both as the sum
        metrics = json.loads((tmp_path / f"two-{rank}.json").read_text())
        assert metrics["data_bytes"] == alone["data_bytes"] > 0 == metrics["substitutes"]


@pytest.mark.parametrize(
    ("units", "min_workers", "workers"), [(8, 1, 8), (9, 1, 8), (4, 1, 4), (3, 1, 2), (1, 1, 1), (1, 3, 4)]
)
def test_workers_are_as_many_as_divide_the_batch_and_find_room(units, min_workers, workers):
    config = configuration(batch_size=16, workers=8, min_workers=min_workers)
    assert pretrain._workers_left(config, 8, 8, units) == workers


def test_a_training_on_gpus_waits_for_another_one_and_does_not_continue_on_cpus(monkeypatch):
    cluster = iter([{"CPU": 16.0}, {"CPU": 16.0}, {"CPU": 32.0, "GPU": 2.0}])
    monkeypatch.setattr(pretrain.cluster, "cluster_resources", lambda: next(cluster))
    monkeypatch.setattr(pretrain, "_LOOK_SECONDS", 0.0)
    assert pretrain._units_left("GPU") == 2
    monkeypatch.setattr(pretrain.cluster, "cluster_resources", lambda: {"CPU": 16.0})
    monkeypatch.setattr(pretrain, "_NODE_SECONDS", 0.0)
    with pytest.raises(UserError, match="the cluster has no GPU any more"):
        pretrain._units_left("GPU")


@pytest.mark.full
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")
def test_when_a_worker_of_ray_train_dies_its_group_continues_in_the_same_attempt(dataset, tmp_path, local_ray):
    config = configuration(workers=2, steps=600, checkpoint_every={"steps": 50})
    results, deaths = [], []
    for name in ("undisturbed", "killed"):
        store, data = open_store(str(tmp_path / name)), make_manifest("ingest")
        shutil.copytree(dataset, store.local(data.folder, ()))
        context = make_context(store, config, data=data)
        if name == "killed":
            killer = threading.Thread(target=kill_a_worker, args=(store, context.attempt, deaths))
            killer.start()
        results.append(pretrain.main(context))
    killer.join()
    undisturbed, killed = results
    assert repeated(killed.files) == repeated(undisturbed.files), "paths, sizes and digests"
    assert killed.metrics["continued_at_step"] == deaths[0]
    assert checkpoints(store, "pretrain", "k")[0].created > deaths[1], "the next group saved, too"
    last = {each.attempt for each in checkpoints(store, "pretrain", "k")}
    assert last == {1}


def kill_a_worker(store: Store, attempt: Attempt, deaths: list[Any]) -> None:
    """SIGKILL for one of Ray Train's workers after the second checkpoint; add its step, and the time."""
    while len(checkpoints(store, attempt.job, attempt.key)) < 2:
        time.sleep(0.02)
    worker, _ = with_words(psutil.Process().children(recursive=True), "ray::RayTrainWorker")
    worker.kill()
    worker.wait()
    deaths += [checkpoints(store, attempt.job, attempt.key)[0].step, now()]
