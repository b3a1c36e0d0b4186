"""Report which worker the others wait for when one hangs, and end the waiting.

Each worker has a thread that watches its step counter. When a step has lasted nearly as long as a collective operation
may, the thread writes the line of code that its worker is at into the group's store, and reads what the others wrote. A
suspended worker writes nothing. A training that makes progress communicates nothing.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import distributed_c10d

from ray_jobs.process.heartbeat import Steps

# shares of the limit after which a worker reports, and reads the others' reports
_SUSPICIOUS, _HEARD = 0.8, 0.9


def limit_collectives(seconds: float) -> None:
    """Limit the collective operations of all groups that this process creates from now on.

    DeepSpeed creates groups without a limit, so this sets torch's default, which is half an hour for gloo.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timedelta(seconds=seconds))


@contextmanager
def named_hangs(rank: int, world: int, steps: Steps, seconds: float) -> Iterator[None]:
    """During the block, which trains, print which workers are missing before a collective operation times out.

    The error of the operation names them, too. With NCCL, torch ends the process instead.

    Args:
        steps: the counter that this worker's training sets.
        seconds: the time limit of the process group.
    """
    if world == 1:
        yield
        return
    watch = _Watch(rank, world, steps, seconds)
    watch.start()
    try:
        yield
    except RuntimeError as error:
        if watch.message is None:
            raise
        raise RuntimeError(f"{watch.message} ({error})") from error
    finally:
        watch.over.set()


class _Watch(threading.Thread):
    """The watching thread; while a step lasts too long, `message` says which workers are missing."""

    def __init__(self, rank: int, world: int, steps: Steps, seconds: float) -> None:
        super().__init__(name="hangs", daemon=True)
        self.message: str | None = None
        self.over = threading.Event()
        self._rank, self._world, self._steps, self._seconds = rank, world, steps, seconds
        self._training = threading.get_ident()
        self._store = distributed_c10d.PrefixStore("hangs", distributed_c10d._get_default_store())

    def run(self) -> None:
        step, since = self._steps.done, time.monotonic()
        while not self.over.wait(self._seconds / 100):
            if self._steps.done != step:
                step, since, self.message = self._steps.done, time.monotonic(), None
            elif self.message is None and time.monotonic() - since > _SUSPICIOUS * self._seconds:
                self._store.set(f"{step or 0}/{self._rank}", self._place())
                if self.over.wait((_HEARD - _SUSPICIOUS) * self._seconds) or self._steps.done != step:
                    continue
                places = {rank: self._place_of(step or 0, rank) for rank in range(self._world)}
                self.message = describe(step or 0, time.monotonic() - since, places)
                if self._rank == min(rank for rank, place in places.items() if place):
                    print(self.message, flush=True)

    def _place_of(self, step: int, rank: int) -> str | None:
        """Return where a worker is; one that hangs right after its update is still at the previous step."""
        keys = (f"{near}/{rank}" for near in (step, step - 1, step + 1))
        return next((self._store.get(key).decode() for key in keys if self._store.check([key])), None)

    def _place(self) -> str:
        """Return where the training is (file:line in function), with a leading `*` if it waits there for the others."""
        frame = sys._current_frames()[self._training]
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        waits = name == "_is_requested" or re.search("/(deepspeed|torch/distributed)/", frame.f_code.co_filename)
        return f"{'*' if waits else ''}{path.parent.name}/{path.name}:{frame.f_lineno} in {name}"


def describe(step: int, seconds: float, places: dict[int, str | None]) -> str:
    """Return which workers are missing. `places` has the `_Watch._place` of each rank, None if it is silent.

    Silent workers are missing; if there are none, the workers that do not wait for the others are.
    """
    silent = [rank for rank, place in places.items() if place is None]
    elsewhere = [rank for rank, place in places.items() if place and not place.startswith("*")]
    missing = silent or (elsewhere if len(elsewhere) < len(places) else [])
    who = f"the others wait for rank {', '.join(map(str, missing))}" if missing else "no worker goes on"
    where = "; ".join(
        f"rank {rank} {'does not answer' if place is None else 'is at ' + place.lstrip('*')}"
        for rank, place in places.items()
    )
    return f"step {step} has lasted for {seconds:.0f} s and {who}: {where}"
