"""Archives, images and whole sources, mutated: a UserError is the worst that comes of it. See `tests.support.fuzz`.

VITFLOW_FUZZ_MUTATIONS (default 300) is how many mutations each target has in the long test.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import fuzz

MISBEHAVED = """
import json, os, pickle, subprocess, sys, time
from pathlib import Path
from tests.support import fuzz

class Evil:
    def __reduce__(self):
        return str, ("unpickled",)

def crash(folder, data):
    calls.append(data)
    if len(calls) > 1:  # the first is the seed itself, unguarded
        {"writes": lambda: Path(sys.argv[1]).write_text("outside"),
         "links": lambda: os.symlink("/etc", sys.argv[1]),
         "unpickles": lambda: pickle.loads(evil),
         "starts": lambda: subprocess.run(["true"]),
         "hangs": lambda: time.sleep(30),
         "fills": lambda: bytearray(2**36),
         "raises": lambda: {}["key"]}[name]()

fuzz.SECONDS, evil = 1, pickle.dumps(Evil())
faults = {}
for name in ("writes", "links", "unpickles", "starts", "hangs", "fills", "raises"):
    calls = []
    fuzz.targets = lambda: {name: fuzz.Target([b"seed" * 9], crash)}
    faults[name] = fuzz.fuzz(Path.cwd(), 1, 0, [])["faults"][0]
print(json.dumps(faults))
"""


def run(folder: Path, *arguments: str, timeout: float = 60) -> Any:
    environment = os.environ | {"PYTHONPATH": str(Path.cwd()), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{folder / 'last'} brought it down: {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout)


def check(folder: Path, mutations: int, seed: int, timeout: float) -> None:
    """Every target has all its mutations; two processes share the targets out, each with a folder of its own."""
    targets = fuzz.targets()
    names = list(targets)

    def part(number: int) -> dict[str, int]:
        own = folder / str(number)
        own.mkdir()
        arguments = (str(own), str(mutations), str(seed), *names[number::2])
        report = run(own, "-m", "tests.support.fuzz", *arguments, timeout=timeout)
        assert not report["faults"], "\n\n".join(report["faults"][:10])
        assert report["peak_mib"] < 2_000
        assert [path.name for path in own.iterdir()] == ["last"]
        return {name: sum(counts.values()) for name, counts in report["counts"].items()}

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(part, range(2))
    assert {path.name for path in folder.iterdir()} == {"0", "1"}
    assert first | second == {name: target.mutations(mutations) for name, target in targets.items()}


@pytest.mark.slow
def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    check(tmp_path, 12, seed=0, timeout=60)


@pytest.mark.full
@pytest.mark.slow
def test_thousands_of_mutations_are_read_or_refused(tmp_path: Path) -> None:
    check(tmp_path, int(os.environ.get("VITFLOW_FUZZ_MUTATIONS", "300")), seed=1, timeout=580)


@pytest.mark.slow
def test_the_fuzzer_sees_what_must_not_happen(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    faults = run(tmp_path / "in", "-c", MISBEHAVED, str(tmp_path / "outside"))
    assert "open" in faults["writes"] and "os.symlink" in faults["links"] and "find_class" in faults["unpickles"]
    assert "Popen" in faults["starts"] and "no answer" in faults["hangs"] and "MemoryError" in faults["fills"]
    assert "KeyError" in faults["raises"]
