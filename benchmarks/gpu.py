"""Pretraining's engines on this machine's GPUs: `python benchmarks/gpu.py`.

Plain torch and DeepSpeed's ZeRO stages 1 to 3 take the same steps in bfloat16, with float32 master weights, clipping
and AdamW: B/16 and L/16 at 224 pixels, one process per GPU, random images. Each case has fresh processes. Images per
second and MFU come from the median step; memory is the most that torch allocated.
Then a new engine continues from a state that was saved after three steps. After three more steps, its weights are
compared with those of six uninterrupted steps, and so are those of six steps that were repeated: a GPU adds in no fixed
order, so continuing cannot be more exact than repeating.
Last, plain torch trains B/16 fed by the loader: JPEGs of 341 x 256, cropped while they are decoded. Beside it, the same
without the loader, and the loader alone: what is trained per second should be the lower of the two.

It needs the project's packages. train_step.py needs only torch and pydantic, and compares with Hugging Face and timm.

    python benchmarks/gpu.py [--batch 128] [--steps 20] [--no-keep]

Prints the table and writes it to benchmarks/results/gpu.md. `--cpu` tries it with a tiny model, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import keep
from loading.arms import open_loader
from loading.data import prepare

from pipelines.spec import Pretrain
from ray_jobs.process import devices
from ray_jobs.training import optim
from ray_jobs.training.engine import WEIGHTS, Engine, Plain, Zero
from ray_jobs.training.methods import make_method
from tests.support.vits import contract_for
from tests.support.workers import run_workers
from tests.support.zero_matrix import Case, State, state_of
from vit_model.build import build
from vit_model.config import Architecture

GIB = 2**30
WARM = 3  # steps before the clock starts
TINY = {"patch_size": 4, "width": 64, "depth": 2, "num_heads": 2}
STAGES = (0, 1, 2, 3)
IMAGES = 4096  # JPEGs for the loader


class Measured(NamedTuple):
    """The results of one case, on rank 0."""

    step: float
    """seconds, median"""
    mfu: float | None
    memory: float
    """the most bytes that torch allocated; 0 on a CPU"""
    continued: float
    """the largest difference of a weight after continuing from a saved state"""
    repeated: float
    """the same, after the same steps once more"""


def main() -> None:
    """Run every case in fresh processes, print the table and keep it."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--batch", type=int, default=128, help="images per GPU and step")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--cpu", action="store_true", help="a tiny model on two processes")
    arguments.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the table only")
    options = arguments.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("error: torch found no GPU; use --cpu to try this benchmark with a tiny model", file=sys.stderr)
        sys.exit(2)
    world = 2 if options.cpu else torch.cuda.device_count()
    rows = []
    for model in (TINY,) if options.cpu else ("B/16", "L/16"):
        for stage in STAGES:
            config = configuration(model, stage, options.batch * world, options.steps, 16 if options.cpu else 224)
            name = "tiny" if options.cpu else str(model)
            rows.append(row(name, config, world, is_cpu=options.cpu))
            print(rows[-1], file=sys.stderr, flush=True)  # a lent GPU may not have time for all of them
    card = "CPU" if options.cpu else f"{world} x {torch.cuda.get_device_name()}"
    head = "| model | engine | images/s | MFU | peak GiB | continued | repeated |"
    keep(
        "gpu.md",
        [
            "# Pretraining's engines on a GPU",
            "",
            f"`python benchmarks/gpu.py --batch {options.batch} --steps {options.steps}`, {datetime.now(UTC):%Y-%m-%d},"
            f" {card}, torch {torch.__version__}, bfloat16 with float32 master weights.",
            "",
            head,
            "|---|---|---:|---:|---:|---|---|",
            *rows,
            "",
            *fed(options.batch, options.steps, is_cpu=options.cpu),
        ],
        is_written=options.is_kept and not options.cpu,
    )


def configuration(model: Any, stage: int, batch: int, steps: int, resolution: int) -> Pretrain:
    """Return the pretraining of a case."""
    return Pretrain.model_validate(
        {
            "job": "pretrain",
            "data": "noise",
            "model": model,
            "resolution": resolution,
            "steps": steps,
            "batch_size": batch,
            "learning_rate": 1e-3,
            "optimizer": {"clip_norm": 1.0},
            "dtype": "bfloat16",
            "zero_stage": stage,
        }
    )


def row(name: str, config: Pretrain, world: int, is_cpu: bool) -> str:
    """Measure a case and return its row of the table."""
    engine = "plain torch" if config.zero_stage == 0 else f"ZeRO-{config.zero_stage}"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        run_workers(world, worker, world, config.model_dump(mode="json"), f"file://{folder}/meeting", output, is_cpu)
        found = Measured(*json.loads(output.read_text()))
    mfu = "" if found.mfu is None else f"{found.mfu:.1%}"
    differences = ("same bits" if off == 0 else f"{off:.0e} off" for off in (found.continued, found.repeated))
    return (
        f"| {name} | {engine} | {config.batch_size / found.step:,.0f} | {mfu} | {found.memory / GIB:,.2f}"
        f" | {' | '.join(differences)} |"
    )


