"""The folder that the documentation's commands run in: images, and a store as `vitflow run quickstart` leaves it.

Nothing is trained and no Ray is started. Each stage's artifact is committed under the key that the plan gives it, so
every command finds the whole quickstart cached. Models have random weights; predictions are right at a chosen rate.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from pipelines.engine.history import end_run
from pipelines.engine.plan import PlannedStage, plan_pipeline
from pipelines.engine.runs import start_run
from pipelines.files.sources import source_files
from pipelines.identity import CODE_SCHEME, canonical_json, code_digest, sha256
from pipelines.recipe.load import load_pipeline
from pipelines.spec import AnyStage, Finetune, Source
from pipelines.store import (
    LOG,
    FileEntry,
    LogLine,
    Store,
    add_event,
    commit,
    encode_lines,
    now,
    open_store,
    read_manifest,
)
from ray_jobs import report
from ray_jobs.data.columns import Sample
from ray_jobs.data.shards import ImageSize, open_dataset
from ray_jobs.evaluation.cost import Cost, Speed, write_cost
from ray_jobs.evaluation.rows import Truth
from ray_jobs.process.context import Context
from ray_jobs.sources.readers import digits
from tests.support import datasets
from tests.support.records import make_attempt, make_manifest
from tests.support.scores import Scores, put_scores
from tests.support.vits import TINY, contract_for
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.weights import save_model

SIZE = ImageSize(height=8, width=8, channels=1)
DRAWS = 3
# all other methods: 0.7
SHARE_RIGHT = {"ViT, pretrained": 0.9, "ViT, from scratch": 0.5, "ViT, untrained": 0.4}
ENVIRONMENT = {
    "python": "3",
    "machine": "x86_64",
    "processor": "a",
    "cluster": {},
    "packages": {"torch": "2"},
}


def prepare(folder: Path) -> None:
    """Write the store `runs`, and the images `digit.png` and `photos/CLASS/*.png`."""
    store = open_store(str(folder / "runs"))
    put_quickstart(store)
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(folder / "digit.png")


def put_quickstart(store: Store) -> None:
    """Commit an artifact for each stage of the quickstart, and the run that made them."""
    pipeline = load_pipeline("quickstart")
    run = start_run(store, pipeline, tuple(pipeline.stages))
    while waiting := [stage for stage in plan_pipeline(store, pipeline, pipeline.order()) if stage.state != "cached"]:
        for stage in waiting:
            if stage.state == "run":
                _commit(store, stage, run.id)
                add_event(store, run.id, "stage", stage=stage.name, status="SUCCEEDED", key=stage.key)
    end_run(store, run.id, "SUCCEEDED")


def _commit(store: Store, planned: PlannedStage, run: str) -> None:
    config, inputs = planned.config, planned.inputs or {}
    common = {
        "key": planned.key,
        "stage": planned.name,
        "run": run,
        "config": config.model_dump(mode="json"),
        "inputs": inputs,
        "source": planned.source,
    }
    code = code_digest(config.job)
    attempt = make_attempt(config.job, store_id=store.id, store_uri=store.uri, code_digest=code, **common)
    manifests = {
        field: tuple(read_manifest(store, reference.job, reference.key) for reference in references)
        for field, references in inputs.items()
    }
    files = _made(Context(attempt, config, manifests))
    content = sha256(canonical_json([[entry.path, entry.sha256] for entry in files]))
    made_by = {"version": config.version, "scheme": CODE_SCHEME, "digest": code}
    fields = {"files": files, "content_digest": content, "code": made_by, "environment": ENVIRONMENT}
    if isinstance(config, Finetune):
        fields["metrics"] = {"learning_rate": config.learning_rates[0]}
    commit(store, make_manifest(config.job, **common, **fields))


def _made(context: Context[Any]) -> tuple[FileEntry, ...]:
    """The files of a stage's artifact."""
    config = context.config
    if config.job == "report":
        return report.make(context).files
    with context.staging() as staging:
        if config.job == "ingest":
            _put_dataset(staging.path, config.source)
        if config.KIND == "model":
            _put_model(staging.path)
        if config.job == "finetune":
            _put_training(staging.path, config)
        if config.job in ("finetune", "evaluate", "baselines"):
            _put_scores(staging.path, context)
    return staging.files


