"""The report stage: a page about datasets, models and evaluations, with the numbers and rows behind it.

In: artifacts of any kind except reports. Out: report.html (self-contained), report.json (the same numbers),
rows.parquet and predictions.parquet (the rows of all inputs, each with its artifact and stage), and groups.csv if an
embedding is among the inputs. The same inputs give the same bytes.

    python -m ray_jobs.report --spec STORE/artifacts/report/<key>/attempts/<n>/attempt.json
"""

from __future__ import annotations

import json

from pipelines.spec import Report
from ray_jobs.process.cluster import in_task
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage


def main(context: Context[Report]) -> Result:
    """Make the report in one Ray task."""
    return in_task(make, context)


def make(context: Context[Report]) -> Result:
    """Gather, render and write; runs in any process.

    Raises:
        UserError: the files of an input contradict each other.
    """
    from ray_jobs.evaluation.rows import ROWS, digest_rows, write_parquet
    from ray_jobs.reporting.clusters import write_groups
    from ray_jobs.reporting.gather import gather
    from ray_jobs.reporting.page import render

    data = gather(context)
    with context.staging() as staging:
        (staging.path / "report.html").write_text(render(data), "utf-8")
        text = json.dumps(data.numbers, indent=1, ensure_ascii=False, allow_nan=False)
        (staging.path / "report.json").write_text(text + "\n", "utf-8")
        if embeddings := data.numbers.get("embeddings"):
            write_groups(staging.path / "groups.csv", embeddings)
        write_parquet(staging.path / "rows.parquet", data.rows)
        write_parquet(staging.path / "predictions.parquet", data.predictions)
    digest = digest_rows(data.rows.select(ROWS.names).to_pylist(), ROWS)
    verdicts = data.numbers["verdicts"]
    above = sum(verdict["conclusion"] == "above zero" for verdict in verdicts)
    return Result(digest, staging.files, {"comparisons": len(verdicts), "above_zero": above})


if __name__ == "__main__":
    run_stage("report")
