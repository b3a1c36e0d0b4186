"""Writes what torchvision 0.28 computes for test_fcos.py, the losses, boxes and scores of its FCOS, beside itself.

PyPI's build does not load beside the CPU build of torch: two operators are missing, which are defined here.

    pip install --no-deps --target DIR torchvision==0.28.0
    PYTHONPATH=DIR:. python tests/vit_model/detection/torchvision_fcos.py
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

LIBRARY = torch.library.Library("torchvision", "DEF")
LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def plain_nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Drop each box that overlaps with a kept one of a higher score: two loops."""
    kept: list[int] = []
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for place in scores.argsort(descending=True, stable=True).tolist():
        x1, y1, x2, y2 = boxes[place].tolist()
        for other in kept:
            u1, v1, u2, v2 = boxes[other].tolist()
            shared = max(0.0, min(x2, u2) - max(x1, u1)) * max(0.0, min(y2, v2) - max(y1, v1))
            if shared / (areas[place] + areas[other] - shared) > threshold:
                break
        else:
            kept.append(place)
    return torch.tensor(kept, dtype=torch.int64)


LIBRARY.impl("nms", plain_nms, "CPU")

# ruff: noqa: E402
import torchvision.ops.boxes
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOS

from tests.vit_model.detection.case import BOXES, CHANNELS, CLASSES, LABELS, SIDE, STRIDES, maps, weight

torchvision.ops.boxes._assert_has_ops = lambda: None


class Given(nn.Module):
    """A backbone that returns given maps."""

    out_channels = CHANNELS

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {str(place): each for place, each in enumerate(maps())}


def main() -> None:
    anchors = AnchorGenerator(tuple((stride,) for stride in STRIDES), ((1.0,),) * len(STRIDES))
    plain = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "min_size": SIDE, "max_size": SIDE}
    model = FCOS(Given(), CLASSES, anchor_generator=anchors, score_thresh=0.05, **plain)
    model.head.load_state_dict(
        {name: weight(name, tuple(each.shape)) for name, each in model.head.state_dict().items()}
    )
    images = [torch.zeros(3, SIDE, SIDE) for _ in BOXES]
    targets = [
        {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}
        for boxes, labels in zip(BOXES, LABELS, strict=True)
    ]
    kept = {f"loss.{name}": value.detach() for name, value in model(images, targets).items()}
    model.eval()
    with torch.no_grad():
        for place, found in enumerate(model(images)):
            kept |= {f"{name}{place}": each for name, each in found.items()}
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **{name: each.numpy() for name, each in kept.items()})


if __name__ == "__main__":
    main()
