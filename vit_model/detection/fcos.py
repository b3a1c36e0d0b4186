"""The FCOS detector's head, targets, loss and inference (Tian et al. 2019, arXiv 1904.01355).

In: maps of features. Out: for each place of each map, logits of classes, the distances to the four sides of a box, and
a logit of its centredness; from these a loss, or boxes with scores.
Use: `outputs = head(maps)`; `places = Places.of(shapes, strides)`; `loss(outputs, places, truths)` or
`detect(outputs, places, height, width)`.

It follows torchvision's (models/detection/fcos.py): distances are in strides and not below 0, and centredness comes
from the tower of the boxes. Places are in the middle of their squares, as in the paper; torchvision's are at the upper
left corner. Letters in shapes: b batch, n places of all maps, k classes, m boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_model.detection.boxes import areas, clip, giou, nms
from vit_model.detection.contract import GROUPS

CENTRE_RADIUS = 1.5  # strides from the middle of a box within which a place can belong to it
FAR, FARTHEST = 4, 8  # strides from a place to the farthest side of a box that its map may detect
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss
PRIOR = 0.01  # the probability of each class at first
SCORE, NMS, PER_MAP, PER_IMAGE = 0.05, 0.6, 1000, 100


class Outputs(NamedTuple):
    """What the head says about each place."""

    classes: Tensor
    """logits [b, n, k]"""
    sides: Tensor
    """distances to the left, upper, right and lower side [b, n, 4], in strides"""
    centred: Tensor
    """logits [b, n]"""


class Truth(NamedTuple):
    """The boxes of an image."""

    boxes: Tensor
    """[m, 4], see `vit_model.detection.boxes`"""
    classes: Tensor
    """int64 [m]"""
    ignored: Tensor
    """bool [m]: regions where nothing is right or wrong, such as crowds"""


class Losses(NamedTuple):
    """The three parts of the loss, each divided by the number of places with a box, or by 1 without any."""

    classes: Tensor
    boxes: Tensor
    centred: Tensor


class Found(NamedTuple):
    """The detections in an image, by descending score."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


class Places(NamedTuple):
    """The places of all maps, one after the other, each in raster order."""

    centres: Tensor
    """x, y in pixels [n, 2]"""
    strides: Tensor
    """[n]"""
    nearest: Tensor
    """The distances [n] to the farthest side of a box between which a place may detect it."""
    farthest: Tensor
    sizes: tuple[int, ...]
    """The number of places in each map."""

    @classmethod
    def of(
        cls, shapes: Sequence[tuple[int, int]], strides: Sequence[float], device: torch.device | None = None
    ) -> Self:
        """Return the places of maps with these (rows, columns), and strides that double from one to the next."""
        centres, every, nearest, farthest = [], [], [], []
        for place, ((rows, columns), stride) in enumerate(zip(shapes, strides, strict=True)):
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            centres.append((torch.stack([x, y], dim=-1).reshape(-1, 2) + 0.5) * stride)
            count = rows * columns
            every.append(torch.full((count,), float(stride)))
            nearest.append(torch.full((count,), FAR * float(stride) if place else 0.0))
            farthest.append(torch.full((count,), FARTHEST * float(stride) if place < len(strides) - 1 else math.inf))
        sizes = tuple(rows * columns for rows, columns in shapes)
        parts = [torch.cat(part).to(device) for part in (centres, every, nearest, farthest)]
        return cls(parts[0], parts[1], parts[2], parts[3], sizes)


class FCOSHead(nn.Module):
    """Two towers of convolutions, which all maps share."""

    def __init__(self, channels: int, num_classes: int, convs: int = 4) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.class_tower, self.box_tower = _tower(channels, convs), _tower(channels, convs)
        self.classes = nn.Conv2d(channels, num_classes, 3, padding=1)
        self.sides = nn.Conv2d(channels, 4, 3, padding=1)
        self.centred = nn.Conv2d(channels, 1, 3, padding=1)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw kernels from a normal distribution of std 0.01; biases are 0, but the classes begin at `PRIOR`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 4:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.01, generator=generator))
            else:
                parameter.fill_(1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0)
        nn.init.constant_(self.classes.bias, -math.log((1 - PRIOR) / PRIOR))  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> Outputs:
        """[b, channels, rows, columns] each -> the outputs of all their places."""
        classes, sides, centred = [], [], []
        for each in maps:
            classes.append(_rows(self.classes(self.class_tower(each))))
            box = self.box_tower(each)
            sides.append(_rows(F.relu(self.sides(box))))
            centred.append(_rows(self.centred(box)).squeeze(-1))
        return Outputs(torch.cat(classes, dim=1), torch.cat(sides, dim=1), torch.cat(centred, dim=1))


def _tower(channels: int, convs: int) -> nn.Sequential:
    parts = ((nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(GROUPS, channels)) for _ in range(convs))
    return nn.Sequential(*(part for conv, norm in parts for part in (conv, norm, nn.ReLU())))


def _rows(maps: Tensor) -> Tensor:
    """[b, c, rows, columns] -> [b, rows * columns, c]."""
    return maps.flatten(2).transpose(1, 2)


