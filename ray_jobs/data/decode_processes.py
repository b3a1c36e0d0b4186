"""Decode images in other processes, which do not need the training process's GIL.

In: rows of a training's images, as in `DecodePool`. Out: their pixels, in memory that the processes share.

The training process cannot be forked (CUDA, Ray, threads), and importing torch takes each new process seconds. So it
starts one helper, which imports what decoding needs and is forked. A process reads its tasks from a pipe. The pipe ends
with the process at either end, so neither outlives or waits for the other; the shared memory has no name to leave
behind.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe

import numpy as np
import torch
from numpy.typing import NDArray

from ray_jobs.data.decode_pool import Decoder, Indices, Substitute


class DecodeProcesses:
    """Processes that fill the batches of `ring` with a decoder's images, as `DecodePool` does on threads.

    Args:
        shape: the shape of `ring`, [batches, n, h, w, c]; its memory is pinned if there is a GPU.
    """

    def __init__(self, decoder: Decoder, processes: int, shape: tuple[int, ...]) -> None:
        self._decoder, self._submitted = decoder, 0
        # The images of a batch are dealt out in advance: each process fills the same part of every batch, in order.
        self._bounds = np.linspace(0, shape[1], min(processes, shape[1]) + 1).astype(int).tolist()
        pipes = [Pipe() for _ in self._bounds[1:]]
        self._pipes = [ours for ours, _ in pipes]
        with (
            os.fdopen(os.memfd_create("ring"), "r+b") as memory,
            os.fdopen(os.memfd_create("setup"), "r+b") as setup,
        ):
            memory.truncate(math.prod(shape))
            files = [memory.fileno(), *(theirs.fileno() for _, theirs in pipes)]
            pickle.dump((decoder, shape, files), setup)
            setup.seek(0)
            self._helper = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=setup,
                pass_fds=files,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self.ring = _mapped(memory.fileno(), shape)
        for _, theirs in pipes:
            theirs.close()
        if torch.cuda.is_available():  # pinned memory is copied to the GPU several times as fast
            ring = self.ring.ctypes.data, self.ring.nbytes
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(*ring, 0)))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        self._helper.wait()
        if torch.cuda.is_available():
            torch.cuda.cudart().cudaHostUnregister(self.ring.ctypes.data)

    def submit(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Callable[[], Indices]:
        """Start to fill `out` [n, h, w, c], a batch of `ring`; see `DecodePool.submit`.

        The function that it returns raises RuntimeError if a process has ended. Call these functions in order.
        """
        # A process fetches the bytes that it does not find in the cache itself, and each would fetch the same.
        self._decoder.reader.wait(rows)
        self._submitted += 1
        number, batch = self._submitted, (out.ctypes.data - self.ring.ctypes.data) // out.nbytes
        with _alive():
            for pipe, (first, end) in zip(self._pipes, pairwise(self._bounds), strict=True):
                pipe.send((number, batch, first, rows[first:end], positions[first:end]))
        return lambda: self._decoder.used(rows, self._replies(number))

    def _replies(self, number: int) -> Iterator[tuple[int, list[Substitute]]]:
        """Yield (its first image, its substitutes) of each process's part of a batch, given its number."""
        for pipe, first in zip(self._pipes, self._bounds, strict=False):
            replied = None
            while replied != number:  # the loader may have gone back before it took all batches
                with _alive():
                    replied, reply = pipe.recv()
            if isinstance(reply, Exception):
                raise reply
            yield first, reply


def main() -> None:
    """Fork the processes and wait for their ends, or, in each of them, fill batches until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training process, and thereby the pipes
    with os.fdopen(sys.stdin.fileno(), "rb") as setup:  # closes the file, unlike sys.stdin, which frees its memory
        decoder, shape, (memory, *files) = pickle.load(setup)
    ring, pipes = _mapped(memory, shape), [Connection(file) for file in files]
    torch.set_num_threads(1)
    own = next((pipe for pipe in pipes if os.fork() == 0), None)
    for pipe in pipes:
        if pipe is not own:
            pipe.close()
    with suppress(ChildProcessError, EOFError, ConnectionError):
        while own is None:
            os.wait()
        while True:
            own.send(_filled(decoder, ring, *own.recv()))


def _filled(
    decoder: Decoder,
    ring: NDArray[np.uint8],
    number: int,
    batch: int,
    first: int,
    rows: Indices,
    positions: Indices,
) -> tuple[int, list[Substitute] | Exception]:
    """Return the reply to a task: its number, and the images that were replaced, or an error."""
    try:
        return number, decoder.decode(rows, positions, ring[batch], np.arange(first, first + len(rows)))
    except Exception as error:
        error.add_note(traceback.format_exc())
        return number, error


def _mapped(memory: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return an array in a shared file's memory."""
    return np.frombuffer(mmap.mmap(memory, 0), np.uint8).reshape(shape)


@contextmanager
def _alive() -> Iterator[None]:
    """Raise RuntimeError if the pipe that the block uses has no process at its other end."""
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RuntimeError(
            "a process that decodes images ended unexpectedly; perhaps the machine's memory ran out"
        ) from error


if __name__ == "__main__":
    main()
    os._exit(0)  # at once, because the training process waits, and has nothing more to take from here
