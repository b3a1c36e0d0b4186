"""Features of labelled and test images: from a frozen backbone, from untrained models, and plain pixels.

A backbone's features are part of the evaluation's artifact: `features/KEY.parquet` has one row per image, and KEY is a
hash of everything except the image that a feature depends on (`Weights.key`). A later evaluation with the same KEY,
with other images or numbers of labels, computes only the missing features. An image's feature does not depend on the
other images in its batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from pipelines.identity import canonical_json, sha256
from pipelines.spec import Audit, Evaluate
from pipelines.store import StoreError, all_manifests, local_file
from ray_jobs.data.shards import Dataset, Split
from ray_jobs.evaluation.cost import Cost
from ray_jobs.evaluation.frozen import drawn
from ray_jobs.evaluation.leakage import COMPARED
from ray_jobs.evaluation.measuring import forward_cost
from ray_jobs.process.cluster import Run
from ray_jobs.process.context import Context
from ray_jobs.process.devices import device, set_threads
from vit_model.build import Network, build
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing, read_contract
from vit_model.errors import UserError, reasons
from vit_model.preprocessing import normalise
from vit_model.variants import FAMILIES
from vit_model.weights import load_model, transfer_backbone

# The pixels of larger images are reduced to this side; more inputs would be too many for a linear probe.
PIXELS_SIDE = 32
PIXELS, PIXELS_STANDARDISED = "pixels", "pixels, standardised"
UNTRAINED = "untrained"
INITIALISATIONS = 3  # seeds of untrained weights, starting with the stage's seed
BATCH = 256  # images per forward pass
DECODED = 4 * BATCH  # images in memory at once; 450 MB at 384 x 384 pixels

Embed = Callable[[NDArray[Any]], NDArray[Any]]


class Features(NamedTuple):
    """One kind of features of the labelled images and of test."""

    method: str
    pairs: list[tuple[NDArray[Any], NDArray[Any]]]
    """support [n, d] and test [m, d]; for untrained weights, a pair per initialisation"""
    standardise: bool


@dataclass(frozen=True)
class Support:
    """The labelled images that draws are taken from: each image's split, row in it and label, all [n].

    `needed` [m] are the ascending indices of the images in any draw, or of all images for a linear probe.
    """

    splits: NDArray[Any]
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    needed: NDArray[np.int64]


class Weights(NamedTuple):
    """The weights that compute features: a model's, or untrained weights of its architecture."""

    folder: Path
    seed: int | None = None
    """the seed of untrained weights; None: the model's weights"""
    resolution: int | None = None
    """the resolution of the images; None: the model's"""

    def contract(self) -> ModelContract:
        """Return the model's contract at this resolution.

        Raises:
            UserError: the model does not support this resolution.
        """
        contract = read_contract(self.folder)
        if self.resolution is None:
            return contract
        architecture = contract.architecture.model_dump() | {"image_size": self.resolution}
        pixels = contract.preprocessing.model_copy(update={"resolution": self.resolution})
        fields = {"architecture": architecture, "preprocessing": pixels}
        try:
            return ModelContract.model_validate(dict(contract) | fields)
        except ValidationError as error:
            raise UserError(f"resolution {self.resolution}: {reasons(error)}") from None

    def key(self, preprocessing: Preprocessing, code: str) -> str:
        """Return a hash of everything except the image that a feature depends on.

        Args:
            code: the digest of this stage's code.
        """
        contract = self.contract()
        origin: Any = self.seed
        if self.seed is None:
            with (self.folder / "model.safetensors").open("rb") as file:
                origin = hashlib.file_digest(file, "sha256").hexdigest()
        parts = {
            "architecture": contract.architecture.model_dump(mode="json"),
            "weights": origin,
            "preprocessing": preprocessing.model_dump(mode="json"),
            "device": device().type,
            "torch": str(torch.__version__),
            "code": code,
        }
        return sha256(canonical_json(parts))

    def load(self) -> tuple[Network, ModelContract]:
        """Build the model."""
        contract = self.contract()
        if self.seed is None:
            trained, stored = load_model(self.folder)
            if stored.architecture == contract.architecture:
                return trained, stored
        network = build(contract.architecture)
        network.initialise(self.seed or 0)
        if self.seed is None:
            transfer_backbone(network, trained, range(stored.architecture.num_classes))
        return network, contract