def _put_dataset(folder: Path, source: Source) -> None:
    """All digits in their own splits; of the letters a few, as noise."""
    splits: dict[str, list[Sample]] = defaultdict(list)
    if source.kind == "digits":
        files = {name: str(path) for name, path in source_files(source).items()}
        listing = digits.listing(source, files)
        rows = listing.entries.to_pylist()
        for row, pixels in zip(rows, digits.rows(source, files, range(len(rows))), strict=True):
            splits[row["split"]].append(_sample(row["key"], pixels, row["label"]))
    else:
        for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), np.uint8)):
            splits["dev" if number < 10 else "train"].append(_sample(f"{number}", pixels, number % 10))
    datasets.put(folder, source.kind, digits.CLASS_NAMES, SIZE, splits)
    pq.write_table(pa.table({"key": pa.array([], pa.string())}), folder / "quarantine.parquet")


def _sample(key: str, pixels: np.ndarray, label: int) -> Sample:
    return Sample(key, key, pixels.tobytes(), "raw", 8, 8, 1, label)


def _put_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(**TINY | {"patch_size": 2}, in_channels=1, num_classes=10)
    save_model(folder, ViT(config), contract_for(config, digits.CLASS_NAMES))


def _put_training(folder: Path, config: Finetune) -> None:
    """A trial per learning rate of which the first was chosen, the lines of its log, and what the model costs."""
    trials = [{"learning_rate": rate, "accuracies": [0.5], "losses": [1.0]} for rate in config.learning_rates]
    sweep = {"trials": trials, "chosen": config.learning_rates[0], "selected_on": "dev"}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    line = {"time": now(), "fit": "trial-0-0", "epoch": 1.0, "loss": 1.0, "learning_rate": 0.1}
    lines = [LogLine.model_validate(line | {"step": step, "dev_accuracy": step / 100}) for step in (40, 80)]
    (folder / LOG).write_bytes(encode_lines(lines))
    forward = Speed(images=32, dtype="float32", images_per_second=1000.0, peak_bytes=None)
    write_cost(folder, Cost(resolution=8, parameters=10, gflops=0.1, device="CPU", threads=1, forward=forward))


def _put_scores(folder: Path, context: Context[Any]) -> None:
    """Rows and predictions of every method and number of labels that the stage's own would have."""
    config = context.config
    (data,) = context.inputs["data"]
    dataset = open_dataset(context.open_store().local(data.folder, ()))
    truth = Truth("digits", dataset.sample_ids("test"), dataset.labels("test"))
    found = []
    for number, (protocol, method, labels) in enumerate(_scored(config)):
        rngs = [np.random.default_rng([number, draw]) for draw in range(DRAWS if labels else 1)]
        right = np.stack([rng.random(len(truth.labels)) for rng in rngs]) < SHARE_RIGHT.get(method, 0.7)
        answers = np.where(right, truth.labels, (truth.labels + 1) % 10)
        found += Scores(method, protocol, labels, answers, truth).scored()
    put_scores(folder, found)


def _scored(config: AnyStage) -> list[tuple[str, str, int | None]]:
    """(protocol, method, labels per class) of each result."""
    if config.job == "evaluate":
        methods = ("ViT, pretrained", "ViT, untrained", "pixels", "pixels, standardised")
        return [("few-shot linear", method, shots) for method in methods for shots in config.shots]
    if config.job == "finetune":
        method = "ViT, from scratch" if config.backbone is None else "ViT, pretrained"
        return [("fine-tuning", method, config.labels.per_class)]
    return [("baseline", method, config.labels.per_class) for method in config.methods]
