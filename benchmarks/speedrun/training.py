"""Training that the entries of torch share: batches, optimizers, the schedule.

An entry calls `entry(build, settings)` with a function that builds its module from its settings, and its defaults.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIDE, CLASSES = 28, 10
MEAN, DEVIATION = 0.286, 0.353  # of Fashion-MNIST's training pixels in [0, 1]
COMMON: dict[str, Any] = {
    "epochs": 10.0,
    "batch": 256,
    "optimizer": "adamw",  # or muon: Muon for the matrices of blocks; or sgd, with momentum
    "rate": 2e-3,
    "decay": 0.05,
    "warmup": 0.1,  # of the steps; then the rate falls to 0 in a line
    "smoothing": 0.1,
    "shift": 2,  # pixels, in each direction
    "erase": 0,  # side of a square that is erased
    "flips": False,  # of test images: the mean with the mirrored image
    "shifts": False,  # of test images: the mean with the image shifted by a pixel, to either end of a diagonal
}
Build = Callable[[argparse.Namespace], nn.Module]


def entry(build: Build, **defaults: Any) -> None:
    """Run `train` or `predict`, as the words of the command line say (see run.py)."""
    command, *words = sys.argv[1:]
    if command == "train":
        data, seed, model, *given = words
        train(build, Path(data), int(seed), Path(model), settings_of(defaults, given), given)
    else:
        predict(build, defaults, *map(Path, words))


def settings_of(defaults: dict[str, Any], words: list[str]) -> argparse.Namespace:
    """Return the settings: the entry's defaults, or what the words say."""
    parser = argparse.ArgumentParser()
    for name, default in (COMMON | defaults).items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(words)


def train(build: Build, data: Path, seed: int, model: Path, settings: argparse.Namespace, words: list[str]) -> None:
    """Train, and write the weights."""
    torch.manual_seed(seed)
    images, labels = (torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("images", "labels"))
    images, labels = normalised(images), labels.long()
    module = build(settings).to(memory_format=torch.channels_last)
    steps = round(settings.epochs * len(images) / settings.batch)
    optimizers = [*optimizers_of(module, settings)]
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_of = nn.CrossEntropyLoss(label_smoothing=settings.smoothing)
    began = time.monotonic()
    for step, rows in zip(range(steps), batches(len(images), settings.batch), strict=False):
        share = step / steps
        for optimizer, first in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, first, strict=True):
                group["lr"] = rate * min(
                    1.0, (share + 1 / steps) / max(settings.warmup, 1e-9), (1 - share) / (1 - settings.warmup)
                )
        with torch.autocast("cpu", torch.bfloat16):
            logits = module(changed(images[rows], settings))
        loss = loss_of(logits.float(), labels[rows])
        module.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    torch.save({"words": words, "weights": module.state_dict()}, model)


def optimizers_of(module: nn.Module, settings: argparse.Namespace) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers; weights with fewer than two dimensions are not decayed."""
    named = dict(module.named_parameters())
    if settings.optimizer == "muon":
        matrices = {name: weight for name, weight in named.items() if "blocks." in name and weight.ndim == 2}
        named = {name: weight for name, weight in named.items() if name not in matrices}
        # scaled to the size of AdamW's updates, so that one rate fits both
        yield torch.optim.Muon(matrices.values(), settings.rate, settings.decay, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [weight for weight in named.values() if weight.ndim > 1], "weight_decay": settings.decay},
        {"params": [weight for weight in named.values() if weight.ndim < 2], "weight_decay": 0.0},
    ]
    if settings.optimizer == "sgd":
        yield torch.optim.SGD(groups, settings.rate, momentum=0.9, nesterov=True)
    else:
        yield torch.optim.AdamW(groups, settings.rate, betas=(0.9, 0.95), fused=True)


def convolution(before: int, after: int) -> list[nn.Module]:
    """Return a 3 x 3 convolution with batch normalisation."""
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]


def batches(count: int, size: int) -> Iterator[Tensor]:
    """Yield rows of shuffled epochs without end; the last batch of an epoch goes on into the next one."""
    order = torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(count)])
        yield order[:size]
        order = order[size:]


def normalised(images: Tensor) -> Tensor:
    """[n, 28, 28] uint8 -> [n, 1, 28, 28] with mean 0 and deviation 1 over the training images."""
    return ((images.float() / 255 - MEAN) / DEVIATION)[:, None]


def changed(images: Tensor, settings: argparse.Namespace) -> Tensor:
    """Mirror each image with probability 1/2, shift it by up to `shift` pixels, and erase a square of it."""
    count, every = len(images), torch.arange(len(images))[:, None, None]
    flipped = torch.where(torch.rand(count, 1, 1, 1) < 0.5, images.flip(3), images)
    padded = nn.functional.pad(flipped, (settings.shift,) * 4, value=-MEAN / DEVIATION)
    rows, columns = torch.randint(0, 2 * settings.shift + 1, (2, count, 1)) + torch.arange(SIDE)
    out = padded[every, 0, rows[:, :, None], columns[:, None, :]]
    if side := settings.erase:
        top, left = torch.randint(0, SIDE - side + 1, (2, count, 1)) + torch.arange(side)
        out[every, top[:, :, None], left[:, None, :]] = 0.0
    return out[:, None]


@torch.inference_mode()
def predict(build: Build, defaults: dict[str, Any], model: Path, images: Path, predictions: Path) -> None:
    """Predict the class of each image by the mean of its probabilities over its views (`flips`, `shifts`)."""
    saved = torch.load(model, weights_only=True)
    settings = settings_of(defaults, saved["words"])
    module = build(settings).eval()
    module.load_state_dict(saved["weights"])
    parts = normalised(torch.from_numpy(np.load(images))).split(1000)
    likely = [sum(module(view).softmax(1) for view in views(part, settings)).argmax(1) for part in parts]  # type: ignore[union-attr]
    np.save(predictions, torch.cat(likely).numpy())


def views(images: Tensor, settings: argparse.Namespace) -> Iterator[Tensor]:
    """Yield the images [n, 1, 28, 28], shifted and mirrored."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=-MEAN / DEVIATION)
    for place in (0, 1, 2) if settings.shifts else (1,):
        view = padded[:, :, place : place + SIDE, place : place + SIDE]
        yield from (view, view.flip(3)) if settings.flips else (view,)
