"""Pretraining in one process or in one of several DeepSpeed workers: `train`, its loop and its metrics.

In: a configuration, an open dataset, which worker this is. Out, in a folder: the model (with a classifier if the
objective uses labels) and curve.json [{step, learning_rate, loss, dev_accuracy}]. The code is the same in a plain
process, on one GPU without Ray and in each of N workers under Ray Train (`ray_jobs.pretrain`).
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipelines.spec import Pretrain
from pipelines.store import Checkpoint, write_log
from ray_jobs.augment import TrainTransform
from ray_jobs.data.loader import Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Dataset, Images
from ray_jobs.process import devices
from ray_jobs.process.context import Context
from ray_jobs.process.heartbeat import Steps, count_steps
from ray_jobs.training import optim
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.engine import EMA, WEIGHTS, Engine, StateShard, make_engine
from ray_jobs.training.evaluators import Evaluator
from ray_jobs.training.few_shot import FewShotProbe
from ray_jobs.training.guard import Guard
from ray_jobs.training.log import Gauges, Log, LogWriter, Reporting
from ray_jobs.training.methods import Method, make_method
from ray_jobs.training.model_ref import ModelRef, find_model, make_contract, take_over
from ray_jobs.training.state import TrainState, worker_state
from ray_jobs.training.steps import Curve, TrainSetup, advise_on_memory, evenly, steps
from ray_jobs.training.task import Evaluation
from ray_jobs.training.workers import ALONE, Worker, micro_batch_share, this_worker
from ray_jobs.training.workers.hangs import named_hangs
from ray_jobs.training.workers.process_group import COLLECTIVE_SECONDS
from vit_model.build import Network, build
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.momentum import MovingAverage
from vit_model.weights import save_model, save_weights

_CURVE_POINTS = 100
_DEV_EVALUATIONS = 5  # over the run, the last one at its end


def work(context: Context[Pretrain], group: int, start: Checkpoint | None) -> dict[str, Any]:
    """Train as a worker of Ray Train; rank 0 returns {files, metrics}, the others an empty dict.

    Args:
        group: the number of this group of workers in the attempt.
        start: the checkpoint to continue from.
    """
    worker, store, config = this_worker(group), context.open_store(), context.config
    init_from, teacher = find_model(context), find_model(context, "teacher")

    def trained(steps: Steps, output: Path | None, writer: LogWriter | None) -> dict[str, float | int | str]:
        with named_hangs(worker.rank, worker.world, steps, COLLECTIVE_SECONDS):
            manager = CheckpointManager(store, context.attempt, config, worker, start, steps)
            dataset = context.dataset(config.cache_gib)
            return train(config, dataset, output, worker, manager, init_from, teacher, writer)

    if worker.rank:
        trained(Steps(), None, None)
        return {}
    with context.staging() as staging, count_steps(context) as steps:
        with LogWriter(store, context.attempt, callback=Gauges(context.attempt).show) as writer:
            metrics = trained(steps, staging.path, writer)
        write_log(store, context.attempt, staging.path)
    return {"files": staging.files, "metrics": metrics}


@advise_on_memory()
def train(
    config: Pretrain,
    dataset: Dataset,
    output: Path | None,
    worker: Worker = ALONE,
    manager: CheckpointManager | None = None,
    init_from: ModelRef | None = None,
    teacher: ModelRef | None = None,
    writer: LogWriter | None = None,
) -> dict[str, float | int | str]:
    """Train as one of `worker.world` workers and return the metrics.

    Every step uses the same images at any world size that divides the batch, and stochastic depth drops the same blocks
    for each image, so without dropout the weights agree up to rounding. With the same world size and threads on the
    same type of CPU, the files are identical, even if the training was interrupted and continued from checkpoints.

    Args:
        output: the folder for the model and its curve; None on every rank but 0.
        manager: writes the checkpoints and has the one to continue from; None: no checkpoints are written.
        init_from: the model whose weights training starts from; None: new weights.
        teacher: the model that objective distillation imitates.
        writer: writes rank 0's log; None: no log is written.

    Raises:
        UserError: the workers cannot share a batch evenly, a device has not enough memory, the dataset has no training
            images, the weights of `init_from` do not fit the model, or the teacher does not fit the data.
        DivergenceError: the loss or a gradient is not finite.
        StoreDamaged: the checkpoint does not fit the model.
        Superseded: there was a newer attempt when a checkpoint was committed.
    """
    devices.set_threads(config.threads or 1)
    dataset.require("train")
    contract = make_contract(config, dataset.info, init_from)
    method = make_method(config, contract, devices.device(worker.local_rank), teacher)
    lines = describe(method, worker.world)
    if worker.rank == 0:
        print(*lines, sep="\n", flush=True)
    saved = None if manager is None else manager.opened_start()
    with _without_torchs_warnings():
        training = prepare(method, dataset, worker, saved, init_from)
        began, first = time.monotonic(), 0 if saved is None else saved.step
        curve, loading, measured = _run_steps(training, manager, saved, writer)
        seconds = time.monotonic() - began
        loading = _summed(loading, training)
        weights = result_weights(training)
    if output is not None:
        save_model(output, as_model(contract, weights), contract)
        (output / "curve.json").write_text(json.dumps(curve.points, indent=1) + "\n")
        write_named(output, training, curve.best, manager)
    metrics = _speed(training, first, seconds) | {"final_loss": curve.points[-1]["loss"]} | loading | measured
    if (accuracy := curve.points[-1]["dev_accuracy"]) is not None:
        metrics["dev_accuracy"] = accuracy
    return metrics | ({"continued_at_step": first} if first else {})


def describe(method: Method, world: int) -> tuple[str, str]:
    """Describe what the configuration implies in two lines: how the batch is divided, and the FLOPs.

    Raises:
        UserError: the workers cannot share a micro-batch evenly.
    """
    config, flops = method.config, method.train_flops
    exaflops = flops * config.steps * config.batch_size / 1e18
    images, parts = micro_batch_share(config, world), config.gradient_accumulation_steps
    teacher_share = f", {method.teacher_flops / 1e9:.4g} of them the teacher's" if method.teacher_flops else ""
    return (
        f"batch: {config.batch_size:,} images = {world} {'worker' if world == 1 else 'workers'}"
        f" x {parts} {'micro-batch' if parts == 1 else 'micro-batches'} x {images:,} images",
        f"compute: {method.contract.architecture.num_parameters:,} parameters"
        f" · {method.forward_flops / 1e9:.4g} GFLOPs per image forward"
        f" · {flops / 1e9:.4g} GFLOPs per image in training{teacher_share}"
        f" · {exaflops:.4g} exaFLOPs in {config.steps:,} steps of {config.batch_size:,} images",
    )


def _speed(training: Training, first: int, seconds: float) -> dict[str, float | int | str]:
    """Return the size of a training and its speed, given the seconds that it took from step `first` on."""
    config, architecture = training.method.config, training.method.contract.architecture
    images = (config.steps - first) * config.batch_size  # since the last start
    flops = training.method.train_flops  # per image
    return {
        "parameters": architecture.num_parameters,
        "workers": training.worker.world,
        "device": str(training.method.device.type),
        "train_seconds": seconds,
        "images_per_second": images / seconds,
        "exaflops": flops * config.steps * config.batch_size / 1e18,
        "flops_per_second": flops * images / seconds,
    }


def write_named(output: Path, training: Training, best: int | None, manager: CheckpointManager | None) -> None:
    """Write the weights of the earlier steps that consumers can name, and checkpoints.json {best, steps}."""
    named, contract = [] if manager is None else manager.named(best), training.method.contract
    result = training.method.result
    kinds = (EMA, WEIGHTS) if result is None else (result,)
    for saved in named:
        model = build(contract.architecture)
        saved.load(model, *kinds, prefix=result_prefix(training))
        save_weights(output / "checkpoints" / str(saved.step), model, contract)
    listed = {"best": best, "steps": [*(saved.step for saved in named), training.method.config.steps]}
    (output / "checkpoints.json").write_text(json.dumps(listed, indent=1) + "\n")


@contextmanager
def _without_torchs_warnings() -> Iterator[None]:
    """Ignore torch's warnings about deprecated functions, which DeepSpeed and torch itself call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch\\.(distributed|jit)", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*torch\\.distributed", category=FutureWarning)
        yield


