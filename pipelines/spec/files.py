"""Which files a source has: below a folder, in an installed package, or at s3://bucket/prefix."""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.file_names import left_by_a_system, parts_of
from pipelines.spec.fields import RecipeError


def files_below(root: str) -> Iterator[tuple[str, str | Path]]:
    """(name relative to the root, path or s3://bucket/key) of every regular file below it that its user put there.

    FIFOs, sockets and devices are left out: opening one may never return.

    Raises:
        RecipeError: it is not a folder, a name in it is not UTF-8, a link is broken, or nothing lies below
            s3://bucket/prefix.
    """
    if root.startswith("s3://"):
        yield from _objects_at(root)
        return
    top = Path(root)
    if not top.is_dir():
        raise RecipeError(f"source.root: {root} is not a folder")
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not left_by_a_system(name))
        for name in sorted(name for name in files if not left_by_a_system(name)):
            path = Path(folder) / name
            relative = path.relative_to(top).as_posix()
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise RecipeError(
                    f"source.root: the name of {str(path)!r} is not UTF-8: rename the file"
                ) from None
            if _is_regular(path):
                yield relative, path


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if path.is_symlink():
            raise RecipeError(
                f"source.root: {path} is a broken link ({path.readlink()}): remove it, or restore its target"
            ) from None
        raise RecipeError(f"source.root: {path}: {error.strerror}") from None


def files_at(root: str) -> Iterator[tuple[str, str | Path]]:
    """The file or object `root` and its further parts by name, or `files_below` it. Raises RecipeError."""
    if root.startswith("s3://"):
        found = list(_objects_at(root))
        folder, _, name = root.rpartition("/")
        if found == [(name, root)]:
            found = [(part, f"{folder}/{part}") for part in parts_of(name, _names_in(folder))]
        yield from found
    elif Path(root).is_file():
        path = Path(root)
        names = parts_of(path.name, _names_in(str(path.parent)))
        yield from ((name, path.parent / name) for name in names)
    else:
        yield from files_below(root)


def _names_in(folder: str) -> Iterator[str]:
    """A generator, because `parts` hardly ever needs the names."""
    if folder.startswith("s3://"):
        from pipelines.files.s3 import listing

        yield from (file.name for file in listing(folder))
    else:
        yield from (path.name for path in Path(folder).iterdir())


def files_named(root: str, names: Sequence[str]) -> dict[str, str | Path]:
    """Those of these files that lie directly in a folder or at s3://bucket/prefix, in this order."""
    if root.startswith("s3://"):
        present = dict(_objects_at(root))
        return {name: present[name] for name in names if name in present}
    return {name: Path(root, name) for name in names if Path(root, name).is_file()}


def _objects_at(root: str) -> Iterator[tuple[str, str]]:
    """(name, s3://bucket/key) of the object there, or of all below it, as in a folder."""
    from pipelines.files.s3 import tree

    if not (found := tree(root)):
        raise RecipeError(f"source.root: there is nothing at {root}")
    bucket = root.split("/")[2]
    for file in found:
        inner = file.name.split("/")
        if any(part in ("", "..") for part in inner[:-1]) or inner[-1] == "..":
            raise RecipeError(f"source.root: {root} has an object {file.key!r}, which is no path")
        # a folder's own object has no name
        if inner[-1] and not any(map(left_by_a_system, inner)):
            yield file.name, f"s3://{bucket}/{file.key}"


def package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise RecipeError(f"the package {package} is not installed: `make install`")
    return Path(found.submodule_search_locations[0])
