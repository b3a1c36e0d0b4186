"""Temporary folders: what killed processes leave is removed by the next one, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

from pipelines.scratch import scratch_folder

HOLD = """
import sys, time
from pathlib import Path
from pipelines.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_killed_processs_folder_is_removed_at_the_next_start_and_a_live_ones_is_not(tmp_path: Path) -> None:
    other = tmp_path / "vitflow-scratch"  # not by us
    other.mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        long_ago = left.stat().st_mtime - 3600
        os.utime(left, (long_ago, long_ago))
        with scratch_folder(tmp_path) as own:
            assert {*tmp_path.iterdir()} == {own, left, other}
        process.kill()
    with scratch_folder(tmp_path) as own:
        assert {*tmp_path.iterdir()} == {own, other}
    assert [*tmp_path.iterdir()] == [other]
