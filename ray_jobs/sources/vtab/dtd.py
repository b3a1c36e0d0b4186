"""DTD: a tar of images in class folders, and lists of ten partitions, of which VTAB uses the first."""

from __future__ import annotations

from pipelines.spec.vtab import VtabSource
from ray_jobs.sources.archives.entries import Files, Listing
from ray_jobs.sources.vtab import archives, splits

_FILE = "dtd-r1.0.1.tar.gz"
_LISTS = {"train": "train1", "validation": "val1", "test": "test1"}


def listing(source: VtabSource, files: Files) -> Listing:
    """List images of 47 classes, sorted by name."""
    members = archives.by_path(files, _FILE)
    lists = {part: archives.lines_of(files, _FILE, members, f"dtd/labels/{name}.txt") for part, name in _LISTS.items()}
    return splits.listing(source, *archives.by_folder(lists, "dtd/images/", members))
