"""The stage inspect: its tables are the analyses of the drawn images, and a report shows them."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from pipelines.spec import Inspect, Model, ModelSize, ResNetSize
from pipelines.store import Layout, Manifest, Store, commit, open_store
from ray_jobs.data.shards import open_artifact
from ray_jobs.inspect import SHOWN, inspect
from ray_jobs.process.context import Context, Result
from ray_jobs.reporting.drawing import pictures
from tests.support.checkpoints import SIZE, put_untrained
from tests.support.digits import put_digits
from tests.support.records import make_context, make_manifest
from tests.support.reports import make_report
from vit_model import inspection
from vit_model.errors import UserError
from vit_model.preprocessing import normalise
from vit_model.weights import load_model


def looked_at(root: Path, size: Model = SIZE, **fields: Any) -> tuple[Context[Inspect], Manifest, Result]:
    """Inspect an untrained model of digits."""
    store: Store = open_store(str(root))
    with store.staging(Layout.files("ingest", "d", 1)) as staging:
        put_digits(staging.path, "digits", {"train": range(20), "dev": range(20, 24), "test": range(24, 64)})
    data = commit(store, make_manifest("ingest", kind="dataset", key="d", stage="d", files=staging.files))
    model = commit(store, put_untrained(store, data, size=size))
    config = Inspect(job="inspect", data="d", backbone="k", **fields)
    context = make_context(store, config, data=data, backbone=model)
    return context, model, inspect(context)


def folder_of(context: Context[Inspect]) -> Path:
    attempt = context.attempt
    return context.open_store().local(Layout.files(attempt.job, attempt.key, attempt.number), ())


def read(folder: Path, name: str) -> dict[str, list[Any]]:
    return dict(pq.read_table(folder / f"{name}.parquet").to_pydict())


def test_the_tables_are_the_analyses_of_the_drawn_images(tmp_path: Path) -> None:
    size = ModelSize(patch_size=4, width=16, depth=3, num_heads=2)
    context, model, result = looked_at(tmp_path / "s", size, images=30)
    folder, store = folder_of(context), context.open_store()
    dataset = open_artifact(store, context.inputs["data"][0])
    network, contract = load_model(store.local(model.folder, ()))

    seen, ids = read(folder, "rollout"), dataset.sample_ids("test")
    rows = np.random.default_rng([0, 7]).permutation(40)[:30]
    assert seen["sample_id"] == [ids[row] for row in rows[:SHOWN]]
    pixels = dataset.images("test", contract.preprocessing, rows)
    for png, image in zip(seen["image"], pixels, strict=False):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))), image.squeeze(-1))

    images = normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32)
    np.testing.assert_allclose(seen["rollout"], inspection.attention_rollout(network, images)[:SHOWN], rtol=1e-5)
    distance, table = inspection.attention_distance(network, images), read(folder, "attention_distance")
    assert table["block"] == [1, 1, 2, 2, 3, 3] and table["head"] == [1, 2] * 3
    np.testing.assert_array_equal(table["pixels"], distance.ravel())
    components = inspection.patch_embedding_components(network, 16)
    np.testing.assert_allclose(read(folder, "filters")["pixels"], components, rtol=1e-5)
    positions, similarity = read(folder, "positions"), inspection.position_similarity(network)
    for row, column, cosines in zip(*positions.values(), strict=True):
        np.testing.assert_array_equal(np.float32(cosines), similarity[row - 1, column - 1])
    # from a patch of a 2 x 2 grid, two of the four are 4 pixels away and one is 4 sqrt 2
    metrics = {"images": 30, "first_block_pixels": distance[0].mean(), "last_block_pixels": distance[-1].mean()}
    assert result.metrics == pytest.approx(metrics | {"uniform_pixels": 2 + 2**0.5}, abs=0.005)


def test_a_report_shows_the_numbers_and_the_pictures(tmp_path: Path) -> None:
    context, _, result = looked_at(tmp_path / "s")
    store = context.open_store()
    made = make_manifest(
        "inspect",
        key=context.attempt.key,
        config=context.attempt.config,
        files=result.files,
        content_digest=result.content_digest,
        metrics=dict(result.metrics),
        code={"version": 1, "digest": "c", "git": "d", "dirty": False},
        environment={"python": "3", "machine": "m", "processor": "p", "cluster": {}, "packages": {}},
    )
    files = make_report(store, [commit(store, made)])
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    (shown,) = numbers["inspections"]
    assert shown["distances"] == [read(folder_of(context), "attention_distance")["pixels"]], "it has one block"
    said = f"In the first block of k, attention reaches {result.metrics['first_block_pixels']:.1f} pixels on average"
    assert numbers["headline"].startswith(said)
    seen = pictures.inside(folder_of(context)).seen
    assert len(seen) == SHOWN and all(image in page and tinted in page for image, tinted in seen)
    assert "over 40 images of test" in page and page.count('role="img"') >= 3


def test_the_tiles_of_positions_have_the_colours_of_their_cosines() -> None:
    cosines = np.array([[[1.0, -1.0]], [[0.0, 1.0]]])  # a grid of one row and two columns
    tiles = pictures.tiles(cosines)
    orange, blue, grey, line = pictures.TINT, pictures.COOL, pictures.NEUTRAL, (255, 255, 255)
    np.testing.assert_array_equal(tiles, [[orange, blue, line, grey, orange]])


def test_the_same_stage_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (looked_at(tmp_path / name)[2] for name in "ab")
    assert [(file.path, file.sha256) for file in first.files] == [(file.path, file.sha256) for file in second.files]


def test_a_table_is_left_out_where_the_model_has_no_such_thing(tmp_path: Path) -> None:
    size = ModelSize(patch_size=4, width=16, depth=2, num_heads=2, axial=True, position="none", pooling="gap")
    context, _, result = looked_at(tmp_path / "s", size)
    assert {file.path for file in result.files} == {"attention_distance.parquet", "filters.parquet"}
    assert result.metrics["uniform_pixels"] == 2.0, "half of a line's two patches are 4 pixels away"
    shown = pictures.inside(folder_of(context))
    assert shown.positions == "" and shown.seen == [] and len(shown.filters) == 16


def test_a_resnet_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="inspection needs a ViT; this model is a ResNet"):
        looked_at(tmp_path / "s", ResNetSize(units=(1,), width_factor=1))
