"""Who trains: each arm runs the steps of a `Size` in one of `world` processes and returns when each step ended."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipelines.spec import Pretrain
from pipelines.store import open_store
from ray_jobs.data import shards
from ray_jobs.process import devices
from ray_jobs.training import loop, optim
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.contract import model_contract
from ray_jobs.training.engine import Plain
from ray_jobs.training.methods import make_method
from tests.support.records import make_attempt
from training.sizes import Size
from vit_model.build import build
from vit_model.contract import ModelContract
from vit_model.parts import AroundModel
from vit_model.preprocessing import normalise

PEERS = Path(tempfile.gettempdir()) / "vitflow-training-peers"
REQUIREMENTS = "transformers accelerate huggingface_hub tokenizers regex httpx httpcore h11 anyio sniffio hf_xet"
DTYPE = torch.bfloat16


class Place(NamedTuple):
    """One of the processes."""

    rank: int
    world: int
    folder: Path
    """The dataset's."""


Arm = Callable[[Size, Place], list[float]]


class TimedManager(CheckpointManager):
    """Notes when each step ended."""

    times: list[float]

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due."""
        self.times.append(time.perf_counter())
        return super().is_due(step)


def ours(size: Size, place: Place, **fields: Any) -> list[float]:
    """The whole pretraining, as the stage runs it in each worker, but for Ray."""
    config = size.config(**fields)
    with tempfile.TemporaryDirectory() as scratch:
        store = open_store(f"{scratch}/store")
        if place.world > 1:
            name = [scratch]
            dist.broadcast_object_list(name, 0)
            store = open_store(f"{name[0]}/store")
        worker = loop.Worker(place.rank, place.world, place.rank)
        manager = TimedManager(store, make_attempt("pretrain", store_uri=store.uri), config, worker)
        manager.times = []
        output = None if place.rank else Path(scratch)
        loop.train(config, shards.open_dataset(place.folder), output, worker, manager)
        if place.world > 1:
            dist.barrier()
    return manager.times


def often_saved(size: Size, place: Place) -> list[float]:
    """The same without ZeRO, with a checkpoint every few steps."""
    return ours(size, place, zero_stage=0, checkpoint_every={"steps": size.saved_every})


def bare(size: Size, place: Place, is_compiled: bool = False) -> list[float]:
    """The same step with clipping and AdamW on a batch in memory; the processes do not exchange anything."""
    config, contract, images, labels = _in_memory(size, place)
    devices.set_threads(config.threads)
    model = build(contract.architecture)
    model.initialise(0)
    method = make_method(config, contract, devices.device())
    optimizer = optim.make_optimizer(model, config.optimizer, config.learning_rate)
    engine = Plain(model, optimizer, DTYPE, config.optimizer.clip_norm)
    if is_compiled:
        for block in engine.module.blocks:
            block.compile()
    share = config.batch_size // place.world
    views, targets, times = (images[:share],), labels[:share], []
    for _ in range(config.steps):
        loss = method.loss(engine, optim.MicroBatch(views, targets, np.arange(share)))
        engine.backward(loss)
        engine.step(config.learning_rate)
        times.append(time.perf_counter())
    return times


def hugging_face(size: Size, place: Place, loaders: int) -> list[float]:
    """Hugging Face's `Trainer` with `loaders` loader processes per worker."""
    sys.path.insert(0, str(PEERS))
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    config, contract, images, labels = _in_memory(size, place)
    devices.set_threads(config.threads)
    model = _WithLoss(contract)
    optimizer = optim.make_optimizer(model, config.optimizer, config.learning_rate)
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            per_device_train_batch_size=config.batch_size // place.world,
            max_steps=config.steps,
            bf16=True,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            max_grad_norm=config.optimizer.clip_norm,
            dataloader_num_workers=loaders,
            dataloader_persistent_workers=loaders > 0,
            dataloader_drop_last=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, config))
        dataset = _Shifted(images, labels)
        Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, schedule), callbacks=[Clock()]).train()
    return times


