"""Pretraining in one process or as one of several DeepSpeed workers: `train`, its loop and its metrics.

In: a configuration, an open dataset, which worker this is. Out, in a folder: the model (with a classifier if the
objective uses labels) and curve.json [{step, learning_rate, loss, dev_accuracy}]. The code is the same in a plain
process, on one GPU without Ray and in each of N workers under Ray Train (`ray_jobs.pretrain`).
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipelines.spec import Pretrain
from ray_jobs.augment import TrainTransform
from ray_jobs.data.loader import MEMORY_BYTES, Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.process import devices
from ray_jobs.process.alive import Steps
from ray_jobs.process.progress import Progress
from ray_jobs.training import objective, optim
from ray_jobs.training.contract import model_contract
from vit_model import compute
from vit_model.build import build
from vit_model.config import Architecture, ModelContract, ViTConfig
from vit_model.contrastive import MomentumEncoder, momentum
from vit_model.model import is_fused
from vit_model.preprocessing import normalise
from vit_model.weights import save_model

_CURVE_POINTS = 100
_DEV_EVALUATIONS = 5  # over the run, the last one at its end
_EVALUATION_BATCH = 512  # images per worker


class Worker(NamedTuple):
    """This process's place among the workers."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0


ALONE = Worker()


def train(
    config: Pretrain,
    dataset: Dataset,
    output: Path | None,
    worker: Worker = ALONE,
    counted: Steps | None = None,
) -> dict[str, float | int | str]:
    """Train as one of `worker.world` workers and return the metrics.

    Every step uses the same images at any world size that divides the batch, so the weights agree up to rounding. With
    the same world size and threads on the same type of CPU, the files are identical.

    Args:
        output: the folder for the model and its curve; None on every rank but 0.
        counted: is told how many steps are done.

    Raises:
        UserError: the workers cannot share a batch evenly, or the dataset has no training images.
        DivergenceError: the loss or a gradient is not finite.
    """
    devices.set_threads(config.threads)
    device = devices.device(worker.local_rank)
    dataset.require("train")
    labelled = config.objective in ("softmax", "sigmoid")
    contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop, labelled)
    if worker.rank == 0:
        print(*derived_numbers(config, contract.architecture, worker.world, device), sep="\n", flush=True)
    model = build(contract.architecture)
    model.initialise(config.seed)
    from_files = dataset.info.image is None
    transform = TrainTransform(config, config.seed, len(contract.class_names), from_files)
    task, momentum_encoder = objective.make_task(config, model)
    if momentum_encoder is not None:
        momentum_encoder.to(device)
    _join_group(worker)
    with warnings.catch_warnings():
        # DeepSpeed, and torch itself, call deprecated functions of torch.
        warnings.filterwarnings("ignore", message=".*torch\\.(distributed|jit)", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch\\.distributed", category=FutureWarning)
        engine = _engine(task, config, worker.world)
        dev = Dev(dataset, contract)
        started = time.monotonic()
        images = Images(dataset, dataset.index("train"))
        sampler = Sampler(
            images,
            seed=config.seed,
            batch_size=config.batch_size,
            order=config.order,
            rank=worker.rank,
            world=worker.world,
        )
        with Loader(
            images, sampler, contract.preprocessing, crop=transform.crop, threads=config.threads
        ) as batches:
            curve = run_steps(
                engine, config, batches, transform, dev, contract, worker, device, momentum_encoder, counted
            )
        seconds = time.monotonic() - started
        loading = _summed(batches.metrics(), device)
        weights = full_weights(engine, "" if labelled else "model.")
    if output is not None:
        trained = build(contract.architecture)
        trained.load_state_dict(weights)
        save_model(output, trained, contract)
        (output / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    exaflops = compute.exaflops(contract.architecture, config.steps * config.batch_size)
    metrics: dict[str, float | int | str] = {
        "parameters": contract.architecture.num_parameters,
        "workers": worker.world,
        "device": str(device.type),
        "train_seconds": seconds,
        "images_per_second": config.steps * config.batch_size / seconds,
        "exaflops": exaflops,
        "flops_per_second": exaflops * 1e18 / seconds,
        "final_loss": curve[-1]["loss"],
        **loading,
    }
    if (dev_accuracy := curve[-1]["dev_accuracy"]) is not None:
        metrics["dev_accuracy"] = dev_accuracy
    return metrics


def run_steps(
    engine: Any,
    config: Pretrain,
    batches: Loader,
    transform: TrainTransform,
    dev: Dev,
    contract: ModelContract,
    worker: Worker,
    device: torch.device,
    momentum_encoder: MomentumEncoder | None,
    counted: Steps | None = None,
) -> list[dict[str, Any]]:
    """Run all training steps and return the curve, about a hundred points {step, learning_rate, loss, dev_accuracy}.

    `loss` is the mean over all images since the previous point; `dev_accuracy` is None if it was not measured there.
    """
    dtype = devices.torch_dtype(config.dtype, device)
    steps, batch = config.steps, config.batch_size
    points = {math.ceil(steps * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
    evaluations = {math.ceil(steps * part / _DEV_EVALUATIONS) for part in range(1, _DEV_EVALUATIONS + 1)}
    curve: list[dict[str, Any]] = []
    loss_sum, summed = torch.zeros((), device=device), 0
    progress = Progress(steps)

    for step, (positions, images, labels) in zip(range(steps), batches, strict=False):
        views, targets = transform(images.to(device), labels.to(device), positions, step)
        rate = optim.learning_rate(step, steps, config.learning_rate, config.optimizer)
        optim.set_learning_rate(engine.optimizer, rate)
        loss = objective.batch_loss(
            engine, config, contract, views, targets, positions, dtype, momentum_encoder
        )
        engine.backward(loss)
        engine.step()
        if momentum_encoder is not None:
            momentum_encoder.update(engine.module, momentum(step, steps, config.contrastive.momentum))
        loss_sum += loss.detach()
        summed += 1

        done = step + 1
        if counted is not None:
            counted.done = done
        if done in points or done in evaluations:
            mean_loss = _mean_over_workers(loss_sum / summed)
            # Not at every step, because reading a number waits for the device.
            optim.check_finite("loss", mean_loss, step)
            optim.check_finite("gradient norm", engine.get_global_grad_norm(), step)
            evaluated = accuracy(engine, dev, contract, dtype, worker) if done in evaluations else None
            curve.append({"step": done, "learning_rate": rate, "loss": mean_loss, "dev_accuracy": evaluated})
            loss_sum.zero_()
            summed = 0
        if worker.rank == 0 and progress.due(done):
            progress.show(done, done * batch, loss=loss.item())
    return curve


def accuracy(
    engine: Any, dev: Dev, contract: ModelContract, dtype: torch.dtype, worker: Worker
) -> float | None:
    """Return the fraction of dev images classified correctly; each worker scores a share.

    None if the dataset has no dev split or the model no classifier.
    """
    total = len(dev.labels)
    if total == 0 or not contract.class_names:
        return None
    share = math.ceil(total / worker.world)
    # ZeRO-3 needs the same number of batches on all workers. Indices past the end wrap around and are not counted.
    own = torch.arange(worker.rank * share, (worker.rank + 1) * share)
    correct = torch.zeros((), device=engine.device)
    engine.eval()
    with torch.no_grad():
        for chosen in own.split(_EVALUATION_BATCH):
            images = dev.images(chosen % total).to(engine.device)
            predicted = engine(normalise(images, contract.preprocessing, dtype)).argmax(dim=1)
            right = (predicted.cpu() == dev.labels[chosen % total]) & (chosen < total)
            correct += right.sum().to(engine.device)
    engine.train()
    torch.distributed.all_reduce(correct)
    return correct.item() / total


def derived_numbers(
    config: Pretrain, architecture: Architecture, world: int, device: torch.device
) -> tuple[str, str]:
    """Describe what the configuration implies in two lines: operations, and memory per worker."""
    exaflops = compute.exaflops(architecture, config.steps * config.batch_size)
    dtype = devices.torch_dtype(config.dtype, device)
    images, value_bytes = config.batch_size // world, dtype.itemsize
    fused = isinstance(architecture, ViTConfig) and is_fused(device, dtype, architecture.num_tokens)
    activations = compute.activation_bytes(
        architecture, images, value_bytes=value_bytes, fused_attention=fused
    )
    states = compute.model_state_bytes(architecture.num_parameters, config.zero_stage, world, value_bytes)
    mib = 2**20
    return (
        f"compute: {architecture.num_parameters:,} parameters"
        f" · {compute.forward_flops(architecture) / 1e9:.4g} GFLOPs per image forward"
        f" · {compute.train_flops(architecture) / 1e9:.4g} GFLOPs per image in training"
        f" · {exaflops:.4g} exaFLOPs in {config.steps:,} steps of {config.batch_size:,} images"
        f" · {compute.tpuv3_core_days(exaflops):.2g} TPUv3-core-days",
        f"estimated memory per worker (of {world}): {activations / mib:,.1f} MiB activations of {images:,} images"
        f" · {states.weights / mib:,.1f} MiB weights · {states.gradients / mib:,.1f} MiB gradients"
        f" · {states.optimizer / mib:,.1f} MiB optimizer states (ZeRO-{config.zero_stage})",
    )


class Dev:
    """The dev split: `labels` int64 [n], and its images, which are kept in memory after the first read if they fit."""

    def __init__(self, dataset: Dataset, contract: ModelContract) -> None:
        self._dataset, self._preprocessing = dataset, contract.preprocessing
        self.labels = torch.from_numpy(dataset.labels("dev"))
        side, channels = contract.preprocessing.resolution, contract.preprocessing.channels
        self._is_kept = len(self.labels) * side * side * channels <= MEMORY_BYTES

    def images(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the images at these indices, uint8 [n, h, w, c]."""
        if self._is_kept:
            return self._all[indices]
        return torch.from_numpy(self._dataset.images("dev", self._preprocessing, indices.numpy()))

    @cached_property
    def _all(self) -> torch.Tensor:
        return torch.from_numpy(self._dataset.images("dev", self._preprocessing))


def _summed(metrics: dict[str, float | int], device: torch.device) -> dict[str, float | int]:
    """Sum the metrics over all workers, which must all call this."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return {
        name: type(value)(total)
        for (name, value), total in zip(metrics.items(), values.tolist(), strict=True)
    }


def full_weights(engine: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Gather the float32 weights from all workers, which must all call this.

    Keeps only names that begin with `prefix`, and removes it from them.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        if name.startswith(prefix):
            weights[name.removeprefix(prefix)] = (
                (parameter if full is None else full).detach().float().cpu().clone()
            )
    return weights


def _join_group(worker: Worker) -> None:
    """Create a process group for a process that works alone; Ray Train's workers have already joined theirs.

    The group stays until the process ends, because DeepSpeed keeps handles to it.
    """
    os.environ.setdefault("LOCAL_RANK", str(worker.local_rank))  # DeepSpeed reads it
    if not dist.is_initialized():
        assert worker.world == 1, "several workers join their process group before they train"
        devices.stay_on_loopback()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(devices.backend(), store=store, rank=0, world_size=1)


def _engine(model: torch.nn.Module, config: Pretrain, world: int) -> Any:
    settings = optim.deepspeed_config(
        batch_size=config.batch_size,
        world=world,
        zero_stage=config.zero_stage,
        dtype=config.dtype,
        optimizer=config.optimizer,
    )
    optimizer = optim.adamw(model, config.optimizer, decays_all=config.objective == "contrastive")
    deepspeed = devices.import_deepspeed()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    return engine


def _mean_over_workers(value: torch.Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
