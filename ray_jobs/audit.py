"""The audit stage: likely wrong labels in train and dev, by confident learning (`ray_jobs.evaluation.label_issues`).

In: a dataset, and a backbone or a model size. Out: label_issues.parquet, the images with a likely wrong label, the most
likely first; probabilities/*.parquet, the out-of-sample probabilities of all images.

The probabilities come from leave-one-out least squares on the backbone's frozen features, or from cross-validated fits.
A backbone that was trained on these labels is refused (`ray_jobs.evaluation.leakage`), because it would repeat the
wrong ones. Test is not audited: images never leave it, so a list of its wrong labels could only bias choices.

    python -m ray_jobs.audit --spec ATTEMPT.json
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Audit, quantity
from pipelines.store import FileEntry, Layout
from ray_jobs.data.shards import Dataset, Images, Split
from ray_jobs.evaluation import label_issues
from ray_jobs.evaluation.leakage import check_labels_unseen
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from vit_model.contract import read_contract

NAMED = 10  # classes named in a log line
AUDITED: tuple[Split, ...] = ("train", "dev")


def main(context: Context[Audit]) -> Result:
    """Audit in one Ray task, which embeds images or fits folds in other tasks."""
    return on_cluster(audit, context)


def audit(context: Context[Audit], run: Run = here) -> Result:
    """Compute out-of-sample probabilities of all labelled images, and list the likely wrong labels.

    Raises:
        UserError: the backbone was trained on these labels, or features or probabilities are not finite.
    """
    config = context.config
    dataset = context.dataset(config.cache_gib)
    dataset.require("train")
    pool = Images(dataset, pa.concat_tables([dataset.index(split) for split in AUDITED]))
    unknown = check_labels_unseen(context, dataset, pool.rows)
    if config.cross_validation is None:
        parts = np.arange(len(pool.rows))
        files, settings = leave_one_out(context, pool, run)
    else:
        parts, files = cross_validate(context, pool, run)
        settings = {}
    attempt = context.attempt
    folder = context.open_store().local(Layout.files(attempt.job, attempt.key, attempt.number), files)
    probabilities = label_issues.read_probabilities([folder / file.path for file in files], pool.rows)
    judged = np.flatnonzero(judgeable(dataset, pool.labels, parts))
    images, labels, probabilities = pool.take(judged).rows, pool.labels[judged], probabilities[judged]
    issues = label_issues.find_issues(labels, probabilities)
    table = label_issues.issues_table(images, dataset.info.class_names, probabilities, issues)
    agreement = float(np.mean(probabilities.argmax(axis=1) == labels)) if len(judged) else 0.0
    with context.staging() as staging:
        label_issues.write_issues(staging.path / label_issues.FILE, table)
    metrics: dict[str, float | int | str] = {
        "label_issues": len(table),
        "audited": len(judged),
        "not_audited": len(pool.rows) - len(judged),
        "agreement": agreement,
        **label_issues.measure_list(labels, probabilities, len(table), config.seed),
        **settings,
    }
    print(label_issues.headline(metrics), flush=True)
    if unknown:
        metrics["unknown_training"] = ", ".join(unknown)
    digest = sha256(canonical_json({"data": dataset.info.content_digest, "issues": table.to_pylist()}))
    return Result(digest, (*staging.files, *files), metrics)


def leave_one_out(context: Context[Audit], pool: Images, run: Run) -> tuple[tuple[FileEntry, ...], dict[str, float]]:
    """Write each image's probabilities by a linear classifier fitted on all others; return the file and settings."""
    from ray_jobs.evaluation import features

    dataset = pool.dataset
    preprocessing = read_contract(context.input("backbone")).preprocessing
    tasks = [
        (context, (None,), preprocessing, split, np.arange(start, min(start + features.DECODED, total)))
        for split in AUDITED
        for total in (dataset.info.splits[split],)
        for start in range(0, total, features.DECODED)
    ]
    embedded = np.concatenate([part for (part,) in run(features.embed_rows, tasks)])
    probabilities, settings = label_issues.left_out_probabilities(embedded, pool.labels, len(dataset.info.class_names))
    with context.staging() as staging:
        path = staging.path / "probabilities/0.parquet"
        label_issues.write_probabilities(path, pool.rows["sample_id"], probabilities)
    return staging.files, settings


def cross_validate(context: Context[Audit], pool: Images, run: Run) -> tuple[NDArray[np.int64], tuple[FileEntry, ...]]:
    """Fit a model per fold on the other folds; return each image's fold, and the files of probabilities."""
    from ray_jobs.training.task import make_task
    from ray_jobs.tuning import folds, ledger

    config = context.config
    assert config.cross_validation is not None
    number = config.cross_validation.folds
    fits_context = Context(context.attempt, config.fine_tuning(), context.inputs)
    task = make_task(fits_context.config, pool.dataset, fits_context.input("backbone") if config.backbone else None)
    task = task._replace(attempts=ledger.open_ledger(fits_context).attempts)
    parts = folds.assign_folds(pool.rows, number, config.seed)
    tasks = [(fits_context, task, pool, parts, fold) for fold in range(number)]
    return parts, tuple(file for files in run(folds.fit_fold, tasks) for file in files)


def judgeable(dataset: Dataset, labels: NDArray[np.integer], parts: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return whether each label can be judged [n]: its class also has images in another part, so a model learned it.

    Print the classes that have images in one part only, and the classes without images.

    Args:
        parts: [n], the number of the part in which an image was left out.
    """
    names = dataset.info.class_names
    pairs = np.unique(np.stack([labels, parts], axis=1), axis=0)
    spread = np.bincount(pairs[:, 0], minlength=len(names))
    for why, classes in (
        ("without an image in train and dev", np.flatnonzero(spread == 0)),
        ("with images in one fold only, not audited", np.flatnonzero(spread == 1)),
    ):
        if len(classes):
            named = ", ".join(names[label] for label in classes[:NAMED])
            more = f" and {len(classes) - NAMED:,} more" if len(classes) > NAMED else ""
            print(f"{quantity(len(classes), 'class', 'classes')} {why}: {named}{more}", flush=True)
    return spread[labels] > 1


if __name__ == "__main__":
    run_stage("audit")
