"""Detection as a task of fine-tuning: the network, its loss, its detections of held-out images and their AP.

In: a `Task` of a `Detect`, and images with boxes. Out: what `fit` and the fits of a sweep need in place of a
classifier's logits. Boxes are in pixels of the stored image, except in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipelines.spec import Detect
from ray_jobs.augment import CROPPING, TrainTransform, crops, drop_path_draws
from ray_jobs.augment.objects import LEAST, in_crop
from ray_jobs.data.boxes import Box, of_rows, sizes_of
from ray_jobs.data.crops import Crops
from ray_jobs.data.loader import MEMORY_BYTES
from ray_jobs.data.sampler import Sampler, sample_positions
from ray_jobs.data.shards import Images
from ray_jobs.detection.average_precision import Detected, match, mean_ap
from ray_jobs.detection.tables import found_table, truths_of
from ray_jobs.evaluation.rows import AP
from ray_jobs.training.engine import Plain
from ray_jobs.training.evaluators import Evaluator, check_loss
from ray_jobs.training.optim import MicroBatch
from ray_jobs.training.task import Evaluation, Task
from vit_model.config import ViTConfig
from vit_model.detection.contract import DetectorContract
from vit_model.detection.detector import Detector
from vit_model.detection.fcos import PER_IMAGE, Found, Outputs, Truth, count_places, detect, loss
from vit_model.errors import UserError
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import load_model, transfer_backbone

_FIELDS = 6  # of a detection: four sides, the score, the class


class Numbered(Images):
    """Images whose labels are their row numbers, by which a loss finds their boxes."""

    @property
    def labels(self) -> NDArray[np.int64]:
        return np.arange(len(self.rows))


def network(task: Task, seed: int) -> Detector:
    """Return the detector before its first step. Raises UserError for a model that cannot be its backbone."""
    detector = untrained(task)
    detector.model.initialise(seed)
    if task.backbone is not None:
        transfer_backbone(detector.model, load_model(task.backbone)[0])
    detector.initialise(seed)
    return detector


def untrained(task: Task) -> Detector:
    """Return the detector with weights of torch's, on torch's default device. Raises UserError as `network`."""
    contract = detector_contract(task)
    architecture = contract.backbone.architecture
    assert isinstance(architecture, ViTConfig)  # the contract has checked it
    names = contract.class_names
    return Detector(ViT(architecture), len(names), contract.channels, contract.convs, contract.scales)


def detector_contract(task: Task) -> DetectorContract:
    """Return the contract of a task's detector. Raises UserError for a model that cannot be its backbone."""
    config = task.config
    assert isinstance(config, Detect)
    try:
        return DetectorContract(
            backbone=task.contract,
            class_names=task.objects,
            channels=config.channels,
            convs=config.convs,
            scales=config.scales,
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def make_loss(
    task: Task, engine: Plain, seed: int, data: Images, transform: TrainTransform, sampler: Sampler
) -> Callable[[MicroBatch], Tensor]:
    """Return the loss of a fit, whose batches have row numbers of `data` as targets.

    Its sums are divided by the number of places with a box in the whole batch of a step, which every worker counts for
    itself. So the mean over micro-batches and workers is the loss of the batch.
    """
    preprocessing, boxes = task.contract.preprocessing, of_rows(data.rows)
    sizes, side, detector = sizes_of(data.rows), preprocessing.resolution, engine.masters
    assert isinstance(detector, Detector)

    def truths_of(positions: NDArray[np.int64], rows: NDArray[np.int64], device: torch.device) -> list[Truth]:
        seen = zip(rows.tolist(), *crops_of(transform, positions, sizes[rows], side), strict=True)
        return [truth(boxes[row], crop, is_flipped, side, device) for row, crop, is_flipped in seen]

    @lru_cache(maxsize=1)  # for all micro-batches of a step
    def places_in(step: int, device: torch.device) -> int:
        positions = sample_positions(step, sampler.batch_size, rank=0, world=1)
        truths = truths_of(positions, sampler.order.rows(positions), device)
        return max(1, count_places(detector.places, truths))

    frozen = _FrozenTokens(transform, side, len(data.rows)) if task.config.freeze == "backbone" else None

    def total(batch: MicroBatch) -> Tensor:
        (images,), rows = batch.views, batch.targets.cpu().numpy()
        inputs = normalise(images, preprocessing, engine.dtype)
        if frozen is None:
            depth = drop_path_draws(task.contract.architecture, seed, batch.positions, images.device)
            outputs = _float(engine.module(inputs, *depth))
        else:
            outputs = _float(engine.module.read(frozen.of(engine.module, inputs, rows, batch.positions)))
        truths = truths_of(batch.positions, rows, images.device)
        share = len(batch.positions) / sampler.batch_size
        count = None  # the loss counts the places of its own images
        if share < 1:
            count = share * places_in(int(batch.positions[0]) // sampler.batch_size, images.device)
        return torch.stack(loss(outputs, detector.places, truths, count)).sum()

    return total


class _FrozenTokens:
    """The tokens of a ViT that is not trained, computed once for each image, and once for its mirror image.

    Crops and changed colours are different every time, and tokens of more than `MEMORY_BYTES` are not kept; then they
    are computed each time. They are those of evaluation: without dropout and stochastic depth.
    """

    def __init__(self, transform: TrainTransform, side: int, images: int) -> None:
        self._transform, self._side, self._images = transform, side, images
        repeats = transform.config.augment in ("none", "flip") and not transform.config.color_jitter
        self._kept: dict[tuple[int, bool], Tensor] | None = {} if repeats else None

    def of(self, detector: Detector, inputs: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Return the tokens [b, n, d] of normalised images, which are these rows at these positions."""
        if self._kept is None:
            return self._computed(detector, inputs)
        flipped = [False] * len(rows)
        if self._transform.config.augment == "flip":
            flipped = crops("flip", self._transform.seed, positions, self._side, self._side).flipped.tolist()
        keys = [*zip(rows.tolist(), flipped, strict=True)]
        if not self._kept:
            one = self._computed(detector, inputs[:1])
            if 2 * self._images * one.numel() * one.element_size() > MEMORY_BYTES:
                self._kept = None
                return self._computed(detector, inputs)
        for number, key in enumerate(keys):
            if key not in self._kept:  # each alone, because a fit that resumes meets them in other batches
                self._kept[key] = self._computed(detector, inputs[number : number + 1])[0]
        return torch.stack([self._kept[key] for key in keys])

    @torch.no_grad()
    def _computed(self, detector: Detector, inputs: Tensor) -> Tensor:
        detector.model.eval()
        return detector.model.normed_tokens(inputs)


def crops_of(
    transform: TrainTransform, positions: NDArray[np.int64], sizes: NDArray[np.int64], side: int
) -> tuple[NDArray[np.float64], list[bool]]:
    """Return each image's crop (top, left, height, width) in pixels of the stored image, and whether it is mirrored.

    Args:
        sizes: the images' widths and heights [n, 2].
    """
    policy, (widths, heights) = str(transform.config.augment), sizes.T
    if transform.crop is not None:
        drawn, scale = transform.crop(positions, heights, widths), np.ones((len(sizes), 1))
    elif policy in CROPPING:  # of the image as it was loaded, squashed to the model's square
        drawn, scale = crops(policy, transform.seed, positions, side, side), sizes[:, ::-1] / side
    else:
        nothing = np.zeros(len(sizes), np.int64)
        drawn, scale = Crops(nothing, nothing, heights, widths, nothing.astype(bool)), np.ones((len(sizes), 1))
    corner = np.stack([drawn.top, drawn.left], axis=1) * scale
    extent = np.stack([drawn.height, drawn.width], axis=1) * scale
    return np.concatenate([corner, extent], axis=1), drawn.flipped.tolist()


def truth(boxes: Sequence[Box], crop: NDArray[np.float64], is_flipped: bool, side: int, device: torch.device) -> Truth:
    """Return the boxes of an image as a loss takes them; it ignores a box of which the crop shows too little."""
    given = torch.tensor([box[:4] for box in boxes], dtype=torch.float32).reshape(-1, 4)
    top, left, height, width = crop.tolist()
    inside, visible = in_crop(given, (top, left, height, width), is_flipped, side)
    ignored = torch.tensor([box.ignored for box in boxes], dtype=torch.bool) | (visible < LEAST)
    kept = visible > 0
    labels = torch.tensor([box.label for box in boxes], dtype=torch.int64)
    return Truth(*(part[kept].to(device) for part in (inside, labels, ignored)))


def _float(outputs: Outputs) -> Outputs:
    return Outputs(*(part.float() for part in outputs))


class Tested(NamedTuple):
    """The detections of images, in their order, and the mean loss."""

    found: list[Detected]
    loss: float


def test(detector: Detector, images: Evaluator) -> Tested:
    """Detect the objects of all images; all workers call this together.

    Raises:
        DivergenceError: the loss is not finite.
    """
    rows, side = images.images.rows, detector.config.image_shape[0]
    boxes, sizes, device = of_rows(rows), sizes_of(rows), next(detector.parameters()).device
    was_training, places = detector.training, detector.places

    def packed(chosen: Tensor, outputs: Outputs) -> Tensor:
        """Return each image's loss and detections, float32 [b, 1 + 100 * 6], in the model's pixels."""
        outputs, packs = _float(outputs), []
        for number, (row, found) in enumerate(
            zip((chosen % len(rows)).tolist(), detect(outputs, places, side, side), strict=True)
        ):
            whole = np.array([0, 0, *sizes[row, ::-1]], float)
            one = Outputs(*(part[number : number + 1] for part in outputs))
            cost = torch.stack(loss(one, places, [truth(boxes[row], whole, False, side, device)])).sum()
            packs.append(torch.cat([cost[None], _padded(found)]))
        return torch.stack(packs)

    values = images.gather(detector.eval(), device, packed)
    detector.train(was_training)
    scale = np.tile(sizes / side, 2)
    found = [_unpacked(each, by) for each, by in zip(values[:, 1:].numpy(), scale, strict=True)]
    return Tested(found, check_loss(float(values[:, 0].double().mean())))


def _padded(found: Found) -> Tensor:
    table = torch.cat([found.boxes, found.scores[:, None], found.classes[:, None].float()], dim=1)
    return torch.nn.functional.pad(table, (0, 0, 0, PER_IMAGE - len(table))).flatten()


def _unpacked(values: NDArray[np.float32], scale: NDArray[np.float64]) -> Detected:
    table = values.reshape(PER_IMAGE, _FIELDS)
    table = table[table[:, 4] > 0]  # no detection has a score of 0
    return Detected((table[:, :4] * scale).astype(np.float32), table[:, 4], table[:, 5].astype(np.int64))


def scored(step: int, detector: Detector, images: Evaluator) -> tuple[Evaluation, pa.Table]:
    """Return the results after a step, and the table of detections (FOUND). Raises DivergenceError as `test`."""
    tested, truths = test(detector, images), truths_of(images.images.rows)
    value = float(mean_ap(match(truths, tested.found, detector.head.num_classes)["all"]))
    value = 0.0 if np.isnan(value) else value  # no image has boxes
    return Evaluation(step, value, tested.loss, {AP: value}), found_table(tested.found)


def train_flops(task: Task) -> int:
    """Return the FLOPs of a step per image, a backward pass counting as two forward passes; frozen tokens are free."""
    with torch.device("meta"):
        detector = untrained(task)
        images = torch.empty(1, task.contract.architecture.in_channels, *detector.config.image_shape)
        tokens = detector.model.normed_tokens(images)
    with FlopCounterMode(display=False) as counter:
        detector.read(tokens if task.config.freeze == "backbone" else detector.model.normed_tokens(images))
    return 3 * counter.get_total_flops()
