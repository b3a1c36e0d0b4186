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

    def __init__(self, process: Process, random: Random, weather: Weather) -> None:
        super().__init__()
        self.process, self.random, self.weather = process, random, weather

    def ask(self, what: str, name: str, answer: Callable[[], Any], lost: Callable[[str], Exception]) -> Any:
        weather, loop, chance = self.weather, self.process.loop, self.random
        is_storm = loop.now < weather.until
        self.process.sleep(chance.choice(LATENCY))
        if is_storm:
            if chance.random() < weather.losses:
                raise lost(f"{what} {name} got lost")
            if what in WRITES and chance.random() < weather.late:
                self._arrive_late(loop, answer, what)
                raise lost(f"{what} {name} arrives late")
            is_full = weather.full_from <= loop.now < weather.full_until
            if is_full and what in {"create", "replace"} and lost is StoreUnreachable:
                raise StoreError("no space left")
            if chance.random() < weather.deaths:
                self.process.exit(1)
        answered = answer()
        self.writes += what in WRITES
        self.process.sleep(chance.choice(LATENCY))
        if is_storm:
            if chance.random() < weather.deaths:
                self.process.exit(1)
            if chance.random() < weather.losses:
                raise lost(f"the answer to {what} {name} got lost")
        return answered

    def _arrive_late(self, loop: Loop, answer: Callable[[], Any], what: str) -> None:
        """What was given up is done later, perhaps twice, even if the process is dead by then."""
        loop.after(self.random.choice([0.5, 4.0, 30.0]), answer)
        if what in {"create", "submit", "stop"} and self.random.random() < 0.3:
            loop.after(self.random.choice([1.0, 40.0]), answer)
