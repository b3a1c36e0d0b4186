"""A detector's training step and inference, beside torchvision's FCOS and transformers' YOLOS on the same ViT.

    python benchmarks/detect.py --torchvision FOLDER     # pip install --no-deps --target FOLDER torchvision==0.28.0

Each contender is a process of its own, because PyPI's torchvision does not load beside the CPU build of torch without
definitions that stop transformers' YOLOS. The suppression of boxes is what does not load, so torchvision's inference is
left out. Contenders take turns, each round in another order; a ratio is a peer's time divided by ours in the same
round. Images of 64 pixels with one to five boxes of ten classes, a ViT of width 96 with 4 blocks and patches of 8,
float32, batches of 32, AdamW, one thread. FCOS has our pyramid (twice the grid of patches, and the grid), two
convolutions and 64 channels; YOLOS has 100 tokens of detections. The last row compares 80 steps of a fit with a frozen
backbone, from its start to its saved weights, with the bare steps of its head. Three minutes.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from common import ROOT, keep, setting
from torch import Tensor, nn

from vit_model.config import ViTConfig
from vit_model.detection.detector import Detector
from vit_model.detection.fcos import Truth, detect, loss
from vit_model.model import ViT

SIDE, CLASSES, CHANNELS, CONVS, SCALES, BATCH = 64, 10, 64, 2, (2.0, 1.0), 32
SIZE: dict[str, Any] = {"patch_size": 8, "width": 96, "depth": 4, "num_heads": 3}
STEPS, ROUNDS, FITTED = 5, 7, 80
Work = dict[str, Callable[[], object]]


def main() -> None:
    """Measure in turns, and keep the page."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--torchvision", type=Path, help="the folder of torchvision 0.28; without it, it is left out"
    )
    arguments.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.worker:
        serve(WORKERS[given.worker]())
        return
    load = os.getloadavg()[0]
    workers = {name: Worker(name, given.torchvision) for name in WORKERS if name != "torchvision" or given.torchvision}
    measured: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        order = [*workers][number % len(workers) :] + [*workers][: number % len(workers)]
        for what in ("train", "detect"):
            for name in (name for name in order if (name, what) != ("torchvision", "detect")):
                measured.setdefault((name, what), []).append(workers[name].seconds(what))
        for what in ("head", "frozen"):
            measured.setdefault(("vitflow", what), []).append(workers["vitflow"].seconds(what))
    lines = [
        "# Detection beside torchvision and transformers",
        "",
        f"`python benchmarks/detect.py`, {setting(load)}; medians of {ROUNDS} rounds of {STEPS} batches of {BATCH}.",
        "",
        "| | images/s | peer's time / ours |",
        "|---|---:|---:|",
    ]
    for name, what in measured:
        own = measured["vitflow", {"frozen": "head"}.get(what, what)]
        ratio = statistics.median(theirs / ours for theirs, ours in zip(measured[name, what], own, strict=True))
        rate = STEPS * BATCH / statistics.median(measured[name, what])
        lines.append(f"| {NAMES[what]}, {name} | {rate:,.0f} | {ratio:.2f} |")
    keep("detect.md", lines)


NAMES = {
    "train": "training step",
    "detect": "inference",
    "head": "bare step of the head on frozen tokens",
    "frozen": "whole fit of 80 steps with a frozen backbone (its time / the bare steps')",
}


class Worker:
    """A process that does a kind of work when it is asked to."""

    def __init__(self, name: str, torchvision: Path | None) -> None:
        paths = [str(ROOT), *([str(torchvision)] if name == "torchvision" else [])]
        command = [sys.executable, __file__, "--worker", name]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for what in ("train", "detect", *(("head",) if name == "vitflow" else ())):
            self.seconds(what)  # warm

    def seconds(self, what: str) -> float:
        """Return how long STEPS batches take."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith("seconds "):
            if not line:
                raise RuntimeError("a worker ended")
        return float(line.split()[1])


def serve(work: Work) -> None:
    """Do what standard input asks for, and say how long it took."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        began = time.perf_counter()
        done = work[line.strip()]()
        seconds = done if isinstance(done, float) else time.perf_counter() - began
        print("seconds", seconds, flush=True)


