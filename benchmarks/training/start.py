"""The seconds from a job's submission to its first training step: of a pretrain stage, and of a plain Ray job."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import ROOT, keep_ray_below

from pipelines.cluster.local import hold, shut_down
from training.sizes import SIZES, write_noise

TARGET = 1.4
RECIPE = """
name: start
description: The quickstart's model, for two steps.
stages:
  digits: {job: ingest, source: {kind: digits}}
  pretrain:
    job: pretrain
    data: digits
    model: {patch_size: 2, width: 64, depth: 4, num_heads: 4, gelu: exact}
    resolution: 8
    steps: 2
    batch_size: 256
    learning_rate: 1.0e-3
    augment: shift
    keep_steps: [1]
    workers: 2
"""
ATTEMPTS = "artifacts/pretrain/*/attempts/1/attempt.json"
LIMIT = 300.0


def seconds_to_first_step(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Submit the jobs in turn to one local Ray, in a state of its own below `folder`."""
    keep_ray_below(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    (folder / "start.yaml").write_text(RECIPE)
    write_noise(folder / "noise", SIZES["quickstart"])
    seconds: dict[str, list[float]] = {"plain": [], "ours, plain": [], "ours, ZeRO-1": []}
    try:
        for number in range(rounds + 1):  # the first round warms up
            with hold() as ray:
                mark = folder / f"mark-{number}"
                script = Path(__file__).with_name("actors.py")
                command = shlex.join(map(str, [sys.executable, script, folder / "noise", mark]))
                began = time.time()
                ray.cluster().submit(f"plain-{number}", command, {"PYTHONPATH": str(ROOT)}, {})
                plain = _appeared(mark.exists) - began
            ours = [_our_seconds(folder, number, stage) for stage in (0, 1)]
            if number:
                for each, value in zip(seconds.values(), (plain, *ours), strict=True):
                    each.append(value)
    finally:
        shut_down()
    return seconds


def _our_seconds(folder: Path, number: int, stage: int) -> float:
    store = folder / f"store-{stage}"
    fields = {"seed": number, "zero_stage": stage}
    settings = [part for name, value in fields.items() for part in ("--set", f"pretrain.{name}={value}")]
    command = ["run", str(folder / "start.yaml"), "--store", str(store), *settings]
    subprocess.run([sys.executable, "-m", "pipelines", *command, "--only", "digits"], check=True)
    before = set(store.glob(ATTEMPTS))
    with subprocess.Popen([sys.executable, "-m", "pipelines", *command], stdout=subprocess.DEVNULL):
        _appeared(lambda: set(store.glob(ATTEMPTS)) > before)
        (attempt,) = set(store.glob(ATTEMPTS)) - before
        first = _appeared(lambda: any(attempt.parent.glob("checkpoints/*/*.safetensors")))
    return first - attempt.stat().st_mtime


def _appeared(is_there: Callable[[], bool]) -> float:
    """Wait, and return the time."""
    began = time.time()
    while not is_there():
        if time.time() - began > LIMIT:
            sys.exit(f"nothing within {LIMIT:.0f} s")
        time.sleep(0.02)
    return time.time()
