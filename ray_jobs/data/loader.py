"""Training batches from shards: uint8 images in `ray_jobs.data.sampler`'s order, the same for any ranks and threads.

In: rows of a dataset's index. Out: endless batches, of which each rank gets its share. What a batch holds is a pure
function of (rows, seed, positions in the stream), so the state is the number of samples that were delivered.

    with Loader(dataset, dataset.index("train"), preprocessing, seed=0, batch=256, threads=4) as batches:
        for positions, images, labels in batches: ...
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from ray_jobs.augment import CROPPING, crops
from ray_jobs.data.decode import Crop, DamagedError, cropped, square
from ray_jobs.data.reading import PIECE_BYTES, pieces
from ray_jobs.data.sampler import (
    STREAMS,
    WINDOW,
    GlobalOrder,
    Order,
    WindowOrder,
    check_world,
    sample_positions,
)
from ray_jobs.data.shards import Dataset
from vit_model.config import Preprocessing
from vit_model.errors import UserError

MEMORY_BYTES = 2**30  # images that are the same in every epoch are decoded once, where they fit in here
_RING_BYTES = 2**30  # of decoded batches that wait
_CHUNK = 16  # images a task: less and handing them over costs more than it spreads
_PLANNED = 4096  # positions whose rows are computed at once: costs as much as for a few
_AHEAD = 16  # batches whose bytes are fetched from S3 while others are decoded
_SPARED, _SPARED_FRACTION = 10, 0.001  # substitutes that are borne: so many, and of what was delivered

Indices = NDArray[np.int64]


class Batch(NamedTuple):
    """A rank's share of a global batch. `images` are overwritten when the next but one is asked for."""

    positions: Indices
    images: torch.Tensor
    """uint8 [n, resolution, resolution, channels]"""
    labels: torch.Tensor
    """int64 [n]"""


class State(NamedTuple):
    """What a checkpoint keeps of a loader."""

    fingerprint: str
    seed: int
    order: Literal["global", "window"]
    batch: int
    """The global batch, on which the order of `window` depends."""
    samples: int
    """Delivered so far, to all ranks together."""


