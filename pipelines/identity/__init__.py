"""A stage's key: what makes two runs of a stage the same. Plus the digests of sources and of code.

    key = sha256(canonical JSON {job, the job's VERSION, identity fields, content digests of the inputs})

A source is known by the sha256 of its files' contents and their names relative to its root; where it lies, and when
its files were touched, does not matter. Code does not enter the key, but with `--strict-code`: its digest is recorded
beside the result, so that a change can be told.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pipelines.spec import AnyStage, RecipeError, module
from pipelines.store import StoreError, StoreUnreachable
from vit_model.config import Frozen

PROJECT = Path(__file__).resolve().parents[2]
CODE_PACKAGES = ("ray_jobs", "vit_model")  # pipelines only carries values, and every value is in the key


def canonical_json(value: Any) -> str:
    """The one spelling of a value in every process.

    Raises:
        TypeError: a value that has no such spelling (a set, NaN, an object); nothing falls back to `str()`.
    """
    _check_canonical(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _check_canonical(value: Any) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key of a mapping must be a string, not {key!r}")
            _check_canonical(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_canonical(item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{value!r} has no canonical spelling")
    elif value is not None and type(value) not in (str, int, bool):
        raise TypeError(f"{value!r} of type {type(value).__name__} has no canonical spelling")


def sha256(text: str) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def identity_fields(config: Frozen) -> dict[str, Any]:
    """The fields that change the result: all but execution fields and names of inputs that no result shows.

    A field that came later (a class's LATER names them) is left out while it has its default, so that what was made
    before it came keeps its key.
    """
    fields: dict[str, Any] = {}
    later: frozenset[str] = getattr(type(config), "LATER", frozenset())
    for name, info in type(config).model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        if extra.get("execution") or ("input" in extra and not extra.get("shows_names")):
            continue
        value = getattr(config, name)
        default = info.get_default(call_default_factory=True, validated_data=vars(config))
        if name in later and value == default:
            continue
        fields[name] = identity_fields(value) if isinstance(value, Frozen) else value
    return fields


def stage_key(
    config: AnyStage, inputs: Mapping[str, Any], source: str | None, code: str | None = None
) -> str:
    """The key of a stage.

    Args:
        config: the stage.
        inputs: field -> content digest of the artifact that it names, or the list of them.
        source: the fingerprint of the files that it reads from outside, None where it reads none.
        code: with `--strict-code` the digest of the stage's code; None leaves it out.
    """
    assert (source is None) == (config.files() is None)
    made_of = {
        "job": config.job,
        "version": config.VERSION,
        "fields": identity_fields(config),
        "inputs": dict(inputs),
        "source": source,
    }
    return sha256(canonical_json(made_of if code is None else made_of | {"code": code}))


def successor_key(key: str, nonce: str) -> str:
    """The key of the artifact that `--force` puts in the place of another."""
    return sha256(canonical_json({"replaces": key, "nonce": nonce}))


# ------------------------------------------------------------------------------------------------- fingerprints


def source_fingerprint(config: AnyStage) -> str | None:
    """The fingerprint of the files that a stage reads from outside: their names and contents; None: it reads none.

    Raises:
        RecipeError: there are no files, or one can't be read.
        StoreUnreachable: they are on S3, which does not answer.
    """
    given = config.files()
    if given is None:
        return None
    try:
        files = list(given)
        if not files:
            raise RecipeError(f"{config.job}: its source has no files")
        return files_fingerprint(files)
    except OSError as error:
        raise RecipeError(f"{error.filename}: {error.strerror}") from None
    except StoreUnreachable:
        raise
    except StoreError as error:
        raise RecipeError(str(error)) from None


def object_facts(uris: Iterable[str]) -> dict[str, tuple[str, int]]:
    """(ETag, size) of objects s3://bucket/key: they stand for the content. Raises StoreError: one is not there."""
    from pipelines.files.s3 import facts

    return facts(uris)


def _hub_digest(location: str) -> str:
    from pipelines.files.hub import digests

    path, _, name = location.rpartition("/")
    return digests(path)[name]


def files_fingerprint(files: Iterable[tuple[str, str | Path]]) -> str:
    """sha256 over what `file_digests` says of all files."""
    return sha256(canonical_json(sorted(file_digests(files))))


def file_digests(files: Iterable[tuple[str, str | Path]]) -> list[tuple[Any, ...]]:
    """(name, sha256 of the contents) of each file, remembered by (device, inode, size, mtime, ctime).

    For an object s3://bucket/key it is (name, ETag, size), because reading all would take too long. For
    hf:ORG/NAME@COMMIT/name the sha256 is the hub's, so a model there has the key of the same files in a folder.

    Raises:
        RecipeError: one can't be read.
    """
    known = _read_digest_cache()
    fresh: dict[str, str] = {}
    lines: list[tuple[Any, ...]] = []
    objects = []
    for name, location in files:
        if isinstance(location, str) and location.startswith("s3://"):
            objects.append((name, location))
            continue
        if isinstance(location, str) and location.startswith("hf:"):
            lines.append((name, _hub_digest(location)))
            continue
        path = Path(location)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RecipeError(f"{path} is not a regular file (a FIFO, a socket or a device): remove it")
            identity = file_version(status)
            digest = known.get(identity)
            if digest is None:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                fresh[identity] = digest
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}") from None
        lines.append((name, digest))
    if fresh:
        _write_digest_cache(known | fresh)
    if objects:
        found = object_facts(uri for _, uri in objects)
        lines += [(name, *found[uri]) for name, uri in objects]
    return lines