def support_of(dataset: Dataset, config: Evaluate) -> Support:
    """Return the images of train, followed by dev with `support: train+dev`."""
    splits: tuple[Split, ...] = ("train", "dev") if config.support == "train+dev" else ("train",)
    by_split = [dataset.labels(split) for split in splits]
    labels = np.concatenate(by_split)
    needed = np.arange(len(labels))
    if not config.linear_probe:
        needed = np.unique(
            np.concatenate([drawn(config, labels, max(config.shots), draw) for draw in range(config.draws)])
        )
    return Support(
        np.repeat(splits, [len(split_labels) for split_labels in by_split]),
        np.concatenate([np.arange(len(split_labels)) for split_labels in by_split]),
        labels,
        needed,
    )


def labelled_rows(dataset: Dataset, support: Support) -> pa.Table:
    """Return the columns COMPARED of the support's needed images."""
    splits: list[Split] = list(dict.fromkeys(support.splits.tolist()))
    rows = pa.concat_tables([dataset.index(split).select(COMPARED) for split in splits])
    return rows.take(support.needed)


def features_of(
    context: Context[Evaluate], dataset: Dataset, support: Support, backbone: str, run: Run, folder: Path
) -> Iterator[Features]:
    """Yield each kind of features, the backbone's first.

    Only support images in some draw are read; the features of the others stay zero and are never used.

    Args:
        backbone: the name of the model's features: PRETRAINED or SEEN.
        folder: new features are written to its subfolder `features`.
    """
    config, model = context.config, context.input("backbone")
    contract = Weights(model, None, config.resolution).contract()
    preprocessing = contract.preprocessing
    if config.eval_crop is not None:
        changed = config.eval_crop.model_dump(exclude_none=True)
        preprocessing = Preprocessing(**(preprocessing.model_dump() | changed))
    parts = _parts(dataset, support)
    seeds = range(config.seed, config.seed + INITIALISATIONS)
    every = [Weights(model, seed, config.resolution) for seed in (None, *seeds)]
    pairs = [
        _paired(features, support) for features in _embedded(context, dataset, every, preprocessing, parts, run, folder)
    ]
    family = FAMILIES[contract.architecture.family]
    yield Features(f"{family}, {backbone}", pairs[:1], True)
    yield Features(f"{family}, {UNTRAINED}", pairs[1:], True)
    small = preprocessing.model_copy(update={"resolution": min(preprocessing.resolution, PIXELS_SIDE)})
    pixels = [_read(dataset, split, rows, small, [_as_vectors])[0] for split, rows in parts]
    pair = _paired(pixels, support)
    yield Features(PIXELS, [pair], False)
    yield Features(PIXELS_STANDARDISED, [pair], True)


def _parts(dataset: Dataset, support: Support) -> list[tuple[Split, NDArray[np.int64]]]:
    """Return (split, rows) of the needed images, test last."""
    rows, splits = support.rows[support.needed], support.splits[support.needed]
    labelled = [(split, rows[splits == split]) for split in dict.fromkeys(splits.tolist())]
    return [*labelled, ("test", np.arange(dataset.info.splits["test"]))]


