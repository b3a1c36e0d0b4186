"""Fine-tuning in one process or in each of several workers: train all or some weights of a model on labelled images.

In: a `Task`, labelled images, a learning rate, a seed. Out: a network and its training curve.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from pipelines.spec import Finetune, Pretrain
from ray_jobs.augment import TrainTransform, drop_path_draws
from ray_jobs.data.loader import Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Images
from ray_jobs.process import devices
from ray_jobs.training import detecting, optim, segmenting
from ray_jobs.training.checkpoint import CheckpointManager
from ray_jobs.training.engine import WEIGHTS, Engine, Plain
from ray_jobs.training.evaluators import NOT_FINITE, Evaluator, evaluation
from ray_jobs.training.guard import Guard
from ray_jobs.training.log import Log, Reporting
from ray_jobs.training.state import TrainState, WorkerState, worker_state
from ray_jobs.training.steps import Curve, TrainSetup, advise_on_memory, evenly, steps
from ray_jobs.training.task import DivergenceError, Evaluation, Task, rank
from ray_jobs.training.workers import ALONE, Worker
from vit_model import compute, lora
from vit_model.build import Network, build, build_for
from vit_model.detection.detector import Detector
from vit_model.model import Segmenter, ViT
from vit_model.objectives.losses import sigmoid_cross_entropy, softmax_cross_entropy
from vit_model.preprocessing import normalise
from vit_model.weights import load_model, transfer_backbone

Trained = Network | Detector
AnyTrained = TypeVar("AnyTrained", bound=Trained)
_CURVE_POINTS = 20
_EVALUATIONS = 5  # per trial, the last one at its end, when the model is scored


class Stopping:
    """Decides when a trial ends early, and which of its evaluations is its result.

    Args:
        steps: the number of steps of a trial that does not end early.
        count: the number of evaluations, at equal distances.
        patience: see `early_stopping`; None: `report` ends the trial by raising an exception.
        report: called with each evaluation; when a trial resumes, again with the evaluations in its checkpoint.
    """

    def __init__(
        self,
        steps: int,
        count: int,
        patience: int | None = None,
        report: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> None:
        self._patience, self._report = patience, report
        self.steps = evenly(steps, count)
        self.evaluations: list[Evaluation] = []

    def add(self, step: int, evaluation: Evaluation | None) -> None:
        """Add the evaluation after a step; None: its loss was not finite."""
        self.continue_from([*self.evaluations, evaluation or Evaluation(step, 0.0, math.inf)])

    def continue_from(self, evaluations: Sequence[Evaluation]) -> None:
        """Replace the evaluations by these, which begin with the present ones, and report the new ones."""
        new, self.evaluations = evaluations[len(self.evaluations) :], [*evaluations]
        for result in new:
            self._report(result)

    @property
    def best(self) -> Evaluation:
        """The evaluation with the highest rank (the first if several are equal); without patience, the last one.

        Raises:
            DivergenceError: no loss was finite.
        """
        best = self.evaluations[-1] if self._patience is None else self._best()
        if math.isinf(best.loss):
            raise DivergenceError(NOT_FINITE.format(best.loss))
        return best

    @property
    def is_over(self) -> bool:
        """Whether the last `patience` evaluations were all worse than an earlier one."""
        if self._patience is None:
            return False
        since = self.evaluations[::-1].index(self._best()) if self.evaluations else 0
        return since >= self._patience

    def _best(self) -> Evaluation:
        return max(self.evaluations, key=lambda evaluation: rank([evaluation]))


class Validation(NamedTuple):
    """Images that a trial held out, on which its model is evaluated several times before the last step."""

    images: Evaluator
    stopping: Stopping | None = None
    """gets the evaluations, and may end the fit early"""
    select_by: str = "accuracy"
    """see `Finetune.select_by`"""


class Fitted(NamedTuple):
    """The result of a fit."""

    model: Trained
    curve: list[dict[str, float | int]]
    """points {step, learning_rate, loss}"""
    substitutes: int
    """damaged images that were replaced by others"""


def start_model(task: Task, seed: int) -> Trained:
    """Return the model before its first step: a backbone with a new head (zeros), or a model with new weights."""
    return detecting.network(task, seed) if task.objects else classifier(task, seed)


def untrained(task: Task) -> Trained:
    """Return the model with weights of torch's, on torch's default device."""
    return detecting.untrained(task) if task.objects else build_for(task.contract)


def classifier(task: Task, seed: int) -> Network:
    """Return the model of a classification, of images or pixels, before its first step."""
    model = build_for(task.contract)
    model.initialise(seed)
    if task.backbone is not None:
        transfer_backbone(model, load_model(task.backbone)[0])
    return model


def start(
    task: Task,
    learning_rate: float,
    seed: int,
    manager: CheckpointManager | None = None,
    worker: Worker = ALONE,
) -> tuple[Trained, Plain, TrainState | None]:
    """Return the model, its engine, and the checkpoint that they continue from: the manager's last one, if any."""
    config, device = task.config, devices.device(worker.local_rank)
    dtype = devices.torch_dtype(config.dtype, device)
    model = start_model(task, seed).to(device).train()
    vit = model.model if isinstance(model, Detector) else model
    if isinstance(vit, ViT):
        vit.activation_checkpointing = config.activation_checkpointing
    _restrict(model, config, seed)
    optimizer = optim.make_optimizer(model, config.optimizer, learning_rate, head_first=config.head_first)
    saved = None if manager is None else manager.resume(task.attempts, model, optimizer)
    if saved is not None:
        saved.load(model, WEIGHTS)
    accumulation = config.gradient_accumulation_steps
    engine = Plain(model, optimizer, dtype, config.optimizer.clip_norm, worker.world, accumulation)
    if saved is not None:
        engine.load_state(saved.read, saved.step)
    return model, engine, saved


