"""Event files say what the log says, read with TensorBoard's own reader."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.results.event_files import TAGS, EventFiles
from pipelines.store import LogLine
from tests.support.trainings import BEGAN, line


def check(folder: Path, lines: Sequence[LogLine]) -> None:
    """TensorBoard sees each number of these lines, at its step and time, and no other."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    expected = {
        tag: [(each.step, value) for each in lines if (value := getattr(each, name)) is not None]
        for name, tag in TAGS.items()
    }
    assert set(reader.Tags()["scalars"]) >= {tag for tag, points in expected.items() if points}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        assert [(event.step, event.value) for event in events] == [
            (step, float(np.float32(value))) for step, value in expected[tag]
        ]
        assert [event.wall_time for event in events] == [BEGAN.timestamp() + event.step for event in events]


@pytest.fixture
def lines() -> list[LogLine]:
    evaluated = {"dev_loss": 0.5, "dev_accuracy": 0.75}
    return [line(step, **(evaluated if step == 3 else {})) for step in range(1, 6)]


def test_all_numbers_are_there_and_what_was_not_measured_is_not(tmp_path: Path, lines: list[LogLine]) -> None:
    lines[1] = line(2, mfu=None, loss=None)
    with EventFiles(tmp_path) as files:
        files.update("pretrain", lines)
        files.update("finetune/draw 0", lines[:2])
        check(tmp_path / "pretrain", lines)
        check(tmp_path / "finetune/draw 0", lines[:2])


def test_new_lines_are_appended_and_a_line_may_get_an_evaluation(tmp_path: Path, lines: list[LogLine]) -> None:
    with EventFiles(tmp_path) as files:
        for count in range(1, 6):
            files.update("pretrain", lines[:count])
            check(tmp_path / "pretrain", lines[:count])
        lines[4] = lines[4].model_copy(update={"dev_accuracy": 0.25})
        files.update("pretrain", lines)
        check(tmp_path / "pretrain", lines)
        assert len([*(tmp_path / "pretrain").iterdir()]) == 1


def test_superseded_steps_disappear(tmp_path: Path, lines: list[LogLine]) -> None:
    with EventFiles(tmp_path) as files:
        files.update("pretrain", lines)
        again = [*lines[:2], line(3, loss=9.0)]
        files.update("pretrain", again)
        check(tmp_path / "pretrain", again)
        again.append(line(4, loss=8.0))
        files.update("pretrain", again)
        check(tmp_path / "pretrain", again)
        files.update("pretrain", lines[:1])
        check(tmp_path / "pretrain", lines[:1])


def test_a_later_writer_takes_over_the_folder(tmp_path: Path, lines: list[LogLine]) -> None:
    for said in (lines, [*lines[:2], line(3, loss=9.0)]):
        with EventFiles(tmp_path) as files:
            files.update("pretrain", said)
        check(tmp_path / "pretrain", said)
