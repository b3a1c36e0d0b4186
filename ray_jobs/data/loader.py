"""Training batches from shards: uint8 images in a sampler's order, the same for any number of ranks and threads.

In: rows of a dataset's index. Out: endless batches; each rank gets its share of a global batch. A batch is a pure
function of (rows, seed, positions in the stream), so the only state is the number of samples delivered.

    images = Images(dataset, dataset.index("train"))
    with Loader(images, Sampler(images, seed=0, batch_size=256), preprocessing, threads=4) as batches:
        for positions, images, labels in batches: ...
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ray_jobs.data.crops import Draw, decode_crops
from ray_jobs.data.decode_pool import DecodePool, Decoder
from ray_jobs.data.decode_processes import DecodeProcesses
from ray_jobs.data.reading import PIECE_BYTES
from ray_jobs.data.sampler import STREAMS, WINDOW, Sampler, describe
from ray_jobs.data.shards import Images
from vit_model.contract import Preprocessing
from vit_model.errors import UserError

MEMORY_BYTES = 2**30  # uncropped images are decoded once and kept if they fit into this
_RING_BYTES = 2**30  # for waiting decoded batches
_AHEAD = 16  # batches to fetch from S3 ahead of decoding
_SPARED, _SPARED_FRACTION = (
    10,
    0.001,
)  # allowed substitutes: a number, plus a fraction of the images delivered

Indices = NDArray[np.int64]


class Batch(NamedTuple):
    """A rank's share of a global batch. `images` are overwritten when the batch after the next is requested."""

    positions: Indices
    images: torch.Tensor
    """uint8 [n, resolution, resolution, channels]"""
    labels: torch.Tensor
    """int64 [n]; with several labels per image bool [n, classes]"""


