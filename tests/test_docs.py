"""What README.md, CONTRIBUTING.md, docs/ and infra/README.md tell people to type works.

The language of a fenced block says what is done with it, and the word after it what it needs:

    sh                  its `vitflow` commands run, in order, in a folder with the store that the quickstart leaves
    sh starts-ray       the same, on a real Ray
    sh needs-...        it is not run, but its `vitflow` commands are parsed, and their recipes read
    python, sql, yaml   run; asked of that store; read as a pipeline, as stages of one, or as fields of a stage

On the pages "Add a ...", a block whose first line names a path is a file, or a change of one. They are put into a copy
of the project, where the page's commands run.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pipelines.cli import app
from pipelines.cluster.local import shut_down
from pipelines.commands import queries
from pipelines.identity import PROJECT
from pipelines.recipe.load import load_pipeline
from pipelines.spec import LATEST, STAGE_TYPES, input_fields
from tests.conftest import Vitflow
from tests.support.documented import prepare

PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    *sorted(PROJECT.glob("docs/*.md")),
    PROJECT / "infra" / "README.md",
]
ADD = [page for page in PAGES if page.name.startswith(("add-a-", "add-an-"))]
LANGUAGES = {"sh", "python", "sql", "yaml", "diff", "mermaid", "text"}
NEEDS = {
    "",
    "starts-ray",
    "needs-cluster",
    "needs-docker",
    "needs-hours",
    "needs-internet",
    "needs-kubernetes",
    "needs-root",
    "needs-terminal",
}
# what stands for a stage that a block names and does not show, by the kind of its artifact
STUBS = {
    "dataset": {"job": "ingest", "source": {"kind": "digits"}},
    "model": {"job": "import", "path": "vit.npz"},
}
PRETRAIN = {
    "job": "pretrain",
    "data": "images",
    "model": "B/16",
    "resolution": 224,
    "steps": 1,
    "batch_size": 2,
    "learning_rate": 0.1,
}
# a stage that has such a field
FIELDS = {"source": {"job": "ingest"}, "model": PRETRAIN, "optimizer": PRETRAIN}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    needs: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(PROJECT)}:{self.line}"

    @property
    def file(self) -> str:
        """The path that the first line names; empty where the block is not a file."""
        found = re.match(r"(?:#|---) (\S+\.(?:py|yaml|md))\n", self.text)
        return found[1] if found else ""

    def lines(self) -> list[str]:
        """The commands of a shell block."""
        lines = (line.strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line and not line.startswith("#")]


@cache
def blocks(page: Path) -> list[Block]:
    found = re.finditer(r"^```(\S*) ?(.*)\n((?:.*\n)*?)```$", page.read_text("utf-8"), re.MULTILINE)
    text = page.read_text("utf-8")
    return [Block(page, text[: match.start()].count("\n") + 1, *match.groups()) for match in found]


def select(language: str, needs: str = "") -> list[Any]:
    """The pages with such blocks, each with these, for parametrize."""
    by_page = {
        page: [block for block in blocks(page) if (block.language, block.needs) == (language, needs)]
        for page in PAGES
        if page not in ADD
    }
    return [pytest.param(own, id=page.name) for page, own in by_page.items() if own]


def arguments(line: str) -> Iterator[list[str]]:
    """Of each `vitflow` command in a line of shell."""
    if "vitflow" not in line:
        return
    words, verbs = shlex.split(line, comments=True), _tree().commands
    separators = {"|", ">", "&&", ";"}
    for place, word in enumerate(words):
        first = place == 0 or words[place - 1] in separators
        known = words[place + 1 : place + 2] and words[place + 1] in verbs
        if word.rpartition("/")[2] == "vitflow" and (first or known):
            yield list(takewhile(lambda word: word not in separators, words[place + 1 :]))


@cache
def _tree() -> Any:
    """The command line; a command reads the recipe that it names, and does nothing else."""

    def quiet(command: Any) -> None:
        for child in getattr(command, "commands", {}).values():
            quiet(child)
        if not hasattr(command, "commands"):
            command.callback = _read_recipe

    tree: Any = typer.main.get_command(app)
    tree.commands = dict(tree.commands)  # all of them, each made once
    quiet(tree)
    return tree


def _read_recipe(pipeline: str = "", changes: list[str] | None = None, **_: Any) -> None:
    """A shipped one, with its `--set`."""
    if re.fullmatch(r"\w+", pipeline):
        load_pipeline(pipeline, tuple(changes or ()))


def check(given: list[str]) -> None:
    """Parse a command and read its recipe. Raises for what does not fit."""
    with suppress(typer.Exit):  # --version
        _tree().main(given, prog_name="vitflow", standalone_mode=False)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that commands run in."""
    folder = tmp_path_factory.mktemp("docs")
    prepare(folder)
    return folder


