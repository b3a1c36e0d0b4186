"""The finetune stage: a sweep over learning rates, a refit with the best, and one look at test (paper, Table 4).

In: a dataset and a backbone, or a shape to train from scratch. Out: model.safetensors and config.json (of draw 0's
refit), rows.parquet and predictions.parquet (`ray_jobs.evaluation.rows`), sweep.json {trials, chosen, selected_on},
curves.json.

What chooses the rate: with few labels, the mean accuracy over folds inside draw 0's labels; with all labels, dev; of
equals the lower loss. Then every draw is fitted with that rate on all its labels (with all labels: train and dev) and
scored on test once. A single rate needs no choice, so nothing is swept. A trial of the sweep is given images of train
and dev only; test is opened by `refit` alone.

    python -m ray_jobs.finetune --spec STORE/artifacts/finetune/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Finetune
from pipelines.store import FileEntry
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluation import rows
from ray_jobs.evaluation.leakage import COMPARED, PRETRAINED, SEEN, Overlap, check_leakage
from ray_jobs.pretrain import model_contract
from ray_jobs.process.progress import Progress
from ray_jobs.process.stage import Context, Result, model_digest, run_stage
from ray_jobs.training import devices, optim
from vit_model.errors import UserError, reasons
from vit_model.variants import FAMILIES

if TYPE_CHECKING:
    from vit_model.build import Network
    from vit_model.config import ModelContract

PROTOCOL = "fine-tuning"
ONE_RATE = "nothing, one learning rate was given"
DIVERGED = sys.float_info.max  # the loss of a trial that diverged: sweep.json can't say infinity
_EVALUATION_BATCH = 512
_CURVE_POINTS = 20

Indices = NDArray[np.int64]


class Images(NamedTuple):
    """Labelled images that are read when they are needed: some rows of a dataset's index."""

    dataset: Dataset
    rows: pa.Table

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.asarray(self.rows["label"].to_numpy(), np.int64)

    def take(self, indices: Indices) -> Images:
        return Images(self.dataset, self.rows.take(indices))


class Task(NamedTuple):
    """What all fits of a stage share."""

    config: Finetune
    contract: ModelContract
    backbone: Path | None


class Score(NamedTuple):
    """A model's results on some images: `predictions` [n] are labels, `probabilities` [n] their softmax probabilities,
    and `loss` is the mean cross-entropy."""

    accuracy: float
    loss: float
    predictions: NDArray[np.int64]
    probabilities: NDArray[np.float32]


# ------------------------------------------------------------------------------------------------- one fit


def fetched(context: Context[Finetune], task: Task) -> Task:
    """The task on this machine: another may have fetched the backbone's files to another folder."""
    return task if task.backbone is None else task._replace(backbone=context.input("backbone"))


def start_model(task: Task, seed: int) -> Network:
    """The model before its first step: a new head (zeros) on the backbone, or new weights throughout."""
    from vit_model.build import build
    from vit_model.weights import load_model, transfer_backbone

    model = build(task.contract.architecture)
    model.initialise(seed)
    if task.backbone is not None:
        transfer_backbone(model, load_model(task.backbone)[0])
    return model


def taken_over(task: Task) -> list[str]:
    """What of the backbone is resized, dropped or new in the model, a line each."""
    from vit_model.build import build
    from vit_model.weights import load_model, transfer_backbone

    if task.backbone is None:
        return []
    return transfer_backbone(build(task.contract.architecture), load_model(task.backbone)[0])


