"""What a driver has been told, and what it must not do then: checks that need no allowance for time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from pipelines.engine.decisions import USER_MISTAKE
from tests.simulation.faults import Faults, FaultyNetwork, Weather
from tests.simulation.loop import Process


class DriversNetwork(FaultyNetwork):
    """The network of a driver's process; it checks each attempt that the driver writes, and each job it submits."""

    def __init__(self, process: Process, random: Random, weather: Weather, faults: Faults | None = None) -> None:
        super().__init__(process, random, weather, faults)
        self.run = ""  # that the process drives
        self.told: set[str] = set()  # names of records that it has read
        self.submitted: set[str] = set()
        # Its own jobs that ended by the user's mistake, and how often it was told so: once to decide, once for the log.
        # A driver that is told only when it fetches the log of a lost job has decided already.
        self.mistakes: Counter[str] = Counter()

    def ask(self, what: str, name: str, answer: Callable[[], Any], lost: Callable[[str], Exception]) -> Any:
        if what == "submit":
            self._begins()
            self.submitted.add(name)
        elif what == "create" and name.endswith("/attempt.json"):
            self._begins()
            self._check_attempt(name)
        answered = super().ask(what, name, answer, lost)
        if what == "read" and answered is not None:
            self.told.add(name)
        elif what == "job" and answered is None:  # a new cluster
            del self.mistakes[name]
        elif what == "job" and (answered.status, answered.exit_code) == ("FAILED", USER_MISTAKE):
            self.mistakes.update({name} & self.submitted)
        return answered

    def _begins(self) -> None:
        assert f"runs/{self.run}/stop.json" not in self.told, "begun, although the request to stop was seen"

    def _check_attempt(self, name: str) -> None:
        _, job, key, _, number, _ = name.split("/")
        assert f"artifacts/{job}/{key}/manifest.json" not in self.told, "an attempt at what was seen to be committed"
        for mistake in (name for name, times in self.mistakes.items() if times > 1):
            same, last = mistake.startswith(f"{job}-{key[:12]}-{self.process.name}-"), mistake.rsplit("-", 1)[1]
            assert not (same and int(last) == int(number) - 1), "an attempt after the user's mistake"