def drawn() -> tuple[Tensor, list[Truth]]:
    """Return images and their boxes, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    images, truths = torch.randn(BATCH, 3, SIDE, SIDE, generator=generator), []
    for _ in range(BATCH):
        count = int(torch.randint(1, 6, (), generator=generator))
        corner, extent = torch.rand(2, count, 2, generator=generator)
        boxes = torch.cat([40 * corner, 40 * corner + 8 + 16 * extent], dim=1)
        classes = torch.randint(0, CLASSES, (count,), generator=generator)
        truths.append(Truth(boxes, classes, torch.zeros(count, dtype=torch.bool)))
    return images, truths


def steps(module: nn.Module, batch_loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that does STEPS training steps."""
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)

    def train() -> None:
        module.train()
        for _ in range(STEPS):
            optimizer.zero_grad()
            batch_loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def inference(module: nn.Module, call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that detects in STEPS batches."""

    @torch.inference_mode()
    def infer() -> None:
        module.eval()
        for _ in range(STEPS):
            call()

    return infer


def new_detector() -> Detector:
    config = ViTConfig(image_size=SIDE, num_classes=0, mlp_dim=4 * SIZE["width"], gelu="exact", **SIZE)
    detector = Detector(ViT(config), CLASSES, CHANNELS, CONVS, SCALES)
    detector.model.initialise(0)
    detector.initialise(0)
    return detector


def ours() -> Work:
    """The whole detector, and its head on tokens that are there."""
    images, truths = drawn()
    detector, headed = new_detector(), new_detector()
    headed.model.requires_grad_(False)
    tokens = headed.model.normed_tokens(images).detach()
    return {
        "train": steps(detector, lambda: torch.stack(loss(detector(images), detector.places, truths)).sum()),
        "detect": inference(detector, lambda: detect(detector(images), detector.places, SIDE, SIDE)),
        "head": steps(headed, lambda: torch.stack(loss(headed.read(tokens), headed.places, truths)).sum()),
        "frozen": frozen_fit(),
    }


def frozen_fit() -> Callable[[], float]:
    """Return a function that gives the seconds of STEPS steps of a fit of 80 with a frozen backbone, as a share."""
    from pipelines.spec import Detect, ModelSize
    from pipelines.store import create_attempt, open_store
    from ray_jobs import finetune
    from ray_jobs.training.task import at_point, make_task
    from ray_jobs.tuning import fits
    from tests.support.finetuning import save_backbone
    from tests.support.ingesting import ingest_here
    from tests.support.records import make_context

    folder = Path(mkdtemp(prefix="vfb-"))
    atexit.register(shutil.rmtree, folder, True)
    store = open_store(str(folder / "store"))
    data = ingest_here(store, {"kind": "scenes", "images": 320, "dev_images": 32, "test_images": 32})
    save_backbone(folder / "backbone", ModelSize.model_validate(SIZE), SIDE, channels=3)
    fields = {"job": "detect", "data": "d", "backbone": "b", "freeze": "backbone", "resolution": SIDE}
    fields |= {"channels": CHANNELS, "convs": CONVS, "scales": SCALES, "batch_size": BATCH, "dtype": "float32"}
    fields |= {"learning_rates": [1e-4], "steps": FITTED, "augment": "none"}
    config = Detect.model_validate(fields)
    numbers = iter(range(1, 1000))

    def fit() -> float:
        given = make_context(store, config, data=data)
        attempt = given.attempt.model_copy(update={"number": next(numbers)})
        given = replace(given, attempt=create_attempt(store, attempt))
        task = make_task(config, given.dataset(), folder / "backbone")
        task = at_point(task, 0, {"learning_rate": 1e-4}, given.dataset())
        type(given).input = lambda *_: folder / "backbone"  # type: ignore[method-assign]
        pools, _ = finetune.labelled(config, given.dataset())
        began = time.perf_counter()
        fits.refit(given, task, pools[0], 0)
        return (time.perf_counter() - began) * STEPS / FITTED

    return fit


def torchvisions() -> Work:
    """Its FCOS on our ViT and pyramid."""
    import_module("tests.vit_model.detection.torchvision_fcos")  # first: it defines what torchvision lacks
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.fcos import FCOS, FCOSHead

    from vit_model.parts import as_map

    images, truths = drawn()
    own = new_detector()

    class Backbone(nn.Module):
        out_channels = CHANNELS

        def __init__(self) -> None:
            super().__init__()
            self.model, self.pyramid = own.model, own.pyramid

        def forward(self, pixels: Tensor) -> dict[str, Tensor]:
            tokens = self.model.encode(self.model.embed(pixels))
            maps = self.pyramid(as_map(tokens[:, own.config.num_prefix_tokens :], own.config.grid))
            return {str(number): each for number, each in enumerate(maps)}

    strides = [int(SIZE["patch_size"] / scale) for scale in SCALES]
    anchors = AnchorGenerator(tuple((stride,) for stride in strides), ((1.0,),) * len(strides))
    plain = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "min_size": SIDE, "max_size": SIDE}
    head = FCOSHead(CHANNELS, 1, CLASSES, num_convs=CONVS)
    model = FCOS(Backbone(), CLASSES, anchor_generator=anchors, head=head, score_thresh=0.05, **plain)
    targets = [{"boxes": truth.boxes, "labels": truth.classes} for truth in truths]
    return {
        "train": steps(model, lambda: torch.stack([*model([*images], targets).values()]).sum()),
        "detect": lambda: None,  # its suppression is the part that does not load
    }


def yolos() -> Work:
    """YOLOS of the same width and depth, with its bipartite matching."""
    from transformers import YolosConfig, YolosForObjectDetection

    images, truths = drawn()
    config = YolosConfig(
        hidden_size=SIZE["width"],
        num_hidden_layers=SIZE["depth"],
        num_attention_heads=SIZE["num_heads"],
        intermediate_size=4 * SIZE["width"],
        image_size=[SIDE, SIDE],
        patch_size=SIZE["patch_size"],
        num_detection_tokens=100,
        use_mid_position_embeddings=False,
        num_labels=CLASSES,
    )
    model = YolosForObjectDetection(config)
    labels = [{"class_labels": truth.classes, "boxes": centred(truth.boxes)} for truth in truths]
    return {
        "train": steps(model, lambda: model(images, labels=labels).loss),
        "detect": inference(model, lambda: model(images).pred_boxes),
    }


def centred(boxes: Tensor) -> Tensor:
    """Return boxes as fractions of the image: the middle, width and height."""
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], dim=1) / SIDE


WORKERS: dict[str, Callable[[], Work]] = {"vitflow": ours, "torchvision": torchvisions, "transformers": yolos}


if __name__ == "__main__":
    main()
