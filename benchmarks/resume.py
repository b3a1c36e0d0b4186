"""Pretrainings that are killed several times, compared with undisturbed ones: `python benchmarks/resume.py`.

Each case without Ray trains two workers (one process for `alone`), in attempts that end with SIGKILL for one worker at
a random moment: within a step, between two, while a checkpoint is written. The next attempt continues from the last
checkpoint. At the end all files (the last, the best and a named step's weights, the curve) must have the bytes of an
undisturbed training. tests/ray_jobs/training/test_resume.py does the same with fewer kills.

Through Ray, one `vitflow run` on a local Ray is killed repeatedly, in one of two ways at random. Either all its
processes get SIGKILL at once (driver, stage, workers), and the same command follows; or one worker does, and its stage
starts the next group. The artifact must have the files of an undisturbed run.

    python benchmarks/resume.py [--kills 5] [--seed 0]

Prints the tables and writes them to benchmarks/results/resume.md. It takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from common import keep, setting

from pipelines.cluster.jobs_client import Cluster
from pipelines.cluster.local import hold
from pipelines.store import open_store
from tests.support import interrupted
from tests.support.local_runs import a_local_ray, finish, kill, matching, start
from tests.support.stores import manifests, repeated

# A tenth of a second per step on two cores, and a checkpoint per second.
TRAINING = (
    "pretrain.model={patch_size: 2, width: 64, depth: 4, num_heads: 4}",
    "pretrain.batch_size=512",
    "pretrain.steps=400",
    "pretrain.checkpoint_every={steps: 10}",
)
WHOLE_RUN, ONE_WORKER = "the whole run", "one worker"


def main() -> None:
    """Kill each case several times and compare."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--kills", type=int, default=5, help="in each case")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the tables only")
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="vitflow-resume-") as temporary:
        through_ray = kill_through_ray(Path(temporary, "ray"), options.kills, options.seed)
        alone = kill_without_ray(Path(temporary), options.kills, options.seed)
    lines = [
        "# Killed and continued",
        "",
        f"`python benchmarks/resume.py --kills {options.kills} --seed {options.seed}`, {setting(load)}.",
        "",
        *alone,
        "",
        *through_ray,
    ]
    keep("resume.md", lines, is_written=options.is_kept)


# ------------------------------------------------------------------------------------------------- without Ray


def kill_without_ray(folder: Path, kills: int, seed: int) -> list[str]:
    """Train every case undisturbed and with kills; return a section of the page."""
    rows, total = [], 0
    dataset = interrupted.write_noise(folder / "dataset")
    for case, fields in interrupted.CASES.items():
        world = interrupted.world_of(case)
        config, own = interrupted.configuration(**fields), folder / case.replace(" ", "-")
        undisturbed, killed = (open_store(str(own / name)) for name in ("undisturbed", "killed"))
        start = interrupted.write_inputs(config, own / "first", dataset)
        assert interrupted.run_attempt(config, dataset, undisturbed, own / "a", world=world, ancestor=start)
        rng = random.Random(f"{seed}/{case}")
        record = interrupted.run_with_kills(config, dataset, killed, own / "b", kills, rng, world, start)
        same = interrupted.files_below(own / "a") == interrupted.files_below(own / "b")
        listed = ", ".join(f"{kill.step} -> {step}" for kill, step in record)
        rows.append(f"| {case} | {len(record)} | {listed} | {'the same bytes' if same else 'DIFFERENT'} |")
        print(rows[-1], file=sys.stderr, flush=True)
        total += len(record)
    return [
        "## Without Ray",
        "",
        f"{total} kills. A small ViT on 8 x 8 images, 40 steps, a checkpoint after every third; in each step that is "
        "named, one worker gets SIGKILL, and the next attempt continues after the step behind the arrow.",
        "",
        "| case | kills | killed in step -> continued after step | weights and curve at the end |",
        "|---|---:|---|---|",
        *rows,
    ]


# ------------------------------------------------------------------------------------------------- through Ray


