"""benchmarks/gpu.py, which needs GPUs for its figures, does all that it does on two processes of a CPU."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

COMMAND = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--steps", "2", "--batch", "8", "--no-keep"]


@pytest.mark.slow
@pytest.mark.full
def test_every_engine_is_measured_and_continues_exactly() -> None:
    done = subprocess.run([*COMMAND, "--cpu"], capture_output=True, text=True, check=True)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| tiny")]
    assert [row[1] for row in rows] == ["plain torch", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert all(row[5:] == ["same bits", "same bits |"] and float(row[2].replace(",", "")) > 0 for row in rows)
    assert "| loaded and trained | " in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("error: torch found no GPU; use --cpu to try this benchmark with a tiny model")
