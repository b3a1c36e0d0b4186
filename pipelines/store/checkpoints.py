"""Checkpoints of a training that has not ended: ask for, commit, list, remove them, choose the one to start from.

They are below the attempt that wrote them; an attempt reads those of earlier ones. Only the newest attempt removes any.
A pretraining has one series of checkpoints, a fine-tuning one for each running fit (`fit`).
"""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.errors import StoreDamaged
from pipelines.store.artifacts import check_newest
from pipelines.store.objects import check_name, numbers, read_record, warn
from pipelines.store.protocol import Store, encode
from pipelines.store.records import Attempt, Checkpoint, Layout, Start, now


def commit_checkpoint(store: Store, attempt: Attempt, checkpoint: Checkpoint) -> None:
    """Make a checkpoint valid, whose files are in the store.

    Raises:
        Superseded: there is a newer attempt.
    """
    check_newest(store, attempt)
    store.create(_name(checkpoint), encode(checkpoint))


def checkpoints(
    store: Store, job: str, key: str, fit: str | None = None, attempts: Iterable[int] | None = None
) -> list[Checkpoint]:
    """Return the valid checkpoints of these attempts: the furthest first, of one step the newest attempt's first.

    None for all attempts. Damaged checkpoints are skipped with a warning.
    """
    found = []
    for number in _attempts(store, job, key) if attempts is None else attempts:
        for step in _steps(store, job, key, number, fit):
            name = f"{Layout.checkpoint(job, key, number, step, fit)}/manifest.json"
            try:
                checkpoint = read_record(store, name, Checkpoint)
                if checkpoint is not None:
                    check_name(store, name, _name(checkpoint))
                    found.append(checkpoint)
            except StoreDamaged as error:
                warn(f"{error}; ignoring this checkpoint")
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt), reverse=True)


def choose_start(store: Store, attempt: Attempt) -> Checkpoint | None:
    """Return the checkpoint that an attempt starts from: the furthest of all attempts; None for the beginning.

    The choice is made once: an attempt that starts again, with other workers, gets the same one, whatever an earlier
    attempt that still lives has written since.

    Raises:
        StoreDamaged: the chosen checkpoint is no longer there.
    """
    name = f"{Layout.attempt(attempt.job, attempt.key, attempt.number)}/start.json"
    there = checkpoints(store, attempt.job, attempt.key)
    if (start := read_record(store, name, Start)) is None:
        start = Start(attempt=there[0].attempt, step=there[0].step) if there else Start()
        if not store.create(name, encode(start)):
            start = read_record(store, name, Start) or start
    if start.step is None:
        return None
    for checkpoint in there:
        if (checkpoint.attempt, checkpoint.step) == (start.attempt, start.step):
            return checkpoint
    raise StoreDamaged(
        f"{store.uri}/{name} names step {start.step} of attempt {start.attempt}, which is not there"
    )


def remove_checkpoints(
    store: Store,
    attempt: Attempt,
    kept: Iterable[Checkpoint] = (),
    step: int | None = None,
    fit: str | None = None,
) -> None:
    """Remove the checkpoints of all attempts but those that are kept, and what is left of unfinished ones.

    Args:
        attempt: the newest, which alone removes any.
        step: this attempt's last checkpoint; it may already be writing the next one. None: it has ended.

    Raises:
        Superseded: there is a newer attempt.
    """
    check_newest(store, attempt)
    spared, (job, key) = {checkpoint.folder for checkpoint in kept}, (attempt.job, attempt.key)
    for number in _attempts(store, job, key):
        for other in _steps(store, job, key, number, fit):
            folder = Layout.checkpoint(job, key, number, other, fit)
            is_being_written = number == attempt.number and step is not None and other > step
            if folder not in spared and not is_being_written:
                _remove_checkpoint(store, folder)


def remove_progress(store: Store, attempt: Attempt) -> None:
    """Remove what only later attempts at the same key would read, once its result is committed.

    That is, of all attempts, the checkpoints, the segments of the log and, of a fine-tuning, the ledger.

    Raises:
        Superseded: there is a newer attempt.
    """
    check_newest(store, attempt)
    job, key = attempt.job, attempt.key
    for number in _attempts(store, job, key):
        for fit in (None, *store.names(Layout.checkpoints(job, key, number))):
            for step in _steps(store, job, key, number, fit):
                _remove_checkpoint(store, Layout.checkpoint(job, key, number, step, fit))
        for folder in (Layout.ledger(job, key, number), Layout.log(job, key, number)):
            store.remove([f"{folder}/{name}" for name in store.names(folder)])


def _remove_checkpoint(store: Store, folder: str) -> None:
    # first the manifest, so that half a checkpoint is none
    others = [name for name in store.names(folder) if name != "manifest.json"]
    store.remove([f"{folder}/{name}" for name in ("manifest.json", *others)])


def ask_for_checkpoint(store: Store, attempt: Attempt) -> int:
    """Ask the workers of an attempt to save their state soon; return the number of this request."""
    folder = Layout.requests(attempt.job, attempt.key, attempt.number)
    number = asked_for(store, attempt) + 1
    store.create(f"{folder}/{number}.json", encode({"time": now()}))
    return number


def asked_for(store: Store, attempt: Attempt) -> int:
    """Return the number of the last request for a checkpoint, 0 if there was none."""
    return max(numbers(store, Layout.requests(attempt.job, attempt.key, attempt.number)), default=0)


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.folder}/manifest.json"


def _attempts(store: Store, job: str, key: str) -> list[int]:
    return numbers(store, Layout.attempts(job, key), suffix="")


def _steps(store: Store, job: str, key: str, attempt: int, fit: str | None) -> list[int]:
    return numbers(store, Layout.checkpoints(job, key, attempt, fit), suffix="")
