"""Pretrainings that are killed several times, beside undisturbed ones: `python benchmarks/resume.py`.

Each case trains two workers without Ray (one process for `alone`), in attempts that end with SIGKILL for one worker at
a random moment: within a step, between two, while a checkpoint is written. The next attempt continues from the last
checkpoint. At the end all files (the last, the best and a named step's weights, the curve) must have the bytes of an
undisturbed training. tests/ray_jobs/training/test_resume.py does the same with fewer kills.

    python benchmarks/resume.py [--kills 6] [--seed 0]

Prints the table and writes it to benchmarks/results/resume.md. It takes about five minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from common import ROOT, keep, setting


def main() -> None:
    """Kill each case several times and compare."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--kills", type=int, default=6, help="in each case")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the table only")
    options = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    from pipelines.store import open_store
    from tests.support import interrupted

    load, rows, total = os.getloadavg()[0], [], 0
    with tempfile.TemporaryDirectory(prefix="vitflow-resume-") as temporary:
        dataset = interrupted.write_noise(Path(temporary, "dataset"))
        for case, fields in interrupted.CASES.items():
            world = interrupted.world_of(case)
            config, folder = interrupted.configuration(**fields), Path(temporary, case.replace(" ", "-"))
            undisturbed, killed = (open_store(str(folder / name)) for name in ("undisturbed", "killed"))
            assert interrupted.run_attempt(config, dataset, undisturbed, folder / "a", world=world)
            rng = random.Random(f"{options.seed}/{case}")
            record = interrupted.run_with_kills(
                config, dataset, killed, folder / "b", options.kills, rng, world
            )
            same = interrupted.files_below(folder / "a") == interrupted.files_below(folder / "b")
            kills = ", ".join(f"{kill.step} -> {step}" for kill, step in record)
            rows.append(f"| {case} | {len(record)} | {kills} | {'the same bytes' if same else 'DIFFERENT'} |")
            print(rows[-1], file=sys.stderr, flush=True)
            total += len(record)
    head = [
        "# Killed and continued",
        "",
        f"`python benchmarks/resume.py --kills {options.kills} --seed {options.seed}`, {setting(load)}.",
        f"{total} kills. A small ViT on 8 x 8 images, 40 steps, a checkpoint after every third; in each step that is "
        "named, one worker gets SIGKILL, and the next attempt continues after the step behind the arrow.",
        "",
        "| case | kills | killed in step -> continued after step | weights and curve at the end |",
        "|---|---:|---|---|",
    ]
    keep("resume.md", [*head, *rows], is_written=options.is_kept)


if __name__ == "__main__":
    main()
