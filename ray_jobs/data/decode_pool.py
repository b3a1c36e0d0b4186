"""Decode images on several threads: whole images, or crops, at the model's resolution.

`ray_jobs.data.decode_processes` decodes in other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

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


class Substitute(NamedTuple):
    """The image that replaces a damaged one."""

    number: int
    """of the damaged image in its task"""
    row: int
    """that is used instead"""
    damage: str


class Decoder:
    """Fills arrays with a reader's images: crops with `crops`, otherwise whole images. It can be pickled.

    If `dataset` (its name) is set, an image that was damaged in storage is replaced by the next row's image; otherwise
    DamagedError is raised.
    """

    def __init__(
        self,
        reader: Reader,
        preprocessing: Preprocessing,
        crops: DecodeCrops | None = None,
        dataset: str | None = None,
    ) -> None:
        self.reader, self._dataset = reader, dataset
        self._crops = crops or partial(_squares, preprocessing)
        self._reported = set[int]()

    def decode(self, rows: Indices, positions: Indices, out: Image, slots: Indices) -> list[Substitute]:
        """Fill `out` [m, h, w, c] at `slots` [n] with the images of `rows` [n], cropped by their `positions` [n]."""
        decode, substitutes = self._images(rows, positions), []
        for number, (row, slot) in enumerate(zip(rows.tolist(), slots.tolist(), strict=True)):
            try:
                out[slot] = decode(self.reader.stored(row), number)
            except DamagedError as error:
                other, out[slot] = self._next(row, positions[number : number + 1], error)
                substitutes.append(Substitute(number, other, str(error)))
        return substitutes

    def copy(self, rows: Indices, positions: Indices, out: Image) -> list[Substitute]:
        """Fill `out` [n, h, w, c] with the images of `rows` [n], which are stored as pixels of this size."""
        substitutes = []
        for slot, error in self.reader.gather(rows, out.reshape(len(rows), math.prod(out.shape[1:]))):
            other, out[slot] = self._next(int(rows[slot]), positions[slot : slot + 1], error)
            substitutes.append(Substitute(slot, other, str(error)))
        return substitutes

    def used(self, rows: Indices, tasks: Iterable[tuple[int, list[Substitute]]]) -> Indices:
        """Return the rows [n] that were used for `rows` [n], and print each replacement once.

        `tasks` are the place of each task's first row in `rows`, and its substitutes.
        """
        used = rows.copy()
        for first, substitutes in tasks:
            for number, other, damage in substitutes:
                row, used[first + number] = int(rows[first + number]), other
                if row not in self._reported:
                    self._reported.add(row)
                    print(f"replaced by the next image: {damage}", flush=True)
        return used

    def _images(self, rows: Indices, positions: Indices) -> DecodeImage:
        width, height, _ = self.reader.size[rows].astype(np.int64).T
        return self._crops(positions, height, width)

    def _next(self, row: int, position: Indices, error: DamagedError) -> tuple[int, Image]:
        """Return (row, image) of the next row that is not damaged; it is the same on every rank and in every epoch."""
        if self._dataset is None:
            raise error
        count = len(self.reader.size)
        for step in range(1, count):
            other = (row + step) % count
            decode = self._images(np.array([other]), position)
            try:
                return other, decode(self.reader.stored(other), 0)
            except DamagedError:
                continue
        raise UserError(f"dataset {self._dataset}: every image is damaged") from error


class DecodePool:
    """A thread pool that fills arrays with a decoder's images. With `is_raw`, they are stored as such pixels."""

    def __init__(self, decoder: Decoder, threads: int, *, is_raw: bool) -> None:
        self._decoder, self._is_raw = decoder, is_raw
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        self._decoder.reader.close()

    def submit(
        self, rows: Indices, positions: Indices, out: Image, slots: Indices | None = None
    ) -> Callable[[], Indices]:
        """Start to fill `out` [m, h, w, c] with the images of `rows` [n], cropped by their `positions` [n].

        `slots` [n] are their indices in `out`; by default they are in order.

        Returns a function that waits for the images and returns the rows [n] that were used; a damaged image's row is
        replaced by another.
        """
        if self._is_raw:  # copying pixels is too cheap for a thread
            assert slots is None
            used = self._decoder.used(rows, [(0, self._decoder.copy(rows, positions, out))])
            return lambda: used
        slots = np.arange(len(rows)) if slots is None else slots
        size = max(1, min(_CHUNK, len(rows) // (2 * self._threads)))
        tasks = []
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            task = self._pool.submit(self._decoder.decode, rows[part], positions[part], out, slots[part])
            tasks.append((first, task))
        return lambda: self._decoder.used(rows, ((first, task.result()) for first, task in tasks))


def _squares(preprocessing: Preprocessing, *_: Indices) -> DecodeImage:
    return lambda image, _: square(image, preprocessing)
