"""A child process with memory and time limits, for libraries that an untrusted file could crash or hang.

`sandboxed` is its program: unrar, h5py and scipy run there, never in a stage's own process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ray_jobs.sources.archives import sandboxed
from vit_model.errors import UserError

SECONDS = 300  # limit without progress: a header, 4 MiB of a RAR's member, 32 MiB of an array, a MATLAB file
MEMORY = 2**32  # bytes of address space, because a header may ask for any number
_CHUNK = 2**20


def converted(name: str, converter: str, path: Path, *arguments: str) -> Iterator[bytes]:
    """Yield the output of a converter of `sandboxed`, in chunks. Messages call the file `name`.

    Raises:
        UserError: the file is damaged, or takes too much memory or time.
    """
    limits = str(SECONDS), str(MEMORY)
    with subprocess.Popen(
        [sys.executable, "-I", "-B", sandboxed.__file__, *limits, converter, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # because each thread takes address space
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            while chunk := process.stdout.read(_CHUNK):
                yield chunk
            reason = process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        except BaseException:
            process.kill()
            raise
    if process.returncode == -signal.SIGALRM:
        reason = f"is damaged: its library made no progress for {SECONDS} s"
    if process.returncode:
        raise UserError(f"{name} {reason or 'is damaged: its library crashed'}")
