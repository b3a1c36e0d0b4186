"""How a stage's process ends: 2 and one line for what the user can fix, 1 and a traceback for everything else."""

import errno
import re
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipelines.spec import RecipeError, Stage
from pipelines.store import (
    Heartbeat,
    Layout,
    StoreDamaged,
    StoreUnreachable,
    Superseded,
    create_attempt,
    encode,
    now,
    open_store,
    protocol,
    read_manifest,
)
from ray_jobs.data.decode import DamagedError, Stored, raw_pixels
from ray_jobs.process import context as stage_context
from ray_jobs.process import stage
from ray_jobs.process.heartbeat import earlier_seconds
from ray_jobs.training.task import DivergenceError
from tests.support.memory_store import MemoryStore
from tests.support.records import make_attempt, make_context
from vit_model.errors import UserError

DIGITS = TypeAdapter(Stage).validate_python({"job": "ingest", "source": {"kind": "digits"}})
WRONG = "source.root: there is no folder 'x'. Give another"


def own(error: Exception) -> Exception:
    """Raised in the stage's own process."""
    return error


def in_task(error: Exception) -> Exception:
    """As `ray.get` raises what a task raised, and as a trial of Ray Tune is reported."""
    from ray.exceptions import RayTaskError

    remote = "".join(traceback.format_exception(error))
    return RayTaskError("refit", remote, error, "ray::refit", 1, "127.0.0.1").as_instanceof_cause()


def in_worker(error: Exception) -> Exception:
    """As Ray Train reports two workers, of which the first lost the second."""
    from ray.train.v2.api.exceptions import WorkerGroupError

    return WorkerGroupError("two failed", {0: RuntimeError("Connection closed by peer"), 1: in_task(error)})


def in_controller(error: Exception) -> Exception:
    from ray.train.v2.api.exceptions import ControllerError

    return ControllerError(error)


PLACES = (own, in_task, in_worker, in_controller)
Place = Callable[[Exception], Exception]


def numpys() -> Exception:
    """A bug of ours: numpy's ValueError, whose traceback ends in this project's code."""
    try:
        raw_pixels(Stored("a", b"123", "raw", 2, 2, 3))
    except ValueError as error:
        return error
    raise AssertionError


def end(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, read_context: Callable[[str], Any] | None = None
) -> None:
    """Run a stage that ends with this error."""

    def main(_: stage.Context) -> stage.Result:
        if error is not None:
            raise error
        return stage.Result(content_digest="d", files=())

    module: Any = ModuleType("failing")
    module.main = main
    monkeypatch.setitem(stage.sys.modules, "ray_jobs.failing", module)
    context = SimpleNamespace(attempt=make_attempt(), open_store=MemoryStore, config=SimpleNamespace())
    monkeypatch.setattr(stage, "read_context", read_context or (lambda _: context))
    monkeypatch.setattr(stage, "join_ray", lambda: None)
    monkeypatch.setattr(stage.sys, "argv", ["failing", "--spec", "/s/attempt.json"])
    stage.run_stage("failing")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [UserError, RecipeError, DamagedError, DivergenceError, StoreDamaged])
