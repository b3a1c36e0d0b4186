"""A stage's line of progress."""

from types import SimpleNamespace

import pytest

from pipelines.store import read_progress
from ray_jobs.process import progress


def test_the_time_left_is_estimated_without_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 5.0, 6.0))  # made, the first step shown (warming up took 4 s), the second
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    shown = progress.Progress(10)
    shown.show(1, "shard")
    shown.show(2, "shard")
    said = capsys.readouterr().out.splitlines()[-1]
    line = read_progress(said)
    assert line is not None and (line.done, line.total) == (2, 10)
    assert line.words() == "shard 2/10 · 0:00:08 left"
