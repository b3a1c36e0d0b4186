"""Which files a source has: below a folder, in an installed package, or at s3://bucket/prefix."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.spec.fields import RecipeError


def files_below(root: str) -> Iterator[tuple[str, str | Path]]:
    """(name relative to the root, path or s3://bucket/key) of every file below it that is not hidden.

    Raises:
        RecipeError: it is no folder, a name in it is not UTF-8, or nothing lies below s3://bucket/prefix.
    """
    if root.startswith("s3://"):
        yield from _objects_at(root)
        return
    top = Path(root)
    if not top.is_dir():
        raise RecipeError(f"source.root: {root} is not a folder")
    for folder, folders, files in os.walk(top):
        # hidden folders (.git) and macOS's shadows are none of the images' business
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        for name in sorted(name for name in files if not name.startswith(".")):
            path = Path(folder) / name
            relative = path.relative_to(top).as_posix()
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise RecipeError(
                    f"source.root: the name of {str(path)!r} is not UTF-8: rename the file"
                ) from None
            yield relative, path


def files_at(root: str) -> Iterator[tuple[str, str | Path]]:
    """The one file or object `root` under its own name, or `files_below` it. Raises RecipeError."""
    if Path(root).is_file():
        yield Path(root).name, Path(root)
    else:
        yield from files_below(root)


def files_named(root: str, names: Sequence[str]) -> dict[str, str | Path]:
    """Those of these files that lie directly in a folder or at s3://bucket/prefix, in this order."""
    if root.startswith("s3://"):
        present = dict(_objects_at(root))
        return {name: present[name] for name in names if name in present}
    return {name: Path(root, name) for name in names if Path(root, name).is_file()}


def _objects_at(root: str) -> Iterator[tuple[str, str]]:
    """(name, s3://bucket/key) of the object there, or of all below it, as in a folder."""
    from pipelines.s3_files import tree

    if not (found := tree(root)):
        raise RecipeError(f"source.root: there is nothing at {root}")
    bucket = root.split("/")[2]
    for file in found:
        parts = file.name.split("/")
        if any(part in ("", "..") for part in parts[:-1]) or parts[-1] == "..":
            raise RecipeError(f"source.root: {root} has an object {file.key!r}, which is no path")
        # a folder's own object has no name; hidden ones and macOS's shadows are none of the images' business
        if parts[-1] and not any(part.startswith((".", "__MACOSX")) for part in parts):
            yield file.name, f"s3://{bucket}/{file.key}"


def package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise RecipeError(f"the package {package} is not installed: `make install`")
    return Path(found.submodule_search_locations[0])
