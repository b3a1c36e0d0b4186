"""Images of a batch, decoded on several threads: a part of each original or the whole, at the model's resolution."""

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
from vit_model.config import Preprocessing
from vit_model.errors import UserError

_CHUNK = 16  # images a task: less and handing them over costs more than it spreads

Indices = NDArray[np.int64]


class Decoder:
    """Fills batches with the images of rows, each a part by `crop` or the whole, brought to the model's square.

    An image that storage has damaged is replaced by the next row's, and that is printed once.
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
        self._lock, self._told = Lock(), set[int]()

    def close(self) -> None:
        """Let go of threads and files."""
        self._pool.shutdown(cancel_futures=True)
        self.reader.close()

    def submit(self, rows: Indices, positions: Indices, out: NDArray[np.uint8]) -> Callable[[], Indices]:
        """Begin to fill `out` [n, h, w, c] with the images of rows [n], cropped as their positions [n] say.

        Returns what waits for them and gives the rows that were taken in the end: others for damaged ones.
        """
        if self.is_raw:  # copied, so that there is nothing to hand to a thread
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
        """(row, image) of the next row that is not damaged: the same one wherever and whenever this is asked."""
        with self._lock:
            is_new = row not in self._told
            self._told.add(row)
        if is_new:
            print(f"replaced by the next: {error}", flush=True)
        n = len(self._height)
        for step in range(1, n):
            other = (row + step) % n
            (box,) = self._boxes(np.array([other]), position)
            try:
                return other, self._image(other, box)
            except DamagedError:
                continue
        raise UserError(f"dataset {self._name}: every image is damaged") from error
