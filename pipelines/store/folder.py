"""A store in a local folder: create-only by hard links, durable by fsync."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines.errors import StoreAbsent, StoreDamaged, StoreError, StoreUnreachable
from pipelines.files.hashing import file_version
from pipelines.scratch import named_if_full
from pipelines.store import protocol
from pipelines.store.file_checks import OF_THE_FILE, fault, size_fault
from pipelines.store.records import FileEntry, Layout

_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP}
_TRIES = 100  # because other processes may remove empty folders meanwhile
_NO_ANSWER = {errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN}  # a file server may answer later


class FolderStore:
    """A store in a folder; see `pipelines.store.Store`.

    Raises:
        StoreError: the folder cannot be created or written, its file system has no hard links, or it is a store of
            another layout.
    """

    def __init__(self, root: Path, *, create: bool = True) -> None:
        self.root = root
        self.uri = str(root)
        self.settings = protocol.job_settings()  # a stage may read files on S3
        self.id = protocol.identify(self, create)

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        try:
            status = (self.root / name).lstat()
            if stat.S_ISLNK(status.st_mode):
                raise StoreDamaged(
                    f"{self.root}/{name} is damaged: it is a symbolic link, which a store never contains"
                )
            if not stat.S_ISREG(status.st_mode):
                raise StoreDamaged(f"{self.root}/{name} is damaged: it is not a file")
            if limit is not None and status.st_size > limit:
                raise protocol.too_large(f"{self.root}/{name}", status.st_size, limit)
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if name != Layout.STORE:
                self._require()
            return None
        except OSError as error:
            raise self._unreadable(name, error) from None

    def read_all(self, names: Sequence[str], limit: int | None = None) -> list[bytes | StoreDamaged | None]:
        return [protocol.read_or_damage(self, name, limit) for name in names]

    def _require(self) -> None:
        """Raise StoreAbsent if the store was deleted: a folder created there now would look like a store."""
        if not (self.root / Layout.STORE).exists():
            raise StoreAbsent(f"{self.root} is no longer a store: its {Layout.STORE} was deleted")

    def _refused(self, verb: str, name: str, error: OSError, kind: type[StoreError]) -> StoreError:
        """Return the error for an operation that the file system refused: StoreUnreachable if a retry may help."""
        hint = " (a store needs a file system with hard links)" if error.errno in _NO_LINKS else ""
        kind = StoreUnreachable if error.errno in _NO_ANSWER else kind
        return kind(f"{self.root}: cannot {verb} {name}: {error.strerror}{hint}")

    def _unreadable(self, name: str, error: OSError) -> StoreError:
        """Return the error for an object that cannot be read: StoreDamaged only if the file itself is at fault."""
        return self._refused("read", name, error, StoreDamaged if error.errno in OF_THE_FILE else StoreError)

    def read_range(self, name: str, start: int, length: int) -> bytes:
        try:
            with (self.root / name).open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise self._refused("read", name, error, StoreError) from None
        return protocol.complete(f"{self.root}/{name}", data, start, length)

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        if name != Layout.STORE:
            self._require()
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            _make_folders(path.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                is_first = _link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except OSError as error:
            raise self._refused("write", name, error, StoreError) from None
        return is_first or self.read(name) == data

    def replace(self, name: str, data: bytes) -> None:
        path = self.root / name
        self._require()
        temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        try:
            _make_folders(path.parent)
            try:
                temporary.write_bytes(data)  # no fsync: the next bytes follow in seconds
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise self._refused("write", name, error, StoreError) from None

    def remove(self, names: Sequence[str]) -> None:
        self._require()
        for name in names:
            path = self.root / name
            try:
                path.unlink()
                _sync_folder(path.parent)  # before the next, so that a power cut cannot change the order
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._refused("remove", name, error, StoreError) from None
        for folder in {(self.root / name).parent for name in names}:
            self._remove_emptied(folder)

    def _remove_emptied(self, folder: Path) -> None:
        """Remove a folder without objects, including killed writers' temporary files, and empty folders above it."""
        with suppress(OSError):
            entries = list(folder.iterdir())
            if all(entry.name.startswith(".") for entry in entries):
                for entry in entries:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent

    def names(self, folder: str, prefix: str = "", after: str = "") -> list[str]:
        return [name for name in self._children(folder) if name.startswith(prefix) and name > after]

    def _children(self, folder: str) -> list[str]:
        try:
            children = os.listdir(self.root / folder)  # noqa: PTH208 (faster: there may be 100,000)
            return sorted(name for name in children if not name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._refused("list", folder, error, StoreError) from None

    def versions(self, folder: str, names: Sequence[str], beside: str) -> dict[str, str | None]:
        root = f"{self.root}/{folder}"
        return {child: _versions([f"{root}/{child}/{name}" for name in names]) for child in self._children(folder)}

    def sizes(self, folder: str) -> dict[str, int]:
        found = {}
        for parent, _, files in os.walk(self.root / folder):
            for path in (Path(parent, name) for name in files):
                with suppress(FileNotFoundError):  # another process has just removed it
                    found[path.relative_to(self.root).as_posix()] = path.lstat().st_size
        return found

    def digest(self, name: str) -> tuple[int, str] | None:
        try:
            if (self.root / name).exists() and not (self.root / name).is_file():
                raise StoreDamaged(f"{self.root}/{name} is damaged: it is not a file")
            with (self.root / name).open("rb") as file:
                return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(name, error) from None

    def check_sizes(self, folder: str, files: Iterable[FileEntry]) -> None:
        self._check(folder, files, size_fault)

    def local(self, folder: str, files: Iterable[FileEntry]) -> Path:
        self._check(folder, files, fault)
        return self.root / folder

    def _check(self, folder: str, files: Iterable[FileEntry], check: Callable[[Path, FileEntry], str | None]) -> None:
        root = self.root / folder
        for entry in files:
            try:
                problem = check(protocol.inside(root, entry.path), entry)
            except OSError as error:
                raise self._unreadable(f"{folder}/{entry.path}", error) from None
            if problem is not None:
                raise StoreDamaged(f"{self.root}/{folder}/{entry.path} is damaged: it {problem}")

    @contextmanager
    def staging(self, folder: str) -> Iterator[protocol.Staging]:
        target = self.root / folder
        self._require()
        _make_folders(target)
        temporary = target / f".staging-{secrets.token_hex(8)}"
        temporary.mkdir()
        try:
            staging = protocol.Staging(temporary)
            with named_if_full(target):
                yield staging
                self._require()
                staging.files = tuple(
                    _move_durably(path, temporary, target) for path in sorted(temporary.rglob("*")) if path.is_file()
                )
        except OSError:
            self._require()  # a better message if the store was deleted in the meantime
            raise
        finally:
            if temporary.exists():
                shutil.rmtree(temporary)


def store_folder(path: str) -> Path:
    """Return the absolute path of a store's folder, which need not exist.

    Raises:
        StoreError: it is not a valid path of a folder, or not UTF-8.
    """
    try:
        root = Path(path).expanduser().resolve()
        str(root).encode()
        root.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return root
    except UnicodeEncodeError:
        raise StoreError(f"{str(root)!a}: not UTF-8; use another path for the store") from None
    except RuntimeError as error:  # an unknown user's home; before Python 3.13 also a loop of links
        raise StoreError(f"{path}: {error}") from None
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise StoreError(f"{path}: {error.strerror}") from None
    return root


def _versions(paths: Iterable[str]) -> str | None:
    try:
        return " ".join(file_version(os.lstat(path)) for path in paths)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return ""


def _make_folders(path: Path) -> None:
    """Do `mkdir -p`, so that new folders survive a power cut."""
    for _ in range(_TRIES):
        if path.is_dir():
            return
        _make_folders(path.parent)
        try:
            path.mkdir(exist_ok=True)
            _sync_folder(path.parent)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a folder") from None
        except FileNotFoundError as error:  # another process has just removed the empty parent (`remove`)
            missing = error
    raise missing  # every time: in /proc, for example, no folder can be made, and this is its error


def _link(temporary: Path, path: Path) -> bool:
    """Link a file to its name unless that exists; rename would overwrite, and O_EXCL expose half-written files."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_durably(path: Path, staging: Path, target: Path) -> FileEntry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    relative = path.relative_to(staging)
    size = path.stat().st_size
    # Safetensors writes files that only their owner can read. The mode for files is derived from a new folder's.
    if hidden := stat.S_IMODE(staging.stat().st_mode) & 0o666 & ~path.stat().st_mode:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | hidden)
    final = target / relative
    _make_folders(final.parent)
    path.rename(final)
    _sync_folder(final.parent)
    return FileEntry(path=relative.as_posix(), size=size, sha256=digest)