def _restrict(model: Trained, config: Finetune, seed: int = 0) -> None:
    """Exclude from training what a fine-tuning keeps, and the pooling, if boxes or pixels do not depend on it."""
    optim.restrict(model, config, seed)
    if isinstance(model, Detector | Segmenter):
        for parameter in (model.model if isinstance(model, Detector) else model).pooling_weights():
            parameter.requires_grad_(False)


def class_weights(task: Task, data: Images) -> torch.Tensor | None:
    """Return the weight of each class in the loss, float32 [classes]; None if all are 1.

    "balanced" is n / (classes * images of the class), as in scikit-learn, over the training images `data`; with masks,
    it counts pixels.
    """
    configured, names = task.config.class_weights, task.contract.class_names or task.contract.mask_classes
    if configured is None:
        return None
    if configured == "balanced":
        if task.contract.mask_classes:
            counts = segmenting.pixels(data)
        else:
            counts = torch.bincount(torch.from_numpy(data.labels), minlength=len(names))
        return counts.sum() / (len(names) * counts.clamp(min=1).float())
    return torch.tensor([configured.get(name, 1.0) for name in names])


def backbone_changes(task: Task) -> list[str]:
    """Describe what fine-tuning resizes, drops or initialises in the task's backbone, one line each."""
    assert task.backbone is not None
    return transfer_backbone(build(task.contract.architecture), load_model(task.backbone)[0])


def parameters(task: Task) -> tuple[int, int]:
    """Return how many weights a fit's model has, and how many it trains, including LoRA's matrices."""
    with torch.device("meta"):
        model = untrained(task)
    whole = sum(weight.numel() for weight in model.parameters())
    _restrict(model, task.config)
    return whole, sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def fit_flops(task: Task) -> int:
    """Return the FLOPs of a fit's step per image; with `freeze: N`, as if all weights were trained."""
    config, architecture = task.config, task.contract.architecture
    if task.objects:
        return detecting.train_flops(task)
    if config.lora is not None:
        return compute.restricted_train_flops(architecture, config.lora)
    if config.freeze == "backbone":
        return compute.restricted_train_flops(architecture, "head")
    if config.freeze == "all_but_biases":
        return compute.restricted_train_flops(architecture, "biases")
    return compute.train_flops(architecture)


