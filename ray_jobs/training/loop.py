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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelines.spec import Pretrain, objective_properties
from pipelines.store import LogLine
from ray_jobs.augment import TrainTransform, dropout_seed
from ray_jobs.data.loader import MEMORY_BYTES, Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.process import devices
from ray_jobs.training import estimates, optim
from ray_jobs.training.ancestor import Ancestor, contract_from, take_over
from ray_jobs.training.checkpoint import Saved, Saver, WorkerState
from ray_jobs.training.contract import model_contract
from ray_jobs.training.engine import EMA, WEIGHTS, Engine, Piece, make_engine
from ray_jobs.training.few_shot import FewShotProbe
from ray_jobs.training.guard import Guard
from ray_jobs.training.log import Log, LogWriter
from ray_jobs.training.methods import Method, make_method
from ray_jobs.training.task import Evaluation
from ray_jobs.training.workers import ALONE, Worker
from vit_model.build import Network, build
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import save_model, save_weights

_CURVE_POINTS = 100
_DEV_EVALUATIONS = 5  # over the run, the last one at its end
_EVALUATION_BATCH = 512  # images per worker


def train(
    config: Pretrain,
    dataset: Dataset,
    output: Path | None,
    worker: Worker = ALONE,
    saver: Saver | None = None,
    saved: Saved | None = None,
    ancestor: Ancestor | None = None,
    writer: LogWriter | None = None,
    teacher: Ancestor | None = None,
) -> dict[str, float | int | str]:
    """Train as one of `worker.world` workers and return the metrics.

    Every step uses the same images at any world size that divides the batch, and stochastic depth leaves out the same
    blocks for each, so without dropout the weights agree up to rounding. With the same world size and threads on the
    same type of CPU, the files are identical, also after any number of interruptions that continue from a checkpoint.

    Args:
        output: the folder for the model and its curve; None on every rank but 0.
        saver: writes the checkpoints; None: none are written.
        saved: the checkpoint to continue from.
        ancestor: the model whose weights training starts from; None: new weights.
        writer: of rank 0, writes the log; None: there is none.
        teacher: the model that objective distillation imitates.

    Raises:
        UserError: the workers cannot share a batch evenly, their memory cannot hold the training, the dataset has no
            training images, the ancestor's weights do not fit the model, or the teacher does not fit the data.
        DivergenceError: the loss or a gradient is not finite.
        StoreDamaged: the checkpoint does not fit the model.
        Superseded: while a checkpoint was committed, there was a newer attempt.
    """
    devices.set_threads(config.threads)
    device = devices.device(worker.local_rank)
    dataset.require("train")
    labelled = objective_properties(config.objective).classifier is not None
    if ancestor is None:
        assert config.model is not None
        contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop, labelled)
    else:
        contract = contract_from(ancestor, config, dataset.info)
    method = make_method(config, contract, device, teacher)
    needed = estimates.memory(method, worker.world)
    if worker.rank == 0:
        print(*estimates.lines(method, worker.world, needed), sep="\n", flush=True)
    estimates.require(needed, devices.memory(device), 1 if device.type == "cuda" else worker.local_world)
    from_files = dataset.info.image is None
    transform = TrainTransform(config, config.seed, len(contract.class_names), from_files)
    probe = None
    if config.fewshot is not None:
        probe = FewShotProbe(config.fewshot, dataset, contract, device, worker.rank, worker.world)
    with warnings.catch_warnings():
        # DeepSpeed, and torch itself, call deprecated functions of torch.
        warnings.filterwarnings("ignore", message=".*torch\\.(distributed|jit)", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch\\.distributed", category=FutureWarning)
        engine = start(method, worker, saved, ancestor)
        dev = Dev(dataset, contract)
        training = Training(
            config,
            contract,
            worker,
            device,
            engine,
            method,
            transform,
            dev,
            probe,
        )
        began, first = time.monotonic(), 0 if saved is None else saved.step
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
            curve = Curve(device, worker)
            if saved is not None:
                batches.load_state_dict(saved.states[0].loader)
                curve.load(saved.states)
                if writer is not None:
                    writer.continue_from(saved.step, saved.states[0].log)
            log = Log(
                config,
                method.train_flops,
                batches,
                len(images.labels),
                device,
                writer,
                first=first,
                world=worker.world,
                is_silent=worker.rank > 0,
            )
            devices.let_gloo_yield()
            guard = Guard(images, sampler, config.steps, saver)
            run_steps(training, batches, curve, log, first, saver, guard)
        if saver is not None:
            saver.wait()
        seconds = time.monotonic() - began
        loading = _summed(batches.metrics(), device, worker)
        weights = engine.full_weights()
    if output is not None:
        prefix = engine.module.model_prefix
        save_model(output, as_model(contract, weights, prefix), contract)
        (output / "curve.json").write_text(json.dumps(curve.points, indent=1) + "\n")
        write_named(output, contract, prefix, config.steps, curve.best, saver)
    here = (config.steps - first) * config.batch_size  # images since the last start
    flops = method.train_flops  # per image
    metrics: dict[str, float | int | str] = {
        "parameters": contract.architecture.num_parameters,
        "workers": worker.world,
        "device": str(device.type),
        "train_seconds": seconds,
        "images_per_second": here / seconds,
        "exaflops": flops * config.steps * config.batch_size / 1e18,
        "flops_per_second": flops * here / seconds,
        "final_loss": curve.points[-1]["loss"],
        **loading,
    }
    if (dev_accuracy := curve.points[-1]["dev_accuracy"]) is not None:
        metrics["dev_accuracy"] = dev_accuracy
    if first:
        metrics["continued_at_step"] = first
    return metrics


def write_named(
    output: Path, contract: ModelContract, prefix: str, steps: int, best: int | None, saver: Saver | None
) -> None:
    """Write the weights of the earlier steps that consumers can name, and checkpoints.json {best, steps}."""
    named = [] if saver is None else saver.named(best)
    for saved in named:
        model = build(contract.architecture)
        saved.load(model, EMA, WEIGHTS, prefix=prefix)
        save_weights(output / "checkpoints" / str(saved.step), model, contract)
    listed = {"best": best, "steps": [*(saved.step for saved in named), steps]}
    (output / "checkpoints.json").write_text(json.dumps(listed, indent=1) + "\n")


@dataclass(frozen=True)
class Training:
    """What the steps of a training share."""

    config: Pretrain
    contract: ModelContract
    worker: Worker
    device: torch.device
    engine: Engine
    method: Method
    transform: TrainTransform
    dev: Dev
    probe: FewShotProbe | None


def start(method: Method, worker: Worker, saved: Saved | None, ancestor: Ancestor | None = None) -> Engine:
    """Return the engine, and give the method what it keeps beside the trained module.

    They are as a checkpoint has them, or else as the ancestor and, for what it lacks, the seed give them.
    """
    config, contract = method.config, method.contract
    model = build(contract.architecture)
    model.initialise(config.seed)
    if ancestor is not None and saved is None:
        lines = take_over(model, contract, ancestor, config.objective)
        if worker.rank == 0:
            print(*lines, sep="\n", flush=True)
    if isinstance(model, ViT):
        model.activation_checkpointing = config.activation_checkpointing
    task = method.module(model).to(method.device)
    optimizer = optim.make_optimizer(task, config.optimizer, config.learning_rate)
    if saved is not None:
        saved.require(task, optimizer)
        saved.load(task, WEIGHTS)
    for kind, module in method.beside.items():
        if saved is not None:
            saved.load(module, kind)
        module.to(method.device)
    os.environ["LOCAL_RANK"] = str(worker.local_rank)  # DeepSpeed reads it
    os.environ.pop(
        "OMPI_COMM_WORLD_LOCAL_RANK", None
    )  # of an mpirun that started Ray; DeepSpeed compares the two
    engine = make_engine(task, optimizer, config, worker.world)
    if saved is not None:
        engine.load_state(saved.read, saved.step)
    return engine


def as_model(contract: ModelContract, weights: dict[str, torch.Tensor], prefix: str) -> Network:
    """Return the model with those weights whose names begin with `prefix`, which is removed."""
    model = build(contract.architecture)
    model.load_state_dict(
        {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
    )
    return model


def full_model(training: Training) -> Network:
    """Return the model as it would be saved now, float32 and in evaluation mode; all workers call this together."""
    weights = training.engine.full_weights()
    model = as_model(training.contract, weights, training.engine.module.model_prefix)
    return model.to(training.device).eval()


class Curve:
    """The training curve, about a hundred points {step, learning_rate, loss, dev_accuracy}.

    `loss` is the mean over all images since the previous point; `dev_accuracy` is None if it was not measured there.
    """

    def __init__(self, device: torch.device, worker: Worker) -> None:
        self.points: list[dict[str, Any]] = []
        self._worker = worker
        self._sum, self._summed = torch.zeros((), device=device), 0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of this worker's share of a micro-batch."""
        self._sum += loss.detach()
        self._summed += 1

    def mean(self) -> float:
        """Return the mean loss of all workers since the last call, which they make together."""
        mean = self._sum / self._summed
        if self._worker.world > 1:
            dist.all_reduce(mean)
        self._sum.zero_()
        self._summed = 0
        return mean.item() / self._worker.world

    @property
    def best(self) -> int | None:
        """The first step with the highest dev accuracy; None if it was never measured."""
        measured = [point for point in self.points if point["dev_accuracy"] is not None]
        return max(measured, key=lambda point: point["dev_accuracy"])["step"] if measured else None

    def state(self, loader: dict[str, Any], log: tuple[LogLine, ...] = ()) -> WorkerState:
        """Return this worker's state for a checkpoint, with the loader's and the unsaved lines of the log."""
        return WorkerState(
            loader=loader,
            points=tuple(self.points),
            loss_sum=self._sum.item(),
            summed=self._summed,
            log=log,
        )

    def load(self, states: list[WorkerState]) -> None:
        """Continue from the states of all workers that wrote a checkpoint; they may have been more or fewer."""
        self.points, self._summed = list(states[0].points), states[0].summed
        sums = [state.loss_sum for state in states]
        same_size = len(sums) == self._worker.world
        self._sum.fill_(sums[self._worker.rank] if same_size else sum(sums) / len(sums))


def run_steps(
    training: Training,
    batches: Loader,
    curve: Curve,
    log: Log,
    first: int,
    saver: Saver | None,
    guard: Guard,
) -> None:
    """Run the steps from number `first` on; write the curve's points, the log, and checkpoints with a saver."""
    config, worker, device, engine = training.config, training.worker, training.device, training.engine
    dtype = devices.torch_dtype(config.dtype, device)
    steps = config.steps
    points = {math.ceil(steps * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
    evaluations = {math.ceil(steps * part / _DEV_EVALUATIONS) for part in range(1, _DEV_EVALUATIONS + 1)}
    for step, (positions, images, labels) in zip(range(first, steps), batches, strict=False):
        torch.manual_seed(dropout_seed(config.seed, step, worker.rank))
        views, targets = training.transform(images.to(device), labels.to(device), positions, step)
        rate = optim.learning_rate(step, steps, config.learning_rate, config.optimizer)
        for part in optim.micro_batches(config.gradient_accumulation_steps, views, targets, positions):
            loss = training.method.loss(engine, *part)
            engine.backward(loss)
            curve.add(loss)
            log.add(loss)
        norm = engine.step(rate)
        guard.watch(step, norm)
        training.method.after_step(engine.module, step)

        done = step + 1
        mean_loss, evaluation, is_best = None, None, False
        if done in points or done in evaluations:
            mean_loss = curve.mean()
            # Not at every step, because reading a number waits for the device.
            optim.check_finite("loss", mean_loss, step)
            evaluation = evaluate(training, dtype, done) if done in evaluations else None
            accuracy = None if evaluation is None else evaluation.accuracy
            curve.points.append(
                {"step": done, "learning_rate": rate, "loss": mean_loss, "dev_accuracy": accuracy}
            )
            is_best = evaluation is not None and curve.best == done
        few_shot = None
        if training.probe is not None and done in evaluations:
            few_shot = training.probe.score(full_model(training))
        log.step(done, rate, norm, mean_loss, evaluation, few_shot)
        if saver is not None and done < steps and (saver.is_due(done) or is_best):
            guard.check()
            saver.save(done, curve.best, _pieces(training), curve.state(batches.state_dict(), log.unsaved()))


def _pieces(training: Training) -> Iterator[Piece]:
    yield from training.engine.pieces()
    for kind, module in training.method.beside.items() if training.worker.rank == 0 else ():
        for name, weight in module.named_parameters():
            yield Piece(kind, name, 0, weight.flatten())


def evaluate(training: Training, dtype: torch.dtype, step: int) -> Evaluation | None:
    """Return the loss of dev images and the fraction that is classified correctly; each worker scores a share.

    None if the dataset has no dev split or the model no classifier.
    """
    dev, contract, worker, engine = training.dev, training.contract, training.worker, training.engine
    total = len(dev.labels)
    if total == 0 or not contract.class_names:
        return None
    share = math.ceil(total / worker.world)
    # ZeRO-3 needs the same number of batches on all workers. Indices past the end wrap around and are not counted.
    own = torch.arange(worker.rank * share, (worker.rank + 1) * share)
    sums = torch.zeros(2, dtype=torch.float64, device=training.device)  # of losses, of images that are right
    network: Any = engine
    if training.config.optimizer.ema is not None:
        network = full_model(training).to(dtype)
    engine.module.eval()
    with torch.no_grad():
        for chosen in own.split(_EVALUATION_BATCH):
            images = dev.images(chosen % total).to(training.device)
            logits = network(normalise(images, contract.preprocessing, dtype))
            counted = int((chosen < total).sum())
            logits, labels = logits[:counted], dev.labels[chosen[:counted]].to(training.device)
            if counted:
                sums[0] += training.method.cross_entropy(logits, labels) * counted
                sums[1] += (logits.argmax(dim=1) == labels).sum()
    engine.module.train()
    if worker.world > 1:
        dist.all_reduce(sums)
    loss, correct = sums.tolist()
    return Evaluation(step, correct / total, loss / total)


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


def _summed(metrics: dict[str, float | int], device: torch.device, worker: Worker) -> dict[str, float | int]:
    """Sum the metrics over all workers, which must all call this."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=device)
    if worker.world > 1:
        dist.all_reduce(values)
    return {
        name: type(value)(total)
        for (name, value), total in zip(metrics.items(), values.tolist(), strict=True)
    }