def test_what_the_user_can_fix_is_one_line_and_exit_code_2(
    place: Place, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        end(monkeypatch, place(kind(WRONG)))
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {WRONG}\n"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error",
    [numpys(), KeyError("label"), OSError(errno.EIO, "Input/output error"), StoreUnreachable("no answer")],
)
def test_everything_else_leaves_the_process_as_it_was_raised(
    place: Place, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = place(error)
    with pytest.raises(type(raised)) as ended:
        end(monkeypatch, raised)
    assert ended.value is raised, "Python prints its traceback and exits with 1"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", PLACES)
def test_an_attempt_with_a_successor_is_one_line_and_no_mistake_of_the_users(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        end(monkeypatch, place(Superseded("attempt 2 has taken over")))
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: attempt 2 has taken over\n"


def test_a_stage_waits_for_its_store_before_it_begins_and_before_it_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An outage that only the cluster sees took all attempts of a run within a minute and a half."""
    monkeypatch.setattr(protocol, "UNREACHABLE_SECONDS", 0.01)
    monkeypatch.setattr(stage, "_environment", dict)  # it asks Ray
    context = make_context(open_store(str(tmp_path / "s")), DIGITS)
    asked: list[str] = []

    def lost(does: Callable[..., Any]) -> Callable[..., Any]:
        """The first two calls of the function get no answer."""

        def ask(*arguments: Any) -> Any:
            asked.append(does.__name__)
            if asked.count(does.__name__) <= 2:
                raise StoreUnreachable(f"no answer to {does.__name__}")
            return does(*arguments)

        return ask

    for function in (stage.is_done, stage.earlier_seconds, stage.commit):
        monkeypatch.setattr(stage, function.__name__, lost(function))

    def read_context(_: str) -> Any:
        return context

    end(monkeypatch, None, lost(read_context))
    assert asked == [name for name in ("read_context", "is_done", "earlier_seconds", "commit") for _ in range(3)]
    assert read_manifest(context.open_store(), "ingest", context.attempt.key) is not None
    assert capsys.readouterr().err.count("waiting for the store") == 4


@pytest.mark.parametrize(("seconds", "opened"), [(600.0, True), (0.0, False)])
def test_a_worker_waits_for_the_store_when_it_opens_it_but_not_for_ever(
    seconds: float, opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver sees the heartbeat of the stage's process, which may be on a machine that reaches the store."""
    monkeypatch.setattr(protocol, "UNREACHABLE_SECONDS", 0.01)
    monkeypatch.setattr(stage_context, "OPEN_SECONDS", seconds)
    store = open_store(str(tmp_path / "s"))
    answers = [StoreUnreachable("no answer"), StoreUnreachable("no answer"), store]

    def ask(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    context = make_context(store, DIGITS)
    monkeypatch.setattr(stage_context, "open_store", ask)
    with nullcontext() if opened else pytest.raises(StoreUnreachable):
        assert context.open_store() is store
    assert (len(answers) == 0) == opened
    assert capsys.readouterr().err.count("waiting for the store") == opened


def test_an_attempt_with_a_successor_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage, "_environment", dict)  # it asks Ray
    context = make_context(open_store(str(tmp_path / "s")), DIGITS)
    result = stage.Result(content_digest="d", files=())
    create_attempt(context.open_store(), context.attempt.model_copy(update={"number": 2}))
    with pytest.raises(Superseded):
        stage.commit_result(context, result, now(), 0.0, {})
    assert read_manifest(context.open_store(), "ingest", context.attempt.key) is None


def test_a_duration_contains_the_attempts_whose_work_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 1 (100 s) left a trial, 2 (30 s more) a checkpoint, 3 nothing, and 4 ran other code."""
    monkeypatch.setattr(stage, "_environment", dict)  # it asks Ray
    store = open_store(str(tmp_path / "s"))
    context = make_context(store, DIGITS)
    left = {1: "ledger/trial-0-0.json", 2: "checkpoints/7/manifest.json", 4: "ledger/trial-1-0.json"}
    for number, seconds in ((1, 100.0), (2, 130.0), (3, 140.0), (4, 900.0)):
        code = "other" if number == 4 else context.attempt.code_digest
        last = create_attempt(store, context.attempt.model_copy(update={"number": number, "code_digest": code}))
        place = last.job, last.key, number
        store.replace(Layout.heartbeat(*place), encode(Heartbeat(nonce=last.nonce, seconds=seconds)))
        if number in left:
            store.create(f"{Layout.attempt(*place)}/{left[number]}", b"{}")
    attempt = create_attempt(store, context.attempt.model_copy(update={"number": 5}))
    context = replace(context, attempt=attempt)
    assert earlier_seconds(context) == 130
    stage.commit_result(context, stage.Result(content_digest="d", files=()), now(), earlier_seconds(context), {})
    made = read_manifest(store, "ingest", attempt.key)
    assert made is not None and made.seconds == pytest.approx(130, abs=9)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("file", ["/s/shard", None])
def test_a_full_disk_is_named(
    place: Place,
    number: int,
    file: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        end(monkeypatch, place(OSError(number, "full", file) if file else OSError(number, "full")))
    assert ended.value.code == 2
    said = capsys.readouterr().err
    place = file or "the store, temporary files or the cache"
    assert re.fullmatch(f"error: no space for {place}: .*full.*free some.*\n", said)
    assert "attempt.json" not in said


@pytest.mark.ray
@pytest.mark.parametrize("error", [UserError(WRONG), numpys()])
def test_ray_reports_errors_as_the_tests_above_have_them(error: Exception, local_ray: None, tmp_path: Path) -> None:
    """A real task, and a trial."""
    import ray
    from ray import tune

    def fail(_: dict[str, Any] | None = None) -> None:
        raise error

    def task() -> None:
        ray.get(ray.remote(fail).remote())

    def trial() -> None:
        run = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
        (result,) = tune.Tuner(fail, run_config=run).fit()
        assert result.error is not None
        raise result.error

    for place in (task, trial):
        with pytest.raises(Exception, match=re.escape(str(error).partition("(")[0])) as ended:
            place()
        expected = WRONG if isinstance(error, UserError) else None
        assert stage.for_the_user(ended.value) == expected, place.__name__
        assert [type(one) for one in stage.causes(ended.value)] == [type(error)]
