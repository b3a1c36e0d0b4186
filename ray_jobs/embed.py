"""The stages embed and predict: a model's features, or its predictions, of a dataset's images, as Parquet.

In: a dataset and a model. Out: `images/00000.parquet`, ..., one row per image, in the order in which they are stored:

    sample_id, key        as in the dataset's index; the key is the file's name in the source
    split, label          the label is the class's name, or "cat; dog"; null if the image has no labels
    feature               embed: float32 [width], the representation that `evaluate` and `finetune` take
    prediction            predict: the name of the likeliest class
    probability           predict: its probability
    predictions           predict, instead of these two, if an image can have several classes: those whose probability
                          reaches the model's thresholds
    probabilities         predict: of all classes, float32 [classes], in the order of `class_names`

The schema's metadata has a JSON object under `vitflow`: the content digests of the model and the dataset, the
checkpoint, the class names and the preprocessing. Nothing is scored, not even test: evaluations do that.

Ray tasks compute the parts, on a GPU each if there is one. How the images are divided depends on their number alone. A
finished part is in the ledger (`ray_jobs.tuning.ledger`), so the next attempt computes only the others, and the files
have the same bytes however often the stage was interrupted.

    python -m ray_jobs.embed --spec ATTEMPT.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.identity import canonical_json, sha256
from pipelines.spec import LAST, Embed, Predict
from pipelines.store import FileEntry, Layout, contract_of
from ray_jobs.data.columns import with_combinations
from ray_jobs.data.shards import Dataset
from ray_jobs.evaluation.multi_label import reaches
from ray_jobs.process.cluster import Run, here, on_cluster
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from ray_jobs.tuning.ledger import Ledger, add_part, open_ledger
from vit_model.contract import ModelContract
from vit_model.errors import UserError

PARTS = 64  # of a dataset, so that many workers share it
SMALLEST, LARGEST = 128, 16_384  # images per part


def main(context: Context[Embed | Predict]) -> Result:
    """Compute in Ray tasks."""
    return on_cluster(infer, context, "part")


def infer(context: Context[Embed | Predict], run: Run = here) -> Result:
    """Compute all parts that no earlier attempt has finished.

    Raises:
        UserError: the splits have no images, the model has no classifier to predict with, or a result is not finite.
    """
    config, dataset = context.config, context.dataset(context.config.cache_gib)
    contract = contract_of(context.open_store(), context.inputs["backbone"][0])
    assert contract is not None, "a model without a contract"
    if isinstance(config, Predict) and not contract.class_names:
        raise UserError(
            f"backbone: {context.inputs['backbone'][0].stage} has no classifier, only representations; use embed, or"
            " fine-tune it first"
        )
    rows = _stored_order(dataset, config)
    size = min(max(len(rows) // PARTS, SMALLEST), LARGEST)
    attempts = open_ledger(context).attempts
    tasks = [
        # not a slice, which would take all rows to its task
        (context, attempts, contract, number, rows.take(np.arange(start, min(start + size, len(rows)))))
        for number, start in enumerate(range(0, len(rows), size))
    ]
    files = tuple(file for part in run(write_part, tasks) for file in part)
    attempt = context.attempt
    folder = Layout.files(attempt.job, attempt.key, attempt.number)
    print(f"{len(rows):,} images: {attempt.store_uri}/{folder}/images/*.parquet", flush=True)
    digest = sha256(canonical_json({file.path: file.sha256 for file in files}))
    counted = {"classes": len(contract.class_names)} if isinstance(config, Predict) else {}
    return Result(digest, files, {"images": len(rows), **counted})


def write_part(
    context: Context[Embed | Predict],
    attempts: Sequence[int],
    contract: ModelContract,
    number: int,
    rows: pa.Table,
) -> tuple[FileEntry, ...]:
    """Compute these rows of the index and write their file (in a Ray task)."""
    from ray_jobs.evaluation.features import infer

    name, config = f"part-{number}", context.config
    if (finished := Ledger(context, attempts).part(name)) is not None:
        return finished
    dataset, is_classifier = context.dataset(config.cache_gib), isinstance(config, Predict)
    values = infer(context.input("backbone"), dataset, rows, config.threads, is_classifier)
    if not np.isfinite(values).all():
        (first, *_) = np.flatnonzero(~np.isfinite(values).all(axis=1))
        raise UserError(f"the model's output for image {rows['key'][int(first)]} is not finite")
    table = _table(rows, dataset.info.class_names, contract, values, is_classifier)
    described = json.dumps(_description(context, contract))
    with context.staging() as staging:
        path = staging.path / f"images/{number:05d}.parquet"
        path.parent.mkdir()
        pq.write_table(table.replace_schema_metadata({"vitflow": described}), path, compression="zstd")
    add_part(context, name, staging.files)
    return staging.files


def _stored_order(dataset: Dataset, config: Embed | Predict) -> pa.Table:
    """Return the rows of the index in the order in which their images are stored, so that shards are read once."""
    rows = pa.concat_tables([dataset.index(split) for split in config.splits])
    if not len(rows):
        raise UserError(f"dataset {dataset.info.name} has no images in {', '.join(config.splits)}")
    return rows.sort_by([("shard", "ascending"), ("offset", "ascending")])


def _table(
    rows: pa.Table,
    label_names: tuple[str, ...],
    contract: ModelContract,
    values: NDArray[np.float32],
    is_classifier: bool,
) -> pa.Table:
    named, texts = with_combinations(rows, label_names or ("",))
    labels, names = named["label"].combine_chunks(), pa.array([text or None for text in texts], pa.string())
    columns = {name: rows[name].cast(pa.string()) for name in ("sample_id", "key", "split")}
    columns |= {"label": names.take(labels)}
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    if not is_classifier:
        return pa.table(columns | {"feature": vectors})
    if contract.is_multi_label:
        chosen = reaches(values, contract.thresholds)
        predictions = [[contract.class_names[label] for label in np.flatnonzero(image)] for image in chosen]
        several = pa.array(predictions, pa.list_(pa.string()))
        return pa.table(columns | {"predictions": several, "probabilities": vectors})
    likeliest = values.argmax(axis=1)
    prediction = pa.array(contract.class_names, pa.string()).take(pa.array(likeliest))
    probability = values[np.arange(len(values)), likeliest]
    return pa.table(columns | {"prediction": prediction, "probability": probability, "probabilities": vectors})


def _description(context: Context[Embed | Predict], contract: ModelContract) -> dict[str, Any]:
    """Return the metadata of the files, a function of the stage's key alone."""
    (model,), (data,) = context.inputs["backbone"], context.inputs["data"]
    return {
        "model": model.content_digest,
        "checkpoint": context.config.checkpoints().get("backbone", LAST),
        "dataset": data.content_digest,
        "class_names": contract.class_names,
        "preprocessing": contract.preprocessing.model_dump(mode="json"),
    }


if __name__ == "__main__":
    run_stage("embed")
