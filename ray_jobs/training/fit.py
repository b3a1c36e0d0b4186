"""Fine-tuning in one process, or in each of several workers: train the weights of a model, or some, on labelled images,
and score it on others.

In: a `Task`, labelled images, a learning rate, a seed. Out: a network, its training curve, its score.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import functional

from ray_jobs.augment import TrainTransform, depth_draws, dropout_seed
from ray_jobs.data.loader import Loader
from ray_jobs.data.sampler import Sampler
from ray_jobs.data.shards import Images
from ray_jobs.evaluation.calibration import probability_table
from ray_jobs.process import devices
from ray_jobs.training import estimates, optim
from ray_jobs.training.checkpoint import Saved, Saver, WorkerState
from ray_jobs.training.engine import WEIGHTS, Plain, has_ema
from ray_jobs.training.guard import Guard
from ray_jobs.training.log import Log, LogWriter
from ray_jobs.training.task import DivergenceError, Evaluation, Score, Task, rank
from ray_jobs.training.workers import ALONE, Worker
from vit_model import lora
from vit_model.build import Network, build
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.objectives.losses import softmax_cross_entropy
from vit_model.preprocessing import normalise
from vit_model.weights import load_model, transfer_backbone

_EVALUATION_BATCH = 512
_CURVE_POINTS = 20
_NOT_FINITE = "loss is {} after training: lower learning_rate, or use a longer warm-up"
_EVALUATIONS = 5  # over a trial, the last one at its end, by `score`


class Stopping:
    """When a trial ends early, and which of its evaluations is its result.

    Args:
        steps: of a trial that does not end early.
        count: of the evaluations, at equal distances.
        patience: see `early_stopping`; None: somebody else ends the trial, by raising an exception in `report`.
        report: is called with each evaluation, and again with those before a checkpoint.
    """

    def __init__(
        self,
        steps: int,
        count: int,
        patience: int | None = None,
        report: Callable[[Evaluation], None] = lambda evaluation: None,
    ) -> None:
        self._patience, self._report = patience, report
        self.steps = {math.ceil(steps * part / count) for part in range(1, count + 1)}
        self.evaluations: list[Evaluation] = []

    def add(self, step: int, evaluation: Evaluation | None) -> None:
        """Add the evaluation after a step; None: its loss was not finite."""
        self.continue_from([*self.evaluations, evaluation or Evaluation(step, 0.0, math.inf)])

    def continue_from(self, evaluations: Sequence[Evaluation]) -> None:
        """Take these evaluations, whose first ones are those that it had."""
        new, self.evaluations = evaluations[len(self.evaluations) :], [*evaluations]
        for evaluation in new:
            self._report(evaluation)

    @property
    def best(self) -> Evaluation:
        """The highest-ranked evaluation, of equal ones the first. Without patience it is the last.

        Raises:
            DivergenceError: no loss was finite.
        """
        best = self.evaluations[-1] if self._patience is None else self._best()
        if math.isinf(best.loss):
            raise DivergenceError(_NOT_FINITE.format(best.loss))
        return best

    @property
    def is_over(self) -> bool:
        """Whether the last evaluations, as many as the patience, were all worse than one before them."""
        if self._patience is None:
            return False
        since = self.evaluations[::-1].index(self._best()) if self.evaluations else 0
        return since >= self._patience

    def _best(self) -> Evaluation:
        return max(self.evaluations, key=lambda evaluation: rank([evaluation]))


def start_model(task: Task, seed: int) -> Network:
    """Return the model before its first step: a new head (zeros) on the backbone, or all weights new."""
    model = build(task.contract.architecture)
    model.initialise(seed)
    if task.backbone is not None:
        transfer_backbone(model, load_model(task.backbone)[0])
    return model


def start(
    task: Task,
    learning_rate: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    saver: Saver | None,
    world: int = 1,
) -> tuple[Network, Plain, Saved | None]:
    """Return the model, its engine, and the saver's last checkpoint, from which they continue, if there is one."""
    config = task.config
    model = start_model(task, seed).to(device).train()
    if isinstance(model, ViT):
        model.activation_checkpointing = config.activation_checkpointing
    optim.restrict(model, config, seed)
    optimizer = optim.make_optimizer(model, config.optimizer, learning_rate, head_first=config.head_first)
    saved = None if saver is None else saver.resume(task.attempts, model, optimizer)
    if saved is not None:
        saved.load(model, WEIGHTS)
    accumulation = config.gradient_accumulation_steps
    engine = Plain(model, optimizer, dtype, config.optimizer.clip_norm, world, accumulation)
    if saved is not None:
        engine.load_state(saved.read, saved.step)
    return model, engine, saved


def class_weights(task: Task, data: Images) -> torch.Tensor | None:
    """Return the weight of each class in the loss, float32 [classes]; None if all are 1.

    "balanced" is n / (classes * images of the class), as in scikit-learn, for the images that are fitted.
    """
    given, names = task.config.class_weights, task.contract.class_names
    if given is None:
        return None
    if given == "balanced":
        counts = torch.bincount(torch.from_numpy(data.labels), minlength=len(names))
        return len(data.labels) / (len(names) * counts.clamp(min=1).float())
    return torch.tensor([given.get(name, 1.0) for name in names])


