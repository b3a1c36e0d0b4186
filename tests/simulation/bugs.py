"""Bugs planted into the project's own code: a simulator that finds none of them proves nothing.

A bug replaces a text of a module by another, once. The functions of the loaded module get the code of the changed one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from pipelines.engine import decisions, driver, history
from pipelines.store import artifacts, protocol
from ray_jobs.process import heartbeat, stage


@dataclass(frozen=True)
class Bug:
    """`old` occurs once in the module's source."""

    name: str
    module: ModuleType
    old: str
    new: str


BUGS = (
    Bug("a commit without a look for a later attempt", stage, "    check_newest(store, attempt)\n", ""),
    Bug("a superseded process lives on", heartbeat, "                check_newest(store, context.attempt)\n", ""),
    Bug("no signs of life", heartbeat, "                beat(store)\n", "                unchanged = beat\n"),
    Bug("no end to attempts", decisions, "flight.attempts >= ATTEMPTS", "flight.attempts > 2 * ATTEMPTS"),
    Bug("waits for ever for a manifest", decisions, "> MANIFEST_SECONDS", "> 1e9"),
    Bug("waits for ever for a start", decisions, "flight.silent > PENDING_SECONDS", "flight.silent > 1e9"),
    Bug("waits for ever for a sign of life", decisions, "flight.silent > limit:", "flight.silent > 1e9:"),
    Bug("sees no new sign of life", decisions, "if sign == flight.sign else 0.0", "if True else 0.0"),
    Bug(
        "overlooks the manifest of a job that failed",
        decisions,
        "    if observed.manifest is not None:\n",
        "    if observed.manifest is not None and (job is None or job.status != 'FAILED'):\n",
    ),
    Bug(
        "takes a job of another session for its own",
        decisions,
        "(job is None and attempt.cluster_session == observed.session)",
        "job is None",
    ),
    Bug(
        "tries again after the request to stop",
        decisions,
        """    if observed.stop_requested:
        return End(Status.STOPPED, "stopped")
    return End""",
        "    return End",
    ),
    Bug("gives up a job and lets it run", decisions, "return flight, (Do.STOP, *actions)", "return flight, actions"),
    Bug("calls every end a success", decisions, "    if job.status == Status.SUCCEEDED:", "    if job.ended:"),
    Bug(
        "ends a stage at its first failure", decisions, "if flight.attempts >= ATTEMPTS else None", "if True else None"
    ),
    Bug(
        "writes its attempt over another driver's",
        artifacts,
        """    if store.create(f"{folder}/attempt.json", encode(attempt)):
""",
        """    store.remove([f"{folder}/attempt.json"])
    if store.create(f"{folder}/attempt.json", encode(attempt)):
""",
    ),
    Bug(
        "takes another driver's attempt for its own",
        artifacts,
        "    existing = read_attempt(store, folder)",
        "    existing = attempt",
    ),
    Bug("numbers no attempts", driver, "previous.number + 1", "max(1, previous.number)"),
    Bug(
        "submits what is not written",
        driver,
        "        return create_attempt(self.store, wanted)",
        "        return wanted",
    ),
    Bug(
        "begins a stage before all its inputs are made",
        driver,
        "elif all(source in self.status for source in inputs):",
        "elif not inputs or any(source in self.status for source in inputs):",
    ),
    Bug(
        "does not record that a run is over",
        driver,
        "        self._patiently(lambda: end_run(self.store, self.run.id, outcome))\n",
        "",
    ),
    Bug(
        "does not see the request to stop",
        driver,
        "            if stop_requested(self.store, self.run.id):",
        "            if False:",
    ),
    Bug("forgets the request to stop", driver, "        request_stop(self.store, self.run.id)\n", ""),
    Bug(
        "dies of a cluster that does not answer",
        driver,
        "except (ClusterUnreachable, StoreUnreachable) as error:",
        "except StoreUnreachable as error:",
    ),
    Bug(
        "dies of a store that does not answer",
        protocol,
        "        except StoreUnreachable as error:\n",
        "        except ZeroDivisionError as error:\n",
    ),
    Bug(
        "continues a run that is over",
        history,
        """    return bool({"over.json", "stop.json"} & {*store.names(Layout.run(run))})
""",
        "    return False\n",
    ),
)


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Run the project's code with the bug during the block."""
    source = inspect.getsource(bug.module)
    assert source.count(bug.old) == 1, f"{bug.name}: {bug.old!r} occurs {source.count(bug.old)} times"
    changed: dict[str, Any] = dict(vars(bug.module))
    exec(compile(source.replace(bug.old, bug.new), bug.module.__file__ or "", "exec"), changed)
    before = {}
    for function, other in _functions(vars(bug.module), changed, bug.module.__name__):
        before[function] = function.__code__
        function.__code__ = other.__code__
    try:
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _functions(ours: Any, theirs: Any, module: str) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield the functions and methods of a module, each with its changed one."""
    for name, value in list(ours.items()):
        other = theirs.get(name)
        if isinstance(value, type) and value.__module__ == module and isinstance(other, type) and value is not other:
            yield from _functions(vars(value), vars(other), module)
            continue
        function, changed = inspect.unwrap(value) if callable(value) else value, other
        if isinstance(function, FunctionType) and function.__module__ == module:
            changed = inspect.unwrap(other)
            if function is not changed and len(function.__code__.co_freevars) == len(changed.__code__.co_freevars):
                yield function, changed
