"""What a notebook gets is what the store holds: the same weights, pixels and numbers, read by other means here."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pipelines
from pipelines.files.hashing import cache_folder
from pipelines.spec import RecipeError
from pipelines.store import Store, StoreError, open_store
from ray_jobs.data.columns import Sample
from ray_jobs.data.shards import ImageSize
from ray_jobs.evaluation.rows import ROWS, write_table
from tests.support import datasets
from tests.support.checkpoints import model_at, put_pretraining
from tests.support.records import committed, row
from tests.support.s3 import Server, used
from tests.support.vits import contract_for
from vit_model.config import ViTConfig
from vit_model.contract import Preprocessing
from vit_model.model import ViT
from vit_model.predict import classify
from vit_model.weights import save_model

CLASSES = ("ape", "bee")
GREY = Preprocessing(mean=(0.5,), std=(0.5,), resolution=4, channels=1)


IDS = datasets.identities(3)


def put_dataset(store: Store) -> None:
    """Three grey images of 4x4 in two shards of test: image i is filled with 10 * i. None in dev and train."""
    with committed(store, "ingest", "da") as folder:
        samples = [Sample(IDS[i], f"{i}.png", bytes([10 * i] * 16), "raw", 4, 4, 1, i % 2) for i in range(3)]
        image = ImageSize(height=4, width=4, channels=1)
        datasets.put(folder, "zoo", CLASSES, image, {"test": samples}, per_shard=2)


def put_finetuned(store: Store) -> ViT:
    """A model with its row."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=4, patch_size=2, in_channels=1, width=8, depth=1, num_heads=1, mlp_dim=8, num_classes=2
    )
    model = ViT(config)
    torch.nn.init.normal_(model.head.weight)
    with committed(store, "finetune", "fa", stage="tune", run="r-1") as folder:
        save_model(folder, model, contract_for(config, CLASSES))
        write_table(folder / "rows.parquet", [row(method="ViT", value=0.5)], ROWS)
    return model.eval()


def test_importing_and_opening_are_light(store: Store) -> None:
    code = f"import sys, pipelines; pipelines.open_store({store.uri!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "ray",
        "pyarrow",
        "duckdb",
        "numpy",
        "matplotlib",
        "boto3",
        "ray_jobs",
        "vit_model.model",
    }
    assert not heavy & set(done.stdout.split())


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        pipelines.open_store(str(tmp_path / "x"))
    assert not list(tmp_path.iterdir())


def test_a_model_is_the_one_that_was_saved(store: Store, tmp_path: Path) -> None:
    saved = put_finetuned(store)
    found = pipelines.open_store(store.uri).model("fa")
    assert not found.model.training
    pixels = torch.rand(5, 1, 4, 4)
    assert torch.equal(found.model(pixels), saved(pixels))
    assert (found.preprocessing, found.class_names) == (GREY, CLASSES)
    file = tmp_path / "image.png"
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(file)
    assert found.classify([str(file)]) == classify(Path(store.uri) / "artifacts/finetune/fa/attempts/1/files", [file])


def test_a_model_may_be_a_checkpoint(store: Store) -> None:
    put_pretraining(store)
    library = pipelines.open_store(store.uri)
    for checkpoint, step in (("last", 20), ("best", 5), ("step:10", 10)):
        found = library.model("pa", checkpoint).model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model_at(step).state_dict().items())


def test_a_notebook_shows_what_is_what(store: Store) -> None:
    put_dataset(store)
    library = pipelines.open_store(store.uri)
    assert repr(library).startswith(f"Library({store.uri!r})")
    shown = repr(library.dataset())
    for said in ("StoredDataset('", " train", " dev", " test images", " classes, 4 x 4 x 1"):
        assert said in shown


def test_a_datasets_samples_and_images_are_in_one_order(store: Store) -> None:
    put_dataset(store)
    found = pipelines.open_store(store.uri).dataset()
    samples = found.samples("test").to_pylist()
    assert [(s["sample_id"], s["key"], s["class_name"]) for s in samples] == [
        (IDS[0], "0.png", "ape"),
        (IDS[1], "1.png", "bee"),
        (IDS[2], "2.png", "ape"),
    ]
    assert found.images("test").tolist() == [np.full((4, 4, 1), 10 * i).tolist() for i in range(3)]
    assert found.images("test", [2, 0])[:, 0, 0, 0].tolist() == [20, 0]
    larger = GREY.model_copy(update={"resolution": 6})
    assert found.images("test", [1], larger).shape == (1, 6, 6, 1)


@pytest.mark.parametrize(("split", "message"), [("tset", "did you mean 'test'"), ("train", "no images in its train")])
def test_a_split_that_is_not_there_is_told(store: Store, split: str, message: str) -> None:
    put_dataset(store)
    found = pipelines.open_store(store.uri).dataset()
    for ask in (found.samples, found.images):
        with pytest.raises(ValueError, match=message):
            ask(split)


def test_images_of_many_sizes_come_as_squares_from_their_middle(store: Store, tmp_path: Path) -> None:
    wide = np.zeros((300, 600, 3), np.uint8)
    wide[:, 150:450] = (255, 0, 0)  # the middle square is red
    with committed(store, "ingest", "db") as folder:
        Image.fromarray(wide).save(tmp_path / "x.png")
        samples = [Sample("i", "x.png", (tmp_path / "x.png").read_bytes(), "png", 600, 300, 3, 0)]
        datasets.put(folder, "zoo", CLASSES, None, {"dev": samples})
    images = pipelines.open_store(store.uri).dataset("db").images("dev")
    assert images.shape == (1, 224, 224, 3)
    assert (images[0, :, 4:-4] == (255, 0, 0)).all()


def test_a_table_is_that_of_sql(store: Store) -> None:
    library = pipelines.open_store(store.uri)
    assert library.table("rows").fetchall() == []
    put_finetuned(store)
    found = library.table("rows")
    assert found.project("artifact, stage, run, method, value").fetchall() == [("fa", "tune", "r-1", "ViT", 0.5)]
    assert found.query("rows", "select max(value) from rows").fetchall() == [(0.5,)]
    assert len(library.table("accuracies").fetchall()) == 1
    with pytest.raises(RecipeError, match="did you mean 'accuracies'"):
        library.table("accuracy")


@pytest.mark.slow
def test_on_s3_only_what_is_asked_for_is_fetched(moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with used(moto, monkeypatch):
        store = open_store(f"s3://{moto.bucket().name}/x")
        put_dataset(store)
        put_finetuned(store)
        library = pipelines.open_store(store.uri)
        assert len(library.table("rows").fetchall()) == 1
        cached = {path.name for path in (cache_folder() / "objects").rglob("*") if path.is_file()}
        assert cached == {"rows.parquet"}, "not the weights beside it"
        assert library.model().class_names == library.dataset("da").info.class_names == CLASSES