@dataclass(frozen=True)
class Training:
    """What the steps of a pretraining and its evaluations share."""

    method: Method
    engine: Engine
    worker: Worker
    dataset: Dataset
    dev: Evaluator
    probe: FewShotProbe | None


def prepare(
    method: Method, dataset: Dataset, worker: Worker, saved: TrainState | None, init_from: ModelRef | None
) -> Training:
    """Return a training before its first step, or after the last one of a checkpoint."""
    config, preprocessing = method.config, method.contract.preprocessing
    probe = None
    if config.fewshot is not None:
        probe = FewShotProbe(config.fewshot, dataset, preprocessing, method.device, worker)
    engine = start(method, worker, saved, init_from)
    dev = Evaluator(Images(dataset, dataset.index("dev")), preprocessing, worker)
    return Training(method, engine, worker, dataset, dev, probe)


def start(method: Method, worker: Worker, saved: TrainState | None, init_from: ModelRef | None = None) -> Engine:
    """Return the engine, and load the modules that the method keeps beside the trained one.

    Weights come from the checkpoint, or without one from `init_from`; what that does not contain is drawn by the seed.
    """
    config, contract = method.config, method.contract
    model = build(contract.architecture)
    model.initialise(config.seed)
    if init_from is not None and saved is None:
        lines = take_over(model, contract, init_from, config.objective)
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
    # set by an mpirun that started Ray; DeepSpeed compares the two
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
    engine = make_engine(task, optimizer, config, worker.world)
    if saved is not None:
        engine.load_state(saved.read, saved.step)
    return engine


