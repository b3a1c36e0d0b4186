"""Decode the images of a batch on several threads: whole images or random crops, at the model's resolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from ray_jobs.augment import RandomCrop
from ray_jobs.data.decode import Crop, DamagedError, cropped, square
from ray_jobs.data.shards import Images
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

_CHUNK = 16  # images per task: with fewer, the overhead of a task outweighs its parallelism

Indices = NDArray[np.int64]


class Decoder:
    """A thread pool that fills batches with decoded images: random crops with `crop`, else whole images.

    An image that was damaged in storage is replaced by the next row's, and the replacement is printed once.
    """

    def __init__(
        self, images: Images, preprocessing: Preprocessing, crop: RandomCrop | None, threads: int
    ) -> None:
        self.reader = images.dataset.reader(images.rows)
        self.is_raw = images.dataset.is_raw(preprocessing)
        self._preprocessing, self._crop, self._name = preprocessing, crop, images.dataset.info.name
        self._height, self._width = (
            images.rows[name].to_numpy().astype(np.int64) for name in ("height", "width")
        )
        self._threads, self._pool = threads, ThreadPoolExecutor(threads)
        self._lock, self._reported = Lock(), set[int]()

    def close(self) -> None:
        """Stop the threads and close the files."""
        self._pool.shutdown(cancel_futures=True)
        self.reader.close()

    def submit(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Callable[[], Indices]:
        """Start to fill `out` [n, h, w, c] with the images of `rows` [n], cropped by their `positions` [n].

        Returns a function that waits for the images and returns the rows [n] that were used: for a damaged image
        another row.
        """
        if self.is_raw:  # copying pixels is too cheap for a thread
            taken = self._copy(rows, positions, out)
            return lambda: taken
        size = max(1, min(_CHUNK, len(rows) // (2 * self._threads)))
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        futures = [self._pool.submit(self._decode, rows[part], positions[part], out[part]) for part in parts]
        return lambda: np.concatenate([future.result() for future in futures])

    def _copy(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Indices:
        taken = rows.copy()
        for slot, error in self.reader.gather(rows, out.reshape(len(rows), math.prod(out.shape[1:]))):
            taken[slot], out[slot] = self._next(int(rows[slot]), positions[slot : slot + 1], error)
        return taken

    def _decode(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Indices:
        taken = rows.copy()
        for slot, (row, box) in enumerate(zip(rows.tolist(), self._boxes(rows, positions), strict=True)):
            try:
                out[slot] = self._image(row, box)
            except DamagedError as error:
                taken[slot], out[slot] = self._next(row, positions[slot : slot + 1], error)
        return taken

    def _boxes(self, rows: Indices, positions: Indices) -> list[Crop] | list[None]:
        if self._crop is None:
            return [None] * len(rows)
        boxes = self._crop.boxes(positions, self._height[rows], self._width[rows])
        return [Crop(*box) for box in zip(*(part.tolist() for part in boxes), strict=True)]

    def _image(self, row: int, box: Crop | None) -> NDArray[np.uint8]:
        stored = self.reader.stored(row)
        return (
            square(stored, self._preprocessing) if box is None else cropped(stored, self._preprocessing, box)
        )

    def _next(self, row: int, position: Indices, error: DamagedError) -> tuple[int, NDArray[np.uint8]]:
        """Return (row, image) of the next row that is not damaged: the same row on every rank, in every epoch."""
        with self._lock:
            is_new = row not in self._reported
            self._reported.add(row)
        if is_new:
            print(f"replaced by the next image: {error}", flush=True)
        n = len(self._height)
        for step in range(1, n):
            other = (row + step) % n
            (box,) = self._boxes(np.array([other]), position)
            try:
                return other, self._image(other, box)
            except DamagedError:
                continue
        raise UserError(f"dataset {self._name}: every image is damaged") from error
