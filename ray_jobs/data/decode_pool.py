"""Decode images on several threads: whole images, or crops, at the model's resolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ray_jobs.data.decode import DamagedError, Stored, square
from ray_jobs.data.reading import Reader
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

_CHUNK = 16  # images per task: with fewer, the overhead of a task outweighs its parallelism

Indices = NDArray[np.int64]
Image = NDArray[np.uint8]
DecodeImage = Callable[[Stored, int], Image]
"""Decodes an image, given its number in the task."""
DecodeCrops = Callable[[Indices, Indices, Indices], DecodeImage]
"""Returns the decoder of a task, from its images' positions in the training stream, heights and widths."""


class DecodePool:
    """A thread pool that fills arrays with a reader's decoded images: crops with `crops`, otherwise whole images.

    If `dataset` (its name) is set, an image that was damaged in storage is replaced by the next row's image, and the
    replacement is printed once; otherwise DamagedError is raised.
    """

    def __init__(
        self,
        reader: Reader,
        preprocessing: Preprocessing,
        threads: int,
        *,
        is_raw: bool,
        crops: DecodeCrops | None = None,
        dataset: str | None = None,
    ) -> None:
        self.reader, self.is_raw = reader, is_raw
        self._crops, self._dataset = (
            crops or (lambda *_: lambda image, _: square(image, preprocessing)),
            dataset,
        )
        self._width, self._height, _ = reader.size.astype(np.int64).T
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self._lock, self._reported = Lock(), set[int]()

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        self.reader.close()

    def submit(
        self, rows: Indices, positions: Indices, out: NDArray[np.uint8], slots: Indices | None = None
    ) -> Callable[[], Indices]:
        """Start to fill `out` [m, h, w, c] with the images of `rows` [n], cropped by their `positions` [n].

        `slots` [n] are their indices in `out`; by default they are in order.

        Returns a function that waits for the images and returns the rows [n] that were used; a damaged image's row is
        replaced by another.
        """
        if self.is_raw:  # copying pixels is too cheap for a thread
            assert slots is None
            used = self._copy(rows, positions, out)
            return lambda: used
        slots = np.arange(len(rows)) if slots is None else slots
        size = max(1, min(_CHUNK, len(rows) // (2 * self._threads)))
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        futures = [
            self._pool.submit(self._decode, rows[part], positions[part], out, slots[part]) for part in parts
        ]
        return lambda: np.concatenate([future.result() for future in futures])

    def _copy(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Indices:
        used = rows.copy()
        for slot, error in self.reader.gather(rows, out.reshape(len(rows), math.prod(out.shape[1:]))):
            used[slot], out[slot] = self._next(int(rows[slot]), positions[slot : slot + 1], error)
        return used

    def _decode(self, rows: Indices, positions: Indices, out: NDArray[np.uint8], slots: Indices) -> Indices:
        used = rows.copy()
        decode = self._crops(positions, self._height[rows], self._width[rows])
        for number, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            try:
                out[slot] = decode(self.reader.stored(row), number)
            except DamagedError as error:
                used[number], out[slot] = self._next(row, positions[number : number + 1], error)
        return used

    def _next(self, row: int, position: Indices, error: DamagedError) -> tuple[int, Image]:
        """Return (row, image) of the next row that is not damaged; it is the same on every rank and in every epoch."""
        if self._dataset is None:
            raise error
        with self._lock:
            is_new = row not in self._reported
            self._reported.add(row)
        if is_new:
            print(f"replaced by the next image: {error}", flush=True)
        for step in range(1, len(self._height)):
            other = (row + step) % len(self._height)
            decode = self._crops(position, self._height[[other]], self._width[[other]])
            try:
                return other, decode(self.reader.stored(other), 0)
            except DamagedError:
                continue
        raise UserError(f"dataset {self._dataset}: every image is damaged") from error
