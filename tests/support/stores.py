"""A store in a folder, read without the project's own code."""

import json
from pathlib import Path
from typing import Any


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


def snapshot(store: Path) -> dict[str, tuple[int, int]]:
    """Path -> its time of modification and its size."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in store.rglob("*")}
