"""The requests to S3 that a command would make, counted on a store in a folder."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from pipelines.store import FileEntry
from pipelines.store.folder import FolderStore

PAGE = 1_000  # names that one request lists


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the requests of all folder stores of this process from now on, by verb."""
    requests: Counter[str] = Counter()

    def counting(verb: str, of: Callable[..., int]) -> None:
        original = getattr(FolderStore, verb)

        def method(self: FolderStore, *arguments: Any, **fields: Any) -> Any:
            answer = original(self, *arguments, **fields)
            requests[verb] += of(answer, *arguments)
            return answer

        monkeypatch.setattr(FolderStore, verb, method)

    def fetched(_: Any, folder: str, files: Iterable[FileEntry] = ()) -> int:
        return len([*files])

    def listed(names: Sequence[str], *_: Any) -> int:
        return max(1, -(-len(names) // PAGE))

    def listed_with_versions(versions: Mapping[str, Any], folder: str, names: Sequence[str], *_: Any) -> int:
        return max(1, -(-len(versions) * (len(names) + 1) // PAGE))

    for verb in ("read", "read_range", "create", "replace", "digest"):
        counting(verb, lambda *_: 1)
    counting("names", listed)
    counting("versions", listed_with_versions)
    counting("local", fetched)
    return requests