def fit(
    task: Task, data: Images, learning_rate: float, seed: int, noun: str = "step", after: int = 0
) -> tuple[Network, list[dict[str, float | int]], int]:
    """The model trained on `data` with all its weights, its curve [{step, learning_rate, loss}], and how many damaged
    images others took the place of.

    The weights are float32; with dtype bfloat16 a bfloat16 copy of them computes the gradients. `after` is of
    `steps_after`, for the time left. Raises ValueError when the loss or a gradient stops being finite.
    """
    config = task.config
    devices.set_threads(config.threads)
    import torch

    from ray_jobs.augment import augment, randomise
    from ray_jobs.data.loader import Loader
    from vit_model.objectives import softmax_cross_entropy
    from vit_model.preprocessing import normalise

    device = devices.device()
    dtype = devices.torch_dtype(config.dtype, device)
    model = start_model(task, seed).to(device).train()
    working = optim.working_copy(model, dtype)
    optimizer = optim.adamw(model, config.optimizer)
    steps, batch = config.steps, config.batch_size
    points = {math.ceil(steps * part / _CURVE_POINTS) for part in range(1, _CURVE_POINTS + 1)}
    curve: list[dict[str, float | int]] = []
    loss_sum, summed = torch.zeros((), device=device), 0
    progress = Progress(steps, noun, after=after)

    classes = len(task.contract.class_names)
    with Loader(
        data.dataset,
        data.rows,
        task.contract.preprocessing,
        policy=config.augment,
        seed=seed,
        batch=batch,
        threads=config.threads,
    ) as batches:
        for step, (positions, images, labels) in zip(range(steps), batches, strict=False):
            images, labels = images.to(device), labels.to(device)
            if not batches.is_cropped:
                images = augment(images, config.augment, seed, positions)
            images, labels = randomise(images, labels, classes, config, seed, step, positions)
            rate = optim.learning_rate(step, steps, learning_rate, config.optimizer)
            optim.set_learning_rate(optimizer, rate)
            logits = working(normalise(images, task.contract.preprocessing, dtype))
            loss = softmax_cross_entropy(logits, labels, config.label_smoothing)
            loss.backward()
            norm = optim.update(optimizer, model, working, config.optimizer.clip_norm)
            loss_sum += loss.detach()
            summed += 1

            done = step + 1
            if done in points:
                optim.check_finite("gradient norm", norm, step)
                optim.check_finite("loss", loss_sum, step)
                curve.append({"step": done, "learning_rate": rate, "loss": loss_sum.item() / summed})
                loss_sum.zero_()
                summed = 0
            if progress.due(done) and done < steps:
                progress.show(done, done * batch, loss=loss.item())
    return model.eval(), curve, batches.substitutes


def score(model: Network, contract: ModelContract, data: Images) -> Score:
    """Judge every image of `data`, in float32."""
    import torch
    from torch.nn import functional

    from vit_model.preprocessing import normalise

    device, preprocessing = next(model.parameters()).device, contract.preprocessing
    labels, parts = torch.tensor(data.labels), []
    with torch.inference_mode():
        for start in range(0, len(labels), _EVALUATION_BATCH):
            images = torch.from_numpy(
                data.dataset.load(data.rows.slice(start, _EVALUATION_BATCH), preprocessing)
            )
            parts.append(model(normalise(images.to(device), preprocessing, torch.float32)).cpu())
        logits = torch.cat(parts)
        predictions = logits.argmax(dim=1)
        probabilities = logits.softmax(dim=1).amax(dim=1)
        loss = functional.cross_entropy(logits, labels).item()
    accuracy = (predictions == labels).double().mean().item()
    return Score(accuracy, loss, predictions.numpy(), probabilities.numpy())


# ------------------------------------------------------------------------------------------------- the sweep


def choose(trials: list[dict[str, Any]]) -> float:
    """The learning rate with the highest mean validation accuracy; among ties the one with the lowest mean loss.

    A rate that diverged in some folds ranks below all rates that diverged in fewer. Raises DivergenceError if every
    rate diverged in every fold.
    """

    def place(trial: dict[str, Any]) -> tuple[float, float, float]:
        losses = [loss for loss in trial["losses"] if loss != DIVERGED]
        # rates compared by loss have equally many losses, so sums rank as means do
        return -len(losses), -float(np.mean(trial["accuracies"])), sum(losses)

    best = min(trials, key=place)
    if set(best["losses"]) == {DIVERGED}:
        raise optim.DivergenceError(
            "training diverged with every learning rate of the sweep: lower ones would help"
        )
    return float(best["learning_rate"])


def run_trial(
    task: Task, pool: Images, fold: tuple[Indices, Indices], rate: float, name: str, after: int = 0
) -> Score:
    """Fit on the first part of a fold and judge on the second."""
    inside, outside = fold
    model, *_ = fit(task, pool.take(inside), rate, task.config.seed, f"{name}, step", after)
    result = score(model, task.contract, pool.take(outside))
    print(f"{name}: accuracy {result.accuracy:.3f}, loss {result.loss:.3f}", flush=True)
    return result


