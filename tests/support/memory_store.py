"""A store in memory: what a driver needs of one, in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any

from pipelines.store import FileEntry, StoreUnreachable
from tests.support.network import Network


class MemoryStore:
    """Objects by name; several stores over one `objects` are what several processes see of one store."""

    uri, id = "memory", "0123456789abcdef"
    settings: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, objects: dict[str, bytes] | None = None, network: Network | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.network = network or Network()

    def _ask(self, what: str, name: str, answer: Callable[[], Any]) -> Any:
        return self.network.ask(what, name, answer, StoreUnreachable)

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        return self._ask("read", name, lambda: self.objects.get(name))

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | None]:
        return [self.read(name) for name in names]

    def create(self, name: str, data: bytes) -> bool:
        return self._ask("create", name, lambda: self.objects.setdefault(name, data) == data)

    def replace(self, name: str, data: bytes) -> None:
        self._ask("replace", name, lambda: self.objects.update({name: data}))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._ask("remove", name, lambda name=name: self.objects.pop(name, None))

    def names(self, folder: str, prefix: str = "", after: str = "") -> list[str]:
        return self._ask("list", folder, lambda: self._names(f"{folder}/", prefix, after))

    def _names(self, start: str, prefix: str, after: str) -> list[str]:
        found = {name[len(start) :].split("/")[0] for name in self.objects if name.startswith(start + prefix)}
        return sorted(name for name in found if name > after)

    def versions(self, folder: str, names: Sequence[str], beside: str) -> dict[str, str | None]:
        def version(child: str) -> str | None:
            found = [self.objects.get(f"{folder}/{child}/{name}") for name in names]
            return None if None in found else sha256(b" ".join(filter(None, found))).hexdigest()

        return self._ask("list", folder, lambda: {child: version(child) for child in self._names(f"{folder}/", "", "")})

    def sizes(self, folder: str) -> dict[str, int]:
        def below() -> dict[str, int]:
            return {name: len(data) for name, data in self.objects.items() if name.startswith(f"{folder}/")}

        return self._ask("list", folder, below)

    def digest(self, name: str) -> tuple[int, str] | None:
        data = self.read(name)
        return None if data is None else (len(data), sha256(data).hexdigest())

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Artifacts of these tests have no files."""
