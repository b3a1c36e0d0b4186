"""The segment stage: linear segmentation of patch tokens of a frozen backbone, of pixels and of untrained models.

In: a dataset with masks and a model. Out: `rows.parquet`, with the metric mIoU, an empty `predictions.parquet`, and
`confusion.parquet`: per test image, how many pixels of each class have each prediction (CONFUSION).

The classifier is fitted on train, L2 and the class weights are chosen by mIoU on dev, then it is refitted on train and
dev. Every test pixel that has a class is scored at the resolution of its mask (`ray_jobs.evaluation.segmentation`).
Images are squashed to the model's square, so that patches cover the whole image. A model that was trained on test
images is refused.

    python -m ray_jobs.segment --spec ATTEMPT.json
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.spec import Segment
from ray_jobs.data.shards import Split
from ray_jobs.evaluation import rows as tables
from ray_jobs.evaluation.artifact import TestedPixels, mean_values, save_evaluation, score_pixels
from ray_jobs.evaluation.leakage import COMPARED, PRETRAINED, SEEN, check_leakage
from ray_jobs.evaluation.metrics import mean_iou
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from vit_model.errors import UserError

if TYPE_CHECKING:
    from ray_jobs.evaluation.segmentation import Moments

PROTOCOL = "linear segmentation"


def main(context: Context[Segment]) -> Result:
    """Segment in one Ray task, which computes tokens in other tasks."""
    return on_cluster(segment, context)


def segment(context: Context[Segment], run: Run = here) -> Result:
    """Fit, choose L2 and the class weights on dev, refit, score test.

    Raises:
        UserError: the dataset has no masks or no dev split, or the backbone was trained on test images.
    """
    from ray_jobs.evaluation.segmentation import VARIANTS
    from ray_jobs.evaluation.tokens import DECODED, Kind, confusions_of_rows, kinds_of, moments_of_rows

    dataset = context.dataset()
    dataset.require("train", "dev", "test")
    next(dataset.masks("train", [0]))  # raises if there are none
    labelled = pa.concat_tables([dataset.index(split).select(COMPARED) for split in ("train", "dev")])
    overlap = check_leakage(context, dataset, labelled)
    kinds: list[Kind] = kinds_of(context, SEEN if overlap.labels_seen else PRETRAINED)

    def parts(split: Split) -> list[tuple[Any, ...]]:
        rows = np.arange(dataset.info.splits[split])
        return [(context, split, rows[start : start + DECODED]) for start in range(0, len(rows), DECODED)]

    def moments(split: Split) -> list[Moments]:
        done = run(moments_of_rows, parts(split))
        return [sum(shares[1:], start=shares[0]) for shares in zip(*done, strict=True)]

    def confusions(split: Split, weights: list[NDArray[np.float64]]) -> list[NDArray[np.int64]]:
        done = run(confusions_of_rows, [(*part, weights) for part in parts(split)])
        return [np.concatenate(shares) for shares in zip(*done, strict=True)]

    train, dev = moments("train"), moments("dev")
    if not all(sums[0].areas.any() for sums in (train, dev)):
        raise UserError(f"dataset {dataset.info.name}: no pixel of train or dev has a class")
    # [images, variants, classes, classes] for each kind of tokens; the last of equally good variants wins
    counted = confusions("dev", [sums.fit(VARIANTS) for sums in train])
    values = [[mean_iou(counts) for counts in by_image.sum(axis=0)] for by_image in counted]
    chosen = [max(zip(by_variant, VARIANTS, strict=True))[1] for by_variant in values]
    weights = [(a + b).fit([variant]) for a, b, variant in zip(train, dev, chosen, strict=True)]
    tested = [counts[:, 0] for counts in confusions("test", weights)]

    checkpoint = context.config.checkpoints().get("backbone")
    shared = {"checkpoint": checkpoint} if checkpoint else {}
    results = [
        TestedPixels(
            kind.method,
            kind.draw,
            counts,
            "dev",
            {"balance": balance, "l2": l2, "width": sums.inputs.shape[1], "patches": kind.grid} | shared,
            overlap.seen if kind.method == kinds[0].method else None,
        )
        for kind, counts, sums, (balance, l2) in zip(kinds, tested, train, chosen, strict=True)
    ]
    majority = _always(tested[0], int((train[0] + dev[0]).areas.argmax()))
    results.append(TestedPixels(tables.MOST_FREQUENT, 0, majority, "nothing", shared, None))
    scored = [pair for result in results for pair in score_pixels(dataset, PROTOCOL, result)]
    rows, pixels = [row for row, _ in scored], [table for _, table in scored]
    for row_name, mean in mean_values(rows).items():
        print(f"{row_name}: {mean:.3f}", flush=True)
    with context.staging() as staging:
        tables.write_parquet(staging.path / tables.CONFUSION_FILE, pa.concat_tables(pixels))
    return save_evaluation(context, rows, [], overlap, staging.files)


def _always(counts: NDArray[np.int64], prediction: int) -> NDArray[np.int64]:
    """Return the confusions [images, classes, classes] of predicting one class for all pixels, from any `counts`."""
    always = np.zeros_like(counts)
    always[:, :, prediction] = counts.sum(axis=2)
    return always


if __name__ == "__main__":
    run_stage("segment")