def sweep(
    context: Context[Finetune], task: Task, pool: Images, folds: list[tuple[Indices, Indices]], scratch: str
) -> list[dict[str, Any]]:
    """Ray Tune over rate x fold: [{learning_rate, accuracies, losses}] in the order of the configuration.

    `scratch` is a folder for Tune's own records, of which nothing is kept.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # its CSV and TensorBoard files would hold times
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # the old one is silent at verbosity 0
    # It misses the files that are switched off above; a trial's last report is in its result all the same.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["TUNE_WARN_INSUFFICIENT_RESOURCE_THRESHOLD_S"] = "900"  # another stage may hold the cores
    from ray import tune

    rates = task.config.learning_rates
    resources, concurrent = devices.fit_resources(task.config.threads)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(
                _tune_trial, context=context, task=task, pool=pool, folds=folds, concurrent=concurrent
            ),
            resources,
        ),
        param_space={
            "rate": tune.grid_search(list(range(len(rates)))),
            "fold": tune.grid_search(list(range(len(folds)))),
        },
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent),
        run_config=tune.RunConfig(name="sweep", storage_path=scratch, verbose=0),
    )
    found = {}
    for result in tuner.fit():
        if result.error is not None:
            raise result.error
        assert result.config is not None and result.metrics is not None
        found[result.config["rate"], result.config["fold"]] = result.metrics
    return [
        {
            "learning_rate": rate,
            "accuracies": [found[number, fold]["accuracy"] for fold in range(len(folds))],
            "losses": [found[number, fold]["loss"] for fold in range(len(folds))],
        }
        for number, rate in enumerate(rates)
    ]


def _tune_trial(
    parameters: dict[str, int],
    context: Context[Finetune],
    task: Task,
    pool: Images,
    folds: list[tuple[Indices, Indices]],
    concurrent: int,
) -> None:
    from ray import tune

    sys.unraisablehook = _show_unraisable
    number = parameters["fold"] * len(task.config.learning_rates) + parameters["rate"]
    after = steps_after(task.config, len(folds), concurrent, number)
    rate = task.config.learning_rates[parameters["rate"]]
    name = f"learning rate {rate:g}" + (f", fold {parameters['fold']}" if len(folds) > 1 else "")
    try:
        result = run_trial(fetched(context, task), pool, folds[parameters["fold"]], rate, name, after)
    except optim.DivergenceError as error:  # a sweep is there to find out which rates are too high
        print(f"{name}: {error}", flush=True)
        tune.report({"accuracy": 0.0, "loss": DIVERGED})
    else:
        tune.report({"accuracy": result.accuracy, "loss": result.loss})


def _show_unraisable(error: sys.UnraisableHookArgs) -> None:
    """Show an exception that nothing can catch, unless it only ends the process.

    Ray's handler of SIGTERM raises SystemExit wherever the code of a trial is that has ended, in a destructor too.
    """
    if not isinstance(error.exc_value, SystemExit):
        sys.__unraisablehook__(error)


def steps_after(config: Finetune, folds: int, concurrent: int, number: int) -> int:
    """How many steps the stage does after the fit `number` (trials, then refits), with `concurrent` fits in parallel.

    Args:
        folds: of the sweep; 0 when it is over, then refits are counted from 0.
    """
    trials = folds * len(config.learning_rates)
    refits = config.labels.draws if config.labels.per_class is not None else 1
    rounds = math.ceil(trials / concurrent)
    own = number // concurrent if number < trials else rounds + (number - trials) // concurrent
    return (rounds + math.ceil(refits / concurrent) - own - 1) * config.steps


# ------------------------------------------------------------------------------------------------- the refits


class Refit(NamedTuple):
    """One draw's model on test. `files` are those of the model, where it was kept."""

    score: Score
    curve: list[dict[str, float | int]]
    substitutes: int
    files: tuple[FileEntry, ...]


