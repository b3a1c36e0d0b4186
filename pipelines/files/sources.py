"""Listing the files outside the store that a stage reads: on this machine, on S3 or on the Hugging Face hub.

A recipe states where the files are and which of them it reads (`pipelines.spec`); this module lists them.
"""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.file_names import left_by_a_system, parts_of
from pipelines.files import s3
from pipelines.spec import ONE_FILE, AnyStage, Import, Ingest, RecipeError
from pipelines.spec.files import At, Below, Files, FileSource, InPackage, Location, Named

EXCLUDE = "/exclude"  # the list of images that an ingest leaves out; names of source files are relative


def stage_files(config: AnyStage) -> Files | None:
    """Return every external file that a stage's result depends on, by name; None if the stage reads none.

    Raises:
        RecipeError: files are missing or cannot be listed.
        StoreError: the same on S3 or the hub. StoreUnreachable: they do not answer.
    """
    if isinstance(config, Ingest):
        files = source_files(config.source)
        return files if config.exclude is None else {**files, EXCLUDE: _list_of_images(config.exclude)}
    return import_files(config.path) if isinstance(config, Import) else None


def _list_of_images(path: str) -> Location:
    if path.startswith("s3://"):
        return path
    if not Path(path).is_file():
        raise RecipeError(f"exclude: {path}: no such file")
    return Path(path)


def source_files(source: FileSource) -> Files:
    """Return the files that a source reads. Raises as `stage_files`."""
    match source.where():
        case Below(root):
            files = dict(_below(root))
        case At(root):
            files = dict(_at(root))
        case Named(root, names):
            files = _named(root, names)
        case InPackage(package, folder, pattern):
            paths = sorted((_package_folder(package) / folder).glob(pattern))
            files = {path.name: path for path in paths}
    return source.choose(files)


def import_files(path: str) -> Files:
    """Return the files of pretrained weights: a single file, or all in a folder or in a model on the hub.

    Raises as `stage_files`.
    """
    if path.startswith("s3://"):
        if not (objects := s3.listing(path)):
            raise RecipeError(f"path: {path}: no such object or prefix")
        bucket = path.split("/")[2]
        return {file.name: f"s3://{bucket}/{file.key}" for file in objects}
    if path.startswith("hf:"):
        from pipelines.files.hub import digests, pinned

        commit = pinned(path)
        return {name: f"{commit}/{name}" for name in digests(commit)}
    local = Path(path)
    if local.is_file():
        return {ONE_FILE: local}
    if not local.is_dir():
        raise RecipeError(f"path: {path}: no such file or folder")
    # without the folders below, because nothing reads a training's checkpoints
    return {file.name: file for file in local.iterdir() if file.is_file() and not file.name.startswith(".")}


def _below(root: str) -> Iterator[tuple[str, Location]]:
    """Yield (name relative to the root, location) of every regular file below it, except those that a system created.

    FIFOs, sockets and devices are left out, because opening one may block forever.

    Raises:
        RecipeError: the root is no folder, a name in it is not UTF-8, a link is broken, or there is nothing below
            s3://bucket/prefix.
    """
    if root.startswith("s3://"):
        yield from _objects_at(root)
        return
    top = Path(root)
    if not top.is_dir():
        raise RecipeError(f"source.root: {root} {'is not a folder' if top.exists() else 'does not exist'}")
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not left_by_a_system(name))
        for name in sorted(name for name in files if not left_by_a_system(name)):
            path = Path(folder) / name
            relative = path.relative_to(top).as_posix()
            try:
                relative.encode()
            except UnicodeEncodeError:
                raise RecipeError(f"source.root: the name of {str(path)!r} is not UTF-8; rename the file") from None
            if _is_regular(path):
                yield relative, path


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if path.is_symlink():
            raise RecipeError(
                f"source.root: {path} is a broken link ({path.readlink()}); remove it, or restore its target"
            ) from None
        if isinstance(error, FileNotFoundError):
            return False  # it went while the folder was listed
        raise RecipeError(f"source.root: {path}: {error.strerror}") from None


def _at(root: str) -> Iterator[tuple[str, Location]]:
    """Yield the file or object `root` and its further parts by name, or all `_below` it. Raises RecipeError."""
    if root.startswith("s3://"):
        objects = list(_objects_at(root))
        folder, _, name = root.rpartition("/")
        if objects == [(name, root)]:
            objects = [(part, f"{folder}/{part}") for part in parts_of(name, _names_in(folder))]
        yield from objects
    elif Path(root).is_file():
        path = Path(root)
        names = parts_of(path.name, _names_in(str(path.parent)))
        yield from ((name, path.parent / name) for name in names)
    else:
        yield from _below(root)


def _names_in(folder: str) -> Iterator[str]:
    """Yield the names in a folder; lazily, because `parts_of` rarely needs them."""
    if folder.startswith("s3://"):
        yield from (file.name for file in s3.listing(folder))
    else:
        yield from (path.name for path in Path(folder).iterdir())


def _named(root: str, names: Sequence[str]) -> dict[str, Location]:
    if root.startswith("s3://"):
        present = dict(_objects_at(root))
        return {name: present[name] for name in names if name in present}
    return {name: Path(root, name) for name in names if Path(root, name).is_file()}


def _objects_at(root: str) -> Iterator[tuple[str, str]]:
    """Yield (name, s3://bucket/key) of the object at an address, or of all below it, as in a folder."""
    if not (objects := s3.tree(root)):
        raise RecipeError(f"source.root: {root}: no such object or prefix")
    bucket = root.split("/")[2]
    for file in objects:
        parts = file.name.split("/")
        if any(part in ("", "..") for part in parts[:-1]) or parts[-1] == "..":
            raise RecipeError(f"source.root: {root} contains the object {file.key!r}, which is not a valid path")
        # the last part of a folder's own object is empty
        if parts[-1] and not any(map(left_by_a_system, parts)):
            yield file.name, f"s3://{bucket}/{file.key}"


def _package_folder(package: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RecipeError(f"the package {package} is not installed; run `make install`")
    return Path(spec.submodule_search_locations[0])