class Group(NamedTuple):
    """The newest group of workers, as its attempt's log shows it."""

    attempt: int
    number: int
    """groups of this attempt before it"""
    start: int
    """the step that it continued after"""
    step: int | None
    """the last that it has shown; it shows one per second"""


def newest_group(store: Path, cluster: Cluster) -> Group:
    """Read the log of a pretraining's newest attempt."""
    records = {int(path.parent.name): path for path in store.glob("artifacts/pretrain/*/attempts/*/attempt.json")}
    attempt = max(records, default=0)
    log = cluster.logs(json.loads(records[attempt].read_text())["submission_id"]) if attempt else ""
    *earlier, own = log.split("workers died; ")
    start, steps = re.search(r"continuing from step (\d+)", own), re.findall(r"progress step (\d+)/", own)
    return Group(attempt, len(earlier), int(start[1]) if start else 0, int(steps[-1]) if steps else None)


def kill_through_ray(folder: Path, kills: int, seed: int) -> list[str]:
    """Kill `kills` times in each of two ways during one run; return a section of the page."""
    rng, rows = random.Random(f"{seed}/Ray"), []
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    with a_local_ray() as environment:
        finish(start(undisturbed, environment, "pretrain", TRAINING))
        driver = start(killed, environment, "pretrain", TRAINING)
        with hold(Path(environment["VITFLOW_RAY_DIR"])) as ray:
            for victim in rng.sample([WHOLE_RUN, ONE_WORKER] * kills, k=2 * kills):
                reached(killed, ray.cluster(), rng.randint(5, 25))
                time.sleep(rng.uniform(0, 1))
                workers = matching(environment, "ray::RayTrainWorker")
                stage = matching(environment, "-m ray_jobs.pretrain")
                controller = matching(environment, "ray::TrainController")
                before, died = newest_group(killed, ray.cluster()), time.monotonic()
                if victim == ONE_WORKER:
                    kill([rng.choice(workers)])
                else:
                    kill([psutil.Process(driver.pid), *stage, *controller, *workers])
                    driver.communicate()
                    driver = start(killed, environment, "pretrain", TRAINING)
                follower(killed, ray.cluster(), before)
                began = time.monotonic() - died
                after = reached(killed, ray.cluster())
                seconds = time.monotonic() - died
                assert (after.attempt > before.attempt) == (victim == WHOLE_RUN)
                rows.append(f"| {victim} | {before.step} | {after.start} | {began:.1f} | {seconds:.1f} |")
                print(rows[-1], file=sys.stderr, flush=True)
        finish(driver)
    ours, theirs = (manifests(store)["pretrain"] for store in (killed, undisturbed))
    same = "the bytes" if repeated(ours["files"]) == repeated(theirs["files"]) else "OTHER BYTES THAN those"
    return [
        "## Through Ray and the driver",
        "",
        f"{len(rows)} kills of one `vitflow run`: {theirs['config']['steps']} steps on two workers of a local Ray, "
        f"{theirs['metrics']['train_seconds']:.0f} s undisturbed, a checkpoint after every tenth. At the end, weights "
        f"and curve have {same} of an undisturbed run.",
        "",
        "The whole run: driver, stage and workers get SIGKILL, and the same command follows at once. One worker: its "
        "stage starts the next group, in the same attempt. Training shows one step per second, so the last column is "
        "up to a second too long.",
        "",
        "| killed | last step shown | continued after step | death to next attempt or group, s | to next step, s |",
        "|---|---:|---:|---:|---:|",
        *rows,
    ]


def follower(store: Path, cluster: Cluster, before: Group) -> Group:
    """Wait for a later group, which may not have shown a step; return it."""
    while (group := newest_group(store, cluster))[:2] <= before[:2]:
        time.sleep(0.2)
    return group


def reached(store: Path, cluster: Cluster, steps: int = 1) -> Group:
    """Wait until the newest group has reported `steps` more steps; return it."""
    while (group := newest_group(store, cluster)).step is None or group.step < group.start + steps:
        time.sleep(0.2)
    return group


if __name__ == "__main__":
    main()