def refit(
    context: Context[Finetune], task: Task, pool: Images, rate: float, draw: int, after: int = 0
) -> Refit:
    """Fit on all of a draw's labels and judge on test. Draw 0's model becomes the artifact's."""
    seed, noun = task.config.seed + draw, f"draw {draw}, step"
    model, curve, substitutes = fit(fetched(context, task), pool, rate, seed, noun, after)
    test = read_split(context.dataset(context.config.cache_gib), "test")
    result = score(model, task.contract, test)
    print(f"draw {draw}: test accuracy {result.accuracy:.3f}", flush=True)
    if draw:
        return Refit(result, curve, substitutes, ())
    from vit_model.weights import save_model

    with context.staging() as staging:
        save_model(staging.path, model, task.contract)
    return Refit(result, curve, substitutes, staging.files)


def run_refits(context: Context[Finetune], task: Task, pools: list[Images], rate: float) -> list[Refit]:
    """Every draw's refit, each in a Ray task."""
    import ray

    resources, concurrent = devices.fit_resources(task.config.threads)
    remote = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0))(refit)
    found: list[Refit] = ray.get([
        remote.remote(context, task, pool, rate, draw, steps_after(task.config, 0, concurrent, draw))
        for draw, pool in enumerate(pools)
    ])  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------- the stage


