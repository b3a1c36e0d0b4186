"""The digest of a stage's code, computed without importing the code.

The digest enters a key only with `--strict-code`. It is always recorded in the manifest, so that changes are detected.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.files.hashing import read_cache, write_cache
from pipelines.identity.key import canonical_json, sha256
from pipelines.spec import module

PROJECT = Path(__file__).resolve().parents[2]
CODE_PACKAGES = ("ray_jobs", "vit_model")
# Every stage also depends on the code in `pipelines` that computes its values: the meaning of fields, the files of a
# source, the encoding of values for a hash. Code that moves records and jobs around is left out.
VALUES = (
    "pipelines/spec/**/*.py",
    "pipelines/files/*.py",
    "pipelines/file_names.py",
    "pipelines/identity/key.py",
)
CODE_SCHEME = 2  # the version of the digest's computation; manifests record it
_FORMS = f"code-forms-{CODE_SCHEME}.json"


@cache
def code_digest(job: str) -> str:
    """Return the sha256 over the code of a stage's job without comments, docstrings and descriptions.

    Parsing a file takes milliseconds, so the digest of its form is cached by the digest of its bytes.
    """
    sources = {name: _source(name) for name in import_closure(job)}
    forms = read_cache(_FORMS)
    fresh = {
        digest: sha256(code_form(text))
        for name, (text, digest) in sources.items()
        if _is_python(name) and digest not in forms
    }
    if fresh:
        forms = forms | fresh
        write_cache(_FORMS, forms)
    return sha256(canonical_json([[name, forms.get(digest, digest)] for name, (_, digest) in sources.items()]))


def _is_python(name: str) -> bool:
    return name.endswith(".py")


def code_form(source: str) -> str:
    """Return a canonical form of Python code, the same in every version of Python.

    It omits comments, formatting, docstrings, descriptions of fields, and the versions of stages, which the key
    contains.
    """
    return _form(ast.parse(source))


def _form(node: Any) -> str:
    if isinstance(node, list):
        return f"[{','.join(_form(item) for item in node if not _says_nothing(item))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    # Fields that a version of Python added are empty where the code does not use them.
    fields = [
        f"{name}={_form(value)}"
        for name, value in ast.iter_fields(node)
        if value is not None and value != [] and name != "ctx"
    ]
    return f"{type(node).__name__}({','.join(fields)})"


def _says_nothing(node: Any) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True  # a docstring
        case ast.keyword(arg="description"):
            return True
        case (
            ast.AnnAssign(target=ast.Name(id="VERSION" | "CONCERNS"))
            | ast.Assign(targets=[ast.Name(id="VERSION" | "CONCERNS")])
        ):
            return True
    return False


def import_closure(job: str) -> list[str]:
    """Return the project's files that a job's module imports or renders, and VALUES, without importing anything."""
    pending, closure = [f"ray_jobs/{module(job)}.py", "ray_jobs/__init__.py", *_value_files()], set()
    while pending:
        name = pending.pop()
        if name not in closure:
            closure.add(name)
            pending += _imported_files(name) if _is_python(name) else ()
    return sorted(closure)


@cache
def _value_files() -> tuple[str, ...]:
    return tuple(file.relative_to(PROJECT).as_posix() for part in VALUES for file in PROJECT.glob(part))


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
        f"{module.replace('.', '/')}{ending}" for module in packages for ending in (".py", "/__init__.py", ".html.j2")
    )
    return tuple(file for file in files if file in _project_files())


def git_state() -> dict[str, Any]:
    """Return the commit of the code, and whether files differ from it.

    The source is git in a checkout, and in an installed package the file that the build wrote. Empty if there is
    neither; a repository that merely contains the folder of installed packages does not count.
    """

    def git(*arguments: str) -> list[str]:

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
