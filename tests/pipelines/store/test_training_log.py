"""The log of a training: which lines its readers see, whoever wrote them, and where they are."""

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ulid import ULID

from pipelines.store import (
    FitName,
    LogLine,
    Store,
    StoreDamaged,
    commit,
    create_attempt,
    describe_line,
    encode_lines,
    open_store,
    read_log,
    remove_progress,
    segment_name,
    write_log,
)
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt, make_manifest

ATTEMPT = make_attempt("pretrain")
TIMES = (f"2026-01-01T00:00:{second:09.6f}+00:00" for second in itertools.count())


def line(step: int, loss: float = 1.0, fit: str | None = None, **fields: float) -> LogLine:
    return LogLine(time=next(TIMES), fit=fit, step=step, epoch=step / 10, loss=loss, learning_rate=0.1, **fields)


def put(store: Store, *lines: LogLine, attempt: int = 1, start: int = 0, writer: str = "A", number: int = 1) -> str:
    """Write a segment and return its name."""
    create_attempt(store, ATTEMPT.model_copy(update={"number": attempt}))
    name = segment_name("pretrain", "k", attempt, start, writer * 26, number)
    assert store.create(name, encode_lines(lines))
    return name


def losses(store: Store, fit: str | None = None) -> dict[int, float | None]:
    return {each.step: each.loss for each in read_log(store, "pretrain", "k") if each.fit == fit}


def test_a_later_writer_takes_over_from_the_step_that_it_started_from() -> None:
    store = MemoryStore()
    put(store, line(1), line(2))
    put(store, line(3), line(9), number=2)
    assert losses(store) == {1: 1, 2: 1, 3: 1, 9: 1}
    put(store, line(2, 2), line(3, 2), line(4, 2), attempt=2, start=2, writer="9")
    assert losses(store) == {1: 1, 2: 2, 3: 2, 4: 2}, "its writer's name does not matter"
    put(store, line(10), number=3)
    assert losses(store) == {1: 1, 2: 2, 3: 2, 4: 2}, "the first attempt lives on"
    put(store, line(5, 3), attempt=2, start=3, writer="B")
    assert losses(store) == {1: 1, 2: 2, 3: 2, 5: 3}, "another writer of the same attempt"
    put(store, line(6, 4), attempt=2, start=3, writer="C")
    assert losses(store) == {1: 1, 2: 2, 3: 2, 6: 4}, "the same start: the later one"
    put(store, line(1, 5), attempt=3)
    assert losses(store) == {1: 5}, "it began anew"


def test_fits_have_histories_of_their_own() -> None:
    store = MemoryStore()
    put(store, line(1, fit="trial-0-0"), line(9, fit="trial-0-0"))
    put(store, line(1, fit="trial-1-0"), line(9, fit="trial-1-0"), writer="B")
    put(store, line(5, 2, fit="trial-1-0"), attempt=2, start=4)
    assert losses(store, "trial-0-0") == {1: 1, 9: 1}
    assert losses(store, "trial-1-0") == {1: 1, 5: 2}
    assert [each.fit for each in read_log(store, "pretrain", "k")] == ["trial-0-0"] * 2 + ["trial-1-0"] * 2


def test_of_two_lines_of_a_step_the_later_one_counts() -> None:
    store = MemoryStore()
    early, late = line(7), line(7, dev_accuracy=0.5)
    put(store, late, number=1)
    put(store, early, number=2)
    assert read_log(store, "pretrain", "k") == [late]


def test_segments_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen = MemoryStore(), {}
    put(store, line(1))
    assert len(read_log(store, "pretrain", "k", seen)) == 1
    new = put(store, line(2), number=2)
    read: list[str] = []
    monkeypatch.setattr(store, "read_all", lambda names: read.extend(names) or [store.objects[n] for n in names])
    assert len(read_log(store, "pretrain", "k", seen)) == 2
    assert read == [new]


def test_segments_that_are_joined_while_they_are_read_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    first, second = line(1), line(2)
    names = [put(store, each, number=each.step) for each in (first, second)]

    def joined_before_it_is_read(wanted: list[str]) -> list[bytes | None]:
        if names[0] in store.objects:
            put(store, first, second, number=3)
            store.remove(names)
        return [store.read(name) for name in wanted]

    monkeypatch.setattr(store, "read_all", joined_before_it_is_read)
    assert read_log(store, "pretrain", "k") == [first, second]


