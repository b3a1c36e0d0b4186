"""The limits of the house: how large a folder, a file, a function and a signature may be, and no imports in a circle.

An import counts wherever it is: at the top of a module, inside a function and under TYPE_CHECKING.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGES = ("pipelines", "ray_jobs", "vit_model")
MODULES_PER_FOLDER, LINES_PER_FILE, LINES_PER_FUNCTION, PARAMETERS, INNER_IMPORTS = 17, 450, 60, 8, 120

FILES = {path.relative_to(ROOT): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}
TREES = {path: ast.parse(file.read_text()) for path, file in FILES.items()}
FUNCTIONS = [
    (path, node)
    for path, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
]


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


def imported(tree: ast.AST) -> Iterator[str]:
    """The project's modules that a module names in its imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in {"self", "cls"} for argument in named)


def too_large() -> Iterator[str]:
    """What exceeds a limit."""
    for folder in sorted({path.parent for path in FILES}):
        if sum(path.parent == folder and path.stem != "__init__" for path in FILES) > MODULES_PER_FOLDER:
            yield f"{folder}: modules"
    for path, file in FILES.items():
        if len(file.read_text().splitlines()) > LINES_PER_FILE:
            yield f"{path}: lines"
    for path, function in FUNCTIONS:
        if function.end_lineno - function.lineno + 1 > LINES_PER_FUNCTION:  # type: ignore[operator]
            yield f"{path} {function.name}: lines"
        if parameters(function) > PARAMETERS:
            yield f"{path} {function.name}: parameters"


def test_folders_files_functions_and_signatures_are_small() -> None:
    assert list(too_large()) == [], "make these smaller"


def test_few_imports_are_inside_functions() -> None:
    inner = {
        (path, node.lineno)
        for path, function in FUNCTIONS
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(inner) < INNER_IMPORTS


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): set(imported(tree)) - {module_name(path)} for path, tree in TREES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")
