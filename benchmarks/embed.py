"""The stage embed beside a torch loop written by hand: `python benchmarks/embed.py`.

Both read the same shards, decode with the same function, compute the same forward pass with the same weights in float32
and write the same columns to Parquet, on two cores. The loop is a `DataLoader` with worker processes, with the fastest
of a few numbers of workers and threads. Ours is the stage as it runs on a cluster: Ray tasks, parts, the ledger. Both
are warm: torch is imported, and Ray's workers run. Photographs are JPEGs of 500 x 375 through a Ti/16 at 224; small
images are 32 x 32 pixels through a ViT of width 192 with four blocks.

    python benchmarks/embed.py [--photographs 2048] [--small 16384] [--rounds 5] [--no-keep]

The contenders take turns, and a ratio is between figures of the same round. Prints the table and writes it to
benchmarks/results/embed.md; takes 15 minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from common import ROOT, keep, setting, spread
from loading import data
from torch.utils.data import DataLoader, Dataset

from pipelines.spec import Embed
from pipelines.store import Layout, Manifest, Store, commit, create_attempt, open_store
from ray_jobs import embed
from ray_jobs.data.columns import Sample
from ray_jobs.data.decode import Stored, square
from ray_jobs.data.samples import write_samples
from ray_jobs.data.shards import ImageSize
from ray_jobs.evaluation.features import BATCH
from ray_jobs.process.context import Context
from tests.support.checkpoints import put_untrained
from tests.support.records import make_context, make_manifest
from vit_model.contract import Preprocessing
from vit_model.preprocessing import normalise
from vit_model.sizes import ModelSize
from vit_model.weights import load_model

CORES = 2
warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # the loop only reads it
LOOPS = ((1, 2), (2, 2), (2, 1))  # (workers of the DataLoader, threads of the forward pass)
SMALL = ModelSize(patch_size=4, width=192, depth=4, num_heads=3)


def main() -> None:
    """Measure both sets, print the table and keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--photographs", type=int, default=2048, help="0: leave them out")
    parser.add_argument("--small", type=int, default=16_384, help="0: leave them out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-keep", dest="is_kept", action="store_false", help="print the table only")
    options = parser.parse_args()
    load, lines = (
        os.getloadavg()[0],
        ["| | ours, images/s | by hand, images/s | ratio | target |", "|---|---:|---:|---:|---:|"],
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])}
    ray.init(
        "local",
        num_cpus=CORES,
        include_dashboard=False,
        logging_level="error",
        runtime_env={"env_vars": environment},
    )
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        for name, size, images in (
            ("photographs, Ti/16 at 224", ModelSize.model_validate("Ti/16"), options.photographs),
            ("32 x 32 pixels, width 192", SMALL, options.small),
        ):
            if images:
                lines.append(measured(store, name, size, images, options.rounds))
    head = [
        "# Features into Parquet, beside a loop by hand",
        "",
        f"`python benchmarks/embed.py`, {options.photographs:,} photographs, {options.small:,} small images,"
        f" {setting(load)}, torch {torch.__version__}; float32, {CORES} cores; medians (ranges) over {options.rounds}"
        " interleaved rounds.",
        "",
    ]
    keep("embed.md", [*head, *lines], is_written=options.is_kept)


def measured(store: Store, name: str, size: ModelSize, images: int, rounds: int) -> str:
    """Return the row of a set."""
    is_small = size is SMALL
    made, model = put_set(store, is_small, images, size)
    folder, weights = (store.local(each.folder, each.files) for each in (made, model))
    ours(store, made, model, "warm")
    settings = min(LOOPS, key=lambda each: by_hand(folder, weights, *each))
    seconds: dict[str, list[float]] = {"ours": [], "hand": []}
    for number in range(rounds):
        for who in ("ours", "hand") if number % 2 else ("hand", "ours"):
            took = ours(store, made, model, str(number)) if who == "ours" else by_hand(folder, weights, *settings)
            seconds[who].append(took)
            print(f"{name}, {who}: {images / took:,.1f} images/s", flush=True)
    ratios = [hand / own for own, hand in zip(seconds["ours"], seconds["hand"], strict=True)]
    rates = {who: spread([images / each for each in took]) for who, took in seconds.items()}
    workers, threads = settings
    return (
        f"| {name} | {rates['ours']} | {rates['hand']} ({workers} workers, {threads} threads)"
        f" | {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | 0.95 |"
    )


def put_set(store: Store, is_small: bool, images: int, size: ModelSize) -> tuple[Manifest, Manifest]:
    """Commit a dataset and an untrained model of it."""
    key = f"data-{is_small}"
    if is_small:
        pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 3), np.uint8)
        encoded, form, width, height = [each.tobytes() for each in pixels], "raw", 32, 32
    else:
        encoded, form, width, height = data.jpegs("originals", images), "jpeg", 500, 375
    samples = [
        Sample(f"{number:06d}", f"{number:06d}", image, form, width, height, 3, number % 2)
        for number, image in enumerate(encoded)
    ]
    with store.staging(Layout.files("ingest", key, 1)) as staging:
        raw = ImageSize(height=32, width=32, channels=3) if is_small else None
        write_samples(staging.path, "drawn", ("a", "b"), raw, {"train": samples}, per_shard=data.PER_SHARD[form])
    made = commit(store, make_manifest("ingest", key=key, content_digest=key, files=staging.files))
    resolution = 32 if is_small else 224
    model = put_untrained(store, made, f"model-{is_small}", size=size, resolution=resolution)
    return made, commit(store, model)


def ours(store: Store, made: Manifest, model: Manifest, key: str) -> float:
    """Return the seconds of the stage."""
    config = Embed(job="embed", data="data", backbone="model")
    context = make_context(store, config, data=made, backbone=model)
    attempt = create_attempt(store, context.attempt.model_copy(update={"key": f"{key}-{made.key}"}))
    began = time.perf_counter()
    embed.main(Context(attempt, config, context.inputs))
    return time.perf_counter() - began


class Images(Dataset[tuple[int, np.ndarray]]):
    """The images of a dataset's shards, decoded as ours are."""

    def __init__(self, folder: Path, preprocessing: Preprocessing) -> None:
        shards = sorted((folder / "shards").iterdir())
        self.rows = pa.concat_tables([pq.read_table(shard, memory_map=True) for shard in shards])
        self._image, self._preprocessing = self.rows["image"], preprocessing
        names = ("key", "format", "width", "height", "channels")
        self._facts = list(zip(*(self.rows[name].to_pylist() for name in names), strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> np.ndarray:
        key, form, *shape = self._facts[number]
        return square(Stored(key, self._image[number].as_py(), form, *shape), self._preprocessing)


def by_hand(folder: Path, weights: Path, workers: int, threads: int) -> float:
    """Return the seconds of the loop."""
    began = time.perf_counter()
    torch.set_num_threads(threads)
    model, contract = load_model(weights)
    images = Images(folder, contract.preprocessing)
    loader: Any = DataLoader(images, batch_size=BATCH, num_workers=workers)
    parts = []
    with torch.inference_mode():
        for batch in loader:
            x = normalise(batch, contract.preprocessing, torch.float32)
            parts.append(model.forward_features(x)[1].numpy())
    values = np.concatenate(parts)
    feature = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    split = pa.array(["train"] * len(values))
    label = pa.array(["a", "b"]).take(images.rows["label"].combine_chunks())
    columns = {
        "sample_id": images.rows["sample_id"],
        "key": images.rows["key"],
        "split": split,
        "label": label,
    }
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        pq.write_table(pa.table(columns | {"feature": feature}), file.name, compression="zstd")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
