"""A training step of the same ViT in our code, Hugging Face's and timm's: `python benchmarks/train_step.py`.

Each row of the table is one model, dtype and mode. All contenders share one process and take turns of about a tenth of
a second, each round in another order. A ratio is a peer's time divided by ours in the same round, so a busy machine
slows both sides of it. All use the same images, weights in the row's dtype, fused AdamW and cross-entropy. On a CPU
they run in one thread, as our workers do, and processor time is measured. A peer that cannot be imported is left out,
and the table says so. On a GPU it needs torch and pydantic only, and the models are B/16 and L/16.

Prints the table and writes it to benchmarks/results/; takes less than 10 minutes on two cores.

What was predicted, and what was measured (one thread of an AMD EPYC with AVX-512 bf16, torch 2.13, Ti/16):
- Matrix products in fp32 are slow in MKL on AMD: no, they run at the peak (100 GFLOP/s), bf16 at twice that, in every
  orientation; oneDNN's convolution and padded batches gain nothing. They are three quarters of a step, so the only way
  to save time there is to compute less.
- So the last block computes only what the class token needs: predicted 7% of a step for 12 blocks, 20% for 4; measured
  6-8% and 14-17%.
- SDPA is slower in bf16 (its backward), and in fp32 for 17 tokens (8% of a step of the quickstart's model); with 197
  tokens in fp32 it is faster by 2 ms of 16.
- A bf16 softmax saves 3% of a step, but gradients are 6% further from fp64's than Hugging Face's: not done.
- Attention as an autograd function of its own (one copy in, one out): predicted 10%, measured 2-4%: not done.
- A ratio of 1.3 against Hugging Face's eager attention in bf16 is out of reach: of its 486 ms we would have 374. The
  matrix products take 330, so everything else, now 110, would have to take 44. Against SDPA, the default of Hugging
  Face and timm, it is reached.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import QUICKSTART, keep
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vit_model.config import ViTConfig
from vit_model.model import ViT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROW_SECONDS, TURN_SECONDS, LEAST_ROUNDS = 14.0, 0.1, 7
CEILING_SIDE = 8192 if DEVICE.type == "cuda" else 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("eager", "checkpointed", "compiled")


class Network(NamedTuple):
    """A model ready for training."""

    module: nn.Module
    blocks: nn.ModuleList
    logits: Callable[[Tensor], Tensor]


class Shape(NamedTuple):
    name: str
    config: ViTConfig
    batch: int


def shapes() -> list[Shape]:
    """Return the models to train on this device. GELU is exact, which is the peers' default."""
    variant = partial(ViTConfig.variant, image_size=224, num_classes=1000, gelu="exact")
    if DEVICE.type == "cuda":
        return [Shape("B/16 at 224", variant("B/16"), 128), Shape("L/16 at 224", variant("L/16"), 64)]
    quickstart = ViTConfig(**QUICKSTART, mlp_dim=256, num_classes=648, gelu="exact")
    return [Shape("Ti/16 at 224", variant("Ti/16"), 8), Shape("quickstart's", quickstart, 128)]


def ours(config: ViTConfig) -> Network:
    model = ViT(config)
    return Network(model, model.blocks, model)


def hugging_face(attention: str, config: ViTConfig) -> Network:
    from transformers import ViTConfig as TheirConfig
    from transformers import ViTForImageClassification

    theirs = TheirConfig(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.in_channels,
        num_labels=config.num_classes,
        hidden_act="gelu",
        layer_norm_eps=config.layer_norm_eps,
        attn_implementation=attention,
    )
    model = ViTForImageClassification(theirs)
    return Network(model, model.vit.layers, lambda images: model(images).logits)


def timm(config: ViTConfig) -> Network:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.in_channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_dim / config.width,
    )
    return Network(model, model.blocks, model)


PEERS: dict[str, tuple[str, Callable[[ViTConfig], Network]]] = {
    "Hugging Face, SDPA": ("transformers", partial(hugging_face, "sdpa")),
    "Hugging Face, eager attention": ("transformers", partial(hugging_face, "eager")),
    "timm": ("timm.models.vision_transformer", timm),
}


def main() -> None:
    """Measure all rows, print the table and keep it."""
    load = os.getloadavg()[0]
    keep_memory()
    torch.set_num_threads(1)
    peers, missing = importable()
    ceilings = {name: matmul_ceiling(dtype) for name, dtype in DTYPES.items()}
    lines = [row(shape, name, mode, peers, ceilings[name]) for shape in shapes() for name in DTYPES for mode in MODES]
    write(lines, list(peers), missing, ceilings, load)


def keep_memory() -> None:
    """Keep malloc from returning memory; else page faults cost a random contender up to a tenth of a step."""
    libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)


