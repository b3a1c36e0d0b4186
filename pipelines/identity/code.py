"""The digest of a stage's code, found without importing it.

Code does not enter a key, but with `--strict-code`: its digest is recorded beside the result, so that a change can be
told.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.identity.key import canonical_json, sha256
from pipelines.spec import module

PROJECT = Path(__file__).resolve().parents[2]
CODE_PACKAGES = ("ray_jobs", "vit_model")  # pipelines only carries values, and every value is in the key


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
