"""The pretrain stage: a dataset and a shape of model in, that model trained on it out.

In: a dataset artifact. Out: model.safetensors and config.json of the model with its classifier (with an objective that
needs no labels, without one), curve.json [{step, learning_rate, loss, dev_accuracy}]. `train` is one worker: it runs in
a plain process, on one GPU without Ray and as one of N DeepSpeed workers under Ray Train (`main`), always the same
code.

    python -m ray_jobs.pretrain --spec STORE/artifacts/pretrain/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import warnings
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.spec import EvalCrop, Model, Pretrain
from pipelines.store import FileEntry
from ray_jobs.process.progress import Progress
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from ray_jobs.training import devices, objective

if TYPE_CHECKING:
    import torch

    from ray_jobs.data.loader import Loader
    from ray_jobs.data.shards import Dataset, DatasetInfo
    from vit_model.config import Architecture, ModelContract
    from vit_model.contrastive import MomentumEncoder

_CURVE_POINTS = 100
_DEV_EVALUATIONS = 5  # over the run, the last one at its end
_EVALUATION_BATCH = 512  # images a worker
# A busy cluster is waited for so long; what it could never give is refused before.
_START_TIMEOUT_SECONDS = 900


class Worker(NamedTuple):
    """Which of how many workers this process is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0


ALONE = Worker()