def importable() -> tuple[dict[str, Callable[[ViTConfig], Network]], list[str]]:
    """Return the peers that are installed, and a line for each that is not."""
    found, missing = {}, []
    for name, (package, build) in PEERS.items():
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # torchvision made for another torch raises the latter
            missing.append(f"{name} is left out: {str(error).splitlines()[0]}")
        else:
            found[name] = build
    return found, missing


def matmul_ceiling(dtype: torch.dtype) -> float:
    """Return the FLOP/s of the best of ten products of square matrices."""
    left, right = (torch.randn(CEILING_SIDE, CEILING_SIDE, device=DEVICE, dtype=dtype) for _ in range(2))
    seconds = [timed(lambda: left @ right) for _ in range(10)]
    return 2 * CEILING_SIDE**3 / min(seconds)


def row(shape: Shape, dtype: str, mode: str, peers: dict[str, Callable[[ViTConfig], Network]], ceiling: float) -> str:
    """Return a line of the table."""
    images = torch.randn(
        shape.batch, shape.config.in_channels, *shape.config.image_shape, device=DEVICE, dtype=DTYPES[dtype]
    )
    labels = torch.arange(shape.batch, device=DEVICE) % shape.config.num_classes
    torch._dynamo.reset()
    steps = [
        training_step(build(shape.config), DTYPES[dtype], mode, images, labels) for build in (ours, *peers.values())
    ]
    own, *others = take_turns(steps)
    rate = shape.batch / statistics.median(own)
    share = rate * training_flops(shape.config) / ceiling
    ratios = [[theirs / mine for theirs, mine in zip(other, own, strict=True)] for other in others]
    cells = [f"{shape.name}, {shape.batch}", dtype, mode, f"{rate:,.1f}", f"{share:.0%}"]
    cells += [spread(values) for values in ratios]
    print(*cells, sep=" | ", flush=True)
    return f"| {' | '.join(cells)} |"


def training_step(
    network: Network, dtype: torch.dtype, mode: str, images: Tensor, labels: Tensor
) -> Callable[[], None]:
    """Return the timed function: forward, loss, backward, update."""
    network.module.to(DEVICE, dtype).train()
    if mode == "checkpointed":
        for block in network.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if mode == "compiled":
        for block in network.blocks:  # blocks share one compilation; whole models take minutes on a CPU
            block.compile()
    optimizer = torch.optim.AdamW(network.module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        F.cross_entropy(network.logits(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def take_turns(steps: list[Callable[[], None]]) -> list[list[float]]:
    """Return the seconds of a step of each contender in each round."""
    for step in steps:
        timed(step)  # compiles
    repeats = [max(1, round(TURN_SECONDS / timed(step))) for step in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    began, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - began < ROW_SECONDS:
        for turn in range(len(steps)):
            now = (rounds + turn) % len(steps)
            taken = timed(lambda now=now: [steps[now]() for _ in range(repeats[now])])
            seconds[now].append(taken / repeats[now])
        rounds += 1
    return seconds


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the device is done; on a CPU, processor time, because others may use it, too."""
    if DEVICE.type == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def training_flops(config: ViTConfig) -> float:
    """Return the FLOPs of an image's forward and backward pass, three times the forward's."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        ViT(config)(torch.empty(1, config.in_channels, *config.image_shape))
    return 3.0 * counter.get_total_flops()


def spread(ratios: list[float]) -> str:
    """Return median and quartiles."""
    first, median, third = statistics.quantiles(ratios, n=4)
    return f"{median:.2f} ({first:.2f}-{third:.2f})"


def hardware() -> str:
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name()
    from ray_jobs.process.stage import processor

    return f"one thread on {os.cpu_count()} cores, {processor()}"


def write(lines: list[str], peers: list[str], missing: list[str], ceilings: dict[str, float], load: float) -> None:
    """Print the table and keep it."""
    measured = ", ".join(f"{name} {flops / 1e9:,.0f}" for name, flops in ceilings.items())
    text = [
        "# A training step, compared with other code for the same model",
        "",
        f"`python benchmarks/train_step.py`, {datetime.now(UTC):%Y-%m-%d}, {hardware()}, torch {torch.__version__}, "
        f"load before: {load:.1f}, after: {os.getloadavg()[0]:.1f}.",
        f"Best matmul of two {CEILING_SIDE} x {CEILING_SIDE} matrices, GFLOP/s: {measured}.",
        "A peer's column is its time divided by ours, median over rounds (quartiles); targets: 1.05 in fp32, 1.3 in "
        "bf16.",
        *missing,
        "",
        "| model, batch | dtype | mode | ours, images/s | of the best matmul | " + " | ".join(peers) + " |",
        "|---|---|---|---:|---:|" + "---:|" * len(peers),
        *lines,
    ]
    keep(f"train_step{'_gpu' if DEVICE.type == 'cuda' else ''}.md", text)


if __name__ == "__main__":
    main()
