"""What stands between a driver and what it asks: requests and answers get lost, and drivers die."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.loop import Killed

WRITES = ("create", "replace", "remove", "submit", "stop")  # requests that change something


class Network:
    """A network that loses nothing. A subclass overrides `before` and `after`, which may raise."""

    def __init__(self) -> None:
        self.writes = 0
        self.dead = False

    def ask(self, what: str, name: str, answer: Callable[[], Any], lost: Callable[[str], Exception]) -> Any:
        """Return the answer to a request, unless the request or the answer gets lost: then raise `lost`."""
        if self.dead:
            raise Killed
        self.before(what, name, lost)
        answered = answer()
        self.writes += what in WRITES
        self.after(what, name, lost)
        return answered

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        """The request is on its way."""

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        """It was done; the answer is on its way."""

    def die(self) -> None:
        """End the driver that uses this network."""
        self.dead = True
        raise Killed


class DiesAfter(Network):
    """The driver dies once it has changed the world so often."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.last = writes

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if what in WRITES and self.writes == self.last:
            self.die()


class Loses(Network):
    """Loses the first requests whose kind and name contain these words, or the answers to them."""

    def __init__(self, *words: str, times: int = 1, answers: bool = False) -> None:
        super().__init__()
        self.words, self.times, self.answers = words, times, answers

    def before(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if not self.answers:
            self._lose(f"{what} {name}", lost)

    def after(self, what: str, name: str, lost: Callable[[str], Exception]) -> None:
        if self.answers:
            self._lose(f"{what} {name}", lost)

    def _lose(self, request: str, lost: Callable[[str], Exception]) -> None:
        if self.times > 0 and all(word in request for word in self.words):
            self.times -= 1
            raise lost(f"{request} got lost")
