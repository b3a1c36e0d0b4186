"""The files of a root, which is a folder, an archive, or a prefix on S3.

In: the root, and the files of its source. Out: a member for each regular file, and what is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pipelines.file_names import left_by_a_system, parts_of
from pipelines.files import s3
from ray_jobs.sources.archives import containers
from ray_jobs.sources.archives.entries import Files, Member, Unusable
from vit_model.errors import UserError


class Root(NamedTuple):
    """The files of a root, by their paths below it."""

    members: dict[str, Member]
    unusable: tuple[Unusable, ...] = ()
    """Members of an archive that are refused."""
    special: tuple[str, ...] = ()
    """Paths of FIFOs, sockets and devices, which are never opened."""
    is_archive: bool = False


def files_of(root: str, files: Files) -> Root:
    """Return the files of a root; `files` are those to use.

    Raises:
        UserError: a link leads outside or to a folder, or is broken; or the archive is damaged, or none of its files
            can be used.
    """
    if Path(root).is_dir():
        keys, special = in_folder(Path(root), files.keys())
        return Root({key: _whole(key, (Path(root) / key).stat().st_size) for key in keys}, special=special)
    name = PurePosixPath(root).name
    if list(files) != parts_of(name, files):
        facts = s3.facts(files.values())
        return Root({name: _whole(name, facts[location][1]) for name, location in files.items()})
    members, refused = containers.contents(files, name)
    if refused and not members:
        raise UserError(
            f"{root}: none of its {len(refused):,} files can be used, such as {refused[0].key}: {refused[0].reason}"
        )
    return Root({member.path: member for member in members}, tuple(refused), is_archive=True)


def in_folder(root: Path, only: Collection[str] = ()) -> tuple[list[str], tuple[str, ...]]:
    """Return the regular files below a folder, and what else is there, sorted.

    Args:
        only: the regular files to list, to ignore those that came later; all if empty.

    Raises:
        UserError: a link leads outside or to a folder, or is broken.
    """
    keys = sorted(
        (key, is_regular) for key, is_regular in _files_below(root) if not (is_regular and only and key not in only)
    )
    special = tuple(key for key, is_regular in keys if not is_regular)
    return [key for key, is_regular in keys if is_regular], special


def _files_below(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield (key, whether it is a regular file) of all files, without those that an operating system left.

    Raises:
        UserError: a link to a folder, a link that leads outside, or a broken link.
    """
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not left_by_a_system(name)]
        for name in folders:
            if Path(folder, name).is_symlink():
                raise UserError(f"{Path(folder, name)} is a link to a folder: put the folder itself there")
        for name in files:
            path = Path(folder, name)
            if left_by_a_system(name):
                continue
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue  # removed while the folder was listed
            if stat.S_ISLNK(mode):
                target = Path(os.path.realpath(path))
                if not target.is_relative_to(inside):
                    raise UserError(f"{path} is a link that leads outside {root}: put the file itself there")
                if not target.exists():
                    raise UserError(f"{path} is a broken link: remove it, or restore its target")
                mode = target.stat().st_mode
            yield path.relative_to(root).as_posix(), stat.S_ISREG(mode)


def _whole(key: str, size: int) -> Member:
    """Return a file that is not in an archive."""
    return Member(key, key, 0, size, "stored", size)
