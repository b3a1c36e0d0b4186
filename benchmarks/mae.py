"""A masked autoencoder, compared with supervised training of the same encoder: `python benchmarks/mae.py`.

It times the forward and backward pass, without the optimizer. The contenders (supervised training, the paper's decoder
of 8 blocks, a decoder of one block) share one process and take turns, each round in another order. A gain is
the supervised step's time over the autoencoder's in the same round, so a busy machine slows both sides of it. On a CPU
they run in one thread, as our workers do, and processor time is measured. On a GPU the benchmark needs torch and
pydantic only, and adds L/16.

Prints the table and writes it to benchmarks/results/; takes 3 minutes on two cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from common import keep, spread
from train_step import DEVICE, DTYPES, hardware, keep_memory, timed

from vit_model.compute import train_flops
from vit_model.config import MaeOptions, ViTConfig
from vit_model.model import ViT
from vit_model.objectives.masked_autoencoder import MaskedAutoencoder

ROUNDS = 3
BATCH = 128 if DEVICE.type == "cuda" else 16
MODELS = ("B/16", "L/16") if DEVICE.type == "cuda" else ("B/16",)
DECODERS = (8, 1)  # blocks
CLASSES = 1000


def main() -> None:
    """Measure all rows, print the table and keep it."""
    load = os.getloadavg()[0]
    if DEVICE.type == "cpu":
        keep_memory()
        torch.set_num_threads(1)
    lines = [line for name in MODELS for dtype in DTYPES for line in rows(name, dtype)]
    text = [
        "# Masked autoencoders, compared with supervised training of the same encoder",
        "",
        f"`python benchmarks/mae.py`, {datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, "
        f"load before: {load:.1f}, after: {os.getloadavg()[0]:.1f}.",
        f"Forward and backward pass at 224, {BATCH} images, 75% of the patches masked; median of {ROUNDS} rounds"
        " (range). The gain is the time of supervised training divided by that of the autoencoder; `calculated` is the"
        " ratio of their FLOPs (`vit_model.compute`).",
        "",
        "| model, dtype | training | ms per image | gain | calculated |",
        "|---|---|---:|---:|---:|",
        *lines,
    ]
    keep(f"mae{'_gpu' if DEVICE.type == 'cuda' else ''}.md", text)


def rows(name: str, dtype: str) -> list[str]:
    """Return the lines of the table for a model and a dtype."""
    classifier = ViTConfig.variant(name, image_size=224, num_classes=CLASSES)
    encoder = ViTConfig.variant(name, image_size=224, position="sincos2d_moco")
    decoders = [MaeOptions(decoder_depth=depth) for depth in DECODERS]
    steps = [supervised(classifier, DTYPES[dtype])]
    steps += [autoencoder(encoder, options, DTYPES[dtype]) for options in decoders]
    own, *others = take_turns(steps)
    lines = [f"| {name}, {dtype} | supervised | {spread([1000 * taken / BATCH for taken in own])} | | |"]
    for options, seconds in zip(decoders, others, strict=True):
        gains = [theirs / ours for theirs, ours in zip(own, seconds, strict=True)]
        calculated = train_flops(classifier) / train_flops(encoder, options)
        width, depth = options.decoder_width, options.decoder_depth
        cells = [f"{name}, {dtype}", f"autoencoder, decoder {depth} x {width}"]
        cells += [spread([1000 * taken / BATCH for taken in seconds]), spread(gains, 2), f"{calculated:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    print(*lines, sep="\n", flush=True)
    return lines


def supervised(config: ViTConfig, dtype: torch.dtype) -> Callable[[], None]:
    model = ViT(config).to(DEVICE, dtype).train()
    images = torch.randn(BATCH, 3, 224, 224, device=DEVICE, dtype=dtype)
    labels = torch.arange(BATCH, device=DEVICE) % CLASSES

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images).float(), labels).backward()

    return step


def autoencoder(config: ViTConfig, options: MaeOptions, dtype: torch.dtype) -> Callable[[], None]:
    task = MaskedAutoencoder(ViT(config), options).to(DEVICE, dtype).train()
    images = torch.randn(BATCH, 3, 224, 224, device=DEVICE, dtype=dtype)
    pixels = torch.randint(256, (BATCH, 224, 224, 3), device=DEVICE, dtype=torch.uint8)
    draws = torch.rand(BATCH, config.num_patches, device=DEVICE, dtype=torch.float64)

    def step() -> None:
        task.zero_grad()
        task(images, pixels, draws).backward()

    return step


def take_turns(steps: list[Callable[[], None]]) -> list[list[float]]:
    """Return the seconds of a step of each contender in each round."""
    for step in steps:
        timed(step)  # allocates
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(ROUNDS):
        for turn in range(len(steps)):
            now = (number + turn) % len(steps)
            seconds[now].append(timed(steps[now]))
    return seconds


if __name__ == "__main__":
    main()