def as_model(contract: ModelContract, weights: dict[str, torch.Tensor]) -> Network:
    """Return the model with these weights."""
    model = build(contract.architecture)
    model.load_state_dict(weights)
    return model


def result_weights(training: Training) -> dict[str, torch.Tensor]:
    """Return the weights of the model that training would end with now; all workers call this together."""
    method, prefix = training.method, result_prefix(training)
    weights = training.engine.full_weights() if method.result is None else method.beside[method.result].state_dict()
    return {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}


def result_prefix(training: Training) -> str:
    """Return the prefix of the result's weights in the names of the module that contains it."""
    trained: Any = training.engine.module
    return trained.model_prefix if training.method.result is None else MovingAverage.model_prefix


def full_model(training: Training) -> Network:
    """Return the model as it would be saved now, in float32 and evaluation mode; all workers call this together."""
    return as_model(training.method.contract, result_weights(training)).to(training.method.device).eval()


def _run_steps(
    training: Training, manager: CheckpointManager | None, saved: TrainState | None, writer: LogWriter | None
) -> tuple[Curve, dict[str, float | int], dict[str, float]]:
    """Run the remaining steps; return the curve, the metrics of this worker's loader, and the last measures."""
    method, engine, worker, dataset = training.method, training.engine, training.worker, training.dataset
    config, preprocessing = method.config, method.contract.preprocessing
    from_files, images = dataset.info.image is None, Images(dataset, dataset.index("train"))
    transform = TrainTransform(config, config.seed, len(method.contract.class_names), from_files)
    sampler = Sampler(
        images,
        seed=config.seed,
        batch_size=config.batch_size,
        order=config.order,
        rank=worker.rank,
        world=worker.world,
    )
    guard, loss = Guard(images, sampler, config.steps, manager), partial(method.loss, engine)
    setup = TrainSetup(config, config.learning_rate, config.seed, engine, transform, loss, guard, method.device, worker)
    with Loader(images, sampler, preprocessing, crop=transform.crop, threads=config.threads or 1) as batches:
        curve = Curve(method.device, worker, divides_first=True)
        log = Log(config, method.train_flops, len(images.labels), batches, Reporting(writer), worker)
        if saved is not None:
            batches.load_state_dict(saved.states[0].loader)
            curve.load(worker_state(saved.states, worker))
            log.continue_from(saved.step, saved.states[0].log)
        devices.let_gloo_yield()
        measured = _take_steps(training, setup, batches, curve, log, manager)
    if manager is not None:
        manager.wait()
    return curve, batches.metrics(), measured


