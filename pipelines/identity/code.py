"""The digest of a stage's code, found without importing it.

Code does not enter a key, but with `--strict-code`: its digest is recorded beside the result, so that a change can be
told.
"""

from __future__ import annotations

import hashlib
import json
import os
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
    return sha256(canonical_json([[name, _source(name)[1]] for name in import_closure(job)]))


def import_closure(job: str) -> list[str]:
    """The project's files that a job's module imports or renders, found without importing anything."""
    pending, found = [f"ray_jobs/{module(job)}.py", "ray_jobs/__init__.py"], set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += _imported_files(name) if name.endswith(".py") else ()
    return sorted(found)


# An import of ours, the names in brackets or to the line's end. Parsing fifty files as Python takes a quarter of the
# time that a run with nothing to do may take.
_IMPORT = re.compile(
    rf"^[ \t]*(?:from ((?:{'|'.join(CODE_PACKAGES)})[\w.]*) import (\([^)]*\)|.*)"
    rf"|import ((?:{'|'.join(CODE_PACKAGES)})[\w.]*))",
    re.MULTILINE,
)


@cache
def _source(name: str) -> tuple[str, str]:
    """The text of a file of the project, and the sha256 of its bytes."""
    data = PROJECT.joinpath(name).read_bytes()
    return data.decode(), hashlib.sha256(data).hexdigest()


@cache
def _project_files() -> frozenset[str]:
    """The names of all files that a stage's code can consist of. A plan asks for some three thousand candidates."""
    root = f"{PROJECT}/"
    return frozenset(
        f"{folder.removeprefix(root)}/{name}"
        for package in CODE_PACKAGES
        for folder, _, names in os.walk(root + package)
        for name in names
        if name.endswith((".py", ".html.j2"))
    )


@cache
def _imported_files(name: str) -> tuple[str, ...]:
    ours: set[str] = set()
    for package, names, imported in _IMPORT.findall(_source(name)[0]):
        if imported:
            ours.add(imported)
        else:
            ours |= {package, *(f"{package}.{name}" for name in re.findall(r"\w+", names))}
    packages = {".".join(name.split(".")[:depth]) for name in ours for depth in range(1, name.count(".") + 2)}
    # a module brings the template that lies beside it under its name
    files = (
        f"{module.replace('.', '/')}{ending}"
        for module in packages
        for ending in (".py", "/__init__.py", ".html.j2")
    )
    return tuple(file for file in files if file in _project_files())


def git_state() -> dict[str, Any]:
    """The commit that the code is from and whether files differ from it.

    In a checkout git says so, in a package that was built from one the file that the build wrote. Empty if neither is
    there; a repository that only contains the folder of installed packages is not the code's own.
    """

    def git(*arguments: str) -> list[str]:
        import subprocess  # not needed to plan

        try:
            done = subprocess.run(["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []

    match git("rev-parse", "--show-toplevel", "HEAD"):
        case [top, commit] if Path(top) == PROJECT:
            return {"git": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    built = PROJECT / "pipelines" / "commit.json"  # see setup.py
    return dict(json.loads(built.read_text())) if built.exists() else {}
