"""A training that is told to end, or whose machine drains, saves its state first."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest
import ray

from pipelines.store import Store, checkpoint_requested, checkpoints
from ray_jobs.process.context import Context
from ray_jobs.training.workers import preemption
from tests.support.checkpoints import put_state
from tests.support.interrupted import configuration
from tests.support.records import make_context


@pytest.fixture
def context(store: Store) -> Context:
    return make_context(store, configuration())


@pytest.fixture
def draining(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The machines that Ray would call draining, until when."""
    nodes: dict[str, int] = {}
    monkeypatch.setattr(preemption, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: dict(nodes))
    yield nodes


def answer_a_request(store: Store, context: Context) -> None:
    """Do what workers do: save the state when they are asked to."""
    while not checkpoint_requested(store, context.attempt):
        time.sleep(0.01)
    put_state(store, 1, 5, key=context.attempt.key)


def test_sigterm_ends_the_process_after_a_checkpoint(store, context, draining):
    saved = []
    before = signal.signal(signal.SIGTERM, lambda *_: saved.append(checkpoints(store, "pretrain", context.attempt.key)))
    try:
        worker = threading.Thread(target=answer_a_request, args=(store, context))
        worker.start()
        with preemption.save_on_notice(context):
            signal.raise_signal(signal.SIGTERM)
        worker.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [[each.step for each in there] for there in saved] == [[5]]


def test_without_an_answer_the_process_ends_all_the_same(context, draining, monkeypatch, capsys):
    monkeypatch.setattr(preemption, "GRACE_SECONDS", 0.1)
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    try:
        with preemption.save_on_notice(context):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [True]
    assert "no checkpoint was saved within" in capsys.readouterr().out


def test_each_draining_machine_is_one_request(store, context, draining):
    with preemption.save_on_notice(context):
        for number, node in enumerate(("a", "b"), start=1):
            draining[node] = 0
            while checkpoint_requested(store, context.attempt) < number:
                time.sleep(0.01)
            put_state(store, 1, number, key=context.attempt.key)
            time.sleep(0.3)  # several looks
    assert checkpoint_requested(store, context.attempt) == 2
