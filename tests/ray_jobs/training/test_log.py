"""What a training writes into its log, whatever happens to the store."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelines.store import (
    LogLine,
    StoreError,
    StoreUnreachable,
    create_attempt,
    describe_line,
    read_log,
    read_progress,
)
from ray_jobs.process import devices
from ray_jobs.training import log as module
from ray_jobs.training.log import Log, LogWriter, Reporting
from ray_jobs.training.steps import Step
from ray_jobs.training.task import Evaluation
from ray_jobs.training.workers import Worker
from tests.support.clusters import wait_for
from tests.support.interrupted import configuration
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt
from tests.support.vits import TINY
from vit_model import compute
from vit_model.config import ViTConfig

ATTEMPT = make_attempt("pretrain")
ARCHITECTURE = ViTConfig(**TINY, num_classes=3)


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    create_attempt(store, ATTEMPT)
    return store


def line(step: int) -> LogLine:
    return LogLine(time=module.now(), step=step, epoch=0.0, loss=1.0, learning_rate=0.1)


def steps_in(store: MemoryStore) -> list[int]:
    return [each.step for each in read_log(store, "pretrain", "k")]


def make_log(writer: Any, unit: str = "step", **fields: Any) -> tuple[Log, SimpleNamespace]:
    """The log of a training of 40 steps of 12 on 48 images, and its loader."""
    loader: Any = SimpleNamespace(seconds_waited=0.0)
    flops = compute.train_flops(ARCHITECTURE)
    return Log(configuration(), flops, 48, loader, Reporting(writer, unit), **fields), loader


def made(done: int, loss: float, rate: float = 0.1, norm: torch.Tensor | float | None = 1.0) -> Step:
    return Step(done, rate, norm, [torch.tensor(loss)])


def test_lines_come_with_the_points_and_at_least_every_ten_seconds(clock: Clock, store: MemoryStore) -> None:
    writer = LogWriter(store, ATTEMPT)
    log, loader = make_log(writer)
    for done in range(1, 41):
        clock.now += 1.0
        loader.seconds_waited += 0.25
        is_point = done in (4, 30)
        evaluation = Evaluation(30, 0.75, 0.5) if done == 30 else None
        step = made(done, float(done), 0.1 * done, torch.tensor(2.0 * done))
        log.add(step, 7.0 if is_point else None, evaluation)
    lines = writer.unsaved()
    assert [each.step for each in lines] == [4, 14, 24, 30, 40]
    assert [each.loss for each in lines] == [7.0, (5 + 14) / 2, (15 + 24) / 2, 7.0, (31 + 40) / 2]
    for each in lines:
        assert each.images_per_second == pytest.approx(12.0)
        assert each.data_wait == pytest.approx(0.25)
        assert each.learning_rate == pytest.approx(0.1 * each.step) and each.gradient_norm == 2.0 * each.step
        assert each.epoch == each.step * 12 / 48
        assert each.mfu is None, "the peak of a CPU is not known"
        evaluated = (0.5, 0.75) if each.step == 30 else (None, None)
        assert (each.dev_loss, each.dev_accuracy) == evaluated


def test_progress_says_what_the_log_says(
    clock: Clock, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.progress, "time", clock)
    monkeypatch.setattr(module.devices, "peak_flops", lambda *_: 1e9)
    writer = LogWriter(store, ATTEMPT)
    log, loader = make_log(writer, unit="draw 0, step", is_limit=True)
    for done in (1, 2, 3):
        clock.now += 1.0
        loader.seconds_waited += 0.25
        log.add(made(done, float(done), 0.5, 2.0), loss=7.0 if done == 2 else None)
    said = capsys.readouterr().out.splitlines()
    (at_a_point,) = writer.unsaved()
    shown = [line.words() for text in said if (line := read_progress(text))]
    assert shown[1] == describe_line(at_a_point, 40, "draw 0, step", may_end_before=True)
    mfu = compute.train_flops(ARCHITECTURE) * 12 / 1e9
    assert shown[2] == (
        "draw 0, step 3/40 (8%) · epoch 0.75 · loss 3 · rate 0.5 · gradient norm 2 · 12 images/s"
        f" · MFU {mfu:.0%} · waiting for images 25% · at most 0:00:37 left"
    )


def test_what_is_not_finite_is_not_written(store: MemoryStore) -> None:
    writer = LogWriter(store, ATTEMPT)
    log, _ = make_log(writer)
    log.add(made(1, float("nan"), norm=-1.0), evaluation=Evaluation(1, 0.5, float("inf")))
    (only,) = writer.unsaved()
    assert only.loss is None and only.gradient_norm is None and only.dev_loss is None


def test_mfu_is_the_share_of_the_peak_of_all_devices(
    clock: Clock, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.devices, "peak_flops", lambda *_: 1e9)
    writer = LogWriter(store, ATTEMPT)
    log, _ = make_log(writer, worker=Worker(world=2))
    clock.now = 3.0
    log.add(made(1, 1.0, norm=None), loss=1.0)
    assert writer.unsaved()[0].mfu == pytest.approx(compute.train_flops(ARCHITECTURE) * 12 / 3.0 / 2e9)


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA L40", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("AMD Instinct MI300X", None, None),
    ],
)
def test_peaks_are_known_by_the_gpus_name(name: str, bfloat16: float | None, float32: float | None) -> None:
    assert (devices.known_peak(name, False), devices.known_peak(name, True)) == (bfloat16, float32)


def test_the_first_worker_alone_writes(store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    writer = LogWriter(store, ATTEMPT)
    log, _ = make_log(writer, worker=Worker(rank=1, world=2))
    log.add(made(40, 1.0), loss=1.0)
    assert writer.unsaved() == () and capsys.readouterr().out == ""


def test_many_segments_become_few(store: MemoryStore) -> None:
    writer = LogWriter(store, ATTEMPT)
    for step in range(1, 3000):
        writer.add(line(step))
        writer._save()
    assert steps_in(store) == [*range(1, 3000)]
    segments = [name for name in store.objects if "/log/" in name]
    assert len(segments) <= 3 * module._JOINED
    joined = max(segments, key=lambda name: len(store.objects[name]))
    assert store.objects[joined].count(b"\n") == module._JOINED**2


def test_segments_are_written_while_training_goes_on(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_SECONDS", 0.002)
    with LogWriter(store, ATTEMPT) as writer:
        writer.add(line(1))
        wait_for(lambda: steps_in(store) == [1], 10)
        writer.add(line(2))
        wait_for(lambda: steps_in(store) == [1, 2], 10)
        assert writer.unsaved() == ()
        writer.add(line(3))
        writer.add_evaluation(Evaluation(1, 0.25, 0.5))
    lines = read_log(store, "pretrain", "k")
    assert [(each.step, each.dev_loss, each.dev_accuracy) for each in lines[1:]] == [
        (2, None, None),
        (3, 0.5, 0.25),
    ]


@pytest.mark.parametrize("error", [StoreUnreachable("no answer"), StoreError("no space")])
def test_a_store_that_fails_delays_nothing_and_loses_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(module, "SEGMENT_SECONDS", 0.002)
    create, tried = store.create, threading.Event()

    def fail(name: str, data: bytes) -> bool:
        tried.set()
        raise error

    with LogWriter(store, ATTEMPT) as writer:
        monkeypatch.setattr(store, "create", fail)
        writer.add(line(1))
        assert tried.wait(10)
        writer.add(line(2))
        assert [each.step for each in writer.unsaved()] == [1, 2], "a checkpoint has them"
        monkeypatch.setattr(store, "create", create)
    assert steps_in(store) == [1, 2]


def test_a_store_that_hangs_delays_no_step(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_SECONDS", 0.002)
    create, asked, answer = store.create, threading.Event(), threading.Event()

    def hang(name: str, data: bytes) -> bool:
        asked.set()
        answer.wait()
        return create(name, data)

    monkeypatch.setattr(store, "create", hang)
    with LogWriter(store, ATTEMPT) as writer:
        log, _ = make_log(writer)
        began = time.monotonic()
        for done in range(1, 41):
            log.add(made(done, 1.0), loss=1.0)
            if done == 1:
                assert asked.wait(10)
        assert time.monotonic() - began < 5
        assert len(writer.unsaved()) == 40
        answer.set()
    assert steps_in(store) == [*range(1, 41)]


def test_a_training_that_fails_does_not_wait_for_the_store(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, data: bytes) -> bool:
        raise StoreUnreachable("no answer")

    monkeypatch.setattr(store, "create", unreachable)
    with pytest.raises(KeyboardInterrupt), LogWriter(store, ATTEMPT) as writer:
        writer.add(line(1))
        raise KeyboardInterrupt