def _take_steps(
    training: Training,
    setup: TrainSetup,
    batches: Loader,
    curve: Curve,
    log: Log,
    manager: CheckpointManager | None,
) -> dict[str, float]:
    """Take the steps; extend the curve and the log, and write checkpoints if there is a manager.

    Returns the method's measures after the last step.
    """
    last = training.method.config.steps
    points, evaluations = evenly(last, _CURVE_POINTS), evenly(last, _DEV_EVALUATIONS)
    for step in steps(setup, batches, log.first, last):
        training.method.after_step(training.engine.module, step.done - 1)
        curve.add(step.losses)
        loss, evaluation, few_shot, measured = None, None, None, dict[str, float]()
        if step.done in evaluations:
            evaluation = evaluate(training, step.done)
            few_shot = None if training.probe is None else training.probe.score(full_model(training))
        if step.done in points | evaluations:
            loss = curve.add_point(step, dev_accuracy=None if evaluation is None else evaluation.accuracy)
            measured = training.method.measures(step.done)
        log.add(step, loss, evaluation, few_shot, measured or None)
        is_best = evaluation is not None and curve.best == step.done
        if manager is not None and step.done < last and (manager.is_due(step.done) or is_best):
            setup.guard.check()
            manager.save(step.done, curve.best, _state_shards(training), curve.state(batches, log.unsaved()))
    return measured


def _state_shards(training: Training) -> Iterator[StateShard]:
    yield from training.engine.state_shards()
    for kind, module in training.method.beside.items() if training.worker.rank == 0 else ():
        for name, weight in module.named_parameters():
            yield StateShard(kind, name, 0, weight.flatten())


def evaluate(training: Training, step: int) -> Evaluation | None:
    """Return the loss and the accuracy on dev after a step.

    None if the dataset has no dev split or the model has no classifier.
    """
    dev, method, engine = training.dev, training.method, training.engine
    total = len(dev.labels)
    if total == 0 or not method.contract.class_names:
        return None
    network: Any = engine
    if method.config.optimizer.ema is not None:
        network = full_model(training).to(method.dtype)
    # the sum of the losses, the number of correct images
    sums = torch.zeros(2, dtype=torch.float64, device=method.device)
    engine.module.eval()
    for rows, logits in dev.outputs(network, method.device, method.dtype):
        if counted := int((rows < total).sum()):
            logits, labels = logits[:counted], dev.labels[rows[:counted]].to(method.device)
            sums[0] += method.cross_entropy(logits, labels) * counted
            sums[1] += (logits.argmax(dim=1) == labels).sum()
    engine.module.train()
    if training.worker.world > 1:
        dist.all_reduce(sums)
    loss, correct = sums.tolist()
    return Evaluation(step, correct / total, loss / total)


def _summed(metrics: dict[str, float | int], training: Training) -> dict[str, float | int]:
    """Sum the metrics over all workers, which must all call this."""
    values = torch.tensor(list(metrics.values()), dtype=torch.float64, device=training.method.device)
    if training.worker.world > 1:
        dist.all_reduce(values)
    return {name: type(value)(total) for (name, value), total in zip(metrics.items(), values.tolist(), strict=True)}