class Loader:
    """Batches of some rows of a dataset's index. Raises ValueError for sizes that do not fit, an empty set, a state of
    another dataset or seed, or a cache that is too small; later when too many images are damaged.

    `policy` is the augmentation: parts of image files are cut while they are decoded (`is_cropped`); for the rest the
    caller has `augment`. An image that storage has damaged is replaced by the next row's, counted and told.
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: pa.Table,
        preprocessing: Preprocessing,
        *,
        seed: int,
        batch: int,
        threads: int,
        policy: str = "none",
        order: Literal["global", "window"] = "global",
        rank: int = 0,
        world: int = 1,
        state: State | None = None,
    ) -> None:
        check_world(batch, rank, world)
        fingerprint = dataset.info.content_digest
        self._dataset, self._preprocessing = dataset, preprocessing
        self._seed, self._policy, self._threads = seed, policy, threads
        self._batch, self._rank, self._world = batch, rank, world
        self._state = State(fingerprint, seed, order, batch, state.samples if state else 0)
        if state is not None and _stream(state) != _stream(self._state):
            raise ValueError(
                f"the loader's state is of another stream of samples, {_stream(state)}, not of "
                f"{_stream(self._state)}: it can't go on there"
            )
        self._first = self._state.samples
        self._order: Order = (
            GlobalOrder(len(rows), fingerprint, seed)
            if order == "global"
            else WindowOrder(pieces(rows), fingerprint, seed, batch)
        )
        self._height, self._width = (rows[name].to_numpy().astype(np.int64) for name in ("height", "width"))
        self._labels = rows["label"].to_numpy().astype(np.int64)
        self._raw = dataset.is_raw(preprocessing)
        # A mere flip needs no original.
        self.is_cropped = policy in CROPPING and policy != "flip" and dataset.info.image is None
        side = preprocessing.resolution
        self._shape = (side, side, preprocessing.channels)
        self._fits = len(rows) * math.prod(self._shape) <= MEMORY_BYTES
        self._reader = dataset.reader(rows)
        if order == "global":
            self._reader.check_room(None, "with order: window less is needed at a time")
        else:
            self._reader.check_room(STREAMS * (WINDOW + 1) * PIECE_BYTES, "more than one window is needed")
        self._pool = ThreadPoolExecutor(threads)
        self._lock, self._told = Lock(), set[int]()
        self.samples, self.substitutes, self.bytes_read, self.seconds_waited = self._first, 0, 0, 0.0
        self._iterator = self._batches()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._iterator.close()
        self._pool.shutdown(cancel_futures=True)
        self._reader.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        found = next(self._iterator)
        self.seconds_waited += time.perf_counter() - started
        self.samples += self._batch
        if self.substitutes > _SPARED + _SPARED_FRACTION * (self.samples - self._first) / self._world:
            raise UserError(
                f"{self.substitutes} of {(self.samples - self._first) // self._world:,} images were damaged and "
                f"replaced, which is too many: dataset {self._dataset.info.name} must be written anew"
            )
        return found

    @property
    def state(self) -> State:
        """Where another loader goes on."""
        return self._state._replace(samples=self.samples)

    def metrics(self) -> dict[str, float | int]:
        """What the loading took: seconds the caller waited, bytes read and fetched, substitutes."""
        return {
            "data_wait_seconds": self.seconds_waited,
            "data_bytes": self.bytes_read,
            "substitutes": self.substitutes,
            **self._reader.metrics(),
        }

    # --------------------------------------------------------------------------------------------- planning

    def _planned(self) -> Iterator[tuple[Indices, Indices]]:
        """(positions, rows) of each batch, without an end."""
        share = self._batch // self._world
        block = max(1, _PLANNED // share)
        step = 0
        while True:
            steps = range(step, step + block)
            positions = np.stack([
                self._first + sample_positions(number, self._batch, self._rank, self._world) for number in steps
            ])  # fmt: skip
            rows = self._order.rows(positions.ravel()).reshape(positions.shape)
            yield from zip(positions, rows, strict=True)
            step += block

    def _fetched(self) -> Iterator[tuple[Indices, Indices]]:
        """The same, each a while after its bytes were asked for."""
        ahead: deque[tuple[Indices, Indices]] = deque()
        for positions, rows in self._planned():
            self._reader.fetch(rows)
            ahead.append((positions, rows))
            if len(ahead) > _AHEAD:
                yield ahead.popleft()

    # --------------------------------------------------------------------------------------------- batches

    def _batches(self) -> Generator[Batch]:
        if self._raw:
            return self._gathered()
        return self._kept() if self._fits and not self.is_cropped else self._decoded()

    def _gathered(self) -> Generator[Batch]:
        """Pixels as they lie in the shards: copied, so that there is nothing to hand to a thread."""
        for positions, rows in self._fetched():
            images = np.empty((len(rows), *self._shape), np.uint8)
            flat = images.reshape(len(rows), math.prod(self._shape))
            used = rows.copy()
            for slot, error in self._reader.gather(rows, flat):
                used[slot], images[slot] = self._other(int(rows[slot]), None, error)
            yield self._batch_of(positions, images, rows, used)

    def _kept(self) -> Generator[Batch]:
        """Images that are the same in every epoch, decoded before the first."""
        every = np.lexsort((self._reader.offset, self._reader.shard))  # as they lie, to read each piece once
        images = np.empty((len(every), *self._shape), np.uint8)
        self._reader.fetch(every)
        used = _joined(self._decode(every, None, images))
        place = np.empty_like(every)
        place[every] = np.arange(len(every))
        for positions, rows in self._planned():
            yield self._batch_of(positions, images[place[rows]], rows, used[place[rows]])

    def _decoded(self) -> Generator[Batch]:
        """Images decoded by threads, each into its place in a ring of batches."""
        share = self._batch // self._world
        depth = 4 if 4 * share * math.prod(self._shape) <= _RING_BYTES else 3
        ring = torch.empty(
            (depth, share, *self._shape), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        ).numpy()
        waiting: deque[tuple[Indices, Indices, NDArray[np.uint8], list[Future[Indices]]]] = deque()
        for number, (positions, rows) in enumerate(self._fetched()):
            slot = ring[number % depth]
            waiting.append((positions, rows, slot, self._decode(rows, positions, slot)))
            if len(waiting) == depth - 1:
                positions, rows, images, going = waiting.popleft()
                yield self._batch_of(positions, images, rows, _joined(going))

    def _batch_of(self, positions: Indices, images: NDArray[np.uint8], rows: Indices, used: Indices) -> Batch:
        """`used` are the rows that are there in place of `rows`."""
        self.bytes_read += int(self._reader.length[used].sum())
        self.substitutes += int((rows != used).sum())
        return Batch(positions, torch.from_numpy(images), torch.from_numpy(self._labels[used]))

    # --------------------------------------------------------------------------------------------- images

    def _decode(
        self, rows: Indices, positions: Indices | None, out: NDArray[np.uint8]
    ) -> list[Future[Indices]]:
        """Begin to decode rows into `out`; each task returns the rows that it took in the end."""
        size = max(1, min(_CHUNK, len(rows) // (2 * self._threads)))
        parts = [slice(start, start + size) for start in range(0, len(rows), size)]
        return [
            self._pool.submit(self._decode_part, rows[part], None if positions is None else positions[part], out[part])
            for part in parts
        ]  # fmt: skip

    def _decode_part(self, rows: Indices, positions: Indices | None, out: NDArray[np.uint8]) -> Indices:
        used = rows.copy()
        boxes = self._boxes(rows, positions)
        for slot, row in enumerate(rows.tolist()):
            box = boxes[slot] if boxes else None
            try:
                out[slot] = self._image(row, box)
            except DamagedError as error:
                used[slot], out[slot] = self._other(
                    row, None if positions is None else positions[slot], error
                )
        return used

    def _boxes(self, rows: Indices, positions: Indices | None) -> list[Crop] | None:
        if positions is None or not self.is_cropped:
            return None
        found = crops(self._policy, self._seed, positions, self._height[rows], self._width[rows])
        return [Crop(*box) for box in zip(*(part.tolist() for part in found), strict=True)]

    def _image(self, row: int, box: Crop | None) -> NDArray[np.uint8]:
        stored = self._reader.stored(row)
        return (
            square(stored, self._preprocessing) if box is None else cropped(stored, self._preprocessing, box)
        )

    def _other(self, row: int, position: int | None, error: DamagedError) -> tuple[int, NDArray[np.uint8]]:
        """(row, image) of the next row that is not damaged: the same one wherever and whenever this is asked."""
        with self._lock:
            is_new = row not in self._told
            self._told.add(row)
        if is_new:
            print(f"replaced by the next: {error}", flush=True)
        n = len(self._labels)
        for step in range(1, n):
            other = (row + step) % n
            boxes = self._boxes(np.array([other]), None if position is None else np.array([position]))
            try:
                return other, self._image(other, boxes[0] if boxes else None)
            except DamagedError:
                continue
        raise UserError(f"dataset {self._dataset.info.name}: every image is damaged") from error


def _joined(parts: list[Future[Indices]]) -> Indices:
    return np.concatenate([part.result() for part in parts])


def _stream(state: State) -> str:
    """What says which sample comes at which position."""
    batch = f", batch {state.batch}" if state.order == "window" else ""
    return f"dataset {state.fingerprint[:12]}, seed {state.seed}, order {state.order}{batch}"
