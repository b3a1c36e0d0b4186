"""What befalls requests: latency, losses before and after the write, late and repeated writes, a full disk, death."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from pipelines.store import StoreError, StoreUnreachable
from tests.simulation.loop import Loop, Process
from tests.support.network import WRITES, Network

LATENCY = (0.0, 0.0, 0.002, 0.02, 0.3)  # seconds, each way


class Faults:
    """What goes wrong in an episode. Each fault has a name, so that an episode can be repeated with some of them only.

    Processes and jobs draw from random numbers of their own, so that a fault that is left out changes little else.
    """

    def __init__(self, seed: int = 0, kept: frozenset[str] | None = None) -> None:
        self.seed, self.kept = seed, kept
        self.happened: dict[str, str] = {}  # name -> description

    def random(self, of: str) -> Random:
        return Random(f"{self.seed} {of}")

    def happens(self, name: str, description: str) -> bool:
        """Whether a fault happens that was drawn."""
        if self.kept is not None and name not in self.kept:
            return False
        self.happened[name] = description
        return True


@dataclass
class Weather:
    """How often what goes wrong, of one request, in an episode; the storm is over at `until`."""

    losses: float = 0.0
    late: float = 0.0
    deaths: float = 0.0
    full_from: float = 1e9  # the store is full for so long
    full_until: float = 1e9
    until: float = 1e9


class FaultyNetwork(Network):
    """A process's network: each way takes time, and the process can die there."""

    def __init__(self, process: Process, random: Random, weather: Weather, faults: Faults | None = None) -> None:
        super().__init__()
        self.process, self.chance, self.weather = process, random.random, weather
        self.faults, self.asked = faults or Faults(), 0

    def ask(self, what: str, name: str, answer: Callable[[], Any], lost: Callable[[str], Exception]) -> Any:
        weather, loop, process = self.weather, self.process.loop, self.process
        is_storm = loop.now < weather.until
        self.asked += 1
        if latency := LATENCY[int(self.chance() * len(LATENCY))]:
            process.sleep(latency)
        if is_storm:
            if self.strikes(weather.losses, f"{what} {name} lost"):
                raise lost(f"{what} {name} got lost")
            if what in WRITES and self.strikes(weather.late, f"{what} {name} late"):
                self._arrive_late(loop, answer, what)
                raise lost(f"{what} {name} arrives late")
            is_full = weather.full_from <= loop.now < weather.full_until and lost is StoreUnreachable
            if is_full and what in {"create", "replace"} and self.faults.happens("full disk", "the store is full"):
                raise StoreError("no space left")
            if self.strikes(weather.deaths, f"dies before {what} {name}"):
                process.exit(1)
        answered = answer()
        self.writes += what in WRITES
        if latency := LATENCY[int(self.chance() * len(LATENCY))]:
            process.sleep(latency)
        if is_storm:
            if self.strikes(weather.deaths, f"dies after {what} {name}"):
                process.exit(1)
            if self.strikes(weather.losses, f"answer to {what} {name} lost"):
                raise lost(f"the answer to {what} {name} got lost")
        return answered

    def strikes(self, share: float, what: str) -> bool:
        """Whether a fault happens to the latest request, of which this share has it."""
        return (
            share > 0
            and self.process.loop.now < self.weather.until
            and self.chance() < share
            and self.faults.happens(
                f"{self.process.name} {self.asked} {what.split()[0]}",
                f"{self.process.loop.now:.1f} s, process {self.process.name}: {what}",
            )
        )

    def _arrive_late(self, loop: Loop, answer: Callable[[], Any], what: str) -> None:
        """What was given up is done later, perhaps twice, even if the process is dead by then."""
        loop.after((0.5, 4.0, 30.0)[int(self.chance() * 3)], answer)
        if what in {"create", "submit", "stop"} and self.chance() < 0.3:
            loop.after((1.0, 40.0)[int(self.chance() * 2)], answer)