def _paired(parts: Sequence[NDArray[Any]], support: Support) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (support features, test features), from the features of `_parts`."""
    *labelled, test = parts
    train = np.zeros((len(support.labels), test.shape[1]), test.dtype)
    train[support.needed] = np.concatenate(labelled)
    return train, test


# ------------------------------------------------------------------------------------------------- embedding


def _embedded(
    context: Context[Evaluate],
    dataset: Dataset,
    every: Sequence[Weights],
    preprocessing: Preprocessing,
    parts: Sequence[tuple[Split, NDArray[np.int64]]],
    run: Run,
    folder: Path,
) -> list[list[NDArray[np.float32]]]:
    """Return features [n, d] for each of `every` and each part; features of earlier evaluations are reused."""
    ids = [_image_ids(dataset, split, rows) for split, rows in parts]
    keys = [weights.key(preprocessing, context.attempt.code_digest) for weights in every]
    in_all = wanted = pa.chunked_array(ids).unique()
    known = [_earlier(context, key, wanted) for key in keys]
    if reused := sum(map(len, known[0])):
        print(f"features of {reused:,} images are reused from earlier evaluations", flush=True)
    for tables in known:
        in_all = in_all.filter(pc.is_in(in_all, _images(tables)))
    missing = [
        (split, rows[~pc.is_in(part_ids, in_all).to_numpy(zero_copy_only=False)])
        for (split, rows), part_ids in zip(parts, ids, strict=True)
    ]
    seeds = tuple(weights.seed for weights in every)
    tasks = [
        (context, seeds, preprocessing, split, rows[start : start + DECODED])
        for split, rows in missing
        for start in range(0, len(rows), DECODED)
    ]
    done = run(embed_rows, tasks)
    new_ids = [_image_ids(dataset, *task[3:]) for task in tasks]
    features = []
    for place, (key, earlier) in enumerate(zip(keys, known, strict=True)):
        new = [_table(images, result[place]) for images, result in zip(new_ids, done, strict=True)]
        if new:
            _write(folder / _file(key), pa.concat_tables(new))
        tables = [*earlier, *new]
        values = np.concatenate([_values(table) for table in tables])
        images = _images(tables)
        features.append([values[pc.index_in(part, images).to_numpy()] for part in ids])
    return features


def embed_rows(
    context: Context[Evaluate | Audit],
    seeds: Sequence[int | None],
    preprocessing: Preprocessing,
    split: Split,
    rows: NDArray[np.int64],
) -> list[NDArray[np.float32]]:
    """Return the features [n, d] of these rows of a split, per seed of untrained weights (None: the backbone)."""
    folder, config = context.input("backbone"), context.config
    resolution = config.resolution if isinstance(config, Evaluate) else None
    functions = []
    for seed in seeds:
        network, contract = Weights(folder, seed, resolution).load()
        functions.append(partial(embed, network, contract, config.threads or 1))
    return _read(context.dataset(), split, rows, preprocessing, functions)


def _read(
    dataset: Dataset,
    split: Split,
    rows: NDArray[np.int64],
    preprocessing: Preprocessing,
    functions: Sequence[Embed],
) -> list[NDArray[Any]]:
    """Return the outputs [n, d] of each function for these rows of a split, with few images in memory at once."""
    features: list[list[NDArray[Any]]] = [[] for _ in functions]
    for start in range(0, len(rows), DECODED):
        images = dataset.images(split, preprocessing, rows[start : start + DECODED])
        for parts, function in zip(features, functions, strict=True):
            parts.append(function(images))
    return [np.concatenate(parts) for parts in features]


def embed(model: Network, contract: ModelContract, threads: int, images: NDArray[Any]) -> NDArray[Any]:
    """Return the frozen representation [n, width] of images in float32, see `outputs`."""
    return outputs(model, contract, threads, images, lambda pixels: model.forward_features(pixels)[1])


def embed_patches(model: Network, contract: ModelContract, threads: int, images: NDArray[Any]) -> NDArray[Any]:
    """Return the tokens of the images' patches [n, patches, width] in float32, see `outputs`."""
    architecture = contract.architecture
    first = architecture.num_prefix_tokens if isinstance(architecture, ViTConfig) else 0
    return outputs(model, contract, threads, images, lambda pixels: model.forward_features(pixels)[0][:, first:])


def infer(folder: Path, dataset: Dataset, rows: pa.Table, threads: int, is_classifier: bool) -> NDArray[np.float32]:
    """Return a model's features [n, width] of these rows of an index, or its probabilities [n, classes].

    Images are decoded while the model computes the ones before them.
    """
    model, contract = _loaded(folder)
    is_multi = contract.is_multi_label

    def probabilities(pixels: torch.Tensor) -> torch.Tensor:
        logits = model(pixels).float()
        return logits.sigmoid() if is_multi else logits.softmax(-1)

    compute = partial(outputs, forward=probabilities) if is_classifier else embed
    decoding = threads if device().type == "cpu" else os.cpu_count() or 1
    batches = dataset.batches(rows, contract.preprocessing, BATCH, decoding)
    return np.concatenate([compute(model, contract, threads, images) for images in batches])


