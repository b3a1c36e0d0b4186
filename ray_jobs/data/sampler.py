"""The order of samples in training: pure functions of (fingerprint, seed, epoch), the same at any world size.

Training reads one endless stream, epoch after epoch; global batch s is positions s * G ... (s + 1) * G of it. An epoch
drops no sample: its last batch is filled from the next epoch, and a set may be smaller than a batch. Each rank takes a
contiguous share of a global batch. A loader's only state is the number of samples delivered, because the row at a
position is computed from the position alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ray_jobs.data.reading import pieces
from ray_jobs.data.shards import Images
from ray_jobs.randomness import GOLDEN, splitmix64

_ROUNDS = 8  # Feistel rounds on both halves; fewer are enough for large n, but visibly too few for n below ten
STREAMS = 64  # parts of an epoch that are read in parallel; up to so many nodes share no row group
WINDOW = 4  # row groups of a stream that are shuffled together
_PLANNED = 4096  # positions whose rows are computed at once, which costs as much as computing a few


class Order(Protocol):
    """The order of rows in the stream."""

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each position, [n] -> [n]."""


def sample_positions(step: int, global_batch: int, rank: int, world: int) -> NDArray[np.int64]:
    """Return a rank's positions in the endless stream at a step, [global_batch / world]. They seed augmentation."""
    share = global_batch // world
    start = step * global_batch + rank * share
    return np.arange(start, start + share, dtype=np.int64)