def ray_train(size: Size, place: Place, loaders: int) -> list[float]:
    """A plain script for Ray Train with DDP and a DataLoader of `loaders` processes per worker; starts its own Ray."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(prefix="vf", ignore_cleanup_errors=True) as scratch:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _temp_dir=scratch,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )
        trainer = TorchTrainer(
            _ray_loop,
            train_loop_config={"size": size, "folder": place.folder, "loaders": loaders},
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=scratch, failure_config=FailureConfig(max_failures=0)),
        )
        times: list[float] = trainer.fit().return_value
        ray.shutdown()
    return times


def _ray_loop(settings: dict[str, Any]) -> list[float]:
    from ray.train.torch import prepare_data_loader, prepare_model

    place = Place(dist.get_rank(), dist.get_world_size(), settings["folder"])
    config, contract, images, labels = _in_memory(settings["size"], place)
    torch.set_num_threads(config.threads)
    model = prepare_model(_WithLoss(contract))
    optimizer = optim.make_optimizer(model, config.optimizer, config.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, config))
    share, loaders = config.batch_size // place.world, settings["loaders"]
    loader = prepare_data_loader(
        DataLoader(_Shifted(images, labels), share, shuffle=True, num_workers=loaders, drop_last=True)
    )
    times: list[float] = []
    while True:
        for batch in loader:
            with torch.autocast("cpu", DTYPE):
                loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
            if len(times) == config.steps:
                return times


class _WithLoss(AroundModel):
    """Our model as Hugging Face's `Trainer` expects one."""

    def __init__(self, contract: ModelContract) -> None:
        super().__init__()
        self.model = build(contract.architecture)
        self.model.initialise(0)
        self.preprocessing = contract.preprocessing

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(normalise(images, self.preprocessing, torch.float32))
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), labels)}


class _Shifted(Dataset[dict[str, Tensor]]):
    """Images in memory, each moved by -1, 0 or 1 pixel in each direction, as `augment: shift`."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = torch.nn.functional.pad(images, (0, 0, 1, 1, 1, 1))
        self.labels, self.side = labels, images.shape[1]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        top, left = torch.randint(3, (2,)).tolist()
        image = self.images[index, top : top + self.side, left : left + self.side]
        return {"images": image, "labels": self.labels[index]}


def _in_memory(size: Size, place: Place) -> tuple[Pretrain, ModelContract, Tensor, Tensor]:
    config, dataset = size.config(), shards.open_dataset(place.folder)
    contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop)
    images = torch.from_numpy(dataset.images("train", contract.preprocessing))
    return config, contract, images, torch.from_numpy(dataset.labels("train"))


def _rate(config: Pretrain, step: int) -> float:
    return optim.learning_rate(min(step, config.steps), config.steps, config.learning_rate, config.optimizer)


ARMS: dict[str, Arm] = {
    "two processes, nothing exchanged": bare,
    "ours, plain": partial(ours, zero_stage=0),
    "ours, ZeRO-1": partial(ours, zero_stage=1),
    "ours, plain, often saved": often_saved,
    "Hugging Face": partial(hugging_face, loaders=0),
    "Hugging Face, loader processes": partial(hugging_face, loaders=1),
    "Ray Train, DataLoader": partial(ray_train, loaders=0),
    "Ray Train, DataLoader processes": partial(ray_train, loaders=1),
    "one process": bare,
    "one process, compiled blocks": partial(bare, is_compiled=True),
    "ours, plain, one worker": partial(ours, zero_stage=0),
}


def run(rank: int, world: int, arm: str, size: Size, folder: Path, scratch: Path, port: int) -> None:
    """Run an arm as process `rank`; rank 0 writes the times."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=world)
    with contextlib.redirect_stdout(io.StringIO()):
        times = ARMS[arm](size, Place(rank, world, folder))
    if rank == 0:
        (scratch / "times").write_text("\n".join(map(str, times)))
    if dist.is_initialized():
        dist.destroy_process_group()
