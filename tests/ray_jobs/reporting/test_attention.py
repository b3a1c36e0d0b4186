"""The tint of an image is the model's attention rollout."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines.store import Layout, Manifest, Store, commit, open_store
from ray_jobs.data.shards import Dataset, open_artifact
from ray_jobs.reporting.drawing import pictures
from tests.support.checkpoints import put_untrained
from tests.support.digits import put_digits
from tests.support.records import make_manifest
from vit_model.inspection import attention_rollout
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import load_model


@pytest.fixture
def made(tmp_path: Path) -> tuple[Store, Manifest, Dataset]:
    """Digits, and an untrained model for them."""
    store = open_store(str(tmp_path / "store"))
    with store.staging(Layout.files("ingest", "d", 1)) as staging:
        put_digits(staging.path, "digits", {"train": range(20), "dev": range(20, 24), "test": range(24, 34)})
    data = commit(store, make_manifest("ingest", kind="dataset", key="d", stage="d", files=staging.files))
    return store, put_untrained(store, data), open_artifact(store, data)


def test_the_tint_is_strongest_where_the_attention_is(made: tuple[Store, Manifest, Dataset]) -> None:
    store, model, dataset = made
    urls = pictures.overlays(store, model, dataset, [4, 2])
    assert urls == pictures.overlays(store, model, dataset, [4, 2]) and len(urls) == 2
    network, contract = load_model(store.local(model.folder, ()))
    assert isinstance(network, ViT)
    pixels = dataset.images("test", contract.preprocessing, [4, 2])
    looked = attention_rollout(network, normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32))
    for url, share in zip(urls, looked, strict=True):
        picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        red, _, blue = np.asarray(picture, float).reshape(64, 64, 3).transpose(2, 0, 1)
        tint = (red - blue).reshape(2, 32, 2, 32).mean(axis=(1, 3))  # per patch; the digits are grey
        assert tint.argmax() == share.argmax() and tint.argmin() == share.argmin()


def test_nothing_is_read_of_a_model_that_is_too_large(
    made: tuple[Store, Manifest, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, model, dataset = made
    monkeypatch.setattr(pictures, "MOST_BYTES", 10)
    monkeypatch.setattr(pictures, "load_model", None)
    assert pictures.overlays(store, model, dataset, [0]) == []