@pytest.fixture
def at_work(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(queries, "_limit_process", lambda: None)  # it would bind this process


def invoke(given: list[str]) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return str(done.output)


# ------------------------------------------------------------------------------------------------- all blocks


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES and block.needs in NEEDS, block.place
        assert page.read_text("utf-8").count("\n```") == 2 * len(blocks(page)), page


def test_every_command_parses() -> None:
    for block in [block for page in PAGES for block in blocks(page) if block.language == "sh"]:
        for given in [given for line in block.lines() for given in arguments(line)]:
            try:
                check(given)
            except Exception as error:
                pytest.fail(f"{block.place}: vitflow {shlex.join(given)}: {error}")


def test_what_is_told_to_be_made_is_in_the_makefile() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    named = {*re.findall(r"(?:^|`|sudo )make (?:-C \S+ )?([a-z-]+)", text, re.MULTILINE)}
    targets = {*re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)}
    assert named <= targets


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
                assert anchor in map(_anchor, headings), f"{page.name}: {target}#{anchor}"


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_index_links_every_page() -> None:
    text = (PROJECT / "docs" / "README.md").read_text("utf-8")
    for page in PROJECT.glob("docs/*"):
        name = f"{page.name}/README.md" if page.is_dir() else page.name
        assert name == "README.md" or f"({name})" in text, name


