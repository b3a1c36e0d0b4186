"""A store, as it lies in a folder or a bucket, read without the project's own code."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.store import LOG
from ray_jobs.evaluation.cost import COST
from tests.support.s3 import Bucket


@dataclass(frozen=True)
class Folder:
    """A folder, as seen behind a store's back; `Bucket` is the same on S3."""

    root: Path

    def objects(self, prefix: str = "") -> dict[str, int]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        found = {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}
        return {name: size for name, size in found.items() if name.startswith(prefix)}

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)


Place = tuple[str, Folder | Bucket]
"""A store's address, and what lies there."""


def manifests(store: Path) -> dict[str, dict[str, Any]]:
    """Stage -> its only manifest."""
    paths = list(store.glob("artifacts/*/*/manifest.json"))
    by_stage = {manifest["stage"]: manifest for path in paths if (manifest := json.loads(path.read_text()))}
    assert len(by_stage) == len(paths), "a stage has several artifacts"
    return by_stage


def files_of(store: Path, manifest: dict[str, Any]) -> Path:
    """The folder of an artifact's files."""
    attempt = f"artifacts/{manifest['job']}/{manifest['key']}/attempts/{manifest['attempt']}"
    return store / attempt / "files"


def repeated(files: Iterable[Any]) -> list[Any]:
    """Those of an artifact's files that every run makes with the same bytes: all but those that have times."""
    timed = {LOG, COST}
    return [file for file in files if (file["path"] if isinstance(file, dict) else file.path) not in timed]


def snapshot(store: Path) -> dict[str, tuple[int, int]]:
    """Path -> its time of modification and its size."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")}