def test_the_artifact_has_the_whole_log_and_the_segments_are_removed(store: Store) -> None:
    put(store, line(1), line(2), line(3))
    put(store, line(3, 2), line(4, 2), attempt=2, start=2)
    last, before = ATTEMPT.model_copy(update={"number": 2}), read_log(store, "pretrain", "k")
    manifest = make_manifest("pretrain", attempt=2)
    with store.staging(manifest.folder) as staging:
        write_log(store, last, staging.path)
    commit(store, manifest.model_copy(update={"files": staging.files}))
    assert read_log(store, "pretrain", "k") == before
    remove_progress(store, "pretrain", "k")
    assert [store.names(f"artifacts/pretrain/k/attempts/{number}/log") for number in (1, 2)] == [[], []]
    assert [each.step for each in read_log(store, "pretrain", "k")] == [1, 2, 3, 4]


def test_a_damaged_segment_is_left_out_and_a_damaged_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path))
    put(store, line(1))
    (tmp_path / put(store, line(2), number=2)).write_bytes(b'{"step": ')
    put(store, line(3), number=3)
    assert losses(store) == {1: 1, 3: 1}
    assert "2.jsonl is damaged: Invalid JSON" in capsys.readouterr().err
    manifest = make_manifest("pretrain")
    with store.staging(manifest.folder) as staging:
        write_log(store, ATTEMPT, staging.path)
    commit(store, manifest.model_copy(update={"files": staging.files}))
    (tmp_path / manifest.folder / "log.jsonl").write_bytes(b"[]\n")
    with pytest.raises(StoreDamaged, match=r"log\.jsonl is damaged"):
        read_log(store, "pretrain", "k")


@pytest.mark.parametrize(
    "field",
    ['"step":9223372036854775808', '"time":"2026-01-01T00:00:00"', f'"fit":"{"x" * 101}"', '"loss":NaN'],
)
def test_a_line_that_its_readers_cannot_show_is_damage(field: str) -> None:
    store = MemoryStore()
    name = put(store, line(1))
    name_of = field.partition(":")[0].encode()
    odd = re.sub(name_of + rb":[^,]*", field.encode(), encode_lines([line(2)]))
    store.create(name.replace("-1.jsonl", "-2.jsonl"), odd)
    assert losses(store) == {1: 1}


def test_an_artifact_of_an_earlier_version_has_no_log(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    commit(store, make_manifest("pretrain"))
    assert read_log(store, "pretrain", "k") == []


def test_a_line_of_a_later_version_is_read() -> None:
    store = MemoryStore()
    create_attempt(store, ATTEMPT)
    known = line(1)
    data = encode_lines([known]).replace(b'"step"', b'"of later": 1, "step"')
    store.create(segment_name("pretrain", "k", 1, 0, str(ULID()), 1), data)
    assert read_log(store, "pretrain", "k") == [known]


def test_what_was_not_measured_is_left_out() -> None:
    assert describe_line(line(10), 40) == "step 10/40 (25%) · epoch 1 · loss 1 · rate 0.1"
    measured = line(10, measures={"feature_rank": 12.345})
    assert describe_line(measured, 40) == "step 10/40 (25%) · epoch 1 · loss 1 · rate 0.1 · feature rank 12.3"


@given(
    number=st.integers(0, 10**9 - 1),
    part=st.integers(0, 10**9 - 1),
    digest=st.none() | st.text("0123456789abcdef", min_size=1, max_size=8),
    last_step=st.none() | st.integers(1, 10**18 - 1),
)
def test_a_fits_name_is_read_as_it_was_written(
    number: int, part: int, digest: str | None, last_step: int | None
) -> None:
    for fit in (FitName("trial", number, part, digest), FitName("refit", number, part, digest, last_step)):
        assert FitName.parse(str(fit)) == fit


@pytest.mark.parametrize("name", [None, "", "trial-1", "trial-0-1-2", "refit-0-0-1", "trial-3-1-s0a1b2c3d", "fold-1"])
def test_other_names_are_no_fits(name: str | None) -> None:
    assert FitName.parse(name) is None
