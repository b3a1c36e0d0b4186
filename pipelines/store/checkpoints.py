"""Checkpoints of a training that has not ended: request, commit, list and remove them, choose the one to start from.

They are below the attempt that wrote them; an attempt also reads earlier attempts' checkpoints. Only the newest attempt
removes checkpoints, and never those of a later attempt.
A pretraining has one series of checkpoints, a fine-tuning one for each running fit (`fit`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial

from pipelines.errors import StoreDamaged
from pipelines.store.artifacts import check_newest, is_committed
from pipelines.store.objects import check_name, numbers, read_record, warn
from pipelines.store.protocol import Store, encode
from pipelines.store.records import Attempt, Checkpoint, Layout, Start, now


def commit_checkpoint(store: Store, attempt: Attempt, checkpoint: Checkpoint) -> None:
    """Commit a checkpoint whose files are in the store.

    Raises:
        Superseded: there is a newer attempt.
    """
    check_newest(store, attempt)
    name, data = _name(checkpoint), encode(checkpoint)
    # an earlier group of this attempt wrote it, and it was skipped because it is damaged
    if not store.create(name, data):
        store.remove([name])
        store.create(name, data)


def checkpoints(
    store: Store, job: str, key: str, fit: str | None = None, attempts: Iterable[int] | None = None
) -> list[Checkpoint]:
    """Return the valid checkpoints of these attempts (None: all), by step and then attempt, the highest first.

    Damaged checkpoints are skipped with a warning.
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


def choose_start(store: Store, attempt: Attempt, kept_steps: Sequence[int] = ()) -> Checkpoint | None:
    """Return the checkpoint that an attempt starts from: `furthest` of all attempts; None for the beginning.

    The choice is made once: an attempt that restarts with other workers gets the same checkpoint, even if an earlier
    attempt that still runs has written others since.

    Raises:
        StoreDamaged: the chosen checkpoint is no longer there; or as `furthest`.
    """
    name = f"{Layout.attempt(attempt.job, attempt.key, attempt.number)}/start.json"
    there = checkpoints(store, attempt.job, attempt.key)
    if (start := read_record(store, name, Start)) is None:
        chosen = furthest(store, there, kept_steps, there)
        start = Start() if chosen is None else Start(attempt=chosen.attempt, step=chosen.step)
        if not store.create(name, encode(start)):
            start = read_record(store, name, Start) or start
    if start.step is None:
        return None
    for checkpoint in there:
        if (checkpoint.attempt, checkpoint.step) == (start.attempt, start.step):
            return checkpoint
    raise StoreDamaged(f"{store.uri}/{name} names step {start.step} of attempt {start.attempt}, which is not there")


def furthest(
    store: Store, candidates: Iterable[Checkpoint], kept_steps: Sequence[int], there: Sequence[Checkpoint]
) -> Checkpoint | None:
    """Return the first candidate from which training can reach its complete result; None if all are damaged.

    It is intact, and so are the checkpoints of earlier steps that the result needs: `kept_steps`, and the best on dev,
    unless training was further and found a better one. Warnings name skipped checkpoints.

    Args:
        there: all valid checkpoints of the training, the furthest first.

    Raises:
        StoreDamaged: some are intact, but each of them lacks an earlier checkpoint that the result needs. The user
            decides whether to train from the beginning.
    """
    is_intact, lost = cache(partial(_is_intact, store)), set[int]()
    results = {*kept_steps, *(each.best for each in there[:1] if each.best is not None)}
    for checkpoint in candidates:
        if not is_intact(checkpoint):
            continue
        needed = {step for step in results if step <= checkpoint.step}
        lost = needed - {each.step for each in there if each.step in needed and is_intact(each)}
        if not lost:
            return checkpoint
        warn(
            f"{store.uri}/{checkpoint.folder} is not used: the result also needs the checkpoint of step {min(lost)}, "
            "which is missing or damaged"
        )
    if lost:
        raise StoreDamaged(
            f"{store.uri}/{Layout.attempts(there[0].job, there[0].key)}: the result needs the checkpoint of step "
            f"{min(lost)}, which is missing or damaged, and no checkpoint from before it is left",
            "remove the step from keep_steps if it is there, or remove */checkpoints in this folder to train from the "
            "beginning",
        )
    return None