def assign(places: Places, truth: Truth) -> Tensor:
    """Return which box each place shall detect, int64 [n]; -1: none.

    A place belongs to a box in which it lies, within `CENTRE_RADIUS` strides of its middle in x and y, if the farthest
    side is in the range of its map; of several boxes, to the smallest one, and of equal ones to the first (section 3.2
    and the center sampling of the authors' second version).
    """
    if not len(truth.boxes):
        return torch.full((len(places.centres),), -1, device=places.centres.device)
    boxes, centres = truth.boxes[None], places.centres[:, None]
    sides = torch.cat([centres - boxes[..., :2], boxes[..., 2:] - centres], dim=-1)  # [n, m, 4]
    farthest = sides.amax(dim=-1)
    from_middle = (centres - (boxes[..., :2] + boxes[..., 2:]) / 2).abs().amax(dim=-1)
    fits = (
        (sides.amin(dim=-1) > 0)
        & (from_middle < CENTRE_RADIUS * places.strides[:, None])
        & (farthest > places.nearest[:, None])
        & (farthest < places.farthest[:, None])
        & ~truth.ignored
    )
    sizes = torch.where(fits, areas(truth.boxes), math.inf)
    smallest, which = sizes.min(dim=1)
    return torch.where(smallest < math.inf, which, -1)


def loss(outputs: Outputs, places: Places, truths: Sequence[Truth], count: float | None = None) -> Losses:
    """Return the focal loss of the classes, 1 - GIoU of the boxes, and the cross-entropy of their centredness.

    Places inside an ignored region count in the classes' loss only if they belong to a box.

    Args:
        count: what the sums are divided by; None: the number of places of this batch with a box (`count_places`).
    """
    assigned = torch.stack([assign(places, truth) for truth in truths])  # [b, n]
    is_box = assigned >= 0
    count = max(1, int(is_box.sum())) if count is None else count
    wanted = torch.zeros_like(outputs.classes)
    counts = torch.ones_like(outputs.centred)
    targets = []
    for image, (truth, which, boxed) in enumerate(zip(truths, assigned, is_box, strict=True)):
        wanted[image, boxed, truth.classes[which[boxed]]] = 1.0
        targets.append(truth.boxes[which[boxed]])
        counts[image] = (boxed | ~_inside(places.centres, truth.boxes[truth.ignored])).to(counts.dtype)
    target = torch.cat(targets)
    rows = is_box.nonzero()[:, 1]
    predicted = decode(outputs.sides[is_box], places.centres[rows], places.strides[rows])
    sides = torch.cat([places.centres[rows] - target[:, :2], target[:, 2:] - places.centres[rows]], dim=-1)
    pairs = sides[:, [0, 2]], sides[:, [1, 3]]
    centredness = torch.stack([pair.amin(1) / pair.amax(1) for pair in pairs]).prod(dim=0).sqrt()
    return Losses(
        (focal(outputs.classes, wanted) * counts[..., None]).sum() / count,
        (1 - giou(predicted, target)).sum() / count,
        F.binary_cross_entropy_with_logits(outputs.centred[is_box], centredness, reduction="sum") / count,
    )


def count_places(places: Places, truths: Sequence[Truth]) -> int:
    """Return how many places of these images belong to a box."""
    return sum(int((assign(places, truth) >= 0).sum()) for truth in truths)


def focal(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the focal loss of each logit (Lin et al. 2017), with alpha 0.25 and gamma 2."""
    p = logits.sigmoid()
    right = p * wanted + (1 - p) * (1 - wanted)
    weight = ALPHA * wanted + (1 - ALPHA) * (1 - wanted)
    return weight * (1 - right) ** GAMMA * F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")


def decode(sides: Tensor, centres: Tensor, strides: Tensor) -> Tensor:
    """Return boxes [..., 4] from the distances [..., 4] of their sides, in strides, from places [..., 2]."""
    pixels = sides * strides[..., None]
    return torch.cat([centres - pixels[..., :2], centres + pixels[..., 2:]], dim=-1)


def _inside(centres: Tensor, boxes: Tensor) -> Tensor:
    """Return whether each place [n, 2] lies in any of the boxes [m, 4]."""
    low, high = centres[:, None] > boxes[None, :, :2], centres[:, None] < boxes[None, :, 2:]
    return (low & high).all(dim=-1).any(dim=1)


def candidates(outputs: Outputs, places: Places, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return each place's box [b, n, 4] in an image of `height` x `width` pixels, and its scores [b, n, k].

    A score is the geometric mean of the probability of a class and of the centredness.
    """
    scores = (outputs.classes.sigmoid() * outputs.centred.sigmoid()[..., None]).sqrt()
    return clip(decode(outputs.sides, places.centres, places.strides), height, width), scores


@torch.no_grad()
def detect(outputs: Outputs, places: Places, height: int, width: int) -> list[Found]:
    """Return the boxes of each image of `height` x `width` pixels.

    Of each map, the `PER_MAP` highest `scores` above `SCORE` count; after `nms` with threshold `NMS`, `PER_IMAGE`
    remain.
    """
    boxes, scores = candidates(outputs, places, height, width)
    found = []
    for of_boxes, of_scores in zip(boxes, scores, strict=True):
        parts = []
        for part_boxes, part in zip(of_boxes.split(places.sizes), of_scores.split(places.sizes), strict=True):
            flat = part.flatten()
            best, which = torch.where(flat > SCORE, flat, -1.0).topk(min(PER_MAP, len(flat)))
            which, classes = which[best > SCORE] // part.shape[1], which[best > SCORE] % part.shape[1]
            parts.append(Found(part_boxes[which], best[best > SCORE], classes))
        of_image = Found(*(torch.cat(each) for each in zip(*parts, strict=True)))
        kept = nms(of_image.boxes, of_image.scores, of_image.classes, NMS)[:PER_IMAGE]
        found.append(Found(*(each[kept] for each in of_image)))
    return found
