"""Every order of two drivers' first requests about one stage, from the look for its attempts on.

What they ask before that only reads, and neither has written anything by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from pipelines.store import Attempt
from tests.simulation.cluster import Script
from tests.simulation.drivers import Episode
from tests.simulation.faults import Weather
from tests.simulation.knowing import DriversNetwork
from tests.simulation.loop import Process, SimulatedFlag
from tests.support.world import pipeline


class InTurns(DriversNetwork):
    """Lets the first requests pass when it is their turn. `turns`: their flags, and those that follow."""

    has_looked = False
    turns: Iterator[tuple[SimulatedFlag, SimulatedFlag]]

    def ask(self, what: str, name: str, answer: Callable[[], Any], lost: Callable[[str], Exception]) -> Any:
        self.has_looked |= what == "list" and name.endswith("/attempts")
        if not self.has_looked or (turn := next(self.turns, None)) is None:
            return super().ask(what, name, answer, lost)
        own, following = turn
        own.wait()
        answered = super().ask(what, name, answer, lost)
        following.set()
        return answered

    def leave(self) -> None:
        """Let the turns pass that are left when the walk is over."""
        for own, following in self.turns:
            own.wait()
            following.set()


@dataclass
class Ordered(Episode):
    """Two drivers of one stage; `order`: whose request is next, 0 or 1."""

    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not self.is_on_s3
        self.is_calm, self.weather, self.poll_seconds = True, Weather(until=0.0), 0.5
        self.pipeline, self.networks = pipeline("images"), list[InTurns]()

    def _random_script(self, attempt: Attempt) -> Script:
        return Script(pending=1.1, running=0.1, closing=0.1)

    def _drivers_network(self, process: Process) -> InTurns:
        network = InTurns(process, self.faults.random(process.name), self.weather, self.faults)
        self.networks.append(network)
        return network

    def _happen(self) -> None:
        ended: list[tuple[str, dict[str, str]]] = []

        def leave(network: int, run: str, status: dict[str, str]) -> None:
            self.networks[network].leave()
            ended.append((run, status))

        for number in range(2):
            self.command(partial(leave, number))
        flags = [SimulatedFlag(self.networks[who].process) for who in (*self.order, 0)]
        flags[0].set()
        for number, network in enumerate(self.networks):
            own = [
                (flag, after) for flag, after, who in zip(flags, flags[1:], self.order, strict=False) if who == number
            ]
            network.turns = iter(own)
        self.loop.run_while(lambda: len(ended) < 2)
        assert len(ended) == 2, "a driver has not ended"
        for self.run_id, self.status in ended:
            self._check_end()


def orders(requests: int) -> Iterator[tuple[int, ...]]:
    """Every order of so many requests of each."""
    for first in combinations(range(2 * requests), requests):
        yield tuple(int(place not in first) for place in range(2 * requests))


def in_order(order: tuple[int, ...]) -> None:
    """Run one; an error is a finding."""
    try:
        Ordered(0, order=order).run()
    except BaseException as error:
        error.add_note(f"orders.in_order({order})")
        raise
