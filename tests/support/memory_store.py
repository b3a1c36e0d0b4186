"""A store in memory: what a driver needs of one, in microseconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from typing import Any

from pipelines.store import FileEntry, StoreUnreachable
from tests.support.network import Network


class Objects(dict[str, bytes]):
    """Objects by name, and the names in each folder."""

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        super().__init__()
        self.folders: dict[str, Counter[str]] = defaultdict(Counter)  # name in a folder -> how many objects it leads to
        for name, data in (objects or {}).items():
            Objects.__setitem__(self, name, data)

    def __setitem__(self, name: str, data: bytes) -> None:
        if name not in self:
            for folder, child in _places(name):
                self.folders[folder][child] += 1
        super().__setitem__(name, data)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        for folder, child in _places(name):
            self.folders[folder][child] -= 1
            if not self.folders[folder][child]:
                del self.folders[folder][child]

    def setdefault(self, name: str, data: bytes = b"") -> bytes:  # type: ignore[override]
        if name not in self:
            self[name] = data
        return self[name]

    def update(self, objects: Mapping[str, bytes]) -> None:  # type: ignore[override]
        for name, data in objects.items():
            self[name] = data

    def pop(self, name: str, default: Any = None) -> Any:
        data = self.get(name, default)
        if name in self:
            del self[name]
        return data


@cache
def _places(name: str) -> list[tuple[str, str]]:
    """Return (folder, name in it) of an object, and of each of its folders."""
    parts = name.split("/")
    return [("/".join(parts[:depth]), parts[depth]) for depth in range(1, len(parts))]


class MemoryStore:
    """Objects by name; several stores over one `objects` are what several processes see of one store."""

    uri, id = "memory", "0123456789abcdef"
    settings: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, objects: Mapping[str, bytes] | None = None, network: Network | None = None) -> None:
        self.objects = objects if isinstance(objects, Objects) else Objects(objects)
        self.network = network or Network()

    def _ask(self, what: str, name: str, answer: Callable[[], Any]) -> Any:
        return self.network.ask(what, name, answer, StoreUnreachable)

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        return self._ask("read", name, lambda: self.objects.get(name))

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | None]:
        return self._ask("read", names[0], lambda: [*map(self.objects.get, names)]) if names else []

    def create(self, name: str, data: bytes) -> bool:
        return self._ask("create", name, lambda: self.objects.setdefault(name, data) == data)

    def replace(self, name: str, data: bytes) -> None:
        self._ask("replace", name, lambda: self.objects.update({name: data}))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._ask("remove", name, lambda name=name: self.objects.pop(name, None))

    def names(self, folder: str, prefix: str = "", after: str = "") -> list[str]:
        return self._ask("list", folder, lambda: self._names(folder, prefix, after))

    def _names(self, folder: str, prefix: str, after: str) -> list[str]:
        found = self.objects.folders.get(folder, ())
        return sorted(name for name in found if name.startswith(prefix) and name > after)

    def versions(self, folder: str, names: Sequence[str], beside: str) -> dict[str, str | None]:
        def version(child: str) -> str | None:
            found = [self.objects.get(f"{folder}/{child}/{name}") for name in names]
            return None if None in found else sha256(b" ".join(filter(None, found))).hexdigest()

        return self._ask("list", folder, lambda: {child: version(child) for child in self._names(folder, "", "")})

    def sizes(self, folder: str) -> dict[str, int]:
        def below() -> dict[str, int]:
            return {name: len(data) for name, data in self.objects.items() if name.startswith(f"{folder}/")}

        return self._ask("list", folder, below)

    def digest(self, name: str) -> tuple[int, str] | None:
        data = self.read(name)
        return None if data is None else (len(data), sha256(data).hexdigest())

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        """Artifacts of these tests have no files."""
