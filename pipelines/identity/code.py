"""The digest of a stage's code, computed without importing the code.

The digest enters a key only with `--strict-code`. It is always recorded in the manifest, so that changes are detected.
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
CODE_PACKAGES = ("ray_jobs", "vit_model")  # not pipelines: it only passes on values, and these are in the key


@cache
def code_digest(job: str) -> str:
    """Return the sha256 over a job's module and the files of this project that it imports, at any depth."""
    return sha256(canonical_json([[name, _source(name)[1]] for name in import_closure(job)]))


def import_closure(job: str) -> list[str]:
    """Return the project's files that a job's module imports or renders, without importing anything."""
    pending, closure = [f"ray_jobs/{module(job)}.py", "ray_jobs/__init__.py"], set()
    while pending:
        name = pending.pop()
        if name not in closure:
            closure.add(name)
            pending += _imported_files(name) if name.endswith(".py") else ()
    return sorted(closure)


# An import from this project; the names are in parentheses or extend to the end of the line. Parsing fifty files as
# Python would take a quarter of the time of a cached rerun.
_IMPORT = re.compile(
    rf"^[ \t]*(?:from ((?:{'|'.join(CODE_PACKAGES)})[\w.]*) import (\([^)]*\)|.*)"
    rf"|import ((?:{'|'.join(CODE_PACKAGES)})[\w.]*))",
    re.MULTILINE,
)


@cache
def _source(name: str) -> tuple[str, str]:
    """Return the text of a file of the project, and the sha256 of its bytes."""
    data = PROJECT.joinpath(name).read_bytes()
    return data.decode(), hashlib.sha256(data).hexdigest()


@cache
def _project_files() -> frozenset[str]:
    """Return the names of all files that can belong to a stage's code. A plan looks up about 3,000 candidates."""
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
    # a module also uses the template of the same name beside it
    files = (
        f"{module.replace('.', '/')}{ending}"
        for module in packages
        for ending in (".py", "/__init__.py", ".html.j2")
    )
    return tuple(file for file in files if file in _project_files())


def git_state() -> dict[str, Any]:
    """Return the commit of the code, and whether files differ from it.

    The source is git in a checkout, and in an installed package the file that the build wrote. Empty if there is
    neither; a repository that merely contains the folder of installed packages does not count.
    """

    def git(*arguments: str) -> list[str]:
        import subprocess  # planning does not need it

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