def file_version(status: os.stat_result) -> str:
    """Values that change when a file is written or replaced: device, inode, size, mtime and ctime."""
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def cache_folder() -> Path:
    """The user's cache folder of vitflow."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vitflow"


def _read_digest_cache() -> dict[str, str]:
    path = cache_folder() / "file-digests.json"
    try:
        status = path.stat()
        return _parse_digests(path, status.st_ino, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, TypeError):
        return {}  # a cache: without it files are read again


@lru_cache(
    maxsize=1
)  # it may be large, and a plan asks for it once a source; a change makes another file of it
def _parse_digests(path: Path, inode: int, modified: int, size: int) -> dict[str, str]:
    return dict(json.loads(path.read_text()))


def _write_digest_cache(digests: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a cache: where it can't be kept, files are read again
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"file-digests.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(digests))
        temporary.replace(folder / "file-digests.json")


# ------------------------------------------------------------------------------------------------- code


@cache
def code_digest(job: str) -> str:
    """sha256 over the files that a job's module imports from this project, itself included, at any depth."""
    return sha256(
        canonical_json(
            [
                [name, hashlib.sha256(PROJECT.joinpath(name).read_bytes()).hexdigest()]
                for name in import_closure(job)
            ]
        )
    )


def import_closure(job: str) -> list[str]:
    """The project's files that a job's module imports or renders, found without importing anything."""
    pending, found = [PROJECT / "ray_jobs" / f"{module(job)}.py", PROJECT / "ray_jobs" / "__init__.py"], set()
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported_files(path) if path.suffix == ".py" else ()
    return sorted(path.relative_to(PROJECT).as_posix() for path in found)


# An import of ours, the names in brackets or to the line's end. Parsing fifty files as Python takes a quarter of the
# time that a run with nothing to do may take.
_IMPORT = re.compile(
    rf"^[ \t]*(?:from ((?:{'|'.join(CODE_PACKAGES)})[\w.]*) import (\([^)]*\)|.*)"
    rf"|import ((?:{'|'.join(CODE_PACKAGES)})[\w.]*))",
    re.MULTILINE,
)


@cache
def _imported_files(path: Path) -> tuple[Path, ...]:
    ours: set[str] = set()
    for package, names, imported in _IMPORT.findall(path.read_text("utf-8")):
        if imported:
            ours.add(imported)
        else:
            ours |= {package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))}
    packages = {".".join(name.split(".")[:depth]) for name in ours for depth in range(1, name.count(".") + 2)}
    modules = (PROJECT.joinpath(*name.split(".")) for name in packages)
    # a module brings the template that lies beside it under its name
    files = (
        file
        for module in modules
        for file in (module.with_suffix(".py"), module / "__init__.py", module.with_suffix(".html.j2"))
    )
    return tuple(file for file in files if file.is_file())


def git_state() -> dict[str, Any]:
    """The commit that the code is from and whether files differ from it; empty outside a git checkout."""

    def git(*arguments: str) -> str | None:
        import subprocess  # not needed to plan

        try:
            done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    sha = git("rev-parse", "HEAD")
    return (
        {}
        if sha is None
        else {"git": sha, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    )
