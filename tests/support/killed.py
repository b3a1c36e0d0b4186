"""A stage's driver that is killed while its Ray tasks run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray

from tests.support.paths import ROOT


def killed_after(files: int, folder: Path, script: str, context: Path) -> None:
    """Run a script with the path of a context and this Ray's address; kill it when a folder has so many files."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, context, ray.get_runtime_context().gcs_address],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    try:
        deadline = time.monotonic() + 60
        while not folder.is_dir() or len(list(folder.iterdir())) < files:
            assert process.poll() is None and time.monotonic() < deadline, "it did not begin"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    time.sleep(1.0)  # its last tasks end, or not