@advise_on_memory()
def fit(
    task: Task,
    data: Images,
    learning_rate: float,
    seed: int,
    manager: CheckpointManager | None = None,
    reporting: Reporting = Reporting(),  # noqa: B008 (never changed)
    validation: Validation | None = None,
    worker: Worker = ALONE,
) -> Fitted:
    """Train the task's model on `data`, starting from the manager's last checkpoint if there is one.

    All weights are trained except those that `freeze` or `lora` exclude. LoRA's matrices are merged at the end.

    The weights are float32; with dtype bfloat16, a bfloat16 copy of them computes the gradients. With the same threads
    on the same type of CPU, the result is the same after any number of interruptions. All workers of a group call this
    together, and each returns the result; without dropout, another number of workers changes it only by rounding.

    Args:
        manager: writes the checkpoints; None: no checkpoints are written.
        worker: this process's rank among the workers that share each batch.

    Raises:
        DivergenceError: the loss or a gradient is not finite.
        UserError: the device has not enough memory.
        Superseded: there was a newer attempt when a checkpoint was committed.
    """
    config, last = task.config, task.steps
    devices.set_threads(config.threads or 1)
    device = devices.device(worker.local_rank)
    model, engine, saved = start(task, learning_rate, seed, manager, worker)
    before = _state_before(saved, worker, reporting)
    if task.is_dense:
        data = detecting.Numbered(*data)
    setup, sampler = _setup(task, data, learning_rate, seed, engine, manager, worker)
    preprocessing = task.contract.preprocessing
    with Loader(data, sampler, preprocessing, crop=setup.transform.crop, threads=config.threads or 1) as batches:
        is_limit = config.early_stopping is not None and task.last_step is None
        log = Log(config, fit_flops(task), len(data.labels), batches, reporting, worker, last, is_limit)
        if saved is not None:
            batches.load_state_dict(before.loader)
            log.continue_from(saved.step, before.log)
        if worker.world > 1:
            devices.let_gloo_yield()
        curve = _run_steps(setup, model, batches, log, before, manager, validation)
    if manager is not None and worker.world > 1:
        manager.wait()  # together, because the first worker scores the model alone
    model = averaged(model, engine, config)
    if isinstance(model, ViT):
        lora.merge(model)  # a detector has none
    substitutes = torch.tensor(before.substitutes + batches.substitutes, device=device)
    if worker.world > 1:
        dist.all_reduce(substitutes)
    return Fitted(model.eval(), curve.points, int(substitutes))


def _state_before(saved: TrainState | None, worker: Worker, reporting: Reporting) -> WorkerState:
    """Return the state that a worker continues from; without a checkpoint, an empty state."""
    if saved is None:
        return WorkerState(loader={}, points=(), loss_sum=0.0, summed=0)
    if worker.rank == 0:
        print(
            f"{reporting.unit} {saved.step}: continuing from the checkpoint of attempt {saved.attempt}",
            flush=True,
        )
    return worker_state(saved.states, worker)


def _setup(
    task: Task,
    data: Images,
    learning_rate: float,
    seed: int,
    engine: Plain,
    manager: CheckpointManager | None,
    worker: Worker,
) -> tuple[TrainSetup, Sampler]:
    """Return what the steps of a fit share, and the order of its images."""
    config = task.config
    transform = TrainTransform(config, seed, len(task.contract.class_names), data.dataset.info.image is None)
    order: Literal["global", "balanced"] = "balanced" if config.sampling == "balanced" else "global"
    sampler = Sampler(data, seed=seed, batch_size=config.batch_size, order=order, rank=worker.rank, world=worker.world)
    if task.objects:
        loss = detecting.make_loss(task, engine, seed, data, transform, sampler)
    elif task.is_dense:
        loss = segmenting.make_loss(task, engine, seed, data, transform, class_weights(task, data))
    else:
        loss = make_loss(task, engine, seed, class_weights(task, data))
    guard, device = Guard(data, sampler, task.steps, manager), devices.device(worker.local_rank)
    return TrainSetup(config, learning_rate, seed, engine, transform, loss, guard, device, worker), sampler


