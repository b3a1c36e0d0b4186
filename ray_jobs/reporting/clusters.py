"""Clusters of an embedding: groups of images that a model finds alike, whether or not they have labels.

k-means of the features of up to MAX_IMAGES training images, drawn with a fixed seed. Each feature is divided by its
length, so that the angle between two decides.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from pipelines.spec import quantity
from pipelines.store import Manifest, Store, local_files
from ray_jobs.data.shards import Dataset
from ray_jobs.randomness import Purpose
from ray_jobs.reporting.drawing.pictures import Tiles, data_urls

MAX_IMAGES = 10_000
MAX_CLUSTERS, IMAGES_PER_CLUSTER = 12, 10  # fewer clusters if they would have fewer images on average
SHOWN = 8  # images nearest to a cluster's centre


class Cluster(NamedTuple):
    """A cluster's number of images, the ids of those nearest to its centre, and all their files, the nearest first."""

    images: int
    nearest: list[str]
    files: list[str]


def sampled_files(store: Store, embedding: Manifest) -> list[Path]:
    """Fetch files of an embedding, spread over all, that hold about twice MAX_IMAGES."""
    files = sorted((file for file in embedding.files if file.path.startswith("images/")), key=lambda file: file.path)
    share = min(1.0, 2 * MAX_IMAGES / int(embedding.metrics["images"]))
    number = math.ceil(share * len(files))
    chosen = [files[place * len(files) // number] for place in range(number)]
    folder = local_files(store, embedding, chosen)
    return [folder / file.path for file in chosen]


def clusters_of(files: list[Path]) -> list[Cluster]:
    """Return the clusters of the training images in an embedding's files, the largest first."""
    ids, keys, features = _sample(files)
    if not len(ids):
        return []
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    number = int(np.clip(len(ids) // IMAGES_PER_CLUSTER, 1, MAX_CLUSTERS))
    with threadpool_limits(1):
        found = KMeans(number, n_init=4, random_state=Purpose.CLUSTERS).fit(features)
        distances = found.transform(features)
    clusters = []
    for label in range(number):
        members = np.flatnonzero(found.labels_ == label)
        nearest = pa.array(members[np.argsort(distances[members, label], kind="stable")])
        shown = ids.take(nearest[:SHOWN]).to_pylist()
        clusters.append(Cluster(len(members), shown, keys.take(nearest).to_pylist()))
    return sorted(clusters, key=lambda cluster: -cluster.images)


def _sample(files: list[Path]) -> tuple[pa.Array, pa.Array, NDArray[np.float32]]:
    """Return the ids [n], names in the source [n] and features [n, width] of the drawn training images."""
    table = pa.concat_tables(pq.read_table(file, columns=["split", "sample_id", "key", "feature"]) for file in files)
    rng = np.random.default_rng([0, Purpose.CLUSTERS])
    drawn = rng.permutation(np.flatnonzero(pc.equal(table["split"], "train")))[:MAX_IMAGES]
    table = table.take(np.sort(drawn)).combine_chunks()
    width = table.schema.field("feature").type.list_size
    values = table["feature"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    ids, keys = (table[name].combine_chunks() for name in ("sample_id", "key"))
    return ids, keys, np.array(values, np.float32).reshape(-1, width)


def sheet(dataset: Dataset, clusters: list[Cluster]) -> list[Tiles]:
    """Return the images nearest to each cluster's centre."""
    rows = {sample_id: row for row, sample_id in enumerate(dataset.sample_ids("train"))}
    shown = [rows[sample_id] for cluster in clusters for sample_id in cluster.nearest]
    urls: Iterator[str] = iter(data_urls(dataset, "train", shown))
    return [
        Tiles(f"Group {number}: {quantity(cluster.images, 'image')}", tuple(next(urls) for _ in cluster.nearest))
        for number, cluster in enumerate(clusters, 1)
    ]


def write_groups(path: Path, embeddings: Sequence[Mapping[str, Any]]) -> None:
    """Write the group of each image as CSV, from the embeddings of report.json: embedding, group from 1, file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("embedding", "group", "file"))
        for embedding in embeddings:
            for number, cluster in enumerate(embedding["clusters"], 1):
                writer.writerows((embedding["stage"], number, name) for name in cluster["files"])