def intact(store: Store, checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the first checkpoint whose files match its manifest; warn of damaged ones before it."""
    return next((checkpoint for checkpoint in checkpoints if _is_intact(store, checkpoint)), None)


def _is_intact(store: Store, checkpoint: Checkpoint) -> bool:
    try:
        store.local(checkpoint.folder, checkpoint.files)
    except StoreDamaged as error:
        warn(f"{error}; ignoring this checkpoint")
        return False
    return True


def remove_checkpoints(
    store: Store,
    attempt: Attempt,
    kept: Iterable[Checkpoint] = (),
    step: int | None = None,
    fit: str | None = None,
) -> None:
    """Remove the checkpoints of an attempt and of earlier ones, except `kept`, and remains of unfinished ones.

    Args:
        attempt: the newest attempt. If it is suspended here, it may wake up after a later attempt has begun, whose
            checkpoints it does not touch.
        step: this attempt's last checkpoint; it may already be writing the next one. None: it has ended.

    Raises:
        Superseded: there is a newer attempt.
    """
    check_newest(store, attempt)
    spared, (job, key) = {checkpoint.folder for checkpoint in kept}, (attempt.job, attempt.key)
    for number in (each for each in _attempts(store, job, key) if each <= attempt.number):
        for other in _steps(store, job, key, number, fit):
            folder = Layout.checkpoint(job, key, number, other, fit)
            is_being_written = number == attempt.number and step is not None and other > step
            if folder not in spared and not is_being_written:
                _remove_checkpoint(store, folder)


def remove_progress(store: Store, job: str, key: str) -> None:
    """Remove the objects of a committed artifact that only later attempts at the same key would read.

    These are all attempts' checkpoints, segments of the log and, for a fine-tuning, ledgers. The stage's process does
    this, and the driver does it again, because that process may have died in between.
    """
    assert is_committed(store, job, key), f"{job}/{key} is not committed"
    for number in _attempts(store, job, key):
        for fit in (None, *store.names(Layout.checkpoints(job, key, number))):
            for step in _steps(store, job, key, number, fit):
                _remove_checkpoint(store, Layout.checkpoint(job, key, number, step, fit))
        for folder in (Layout.ledger(job, key, number), Layout.log(job, key, number)):
            store.remove([f"{folder}/{name}" for name in store.names(folder)])


def _remove_checkpoint(store: Store, folder: str) -> None:
    # the manifest first, so that a partly removed checkpoint is not valid
    others = [name for name in store.names(folder) if name != "manifest.json"]
    store.remove([f"{folder}/{name}" for name in ("manifest.json", *others)])


def request_checkpoint(store: Store, attempt: Attempt) -> int:
    """Ask the workers of an attempt to save their state soon; return the number of this request."""
    folder = Layout.requests(attempt.job, attempt.key, attempt.number)
    number = checkpoint_requested(store, attempt) + 1
    store.create(f"{folder}/{number}.json", encode({"time": now()}))
    return number


def checkpoint_requested(store: Store, attempt: Attempt) -> int:
    """Return the number of the last request for a checkpoint, 0 if there was none."""
    return max(numbers(store, Layout.requests(attempt.job, attempt.key, attempt.number)), default=0)


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.folder}/manifest.json"


def _attempts(store: Store, job: str, key: str) -> list[int]:
    return numbers(store, Layout.attempts(job, key), suffix="")


def _steps(store: Store, job: str, key: str, attempt: int, fit: str | None) -> list[int]:
    return numbers(store, Layout.checkpoints(job, key, attempt, fit), suffix="")