def train(
    config: Pretrain, dataset: Dataset, output: Path | None, worker: Worker = ALONE
) -> dict[str, float | int | str]:
    """Train as one of `worker.world` workers; `output` is where the model and its curve go, None on all ranks but 0.

    The images of every step, and so the weights up to rounding, are the same at any world size that divides the
    batch; with the same world and threads on the same type of CPU the files are the same bytes.

    Returns the metrics. Raises ValueError when the workers cannot share a batch, the dataset has no training images,
    or the loss or a gradient stops being finite.
    """
    devices.set_threads(config.threads)
    from ray_jobs.data.loader import Loader
    from vit_model import compute
    from vit_model.build import build
    from vit_model.weights import save_model

    device = devices.device(worker.local_rank)
    dataset.require("train")
    labelled = config.objective in ("softmax", "sigmoid")
    contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop, labelled)
    if worker.rank == 0:
        print(*derived_numbers(config, contract.architecture, worker.world, device), sep="\n", flush=True)
    model = build(contract.architecture)
    model.initialise(config.seed)
    task, follower = objective.make_task(config, model)
    if follower is not None:
        follower.to(device)
    _join_group(worker)
    with warnings.catch_warnings():
        # DeepSpeed's calls of torch, and torch's of itself, which nobody here can change.
        warnings.filterwarnings("ignore", message=".*torch\\.(distributed|jit)", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch\\.distributed", category=FutureWarning)
        engine = _engine(task, config, worker.world)
        dev = Dev(dataset, contract)
        started = time.monotonic()
        with Loader(
            dataset,
            dataset.index("train"),
            contract.preprocessing,
            policy=objective.policy(config),
            order=config.order,
            seed=config.seed,
            batch=config.batch_size,
            rank=worker.rank,
            world=worker.world,
            threads=config.threads,
        ) as batches:
            curve = run_steps(engine, config, batches, dev, contract, worker, device, follower)
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
    dev: Dev,
    contract: ModelContract,
    worker: Worker,
    device: torch.device,
    follower: MomentumEncoder | None,
) -> list[dict[str, Any]]:
    """The loop. Returns its curve: at about every hundredth of the steps {step, learning_rate, loss, dev_accuracy}.

    `loss` is the mean over all images since the last point; `dev_accuracy` is None where it was not measured.
    """
    import torch

    from ray_jobs.augment import augment, randomise
    from ray_jobs.training import optim
    from vit_model.contrastive import momentum

    dtype = devices.torch_dtype(config.dtype, device)
    steps, batch = config.steps, config.batch_size
    points = {math.ceil(steps * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
    evaluations = {math.ceil(steps * part / _DEV_EVALUATIONS) for part in range(1, _DEV_EVALUATIONS + 1)}
    curve: list[dict[str, Any]] = []
    loss_sum, summed = torch.zeros((), device=device), 0
    progress = Progress(steps)

    for step, (positions, images, labels) in zip(range(steps), batches, strict=False):
        images, labels = images.to(device), labels.to(device)
        if not batches.is_cropped:
            images = augment(images, objective.policy(config), config.seed, positions)
        images, labels = randomise(
            images, labels, len(contract.class_names), config, config.seed, step, positions
        )
        rate = optim.learning_rate(step, steps, config.learning_rate, config.optimizer)
        optim.set_learning_rate(engine.optimizer, rate)
        loss = objective.batch_loss(engine, config, contract, images, labels, positions, dtype, follower)
        engine.backward(loss)
        engine.step()
        if follower is not None:
            follower.follow(engine.module, momentum(step, steps, config.contrastive.momentum))
        loss_sum += loss.detach()
        summed += 1

        done = step + 1
        if done in points or done in evaluations:
            mean_loss = _mean_over_workers(loss_sum / summed)
            # here and not at each step: reading a number waits for the device
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
    """Fraction of dev images that are classified correctly, each worker judging a share.

    None without a dev split or without a classifier.
    """
    import torch

    from vit_model.preprocessing import normalise

    total = len(dev.labels)
    if total == 0 or not contract.class_names:
        return None
    share = math.ceil(total / worker.world)
    # All workers run the same number of batches, which ZeRO-3 needs; what sticks out past the end does not count.
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


def model_contract(
    size: Model,
    resolution: int,
    info: DatasetInfo,
    eval_crop: EvalCrop | None = None,
    classifier: bool = True,
) -> ModelContract:
    """The contract of a model of this size, with a classifier or without, that is trained on a dataset."""
    from vit_model.config import ModelContract, Preprocessing

    channels = 3 if info.image is None else info.image.channels
    class_names = info.class_names if classifier else ()
    if eval_crop is None:
        square = info.image is not None and info.image.height == info.image.width
        eval_crop = EvalCrop(crop="squash" if square else "center")
    preprocessing = Preprocessing(
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        crop=eval_crop.crop,
        crop_fraction=eval_crop.crop_fraction,
        resolution=resolution,
        channels=channels,
    )
    return ModelContract(
        architecture=size.architecture(resolution, channels, len(class_names)),
        class_names=class_names,
        preprocessing=preprocessing,
        training_data=info.content_digest,
        license=None,
    )


def derived_numbers(
    config: Pretrain, architecture: Architecture, world: int, device: torch.device
) -> tuple[str, str]:
    """What follows from the configuration, in two lines with every number named: operations and memory."""
    from vit_model import compute
    from vit_model.config import ViTConfig
    from vit_model.model import is_fused

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
        f" · {compute.forward_flops(architecture) / 1e9:.4g} GFLOPs an image forward"
        f" · {compute.train_flops(architecture) / 1e9:.4g} GFLOPs an image in training"
        f" · {exaflops:.4g} exaFLOPs in {config.steps:,} steps of {config.batch_size:,} images"
        f" · {compute.tpuv3_core_days(exaflops):.2g} TPUv3-core-days",
        f"memory of a worker (of {world}), estimated: {activations / mib:,.1f} MiB activations of {images:,} images"
        f" · {states.weights / mib:,.1f} MiB weights · {states.gradients / mib:,.1f} MiB gradients"
        f" · {states.optimizer / mib:,.1f} MiB optimizer states (ZeRO-{config.zero_stage})",
    )


class Dev:
    """The dev split: `labels` int64 [n]; its images stay in memory once they were read, where they are few."""

    def __init__(self, dataset: Dataset, contract: ModelContract) -> None:
        import torch

        from ray_jobs.data.loader import MEMORY_BYTES

        self._dataset, self._preprocessing = dataset, contract.preprocessing
        self.labels = torch.from_numpy(dataset.labels("dev"))
        side, channels = contract.preprocessing.resolution, contract.preprocessing.channels
        self._is_kept = len(self.labels) * side * side * channels <= MEMORY_BYTES

    def images(self, indices: torch.Tensor) -> torch.Tensor:
        """uint8 [n, h, w, c]."""
        import torch

        if self._is_kept:
            return self._all[indices]
        return torch.from_numpy(self._dataset.images("dev", self._preprocessing, indices.numpy()))

    @cached_property
    def _all(self) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._dataset.images("dev", self._preprocessing))


