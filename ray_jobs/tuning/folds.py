"""Cross-validated fits of an audit: folds of labelled images, and each fold's probabilities by a fit on the others.

In: the fine-tuning's settings, the images with their given labels, and the fold of each. Out: a file of probabilities
per fold. Later attempts reuse a finished fold from the ledger, and continue a running one from its checkpoints.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.spec import Finetune
from pipelines.store import FileEntry
from ray_jobs.data.shards import Images
from ray_jobs.evaluation.label_issues import write_probabilities
from ray_jobs.evaluation.supports import permutation
from ray_jobs.process.context import Context
from ray_jobs.randomness import Purpose
from ray_jobs.training.evaluators import predict
from ray_jobs.training.fit import fit
from ray_jobs.training.log import Reporting
from ray_jobs.training.task import Task
from ray_jobs.training.workers import ALONE
from ray_jobs.tuning.fits import fetched, make_manager
from ray_jobs.tuning.ledger import Ledger, add_part
from vit_model.build import Network
from vit_model.errors import UserError


def assign_folds(images: pa.Table, num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold [n] of each row of an index; classes are spread evenly, and groups are not divided.

    Images of one group (a patient, a site), or without groups images with the same bytes, are in one fold: a fit that
    has learned the label of a copy would confirm the image's label.

    Raises:
        UserError: there are fewer groups than folds.
    """
    groups = pc.coalesce(images["group"], images["content_id"]).combine_chunks().dictionary_encode().indices
    _, first, group = np.unique(groups.to_numpy(), return_index=True, return_inverse=True)
    if len(first) < num_folds:
        raise UserError(
            f"cross_validation.folds {num_folds}: train and dev have only {len(first)} groups of images; use fewer"
        )
    labels = images["label"].to_numpy()
    order = np.lexsort((permutation(len(first), seed, Purpose.AUDIT_FOLDS), labels[first]))
    folds = np.empty(len(first), np.int64)
    folds[order] = np.arange(len(first)) % num_folds
    return folds[group]


def fit_fold(
    context: Context[Finetune], task: Task, pool: Images, folds: NDArray[np.int64], number: int
) -> tuple[FileEntry, ...]:
    """Fit on the images of all other folds, and write the probabilities of this one's (in a Ray task).

    Raises:
        DivergenceError: the loss or a gradient is not finite.
    """
    if (finished := Ledger(context, task.attempts).part(f"fold-{number}")) is not None:
        return finished
    manager = make_manager(context, f"fold-{number}", ALONE)
    model = fit(
        fetched(context, task),
        pool.take(np.flatnonzero(folds != number)),
        task.learning_rate,
        task.config.seed,
        manager,
        Reporting(unit=f"fold {number}, step"),
    ).model
    assert isinstance(model, Network)  # an audit trains classifiers
    held_out = pool.take(np.flatnonzero(folds == number))
    probabilities = predict(model, task.contract, held_out).softmax(dim=1).numpy()
    with context.staging() as staging:
        path = staging.path / f"probabilities/{number}.parquet"
        write_probabilities(path, held_out.rows["sample_id"], probabilities)
    add_part(context, f"fold-{number}", staging.files)
    manager.remove()
    agreement = float(np.mean(probabilities.argmax(axis=1) == held_out.labels))
    print(f"fold {number}: agrees with {agreement:.1%} of its labels", flush=True)
    return staging.files
