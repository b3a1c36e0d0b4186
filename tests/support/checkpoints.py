"""Models in a store: untrained ones, a pretraining with the weights of several steps, and what one has saved so far."""

import hashlib
import json
from typing import Any

import torch

from pipelines.spec import Model, ModelSize
from pipelines.store import (
    Checkpoint,
    FileEntry,
    Layout,
    Manifest,
    Store,
    commit,
    commit_checkpoint,
    local_files,
    now,
)
from ray_jobs.data.shards import open_dataset
from ray_jobs.training.contract import model_contract
from tests.support.records import make_attempt, make_manifest
from tests.support.vits import contract_for
from vit_model.build import build
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.weights import save_model

CONTRACT = contract_for(
    ViTConfig(image_size=8, patch_size=4, width=8, depth=1, num_heads=2, mlp_dim=16, num_classes=3),
    ("ape", "bee", "cat"),
)


SIZE = ModelSize(patch_size=4, width=16, depth=1, num_heads=2)


def put_untrained(
    store: Store,
    data: Manifest,
    key: str = "k",
    job: str = "pretrain",
    size: Model = SIZE,
    resolution: int = 8,
    seed: int = 3,
    **contract: Any,
) -> Manifest:
    """Write an untrained model for a dataset's images, whose contract has these fields; it is not committed."""
    made = model_contract(size, resolution, open_dataset(local_files(store, data)).info)
    model = build(made.architecture)
    model.initialise(seed)
    with store.staging(Layout.files(job, key, 1)) as staging:
        save_model(staging.path, model, made.model_copy(update=contract))
    return make_manifest(job, key=key, content_digest=key, files=staging.files)


def model_at(step: int, contract: ModelContract = CONTRACT) -> ViT:
    """The model of a step: every step has other weights."""
    model = ViT(contract.architecture)
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model.eval()


def put_pretraining(store: Store, contract: ModelContract = CONTRACT, best: int | None = 5, **fields: Any) -> Manifest:
    """Commit a pretraining of 20 steps that kept its steps 5 and 10, and measured dev accuracy at 10 and 20."""
    manifest = make_manifest("pretrain", **{"key": "pa", "stage": "pretrain", "config": {"steps": 20}} | fields)
    with store.staging(Layout.files("pretrain", manifest.key, 1)) as staging:
        for step in (5, 10):
            folder = staging.path / "checkpoints" / str(step)
            save_model(folder, model_at(step, contract), contract)
            (folder / "config.json").unlink()
        save_model(staging.path, model_at(20, contract), contract)
        (staging.path / "checkpoints.json").write_text(json.dumps({"best": best, "steps": [5, 10, 20]}))
        accuracies = {1: None, 10: 0.25, 20: 0.5}
        curve = [{"step": step, "dev_accuracy": accuracy} for step, accuracy in accuracies.items()]
        (staging.path / "curve.json").write_text(json.dumps(curve))
    return commit(store, manifest.model_copy(update={"files": staging.files}))


def put_state(
    store: Store, number: int, step: int, key: str = "pa", fit: str | None = None, best: int | None = None
) -> Checkpoint:
    """Commit what attempt `number` saved after a step."""
    attempt = make_attempt("pretrain", key=key, number=number)
    file = FileEntry(path="rank-0.safetensors", size=5, sha256=hashlib.sha256(b"state").hexdigest())
    checkpoint = Checkpoint(
        job="pretrain", key=key, attempt=number, step=step, files=(file,), created=now(), fit=fit, best=best
    )
    store.create(f"{checkpoint.folder}/{file.path}", b"state")
    commit_checkpoint(store, attempt, checkpoint)
    return checkpoint