def worker(rank: int, world: int, fields: dict[str, Any], meeting: str, output: Path, is_cpu: bool) -> None:
    """Measure a case; rank 0 writes the results."""
    os.environ["LOCAL_RANK"] = str(rank)
    on = torch.device("cpu") if is_cpu else torch.device("cuda", rank)
    if not is_cpu:
        torch.cuda.set_device(on)
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if is_cpu else "nccl", init_method=meeting, rank=rank, world_size=world)
    config = Pretrain.model_validate(fields)
    assert config.model is not None
    architecture = config.model.architecture(config.resolution, 3, 1000)
    batch = random_batch(config, world, rank, on)
    engine = start(config, architecture, world, on)
    seconds = [take_step(engine, batch, on) for _ in range(WARM + config.steps)][WARM:]
    memory = 0 if is_cpu else torch.cuda.max_memory_allocated(on)
    peak = devices.peak_flops(on, torch.bfloat16)
    step = statistics.median(seconds)
    flops = make_method(config, contract_for(architecture), on).train_flops * config.batch_size / world
    del engine
    differences = differences_of(config, architecture, world, on, batch)
    found = Measured(step, None if peak is None else flops / step / peak, memory, *differences)
    if rank == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


def fed(batch: int, steps: int, is_cpu: bool) -> list[str]:
    """Return the images per second of a training on the first GPU with the loader, without it, and of the loader."""
    on = torch.device("cpu" if is_cpu else "cuda")
    folder, _ = prepare("short side 256", 8 * batch if is_cpu else IMAGES)
    config = configuration(TINY | {"patch_size": 16} if is_cpu else "B/16", 0, batch, steps, 224)
    assert config.model is not None
    architecture = config.model.architecture(config.resolution, 3, 1000)
    engine, method = start(config, architecture, 1, on), make_method(config, contract_for(architecture), on)
    threads = max(1, (os.cpu_count() or 1) // (1 if is_cpu else torch.cuda.device_count()) - 1)
    lines = ["| on one device | images/s |", "|---|---:|"]
    with open_loader(folder, threads, batch_size=batch) as batches:

        def train(images: torch.Tensor, labels: torch.Tensor) -> None:
            inputs = method.inputs(images.to(on))
            take_step(engine, (inputs, labels.to(on) % 1000), on)

        _, images, labels = next(batches)
        images = images.clone()  # the loader writes over its own
        for name, work in {
            "trained on one batch in memory": lambda: train(images, labels),
            f"loaded in {threads} threads": lambda: next(batches),
            "loaded and trained": lambda: train(*next(batches)[1:]),
        }.items():
            for _ in range(WARM):
                work()
            began = time.perf_counter()
            for _ in range(steps):
                work()
            lines.append(f"| {name} | {batch * steps / (time.perf_counter() - began):,.0f} |")
    return lines


def random_batch(config: Pretrain, world: int, rank: int, on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this worker's images and labels."""
    generator, images = torch.Generator().manual_seed(rank), config.batch_size // world
    pixels = torch.randn(images, 3, config.resolution, config.resolution, generator=generator)
    return pixels.to(on, torch.bfloat16), torch.randint(1000, (images,), generator=generator).to(on)


def start(
    config: Pretrain, architecture: Architecture, world: int, on: torch.device, state: State | None = None
) -> Engine:
    """Return the engine of a case; ZeRO also runs on a single GPU."""
    module = build(architecture)
    module.initialise(0)
    if state is not None:
        with torch.no_grad():
            for name, weight in module.named_parameters():
                weight.copy_(state[WEIGHTS, name].view_as(weight))
    module = module.to(on).train()
    optimizer = optim.make_optimizer(module, config.optimizer, config.learning_rate)
    if config.zero_stage == 0:
        return Plain(module, optimizer, torch.bfloat16, config.optimizer.clip_norm, world)
    return Zero(module, optimizer, optim.deepspeed_config(config, world))


def take_step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor], on: torch.device) -> float:
    """Take a step and return its seconds."""
    images, labels = batch
    began = time.perf_counter()
    engine.backward(F.cross_entropy(engine(images).float(), labels))
    engine.step(1e-3)
    if on.type == "cuda":
        torch.cuda.synchronize(on)
    return time.perf_counter() - began


def differences_of(
    config: Pretrain,
    architecture: Architecture,
    world: int,
    on: torch.device,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> tuple[float, float]:
    """Return the largest difference of a weight after six steps: if they were saved and continued; if repeated."""
    case = Case(config.zero_stage, config.dtype, 1, True, "AdamW", world)
    engine = start(config, architecture, world, on)
    for _ in range(3):
        take_step(engine, batch, on)
    state = {key: values.cpu() for key, values in state_of(engine, case).items()}
    for _ in range(3):
        take_step(engine, batch, on)
    whole = {name: values.cpu() for name, values in engine.full_weights().items()}
    del engine
    continued = start(config, architecture, world, on, state)
    continued.load_state(lambda kind, name, first, count: state[kind, name][first : first + count].to(on), 3)
    for _ in range(3):
        take_step(continued, batch, on)
    off = farthest(continued, whole)
    del continued
    repeated = start(config, architecture, world, on)
    for _ in range(6):
        take_step(repeated, batch, on)
    return off, farthest(repeated, whole)


def farthest(engine: Engine, weights: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight."""
    return max((values.cpu() - weights[name]).abs().max().item() for name, values in engine.full_weights().items())


if __name__ == "__main__":
    main()
