"""Clusters of an embedding."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_jobs.reporting import clusters
from ray_jobs.reporting.clusters import clusters_of


def put(folder: Path, groups: list[int], files: int = 2) -> tuple[list[Path], dict[str, int]]:
    """Write features in some directions, of all lengths, and a test image elsewhere; return paths, and directions."""
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(np.arange(len(groups)), groups))
    features = (np.eye(len(groups) + 1)[group] + rng.normal(0, 0.02, (len(group), len(groups) + 1))) * rng.lognormal(
        0, 2, (len(group), 1)
    )
    features = np.append(features, [np.eye(len(groups) + 1)[-1]], axis=0).astype(np.float32)
    ids = [f"{number:03d}" for number in range(len(features))]
    table = pa.table(
        {
            "sample_id": ids,
            "key": [f"{number}.png" for number in ids],
            "split": ["train"] * len(group) + ["test"],
            "feature": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), features.shape[1]),
        }
    )
    (folder / "images").mkdir(parents=True)
    step = -(-len(ids) // files)
    for number in range(files):
        pq.write_table(table.slice(number * step, step), folder / f"images/{number:05d}.parquet")
    return sorted(folder.glob("images/*")), dict(zip(ids, group.tolist(), strict=False))


def test_images_in_one_direction_are_a_cluster_whatever_their_lengths(tmp_path: Path) -> None:
    files, group = put(tmp_path, [16, 9, 14])
    found = clusters_of(files)
    assert [cluster.images for cluster in found] == [16, 14, 9]
    for cluster in found:
        assert len({group[sample_id] for sample_id in cluster.nearest}) == 1
        assert {group[name.removesuffix(".png")] for name in cluster.files} == {group[cluster.nearest[0]]}
        assert len(set(cluster.files)) == cluster.images
        assert [f"{sample_id}.png" for sample_id in cluster.nearest] == cluster.files[:8]
        assert len(cluster.nearest) == len(set(cluster.nearest)) == 8
    assert found == clusters_of(files)


def test_many_images_are_sampled_and_none_are_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = put(tmp_path / "a", [40, 40])
    monkeypatch.setattr(clusters, "MAX_IMAGES", 30)
    assert sum(cluster.images for cluster in clusters_of(files)) == 30
    assert clusters_of(put(tmp_path / "b", [])[0]) == []
