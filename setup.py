"""Write the commit that a wheel is built from into it. Everything else about the package is in pyproject.toml."""

import json
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
COMMIT_FILE = "pipelines/commit.json"  # read by pipelines.identity.git_state


def write_commit(folder: str) -> None:
    """Write the commit of this checkout below `folder`. A source distribution has no git and brings the file along."""
    run = ["git", "-C", str(ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        top, commit = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return
    if Path(top) == ROOT:
        changed = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]
        dirty = bool(subprocess.run(changed, capture_output=True, check=True).stdout)
        (Path(folder) / COMMIT_FILE).write_text(json.dumps({"git": commit, "dirty": dirty}))


class BuildPy(build_py):
    """setuptools' step that collects the Python files."""

    def run(self) -> None:
        """Collect them anew: an earlier build may have left modules that were moved since."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        write_commit(self.build_lib)


class Sdist(sdist):
    """setuptools' source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Add the commit to it."""
        super().make_release_tree(base_dir, files)
        write_commit(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