def test_messages_of_the_troubleshooting_page_are_messages() -> None:
    """Each heading in backticks; `...` stands for what varies."""
    text = (PROJECT / "docs" / "troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    assert headings
    for heading in headings:
        for part in heading.split("..."):
            assert part.strip() in _said(), heading


@cache
def _said() -> str:
    """The code, and what it can say on one line: strings that follow each other are joined."""
    files = [path for folder in ("pipelines", "ray_jobs", "vit_model") for path in PROJECT.glob(f"{folder}/**/*.py")]
    texts = [path.read_text("utf-8") for path in [*files, PROJECT / "infra" / "install.sh"]]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


# ------------------------------------------------------------------------------------------------- what runs


@pytest.mark.slow
@pytest.mark.parametrize("own", select("sh"))
def test_commands_run(own: list[Block], at_work: None) -> None:
    for block in own:
        for line in block.lines():
            found = list(arguments(line))
            assert found, f"{block.place}: {line}: not a vitflow command; what does it need?"
            for given in found:
                try:
                    invoke(given)
                except (Exception, SystemExit) as error:
                    pytest.fail(f"{block.place}: {line}: {error}")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("own", select("sh", "starts-ray"))
def test_commands_run_on_ray(
    own: list[Block], workspace: Path, monkeypatch: pytest.MonkeyPatch, vitflow: Vitflow
) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    for given in [given for block in own for line in block.lines() for given in arguments(line)]:
        vitflow(*given)


@pytest.mark.slow
@pytest.mark.parametrize("own", select("python"))
def test_python_runs(own: list[Block], at_work: None) -> None:
    names: dict[str, Any] = {}
    for block in own:
        exec(compile("\n" * block.line + block.text, str(block.page), "exec"), names)


@pytest.mark.parametrize("own", select("sql"))
def test_sql_is_answered(own: list[Block], at_work: None) -> None:
    for block in own:
        assert invoke(["report", "query", block.text, "--csv"]).count("\n") > 1, f"{block.place}: no rows"


@pytest.mark.parametrize("own", select("yaml"))
def test_recipes_are_read(own: list[Block], tmp_path: Path) -> None:
    for block in own:
        for recipe in _recipes(block.text):
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
            try:
                assert load_pipeline(str(tmp_path / "recipe.yaml"))
            except ValueError as error:
                pytest.fail(f"{block.place}: {error}")


def _recipes(text: str) -> Iterator[dict[str, Any]]:
    """Whole pipelines of what a block has: one, some stages of one, or fields of a stage, each of which is a try."""
    entries = [yaml.safe_load(entry) for entry in re.split(r"\n(?=\w)", textwrap.dedent(text).strip())]
    whole = {name: value for entry in entries for name, value in entry.items()}
    if "stages" in whole:
        yield whole
    elif all(isinstance(stage, dict) and "job" in stage for stage in whole.values()):
        yield {"name": "page", "stages": _with_inputs(whole)}
    else:
        for field, value in (pair for entry in entries for pair in entry.items()):
            yield {"name": "page", "stages": _with_inputs({"stage": FIELDS[field] | {field: value}})}


def _with_inputs(stages: dict[str, Any]) -> dict[str, Any]:
    """The stages, with others for the names that they take and the block does not show."""
    found = dict(stages)
    for stage in stages.values():
        for field, kinds in input_fields(STAGE_TYPES[stage["job"]]).items():
            value = stage.get(field, ())
            value = value["stage"] if isinstance(value, dict) else value
            for name in [value] if isinstance(value, str) else value:
                if (field, name) == ("init_from", LATEST) or name.startswith("@"):
                    continue  # no stage
                found.setdefault(name.partition("@")[0], copy.deepcopy(STUBS[kinds[0]]))
    return found


# ------------------------------------------------------------------------------------------------- Add a ...


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the files and the changes that these pages show."""
    folder = tmp_path_factory.mktemp("added")
    for name in ("pipelines", "ray_jobs", "vit_model", "tests", "docs"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests" / "conftest.py").unlink()  # the tests of a page do not need it
    shutil.copy(PROJECT / "pyproject.toml", folder)
    for block in [block for page in ADD for block in blocks(page) if block.file]:
        path = folder / block.file
        if block.language == "diff":
            path.write_text(_changed(path.read_text("utf-8"), block))
        else:
            assert not path.exists(), f"{block.place}: {block.file} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder


def _changed(text: str, block: Block) -> str:
    """A file after the change that a block shows: `@@` begins each part, whose old lines are found by themselves."""
    for hunk in block.text.partition("\n@@\n")[2].split("\n@@\n"):
        lines = hunk.strip("\n").split("\n")
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"{block.place}: {text.count(old)} places in {block.file} read\n{old}"
        text = text.replace(old, new)
    return text


def _run(page: Path, folder: Path, *needs: str) -> None:
    """Run the shell blocks of a page that need no more than this, as they are, with the commands of the copy."""
    own = [block.text for block in blocks(page) if block.language == "sh" and block.needs in needs]
    python = shlex.quote(sys.executable)
    pytest_quick = "-m pytest -p no:hypothesispytest -p no:xdist"  # half of its start-up
    modules = {"python": "", "vitflow": "-m pipelines", "pytest": pytest_quick}
    functions = [f'{name}() {{ {python} {module} "$@"; }}' for name, module in modules.items()]
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*functions, *own])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert own and done.returncode == 0, f"{page.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", ADD, ids=lambda page: page.name)
def test_what_a_page_adds_works(added: Path, page: Path) -> None:
    _run(page, added, "")


def test_what_the_pages_add_passes_the_linter(added: Path) -> None:
    files = {block.file for page in ADD for block in blocks(page) if block.file.endswith(".py")}
    command = [sys.executable, "-m", "ruff", "check", *files]
    done = subprocess.run(command, cwd=added, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
def test_what_the_pages_add_runs(added: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "docs-ray"  # a Ray of its own: the other tests' knows nothing of the copy's modules
    monkeypatch.setenv("VITFLOW_RAY_DIR", str(folder))
    try:
        for page in ADD:
            _run(page, added, "", "starts-ray")
    finally:
        assert shut_down(folder)