class Sampler:
    """The rows of a rank in each global batch of the endless stream (torch's DistributedSampler has one epoch).

    The ranks share a batch equally.
    """

    def __init__(
        self,
        images: Images,
        *,
        seed: int,
        batch_size: int,
        order: Literal["global", "window", "balanced"] = "global",
        rank: int = 0,
        world: int = 1,
    ) -> None:
        fingerprint = images.dataset.info.content_digest
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.stream = {"fingerprint": fingerprint, "seed": seed, "order": order, "batch_size": batch_size}
        """The values that decide the sample at each position; batch_size has an effect only in order "window"."""
        self.order: Order = GlobalOrder(len(images.rows), fingerprint, seed)
        if order == "window":
            self.order = WindowOrder(pieces(images.rows), fingerprint, seed, batch_size)
        elif order == "balanced":
            self.order = BalancedOrder(images.labels, fingerprint, seed)

    def batches(self, first: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (positions, rows) of each of the rank's batches, starting at position `first` of the stream."""
        share = self.batch_size // self.world
        block = max(1, _PLANNED // share)
        step = 0
        while True:
            steps = range(step, step + block)
            shares = [sample_positions(number, self.batch_size, self.rank, self.world) for number in steps]
            positions = first + np.stack(shares)
            rows = self.order.rows(positions.ravel()).reshape(positions.shape)
            yield from zip(positions, rows, strict=True)
            step += block


def describe(stream: dict[str, Any]) -> str:
    """Describe a sampler's stream or a loader's state; equal descriptions mean equal samples."""
    batch = f", batch {stream['batch_size']}" if stream["order"] == "window" else ""
    return f"dataset {stream['fingerprint'][:12]}, seed {stream['seed']}, order {stream['order']}{batch}"


class GlobalOrder:
    """An order in which every epoch is a permutation of all n rows: the best shuffling, for data on a local disk.

    `fingerprint` is the dataset's content digest, so that two datasets have different orders under the same seed.
    """

    def __init__(self, n: int, fingerprint: str, seed: int) -> None:
        self._n = n
        self._key = _key(f"order/{fingerprint}/{seed}")

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each position, [n] -> [n]."""
        epochs, within = np.divmod(positions, self._n)
        if len(positions) and epochs[0] == epochs[-1]:  # the usual case: one key for all halves the cost
            epochs = epochs[:1]
        return permute(within, self._n, _mix(self._key, epochs))


class WindowOrder:
    """An order in which every epoch is a permutation that reads few row groups at a time, for data on S3 that exceeds
    the local disk.

    The row groups are permuted and cut into `STREAMS` parts. A global batch takes an equal share of each part, so that
    ranks read different parts. Within a part, the rows of `WINDOW` row groups at a time are permuted. Rows of one row
    group have the same number in `groups` [n].
    """

    def __init__(self, groups: NDArray[np.int64], fingerprint: str, seed: int, global_batch: int) -> None:
        self._n, self._batch = len(groups), global_batch
        self._by_group = np.argsort(groups, kind="stable")
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._window = max(1, round(WINDOW * self._n / len(np.unique(groups))))
        self._key = _key(f"window/{fingerprint}/{seed}")
        streams = min(STREAMS, global_batch)
        # Slots [edges[c], edges[c + 1]) of a global batch belong to stream c.
        self._edges = np.arange(streams + 1) * global_batch // streams

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each position, [n] -> [n]."""
        epochs = positions // self._n
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            rows[in_epoch] = self._in_epoch(epoch, positions[in_epoch])
        return rows

    def _in_epoch(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = epoch * self._n
        before, after = self._slots(np.array([first, first + self._n]))
        ends = np.cumsum(after - before)
        stream = np.searchsorted(self._edges, positions % self._batch, "right") - 1
        starts, length = ends[stream] - (after - before)[stream], (after - before)[stream]
        place = self._slots(positions)[np.arange(len(positions)), stream] - before[stream]

        key = _mix(self._key, epoch)
        window, within = np.divmod(place, self._window)
        size = np.minimum(self._window, length - window * self._window)
        mixed = permute(within, size, _mix(_mix(key, stream), window))
        sequence = starts + window * self._window + mixed

        groups = permute(np.arange(len(self._sizes)), len(self._sizes), key)
        group_ends = np.cumsum(self._sizes[groups])
        number = np.searchsorted(group_ends, sequence, "right")
        group = groups[number]
        return self._by_group[self._starts[group] + sequence - (group_ends - self._sizes[groups])[number]]

    def _slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each position, the number of earlier positions in each stream: [n] -> [n, streams]."""
        whole, part = np.divmod(positions[:, None], self._batch)
        sizes = np.diff(self._edges)
        return whole * sizes + np.clip(part - self._edges[:-1], 0, sizes)


class BalancedOrder:
    """An order in which all classes are equally frequent: every K positions have each of the K classes once.

    A class cycles through permutations of its images, so the images of a small class come more often.
    `labels` is the class of each row, [n].
    """

    def __init__(self, labels: NDArray[np.int64], fingerprint: str, seed: int) -> None:
        self._by_class = np.argsort(labels, kind="stable")
        _, self._starts, self._sizes = np.unique(labels[self._by_class], return_index=True, return_counts=True)
        self._key = _key(f"balanced/{fingerprint}/{seed}")

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each position, [n] -> [n]."""
        classes = len(self._sizes)
        turn, place = np.divmod(positions, classes)
        chosen = permute(place, classes, _mix(self._key, turn))
        sizes = self._sizes[chosen]
        epoch, within = np.divmod(turn, sizes)
        mixed = permute(within, sizes, _mix(_mix(self._key, -1 - chosen), epoch))
        return self._by_class[self._starts[chosen] + mixed]


def permute(index: ArrayLike, n: ArrayLike, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the image of each `index` under the permutation of 0..n-1 with this `key`; n and key may differ per index.

    A Feistel network on the numbers below a * b >= n, with a about the square root of n, is repeated until its output
    is below n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Without a table, every position costs
    the same.
    """
    index, n = np.atleast_1d(index).astype(np.uint64), np.atleast_1d(n).astype(np.uint64)
    a = np.ceil(np.sqrt(n)).astype(np.uint64)
    b = (n + a - np.uint64(1)) // a
    keys = _mix(key, np.arange(2 * _ROUNDS)[:, None])
    value = _feistel(index, a, b, keys)
    while (outside := value >= n).any():
        some = [np.broadcast_to(part, (*part.shape[:-1], len(value)))[..., outside] for part in (a, b, keys)]
        value[outside] = _feistel(value[outside], *some)
    return value.astype(np.int64)


def _feistel(
    value: NDArray[np.uint64], a: NDArray[np.uint64], b: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    left, right = value % a, value // a
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(even, right)) % a
        right = (right + _mix(odd, left)) % b
    return np.asarray(right * a + left, np.uint64)


def _key(name: str) -> NDArray[np.uint64]:
    return np.frombuffer(hashlib.sha256(name.encode()).digest()[:8], ">u8").astype(np.uint64)


def _mix(key: NDArray[np.uint64], number: ArrayLike) -> NDArray[np.uint64]:
    """Return a 64-bit hash of (key, number), by SplitMix64."""
    # at least one dimension, because numpy warns about scalars that overflow
    return splitmix64(key + (np.atleast_1d(number).astype(np.uint64) + np.uint64(1)) * GOLDEN)
