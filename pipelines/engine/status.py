"""The statuses of stages and runs, as events record them and commands show them."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Status(StrEnum):
    """Ray's five job statuses, and those that the driver adds."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    CACHED = "CACHED"  # committed before the run
    SKIPPED = "SKIPPED"  # an input was not made
    LOST = "LOST"  # the job's cluster is gone, or it shows no sign of life; the next attempt follows
    WAITING = "WAITING"  # the store or the cluster does not answer
    UNFINISHED = "UNFINISHED"  # a run whose driver is gone

    @property
    def succeeded(self) -> bool:
        """Whether a stage with this status is committed."""
        return self in COMMITTED


COMMITTED = frozenset({Status.CACHED, Status.SUCCEEDED})
ENDED = COMMITTED | {Status.FAILED, Status.STOPPED, Status.SKIPPED}


def run_outcome(stages: Collection[Status]) -> Status:
    """Return the status of a run whose stages have ended."""
    if all(status.succeeded for status in stages):
        return Status.SUCCEEDED
    return Status.STOPPED if Status.STOPPED in stages else Status.FAILED