@lru_cache(1)
def _loaded(folder: Path) -> tuple[Network, ModelContract]:
    """Load a model once per process, which computes many parts."""
    return load_model(folder)


def outputs(
    model: Network,
    contract: ModelContract,
    threads: int,
    images: NDArray[Any],
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> NDArray[Any]:
    """Return `forward`'s output, a model's, for images in float32; a GPU computes it in bfloat16."""
    set_threads(threads)
    target = device()
    dtype = _dtype()
    model.to(target, dtype).eval()
    with torch.inference_mode():
        parts = [
            forward(normalise(batch.to(target), contract.preprocessing, dtype)).float().cpu()
            for batch in torch.from_numpy(images).split(BATCH)
        ]
    return torch.cat(parts).numpy()


def cost_of_features(context: Context[Evaluate]) -> Cost:
    """Measure the cost of the backbone's features, without its classifier."""
    contract = Weights(context.input("backbone"), None, context.config.resolution).contract()
    headless = contract.architecture.model_dump() | {"num_classes": 0, "head_bias": 0.0}
    architecture = type(contract.architecture).model_validate(headless)
    contract = contract.model_copy(update={"architecture": architecture, "class_names": ()})

    def untrained() -> Network:  # takes the same time as the trained one
        network = build(architecture)
        network.initialise(0)
        return network

    return forward_cost(untrained, contract, _dtype(), context.config.threads)


def _dtype() -> torch.dtype:
    return torch.float32 if device().type == "cpu" else torch.bfloat16


def _as_vectors(images: NDArray[Any]) -> NDArray[np.float32]:
    return np.asarray(images.reshape(len(images), -1) / np.float32(255), np.float32)


# ------------------------------------------------------------------------------------- features of earlier evaluations


def _table(images: pa.Array, values: NDArray[np.float32]) -> pa.Table:
    """Return a table of the identities [n] of images and their features [n, d]."""
    features = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.table({"image": images, "feature": features})


def _images(tables: Sequence[pa.Table]) -> pa.Array:
    """Return the identities of the images in these tables."""
    return pa.concat_arrays([pa.array([], pa.string()), *(_flat(table["image"]) for table in tables)])


def _values(table: pa.Table) -> NDArray[np.float32]:
    """Return the features [n, d] of a table."""
    column = _flat(table["feature"])
    return np.asarray(column.flatten().to_numpy(), np.float32).reshape(len(column), column.type.list_size)


def _write(path: Path, table: pa.Table) -> None:
    """Write each image's feature once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = np.unique(table["image"].to_numpy(), return_index=True)[1]
    pq.write_table(table.take(first).combine_chunks(), path)


def _file(key: str) -> str:
    return f"features/{key}.parquet"


def _image_ids(dataset: Dataset, split: Split, rows: NDArray[np.int64]) -> pa.Array:
    """Return an identity of these rows of a split: of their original bytes, their stored bytes, and their size."""
    columns = ["content_id", "checksum", "format", "width", "height", "channels"]
    index = dataset.index(split).select(columns).take(rows)
    parts = [column.cast(pa.string()) for column in index.columns]
    return _flat(pc.binary_join_element_wise(*parts, "/"))


def _earlier(context: Context[Evaluate], key: str, wanted: pa.Array) -> list[pa.Table]:
    """Return the features of these images that earlier evaluations in this store have, of each image once."""
    store, found = context.open_store(), []
    for manifest in all_manifests(store, "evaluate"):
        if not any(file.path == _file(key) for file in manifest.files):
            continue
        try:
            path = local_file(store, manifest, _file(key))
            assert path is not None
            stored = pq.read_table(path, columns=["image", "feature"])
            found.append(stored.filter(pc.is_in(stored["image"], wanted)))
        except (pa.ArrowException, StoreError) as error:
            print(f"the features of {manifest.stage} are recomputed: {error}", flush=True)
            continue
        wanted = wanted.filter(pc.invert(pc.is_in(wanted, _images(found[-1:]))))
    return found


def _flat(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