def backbone_changes(task: Task) -> list[str]:
    """Describe what fine-tuning resizes, drops or initialises in the task's backbone, one line each."""
    assert task.backbone is not None
    return transfer_backbone(build(task.contract.architecture), load_model(task.backbone)[0])


def fit(
    task: Task,
    data: Images,
    learning_rate: float,
    seed: int,
    noun: str = "step",
    after: int = 0,
    saver: Saver | None = None,
    writer: LogWriter | None = None,
    validation: Images | None = None,
    stopping: Stopping | None = None,
    worker: Worker = ALONE,
) -> tuple[Network, list[dict[str, float | int]], int]:
    """Train the task's model on `data`, from the saver's last checkpoint on if there is one.

    All weights are trained but those that `freeze` or `lora` exclude. LoRA's matrices are merged at the end.

    The weights are float32; with dtype bfloat16, a bfloat16 copy of them computes the gradients. With the same threads
    on the same type of CPU, the result is the same after any number of interruptions. All workers of a group call this
    together, and each returns the result; with another number of workers it is the same up to rounding, without
    dropout.

    Args:
        noun: what the progress line calls a step.
        after: steps that the stage still does after this fit (`steps_after`), for the estimated time left.
        saver: writes the checkpoints; None: none are written.
        writer: of the first worker, writes the log; None: there is none.
        validation: images that the model is evaluated on for the log, some times before the last step.
        stopping: ends the fit early, by the accuracy on these images; it is told of the evaluations.
        worker: this process's place among those that share each batch.

    Returns:
        The model, its curve [{step, learning_rate, loss}], and the number of damaged images that were replaced by
        others.

    Raises:
        DivergenceError: the loss or a gradient is not finite.
        UserError: the device certainly cannot hold the fit.
        Superseded: while a checkpoint was committed, there was a newer attempt.
    """
    config = task.config
    devices.set_threads(config.threads)
    device = devices.device(worker.local_rank)
    dtype = devices.torch_dtype(config.dtype, device)
    estimates.require_fit(task, device)
    model, engine, saved = start(task, learning_rate, seed, device, dtype, saver, worker.world)
    first, before = 0, WorkerState(loader={}, points=(), loss_sum=0.0, summed=0)
    if saved is not None:
        first, before = saved.step, own_state(saved.states, worker)
        if worker.rank == 0:
            print(f"{noun} {first}: continuing from the checkpoint of attempt {saved.attempt}", flush=True)
    steps, last = config.steps, task.steps  # of the schedule, of this fit
    evaluations = {math.ceil(steps * part / _EVALUATIONS) for part in range(1, _EVALUATIONS)} - {steps}
    if stopping is not None:
        evaluations = stopping.steps
        stopping.continue_from(before.evaluations)
    points = {math.ceil(last * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
    curve: list[dict[str, Any]] = [*before.points]
    loss_sum, summed = torch.full((), before.loss_sum, device=device), before.summed

    from_files = data.dataset.info.image is None
    transform = TrainTransform(config, seed, len(task.contract.class_names), from_files)
    order: Literal["global", "balanced"] = "balanced" if config.sampling == "balanced" else "global"
    share: Any = {"rank": worker.rank, "world": worker.world}
    sampler = Sampler(data, seed=seed, batch_size=config.batch_size, order=order, **share)
    weights = class_weights(task, data)
    weights = None if weights is None else weights.to(device)
    guard = Guard(data, sampler, last, saver)
    with Loader(
        data, sampler, task.contract.preprocessing, crop=transform.crop, threads=config.threads
    ) as batches:
        if saved is not None:
            batches.load_state_dict(before.loader)
            if writer is not None:
                writer.continue_from(first, before.log)
        log = Log(
            config,
            estimates.fit_flops(task),
            batches,
            len(data.labels),
            device,
            writer,
            first=first,
            world=worker.world,
            is_silent=worker.rank > 0,
            noun=noun,
            after=after,
            steps=last,
            is_limit=config.early_stopping is not None and task.last_step is None,
        )
        if worker.world > 1:
            devices.let_gloo_yield()
        for step, (positions, images, labels) in zip(range(first, last), batches, strict=False):
            torch.manual_seed(dropout_seed(seed, step, worker.rank))
            batch = (*transform(images.to(device), labels.to(device), positions, step), positions)
            rate = optim.learning_rate(step, steps, learning_rate, config.optimizer)
            for (part,), targets, drawn in optim.micro_batches(config.gradient_accumulation_steps, *batch):
                depth = depth_draws(task.contract.architecture, seed, drawn, device)
                logits = engine(normalise(part, task.contract.preprocessing, dtype), *depth)
                # a mean over images, also with weights, so that the mean over the parts is the batch's
                loss = softmax_cross_entropy(logits, targets, config.label_smoothing, weights)
                engine.backward(loss)
                loss_sum += loss.detach()
                summed += 1
                log.add(loss)
            norm = engine.step(rate)
            guard.watch(step, norm)

            done = step + 1
            mean_loss = None
            if done in points:
                of_all = summed_over_workers(loss_sum, worker)
                optim.check_finite("loss", of_all, step)
                mean_loss = of_all.item() / (summed * worker.world)
                curve.append({"step": done, "learning_rate": rate, "loss": mean_loss})
                loss_sum.zero_()
                summed = 0
            evaluation = None
            if validation is not None and done in evaluations:
                evaluation = _evaluate(averaged(model, engine), task.contract, validation, done, worker)
                if stopping is not None:
                    stopping.add(done, evaluation)
            log.step(done, rate, norm, mean_loss, evaluation)
            if stopping is not None and stopping.is_over:
                guard.check()
                break
            if saver is not None and done < last and saver.is_due(done):
                guard.check()
                state = WorkerState(
                    loader=batches.state_dict(),
                    points=tuple(curve),
                    loss_sum=loss_sum.item(),
                    summed=summed,
                    substitutes=before.substitutes + batches.substitutes,
                    evaluations=() if stopping is None else tuple(stopping.evaluations),
                    log=log.unsaved(),
                )
                saver.save(done, None, engine.pieces(), state)
    if saver is not None and worker.world > 1:
        saver.wait()  # together, because the first worker scores the model alone
    model = averaged(model, engine)
    if isinstance(model, ViT):
        lora.merge(model)
    substitutes = torch.tensor(before.substitutes + batches.substitutes, device=device)
    return model.eval(), curve, int(summed_over_workers(substitutes, worker))


def own_state(states: Sequence[WorkerState], worker: Worker) -> WorkerState:
    """Return what a worker continues from; more or fewer workers may have written the checkpoint."""
    if len(states) == worker.world:
        return states[worker.rank]
    damaged = sum(state.substitutes for state in states)
    mean = sum(state.loss_sum for state in states) / len(states)
    changes = {"loss_sum": mean, "substitutes": 0 if worker.rank else damaged}
    return states[0].model_copy(update=changes)


def summed_over_workers(value: torch.Tensor, worker: Worker) -> torch.Tensor:
    """Return the sum of all workers' values, which all call this together; alone, the value itself."""
    if worker.world == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def averaged(model: Network, engine: Plain) -> Network:
    """Return a copy of the model with the moving averages of its weights, or the model itself if there are none."""
    if not has_ema(engine.optimizer):
        return model
    model = copy.deepcopy(model)
    model.load_state_dict(engine.full_weights())
    return model


def _evaluate(
    model: Network, contract: ModelContract, data: Images, step: int, worker: Worker = ALONE
) -> Evaluation | None:
    """Return what `score` says in the middle of a training; None if the loss is not finite, which may yet change.

    Each worker computes the logits of a share of the images, and all of them get the same evaluation.
    """
    model.eval()
    count = len(data.labels)
    low, high = (count * rank // worker.world for rank in (worker.rank, worker.rank + 1))
    try:
        logits = predict(model, contract, data if worker.world == 1 else data.take(np.arange(low, high)))
        if worker.world > 1:
            device = next(model.parameters()).device
            everyones = torch.zeros(count, logits.shape[1], device=device)
            everyones[low:high] = logits.to(device)
            logits = summed_over_workers(everyones, worker).cpu()
        accuracy, loss, *_ = score(logits, data.labels)
    except DivergenceError:
        return None
    finally:
        model.train()
    return Evaluation(step, accuracy, loss)


def predict(model: Network, contract: ModelContract, data: Images) -> torch.Tensor:
    """Return the logits of every image of `data`, float32 [n, classes]."""
    device, preprocessing = next(model.parameters()).device, contract.preprocessing
    parts = [torch.empty(0, len(contract.class_names))]
    with torch.inference_mode():
        for start in range(0, len(data.labels), _EVALUATION_BATCH):
            images = torch.from_numpy(
                data.dataset.load(data.rows.slice(start, _EVALUATION_BATCH), preprocessing)
            )
            parts.append(model(normalise(images.to(device), preprocessing, torch.float32)).cpu())
    return torch.cat(parts)


def score(logits: torch.Tensor, labels: NDArray[Any], temperature: float | None = None) -> Score:
    """Compare logits [n, classes] with the labels [n].

    Args:
        temperature: of the calibrated probabilities; None: there are none.

    Raises:
        DivergenceError: the loss is not finite, because the last steps made the weights too large.
    """
    truth = torch.tensor(labels)
    loss = functional.cross_entropy(logits, truth).item()
    if not math.isfinite(loss):
        raise DivergenceError(_NOT_FINITE.format(loss))
    predictions = logits.argmax(dim=1)
    table = probability_table(logits.numpy(), labels, temperature)
    accuracy = (predictions == truth).double().mean().item()
    return Score(accuracy, loss, predictions.numpy(), table)