def make_loss(task: Task, engine: Plain, seed: int, weights: Tensor | None) -> Callable[[optim.MicroBatch], Tensor]:
    """Return the loss of a fit: the cross-entropy with the labels, whose classes may have weights [classes].

    With several labels per image it is the binary cross-entropy, summed over classes.
    """
    contract, smoothing = task.contract, task.config.label_smoothing
    weights = None if weights is None else weights.to(next(engine.masters.parameters()).device)

    def loss(batch: optim.MicroBatch) -> Tensor:
        (images,) = batch.views
        depth = drop_path_draws(contract.architecture, seed, batch.positions, images.device)
        logits = engine(normalise(images, contract.preprocessing, engine.dtype), *depth)
        if contract.is_multi_label:
            return sigmoid_cross_entropy(logits, batch.targets.float(), smoothing)
        # the mean over images, also with class weights, so that the mean over micro-batches is the batch's
        return softmax_cross_entropy(logits, batch.targets, smoothing, weights)

    return loss


def _run_steps(
    setup: TrainSetup,
    model: Trained,
    batches: Loader,
    log: Log,
    before: WorkerState,
    manager: CheckpointManager | None,
    validation: Validation | None,
) -> Curve:
    """Run the steps of a fit: evaluate, stop early, extend the curve and the log, write checkpoints."""
    last, (images, stopping, select_by) = log.last, validation or (None, None, "accuracy")
    evaluations = evenly(setup.config.steps, _EVALUATIONS) - {setup.config.steps}
    if stopping is not None:
        evaluations = stopping.steps
        stopping.continue_from(before.evaluations)
    points = evenly(last, _CURVE_POINTS)
    curve = Curve(setup.device, setup.worker, divides_first=False)
    curve.load(before)
    for step in steps(setup, batches, log.first, last):
        curve.add(step.losses)
        loss = curve.add_point(step) if step.done in points else None
        measured = None
        if images is not None and step.done in evaluations:
            current = averaged(model, setup.engine, setup.config)
            measured = evaluate(current, images, step.done, select_by)
            if stopping is not None:
                stopping.add(step.done, measured)
        log.add(step, loss, measured)
        if stopping is not None and stopping.is_over:
            setup.guard.check()
            break
        if manager is not None and step.done < last and manager.is_due(step.done):
            setup.guard.check()
            substitutes = before.substitutes + batches.substitutes
            so_far = () if stopping is None else tuple(stopping.evaluations)
            state = curve.state(batches, log.unsaved(), substitutes=substitutes, evaluations=so_far)
            manager.save(step.done, None, setup.engine.state_shards(), state)
    return curve


def averaged(model: AnyTrained, engine: Engine, config: Finetune | Pretrain) -> AnyTrained:
    """Return a copy of the model with the moving averages of its weights; without averages, the model itself."""
    if config.optimizer.ema is None:
        return model
    model = copy.deepcopy(model)
    model.load_state_dict(engine.full_weights())
    return model


def dense_scores(step: int, model: Detector | Segmenter, images: Evaluator) -> tuple[Evaluation, pa.Table]:
    """Return the results on images with boxes or masks, and a table of each image's. Raises DivergenceError."""
    if isinstance(model, Detector):
        return detecting.scored(step, model, images)
    return segmenting.scored(step, model, images)


def evaluate(model: Trained, images: Evaluator, step: int, select_by: str) -> Evaluation | None:
    """Evaluate a model after a step; None if the loss is not finite, which may yet change."""
    try:
        if isinstance(model, Detector | Segmenter):
            return dense_scores(step, model, images)[0]
        return evaluation(step, images.logits(model), images.labels, select_by)
    except DivergenceError:
        return None
