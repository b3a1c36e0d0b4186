"""What each pretraining objective teaches in equal time: `python benchmarks/objectives.py`.

Runs the recipe `objectives` twice, as a user would: first every pretraining for some steps, to measure its steps per
second, then all of them for the steps that take the given time, and the evaluations. A student and its teacher share
the time. Prints the table and writes it to benchmarks/results/objectives.md. Needs Fashion-MNIST
(apt-get install dataset-fashion-mnist) and an idle machine.

    python benchmarks/objectives.py [--seconds 150]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from common import keep, query, setting, vitflow

from pipelines.recipe.load import load_pipeline
from pipelines.spec import Pretrain

PROBE_STEPS = 300
HELD_OUT, ALL = "Fashion-MNIST, 3 held-out classes", "Fashion-MNIST"
TIMES = "SELECT stage, (metrics->>'train_seconds')::DOUBLE AS seconds, (config->>'steps')::INTEGER AS steps"
TIMES += " FROM artifacts WHERE job = 'pretrain' ORDER BY finished"
ACCURACIES = """
SELECT CASE WHEN method IN ('ViT, pretrained', 'ViT, trained on these images') THEN config->>'backbone'
       ELSE method END AS learner,
       task, labels_per_class AS shots, 100 * avg(value) AS mean, 100 * stddev_samp(value) AS deviation
FROM accuracies JOIN artifacts USING (artifact)
GROUP BY ALL
ORDER BY learner
"""
COLUMNS = ((HELD_OUT, 5), (HELD_OUT, 25), (ALL, None))  # task, shots


def main() -> None:
    """Measure the rates, train for equal time, and keep the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=150, help="of each pretraining")
    seconds: float = arguments.parse_args().seconds
    load = os.getloadavg()[0]
    recipe = load_pipeline("objectives").stages
    stages = {name: stage for name, stage in recipe.items() if isinstance(stage, Pretrain)}
    teachers = {name: stage.inputs().get("teacher", ()) for name, stage in stages.items()}
    sharing = {name for student, of in teachers.items() if of for name in (student, *of)}
    with tempfile.TemporaryDirectory(prefix="vfb-") as folder:
        store = Path(folder)
        only = [word for stage in stages for word in ("--only", stage)]
        run(store, dict.fromkeys(stages, PROBE_STEPS), *only)
        rates = {row["stage"]: row["steps"] / row["seconds"] for row in query(store, TIMES)}
        steps = {name: round(rates[name] * seconds / (2 if name in sharing else 1)) for name in stages}
        run(store, steps)
        trained = {row["stage"]: row for row in query(store, TIMES)}  # the second run's
        rows = query(store, ACCURACIES)
    keep("objectives.md", page(trained, rows, seconds, load))


def run(store: Path, steps: dict[str, int], *options: str) -> None:
    """Run the recipe with these steps, one stage after the other."""
    sets = [word for stage, number in steps.items() for word in ("--set", f"{stage}.steps={number}")]
    vitflow("run", "objectives", "--parallel", "1", *sets, *options, store=store)


def page(trained: dict[str, dict[str, Any]], rows: list[dict[str, Any]], seconds: float, load: float) -> list[str]:
    """Return the lines of the page of results."""
    learners = [*trained, *sorted({row["learner"] for row in rows} - trained.keys())]
    lines = [
        "# What each objective teaches in equal time",
        "",
        f"`python benchmarks/objectives.py --seconds {seconds:g}`, {setting(load)}; two workers. Recipe: `objectives`."
        " Accuracy on test in %, of a linear classifier on frozen features: with few images of three classes that no"
        " backbone has seen (mean and deviation over 20 draws), and with all labels of all ten. The learning rates were"
        " not searched.",
        "",
        "| pretraining | steps | seconds | 5 labels per held-out class | 25 | all labels of ten classes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for learner in learners:
        run = trained.get(learner)
        cells = ["", ""] if run is None else [f"{run['steps']:,}", f"{run['seconds']:.0f}"]
        cells += [accuracy(rows, learner, *column) for column in COLUMNS]
        lines.append(f"| {learner} | {' | '.join(cells)} |")
    return lines


def accuracy(rows: list[dict[str, Any]], learner: str, task: str, shots: int | None) -> str:
    """Return a cell of the table: empty if it was not measured."""
    for row in rows:
        if (row["learner"], row["task"], row["shots"]) == (learner, task, shots):
            deviation = "" if row["deviation"] is None else f" ± {row['deviation']:.1f}"
            return f"{row['mean']:.1f}{deviation}"
    return ""


if __name__ == "__main__":
    main()