def main(context: Context[Finetune]) -> Result:
    """Check the backbone for leakage, sweep, choose, refit, score, write.

    Raises:
        ValueError: the backbone was trained on test images, see `check_leakage`; or every learning rate diverged.
    """
    config = context.config
    dataset = context.dataset(config.cache_gib)
    task = make_task(config, dataset, context.input("backbone") if config.backbone else None)
    for line in taken_over(task):
        print(line, flush=True)
    pools, folds, selected_on = labelled(config, dataset)
    dataset.require("test")
    overlap = check_leakage(context, dataset, learned_from(pools))
    if len(config.learning_rates) == 1:  # nothing to choose from, so no image is kept from the training
        trials, chosen, selected_on = [], config.learning_rates[0], ONE_RATE
    else:
        with tempfile.TemporaryDirectory(prefix="vitflow-", ignore_cleanup_errors=True) as scratch:
            trials = sweep(context, task, pools[0], folds, scratch)
        chosen = choose(trials)
    print(f"chosen on {selected_on}: learning rate {chosen:g}", flush=True)
    refits = run_refits(context, task, pools, chosen)

    number_rows, predictions = tables(task, dataset, refits, chosen, selected_on, overlap)
    with context.staging() as staging:
        rows.write_table(staging.path / "rows.parquet", number_rows, rows.ROWS)
        rows.write_predictions(staging.path / "predictions.parquet", predictions)
        ledger = {"trials": trials, "chosen": chosen, "selected_on": selected_on}
        sweep_json = json.dumps(ledger, indent=1) + "\n"
        (staging.path / "sweep.json").write_text(sweep_json)
        curves = [{"draw": draw, "points": found.curve} for draw, found in enumerate(refits)]
        (staging.path / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    files = (*refits[0].files, *staging.files)
    digest = {"model": model_digest(refits[0].files), "rows": rows.digest_rows(number_rows, rows.ROWS)}
    digest["sweep"] = sha256(sweep_json)  # a report shows it
    metrics: dict[str, float | int | str] = {
        "learning_rate": chosen,
        **_test_accuracy(dataset, refits, overlap),
        "parameters": task.contract.architecture.num_parameters,
        "substitutes": sum(found.substitutes for found in refits),
        **overlap.metrics,
    }
    if trials:
        (taken,) = (trial for trial in trials if trial["learning_rate"] == chosen)
        metrics["validation_accuracy"] = float(np.mean(taken["accuracies"]))
    return Result(content_digest=sha256(canonical_json(digest)), files=files, metrics=metrics)


def _test_accuracy(dataset: Dataset, refits: list[Refit], overlap: Overlap) -> dict[str, float]:
    """The mean over draws, on the test images that were not seen in training; empty if all were."""
    unseen = ~overlap.seen
    if not unseen.any():
        return {}
    right = [found.score.predictions == dataset.labels("test") for found in refits]
    return {"test_accuracy": float(np.mean([own[unseen].mean() for own in right]))}


def make_task(config: Finetune, dataset: Dataset, backbone: Path | None) -> Task:
    """The task with its model's contract: the backbone's with another head and resolution, or the shape's."""
    if backbone is None:
        assert config.model is not None and config.resolution is not None
        contract = model_contract(config.model, config.resolution, dataset.info, config.eval_crop)
        return Task(config, contract, None)
    from vit_model.config import ModelContract, Preprocessing
    from vit_model.weights import read_contract

    source = read_contract(backbone)
    resolution = config.resolution or source.preprocessing.resolution
    names = dataset.info.class_names
    changed = {"resolution": resolution} | (config.eval_crop.model_dump() if config.eval_crop else {})
    try:
        contract = ModelContract(
            architecture=source.architecture.for_finetuning(resolution, len(names)),
            class_names=names,
            preprocessing=Preprocessing(**(source.preprocessing.model_dump() | changed)),
            training_data=dataset.info.content_digest,
            license=source.license,
        )
    except ValidationError as error:
        raise UserError(f"fine-tuning {config.backbone}: {reasons(error)}") from error
    return Task(config, contract, backbone)


def labelled(config: Finetune, dataset: Dataset) -> tuple[list[Images], list[tuple[Indices, Indices]], str]:
    """(each draw's images, the folds inside draw 0's, on what the rate is selected). Reads train and dev only."""
    from ray_jobs.evaluation.supports import (  # scikit-learn, a second that no trial needs
        draw_labels,
        stratified_folds,
    )

    labels = config.labels
    train = read_split(dataset, "train")
    if labels.per_class is not None:
        pools = [
            train.take(draw_labels(train.labels, labels.per_class, labels.seed, draw))
            for draw in range(labels.draws)
        ]
        folds = stratified_folds(pools[0].labels, labels.folds, labels.seed)
        return pools, folds, f"{labels.folds}-fold cross-validation in draw 0"
    if not dataset.info.splits["dev"]:
        folds = stratified_folds(train.labels, labels.folds, labels.seed)
        return [train], folds, f"{labels.folds}-fold cross-validation in train"
    dev = read_split(dataset, "dev")
    both = Images(dataset, pa.concat_tables([train.rows, dev.rows]))
    return [both], [(np.arange(len(train.labels)), np.arange(len(train.labels), len(both.labels)))], "dev"


def learned_from(pools: list[Images]) -> pa.Table:
    """sample_id and COMPARED of the images that some draw takes, each once."""
    rows = pa.concat_tables([pool.rows for pool in pools])
    return rows.group_by(["sample_id", *COMPARED]).aggregate([])


def read_split(dataset: Dataset, split: Split) -> Images:
    """The images of a split. Raises ValueError when it is empty."""
    dataset.require(split)
    return Images(dataset, dataset.index(split))


def tables(
    task: Task, dataset: Dataset, refits: list[Refit], chosen: float, selected_on: str, overlap: Overlap
) -> tuple[list[rows.Row], list[Any]]:
    """rows.parquet's rows and predictions.parquet's tables."""
    config = task.config
    settings: dict[str, Any] = {"learning_rate": chosen, "steps": config.steps,
                                "batch_size": config.batch_size, "augment": config.augment}  # fmt: skip
    if config.randaugment is not None:
        settings["randaugment"] = config.randaugment.model_dump()
    settings |= {name: alpha for name in ("mixup", "cutmix") if (alpha := getattr(config, name))}
    truth = rows.truth_of(dataset, overlap.seen)
    family = FAMILIES[task.contract.architecture.family]
    start = "from scratch" if task.backbone is None else PRETRAINED
    if config.labels.per_class is not None and overlap.labels_seen:
        start = SEEN  # it learned from more of these labels than the row states
    numbers, predictions = [], []
    for draw, found in enumerate(refits):
        common = {
            "protocol": PROTOCOL,
            "method": f"{family}, {start}",
            "labels_per_class": config.labels.per_class,
            "draw": draw,
        }
        answers, probabilities = found.score.predictions, found.score.probabilities
        for row, images in rows.scored(common, truth, answers, selected_on, settings, probabilities):
            numbers.append(row)
            predictions.append(images)
    return numbers, predictions


if __name__ == "__main__":
    run_stage("finetune")
