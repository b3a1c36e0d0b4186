"""The wheel: it holds the packages and nothing else, knows its commit, and runs a pipeline without the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipelines", "ray_jobs", "vit_model")


class Wheel(NamedTuple):
    """A wheel, the commit it was built from, and the files that the commit's packages have."""

    file: Path
    commit: str
    sources: set[str]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commit_all(folder: Path) -> None:
    """Make a repository of a folder."""
    author = {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    run("git", "init", "--quiet", cwd=folder)
    run("git", "add", ".", cwd=folder)
    run("git", "commit", "--quiet", "--allow-empty", "--message=all", cwd=folder, **author)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Built from a commit of the files as they are now, with the left-overs of an earlier build beside them."""
    checkout = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    names = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    commit_all(checkout)
    stale = checkout / "build" / "lib" / "pipelines" / "moved_since.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir=dist", ".", cwd=checkout)
    (file,) = (checkout / "dist").iterdir()
    commit = run("git", "rev-parse", "HEAD", cwd=checkout).strip()
    return Wheel(file, commit, {name for name in names if name.split("/")[0] in PACKAGES})


@pytest.fixture(scope="module")
def site(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in, inside somebody else's repository; its dependencies are the tests'."""
    other = tmp_path_factory.mktemp("other")
    commit_all(other)
    folder = other / "site"
    install = ["install", "--quiet", "--no-index", "--no-deps", f"--target={folder}"]
    run(sys.executable, "-m", "pip", *install, wheel.file, cwd=other)
    return folder


def test_it_has_every_file_of_the_packages_and_no_other(wheel: Wheel) -> None:
    packed = {name for name in ZipFile(wheel.file).namelist() if ".dist-info/" not in name}
    linted = {f"{package}/ruff.toml" for package in PACKAGES}
    assert packed == wheel.sources - linted | {"pipelines/commit.json"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed


def test_it_says_its_version_and_its_commit(wheel: Wheel, site: Path, tmp_path: Path) -> None:
    said = run(site / "bin" / "vitflow", "--version", cwd=tmp_path, PYTHONPATH=str(site))
    version = wheel.file.name.split("-")[1]
    assert said == f"vitflow {version} (commit {wheel.commit[:12]})\n"


@pytest.mark.ray
@pytest.mark.full
def test_it_runs_a_pipeline_from_another_folder(wheel: Wheel, site: Path, home: Path, tmp_path: Path) -> None:
    recipe = shutil.copy(ROOT / "tests" / "tiny.yaml", tmp_path)
    own = {"PYTHONPATH": str(site), "VITFLOW_RAY_DIR": str(home / "wheel")}  # a Ray of this installation
    try:
        command = ("run", recipe, "--only", "pixels", "--store", "results")
        run(site / "bin" / "vitflow", *command, cwd=tmp_path, **own)
    finally:
        run(sys.executable, "-m", "pipelines.cluster.local", "stop", cwd=tmp_path, **own)
    manifests = tmp_path.glob("results/artifacts/*/*/manifest.json")
    commits = [json.loads(path.read_text())["code"]["git"] for path in manifests]
    assert commits == [wheel.commit] * 2, "the wheel's code made them"