def _summed(metrics: dict[str, float | int], device: torch.device) -> dict[str, float | int]:
    """The sums over all workers, which must all call this."""
    import torch
    import torch.distributed as dist

    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return {
        name: type(own)(total) for (name, own), total in zip(metrics.items(), values.tolist(), strict=True)
    }


def full_weights(engine: Any, prefix: str) -> dict[str, torch.Tensor]:
    """The float32 weights whose names begin with `prefix`, without it; put together from all workers, which must all
    call this."""
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
    """Make the group of a process that works alone; Ray Train's workers have joined theirs before.

    It stays until the process ends, because DeepSpeed keeps handles to it.
    """
    import torch.distributed as dist

    os.environ.setdefault("LOCAL_RANK", str(worker.local_rank))  # DeepSpeed reads it
    if not dist.is_initialized():
        assert worker.world == 1, "several workers join their group before they train"
        devices.stay_on_loopback()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(devices.backend(), store=store, rank=0, world_size=1)


def _engine(model: torch.nn.Module, config: Pretrain, world: int) -> Any:
    from ray_jobs.training import optim

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
    import torch.distributed as dist

    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# ------------------------------------------------------------------------------------------------- under Ray


def main(context: Context[Pretrain]) -> Result:
    """Run `config.workers` workers under Ray Train."""
    outcome = run_workers(context)
    files: tuple[FileEntry, ...] = outcome["files"]
    return Result(content_digest=model_digest(files), files=files, metrics=outcome["metrics"])


def run_workers(context: Context[Pretrain]) -> dict[str, Any]:
    """{files, metrics} of rank 0."""
    os.environ.update(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",  # the default notices starts and ends a second later
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(_START_TIMEOUT_SECONDS),
        RAY_TRAIN_METRICS_ENABLED="0",
        RAY_TRAIN_ENABLE_PRINT_PATCH="0",  # it shows every line twice
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    )
    from ray.train import FailureConfig, LoggingConfig, RunConfig
    from ray.train.torch import TorchTrainer

    from ray_jobs.training.process_group import OnOneMachine

    attempt = context.attempt
    workers = context.config.workers or devices.default_workers(context.config.batch_size)
    with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
        trainer = TorchTrainer(
            _ray_worker,
            train_loop_config={"context": context},
            torch_config=OnOneMachine(),
            scaling_config=devices.scaling(workers, context.config.threads),
            run_config=RunConfig(
                name=attempt.submission_id,  # Ray Train resumes a run of the same name: an attempt has its own
                storage_path=scratch,  # nothing is kept there: what a worker made goes into the store
                # A failed worker fails the attempt; the pipeline's driver decides about the next.
                failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
                # Below a warning it says where each worker runs.
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
        )
        outcome: dict[str, Any] = trainer.fit().return_value
    return outcome


def _ray_worker(settings: dict[str, Any]) -> dict[str, Any]:
    import ray.train

    context: Context[Pretrain] = settings["context"]
    at = ray.train.get_context()
    worker = Worker(at.get_world_rank(), at.get_world_size(), at.get_local_rank())
    if worker.rank:
        train(context.config, context.dataset(context.config.cache_gib), None, worker)
        return {}
    with context.staging() as staging:
        metrics = train(context.config, context.dataset(context.config.cache_gib), staging.path, worker)
    return {"files": staging.files, "metrics": metrics}


if __name__ == "__main__":
    run_stage("pretrain")
