"""The stage inspect: the analyses of the paper's section 4.5 of one ViT, as Parquet (`vit_model.inspection`).

In: a dataset and a ViT. Out, each where the model has it:

    attention_distance.parquet   block, head, pixels: how far a head looks, the mean over the drawn images
    rollout.parquet              sample_id, image, rollout: the first SHOWN of these images as the model sees them, PNG,
                                 and how much of each patch reaches the representation [rows, columns], the largest 1
    filters.parquet              component, pixels: principal components of the patch embedding, [p, p, channels]
    positions.parquet            row, column, cosines: of a patch's position embedding with all, [rows, columns]

No label is read and nothing is scored.

    python -m ray_jobs.inspect --spec ATTEMPT.json
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Inspect
from ray_jobs.data.shards import Dataset
from ray_jobs.process.cluster import in_tasks
from ray_jobs.process.context import Context, Result
from ray_jobs.process.stage import run_stage
from ray_jobs.randomness import Purpose
from vit_model.contract import read_contract

SHOWN = 12  # images with a rollout
FILTERS = 28  # components of the patch embedding; the paper shows as many


def main(context: Context[Inspect]) -> Result:
    """Inspect in one Ray task, on a GPU if there is one."""
    (result,) = in_tasks(inspect, [(context,)], context.config.threads)
    return result


def inspect(context: Context[Inspect]) -> Result:
    """Compute all tables; runs in any process.

    Raises:
        UserError: the model is not a ViT, or the split has no images.
    """
    from ray_jobs.process.devices import device, set_threads
    from vit_model import inspection

    config, dataset = context.config, context.dataset()
    set_threads(config.threads)
    folder, rows = context.input("backbone"), _drawn(dataset, config)
    pixels = dataset.images(config.split, read_contract(folder).preprocessing, rows)
    found = inspection.inspect(folder, pixels, device(), SHOWN, FILTERS)
    tables = {"attention_distance": _distances(found.distance)}
    if found.rollout is not None:
        ids = [dataset.sample_ids(config.split)[row] for row in rows[:SHOWN]]
        tables["rollout"] = _rollouts(ids, pixels, found.rollout)
    if found.components is not None:
        tables["filters"] = _filters(found.components)
    if found.similarity is not None:
        tables["positions"] = _positions(found.similarity)
    with context.staging() as staging:
        for name, table in tables.items():
            pq.write_table(table, staging.path / f"{name}.parquet", compression="zstd")
    digest = sha256(canonical_json({file.path: file.sha256 for file in staging.files}))
    distances = {"first_block": found.distance[0].mean(), "last_block": found.distance[-1].mean()}
    distances = {
        f"{name}_pixels": round(float(value), 2) for name, value in {**distances, "uniform": found.uniform}.items()
    }
    print(
        "mean attention distance: {first_block_pixels} pixels in the first block, {last_block_pixels} in the last; "
        "{uniform_pixels} if heads attended to all patches equally".format(**distances),
        flush=True,
    )
    return Result(digest, staging.files, {"images": len(rows), **distances})


def _drawn(dataset: Dataset, config: Inspect) -> NDArray[np.int64]:
    """Draw rows of the split."""
    dataset.require(config.split)
    total = dataset.info.splits[config.split]
    rng = np.random.default_rng([config.seed, Purpose.INSPECT])
    return rng.permutation(total)[: config.images]


def _distances(distance: NDArray[np.float64]) -> pa.Table:
    blocks, heads = np.indices(distance.shape).reshape(2, -1)
    return pa.table({"block": blocks + 1, "head": heads + 1, "pixels": distance.ravel()})


def _rollouts(ids: list[str], pixels: NDArray[np.uint8], rollout: NDArray[np.float32]) -> pa.Table:
    images = pa.array([_png(each) for each in pixels[: len(ids)]], pa.binary())
    return pa.table({"sample_id": ids, "image": images, "rollout": _nested(rollout)})


def _filters(components: NDArray[np.float64]) -> pa.Table:
    return pa.table({"component": np.arange(1, len(components) + 1), "pixels": _nested(components)})


def _positions(cosines: NDArray[np.float32]) -> pa.Table:
    rows, columns = np.indices(cosines.shape[:2]).reshape(2, -1)
    by_patch = cosines.reshape(-1, *cosines.shape[2:])
    return pa.table({"row": rows + 1, "column": columns + 1, "cosines": _nested(by_patch)})


def _nested(values: NDArray[Any]) -> pa.Array:
    """Return [n, ...] as a column of lists in lists, in float32."""
    kind: Any = pa.float32()
    for _ in values.shape[1:]:
        kind = pa.list_(kind)
    return pa.array(values.tolist(), kind)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(buffer, "png")
    return buffer.getvalue()


if __name__ == "__main__":
    run_stage("inspect")
