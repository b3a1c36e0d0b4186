"""Digests of files outside the store: on disk, on S3 or on the hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.files import s3
from pipelines.files.hashing import local_digests


def file_digests(files: Iterable[tuple[str, str | Path]]) -> list[tuple[Any, ...]]:
    """Return (name, sha256 of the contents) of each file.

    For an object s3://bucket/key it is (name, ETag, size), because reading it would take too long. For
    hf:ORG/NAME@COMMIT/name the sha256 is the hub's, so a model there has the same key as its files in a folder.

    Raises:
        RecipeError: a file cannot be read.
    """
    named = [(name, str(location)) for name, location in files]
    objects = [(name, location) for name, location in named if location.startswith("s3://")]
    others = [(name, location) for name, location in named if not location.startswith("s3://")]
    local = local_digests(Path(location) for _, location in others if not location.startswith("hf:"))
    lines: list[tuple[Any, ...]] = [
        (name, _hub_digest(location) if location.startswith("hf:") else next(local)) for name, location in others
    ]
    if objects:
        versions = s3.facts(uri for _, uri in objects)
        lines += [(name, *versions[uri]) for name, uri in objects]
    return lines


def _hub_digest(location: str) -> str:
    from pipelines.files import hub

    path, _, name = location.rpartition("/")
    return hub.digests(path)[name]
