"""In what order samples are seen: pure functions of (fingerprint, seed, epoch), the same at any world size.

Training sees one endless stream, epoch after epoch; global batch s is positions s * G ... (s + 1) * G of it.
So an epoch drops nothing, its last batch is filled from the next epoch, and a set smaller than a batch works
too. Each rank takes its contiguous share of a global batch. The whole state of a loader is the number of the
next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def epoch_order(fingerprint: str, seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """A permutation of 0..n-1 for one epoch, the same in every process and with every version of numpy.

    `fingerprint` is the dataset's content digest: another dataset under the same seed has another order.
    """
    digest = hashlib.sha256(f"order/{fingerprint}/{seed}/{epoch}".encode()).digest()
    # numpy promises the raw stream of a bit generator for ever, that of Generator.permutation it does not.
    keys = np.random.Philox(key=int.from_bytes(digest[:16])).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)


def sample_positions(step: int, global_batch: int, rank: int, world: int) -> NDArray[np.int64]:
    """A rank's positions in the endless stream at one step, [global_batch / world]: they seed augmentation."""
    check_world(global_batch, rank, world)
    share = global_batch // world
    start = step * global_batch + rank * share
    return np.arange(start, start + share, dtype=np.int64)


def batches(
    n: int, global_batch: int, rank: int, world: int, fingerprint: str, seed: int, start_step: int, steps: int
) -> Iterator[NDArray[np.int64]]:
    """Indices of a rank's samples, [global_batch / world] each, for `steps` steps from `start_step` on.

    Joined over the ranks they are the same at every world size that divides `global_batch`. Starting late
    costs no more than starting at zero. Raises ValueError for sizes that do not fit, before the first batch.
    """
    check_world(global_batch, rank, world)
    if n < 1:
        raise ValueError(f"n {n}: a loader needs one sample or more")
    if start_step < 0 or steps < 0:
        raise ValueError(f"start_step {start_step} and steps {steps} must not be negative")
    return _batches(n, global_batch, rank, world, fingerprint, seed, range(start_step, start_step + steps))


def check_world(global_batch: int, rank: int, world: int) -> None:
    """Raise ValueError unless `rank` is one of `world` ranks that share `global_batch` equally."""
    if global_batch < 1 or world < 1 or global_batch % world:
        raise ValueError(f"global batch {global_batch} cannot be shared equally by {world} workers")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks 0..{world - 1}")


def _batches(
    n: int, global_batch: int, rank: int, world: int, fingerprint: str, seed: int, steps: range
) -> Iterator[NDArray[np.int64]]:
    orders: dict[int, NDArray[np.int64]] = {}
    for step in steps:
        epochs, within = np.divmod(sample_positions(step, global_batch, rank, world), n)
        needed = range(int(epochs[0]), int(epochs[-1]) + 1)
        orders = {
            epoch: orders[epoch] if epoch in orders else epoch_order(fingerprint, seed, epoch, n)
            for epoch in needed
        }
        indices = [orders[epoch][within[epochs == epoch]] for epoch in needed]
        yield np.concatenate(indices)