class Loader:
    """An endless iterator of batches of images, in a sampler's order.

    `crop` draws the crop to take while an image is decoded (`TrainTransform.crop`); None: whole images. An image
    that was damaged in storage is replaced by the next row's image, counted and reported.

    Raises:
        UserError: the cache is too small; while iterating: too many images are damaged.
    """

    def __init__(
        self,
        images: Images,
        sampler: Sampler,
        preprocessing: Preprocessing,
        *,
        crop: Draw | None = None,
        threads: int = 1,
        in_processes: bool | None = None,
    ) -> None:
        self._name, self._labels, self._sampler = images.dataset.info.name, images.labels, sampler
        self._share = sampler.batch_size // sampler.world
        self._shape = (preprocessing.resolution, preprocessing.resolution, preprocessing.channels)
        self._reader = images.dataset.reader(images.rows)
        if sampler.stream["order"] == "global":
            self._reader.check_room(None, "order: window needs less")
        else:
            self._reader.check_room(STREAMS * (WINDOW + 1) * PIECE_BYTES, "that is one window")
        is_raw = images.dataset.is_raw(preprocessing)
        fits = len(self._labels) * math.prod(self._shape) <= MEMORY_BYTES
        # Copying stored pixels is cheap, and crops differ in every epoch.
        self._is_kept = fits and crop is None and not is_raw
        decoder = Decoder(self._reader, preprocessing, crop and decode_crops(crop, preprocessing), self._name)
        self._pool = DecodePool(decoder, threads, is_raw=is_raw)
        depth = 4 if 4 * self._share * math.prod(self._shape) <= _RING_BYTES else 3
        self._ring_shape = (depth, self._share, *self._shape)
        # A GPU's training thread needs Python's lock (GIL) to launch its kernels, so nothing decodes beside it. On CPUs
        # its operators take long and release the lock.
        in_processes = torch.cuda.is_available() if in_processes is None else in_processes
        self._processes = None
        if in_processes and not is_raw and not self._is_kept:
            self._processes = DecodeProcesses(decoder, threads, self._ring_shape)
        self.samples = self.substitutes = self.bytes_read = self._delivered = 0
        self.seconds_waited = 0.0
        self._iterator = self._batches()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._iterator.close()
        if self._processes is not None:
            self._processes.close()
        self._pool.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = next(self._iterator)
        self.seconds_waited += time.perf_counter() - started
        self.samples += self._sampler.batch_size
        self._delivered += self._share
        if self.substitutes > _SPARED + _SPARED_FRACTION * self._delivered:
            raise UserError(
                f"dataset {self._name}: {self.substitutes} of {self._delivered:,} images were damaged and replaced, "
                "which is too many. Ingest the dataset again"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the sampler's stream and the number of samples delivered to all ranks."""
        return {**self._sampler.stream, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state of another loader, with any number of ranks and threads.

        Raises:
            ValueError: the state belongs to another stream: another dataset, seed or order.
        """
        if describe(state) != describe(self._sampler.stream):
            raise ValueError(
                f"cannot resume the loader: its state belongs to {describe(state)}, "
                f"but the sampler is for {describe(self._sampler.stream)}"
            )
        self._iterator.close()
        self.samples = state["samples"]
        self._iterator = self._batches()

    def metrics(self) -> dict[str, float | int]:
        """Return the cost of loading: seconds that the caller waited, bytes read and fetched, substitutes."""
        return {
            "data_wait_seconds": self.seconds_waited,
            "data_bytes": self.bytes_read,
            "substitutes": self.substitutes,
            **self._reader.metrics(),
        }

    # --------------------------------------------------------------------------------------------- batches

    def _batches(self) -> Generator[Batch]:
        return self._kept() if self._is_kept else self._decoded()

    def _kept(self) -> Generator[Batch]:
        """Yield batches of images that are the same in every epoch and are decoded before the first batch."""
        every = np.lexsort((self._reader.offset, self._reader.shard))  # in storage order, to read each piece once
        images = np.empty((len(every), *self._shape), np.uint8)
        self._reader.fetch(every)
        used = np.empty_like(every)
        used[every] = self._pool.submit(every, every, images, every)()  # without a crop, positions do not matter
        for positions, rows in self._sampler.batches(self.samples):
            yield self._batch_of(positions, images[rows], rows, used[rows])

    def _decoded(self) -> Generator[Batch]:
        """Yield batches that are decoded ahead into a ring of batches."""
        pool = self._processes or self._pool
        if self._processes is not None:
            ring = self._processes.ring
        else:
            has_gpu = torch.cuda.is_available()
            ring = torch.empty(self._ring_shape, dtype=torch.uint8, pin_memory=has_gpu).numpy()
        waiting: deque[tuple[Indices, Indices, NDArray[np.uint8], Callable[[], Indices]]] = deque()
        for number, (positions, rows) in enumerate(self._fetched()):
            slot = ring[number % len(ring)]
            waiting.append((positions, rows, slot, pool.submit(rows, positions, slot)))
            if len(waiting) == len(ring) - 1:
                positions, rows, images, used = waiting.popleft()
                yield self._batch_of(positions, images, rows, used())

    def _fetched(self) -> Iterator[tuple[Indices, Indices]]:
        """Yield (positions, rows) of each batch; its bytes were requested `_AHEAD` batches earlier."""
        ahead: deque[tuple[Indices, Indices]] = deque()
        for positions, rows in self._sampler.batches(self.samples):
            self._reader.fetch(rows)
            ahead.append((positions, rows))
            if len(ahead) > _AHEAD:
                yield ahead.popleft()

    def _batch_of(self, positions: Indices, images: NDArray[np.uint8], rows: Indices, used: Indices) -> Batch:
        """Return a batch and count it. `used` are the rows that were used in place of `rows`."""
        self.bytes_read += int(self._reader.length[used].sum())
        self.substitutes += int((rows != used).sum())
        return Batch(positions, torch.from_numpy(images), torch.from_numpy(self._labels[used]))
