"""How often the intervals of AP cover it: `python benchmarks/ap_intervals.py`.

Draws test sets of 50, 200 and 1,000 images from 20,000 scenes with detections of simulated detectors, and counts how
often the intervals of AP, and of the difference of two detectors, contain that of all scenes. A quarter of an hour.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from common import keep, setting
from numpy.typing import NDArray

from ray_jobs.detection.average_precision import Boxes, Detected, Matches, match, mean_ap
from ray_jobs.detection.intervals import ap_interval, difference_interval, halves

POOL, SIZES = 20_000, (50, 200, 1_000)
SHARES = (0.4, 0.3, 0.15, 0.1, 0.05)  # of the classes
SKILLS = (0.0, 1.5, 3.0)  # logits of finding an object: AP 0.19, 0.50, 0.80
SIDE = 200


def main() -> None:
    """Count, and keep the page."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sets", type=int, default=400, help="test sets of each size")
    sets: int = arguments.parse_args().sets
    load = os.getloadavg()[0]
    rng = np.random.default_rng(0)
    truths = [boxes(rng) for _ in range(POOL)]
    pools = {skill: match(truths, [detected(each, skill, rng) for each in truths], len(SHARES)) for skill in SKILLS}
    lines = [
        "# How often intervals of AP cover it",
        "",
        f"`python benchmarks/ap_intervals.py --sets {sets}`, {setting(load)}. Test sets are drawn from {POOL:,} scenes "
        "with one to four objects of five classes, the rarest one of twenty objects, and detections of simulated "
        "detectors. Coverage: the share of 95% intervals that contain the AP, or the difference from the detector "
        "above, of all scenes.",
        "",
        "| AP of all scenes | images | mean AP | coverage | mean width | difference: coverage | mean width |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for number, skill in enumerate(SKILLS):
        for size in SIZES:
            before = pools[SKILLS[number - 1]]["all"] if number else None
            lines.append(line(pools[skill]["all"], before, size, sets))
            print(lines[-1], flush=True)
    keep("ap_intervals.md", lines)


def line(pool: list[Matches], other: list[Matches] | None, size: int, sets: int) -> str:
    """Return a detector's line of the table."""
    true = float(mean_ap(pool))
    difference = None if other is None else true - float(mean_ap(other))
    rng = np.random.default_rng(size)
    found, differences = [], []
    for _ in range(sets):
        images = rng.choice(POOL, size, replace=False)
        some = halves([subset(pool, images)])
        found.append(ap_interval(some))
        if other is not None:
            differences.append(difference_interval(some, halves([subset(other, images)])))
    cells = [f"{true:.3f}", f"{size:,}", f"{np.mean([each.value for each in found]):.3f}", *coverage(found, true)]
    cells += ["", ""] if difference is None else coverage(differences, difference)
    return f"| {' | '.join(cells)} |"


def coverage(intervals: list[Any], true: float) -> list[str]:
    """Return how many of the intervals contain a number, and how wide they are."""
    covers = np.mean([each.low <= true <= each.high for each in intervals])
    return [f"{covers:.1%}", f"{np.mean([each.high - each.low for each in intervals]):.3f}"]


def subset(pool: list[Matches], images: NDArray[np.int64]) -> list[Matches]:
    """Return the matches of some images."""
    place = np.full(POOL, -1)
    place[images] = np.arange(len(images))
    some = []
    for each in pool:
        kept = place[each.image] >= 0
        image = place[each.image[kept]]
        some.append(Matches(image, each.is_right[:, kept], each.is_counted[:, kept], each.boxes[images]))
    return some


def boxes(rng: np.random.Generator) -> Boxes:
    """Return the objects of a scene."""
    count = rng.integers(1, 5)
    return Boxes(drawn(count, rng), rng.choice(len(SHARES), count, p=SHARES), np.zeros(count, dtype=bool))


def drawn(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return boxes anywhere."""
    corners = rng.uniform(0, 0.7 * SIDE, (count, 2))
    return np.hstack([corners, corners + rng.uniform(0.06 * SIDE, 0.3 * SIDE, (count, 2))])


def detected(truth: Boxes, skill: float, rng: np.random.Generator) -> Detected:
    """Return what a detector finds: scenes and objects differ in difficulty; it also errs in classes and invents."""
    count = len(truth.boxes)
    chance = 1 / (1 + np.exp(-(skill + rng.normal(0, 0.7) + rng.normal(0, 1, count))))
    sides = np.tile(truth.boxes[:, 2:] - truth.boxes[:, :2], 2)
    moved = truth.boxes + rng.normal(0, 1, (count, 4)) * 0.25 * (1 - chance)[:, None] * sides
    scores = np.clip(0.8 * chance + rng.normal(0, 0.1, count), 0.05, 1)
    is_wrong = (rng.random(count) > chance) & (rng.random(count) < 0.5)
    classes = np.where(is_wrong, rng.choice(len(SHARES), count, p=SHARES), truth.classes)
    is_found, nothing = rng.random(count) < chance, int(rng.poisson(1.0))
    everything = np.vstack([moved[is_found], drawn(nothing, rng)])
    everything[:, 2:] = np.maximum(everything[:, 2:], everything[:, :2] + 1)
    all_scores = np.concatenate([scores[is_found], rng.beta(2, 5, nothing)])
    guessed = rng.choice(len(SHARES), nothing, p=SHARES)
    return Detected(everything, all_scores, np.concatenate([classes[is_found], guessed]))


if __name__ == "__main__":
    main()
