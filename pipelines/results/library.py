"""A store for people in a notebook: `pipelines.open_store(uri)`.

In: a store. Out: models that classify, datasets to look at, and every measured number as a table. Looking changes
nothing. KEY is a key, its unique beginning, or RUN/STAGE, as on the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.results.lookup import find_artifact
from pipelines.spec import nearest
from pipelines.store import Manifest, Store, local_files
from vit_model.errors import UserError

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from ray_jobs.data.shards import Dataset, DatasetInfo, Split
    from vit_model.build import Network
    from vit_model.config import Preprocessing

SIDE = 224  # of images that differ in size, unless a preprocessing says another
SAMPLE_COLUMNS = ("sample_id", "key", "width", "height", "channels", "label")


@dataclass(frozen=True)
class Library:
    """What a store holds. Made by `pipelines.open_store`."""

    store: Store

    def __repr__(self) -> str:
        return f"Library({self.uri!r}): .model(KEY), .dataset(KEY), .rows()"

    @property
    def uri(self) -> str:
        """Where the store is."""
        return self.store.uri

    def model(self, key: str | None = None) -> StoredModel:
        """A model; without a key, the newest. Raises RecipeError where none or several fit."""
        from vit_model.weights import load_model

        manifest = find_artifact(self.store, key, "model")
        folder = local_files(self.store, manifest)
        model, contract = load_model(folder)
        return StoredModel(manifest, folder, model, contract.preprocessing, contract.class_names)

    def dataset(self, key: str | None = None) -> StoredDataset:
        """A dataset; without a key, the newest. Raises RecipeError where none or several fit."""
        from ray_jobs.data.shards import open_artifact

        manifest = find_artifact(self.store, key, "dataset")
        return StoredDataset(manifest, open_artifact(self.store, manifest))

    def rows(self) -> duckdb.DuckDBPyRelation:
        """Every number that an evaluation or a fine-tuning of this store ever measured, as a DuckDB relation.

        Columns as of `vitflow report query --tables`: artifact (its key), job, stage, run, finished, task, protocol,
        method, labels_per_class (null: all), draw, split, metric, value (a fraction), num_images and more.
        `.filter(...)`, `.aggregate(...)`, `.df()`, `.arrow()` and SQL by `.query("rows", "select ...")` follow.
        """
        import duckdb

        from pipelines.results.query import define_tables

        connection = duckdb.connect()
        define_tables(connection, self.store, {"rows"})
        return connection.table("rows")


@dataclass(frozen=True)
class StoredModel:
    """A model: `model` is a torch module on the CPU, float32, in evaluation mode; `folder` has its files."""

    manifest: Manifest = field(repr=False)
    folder: Path = field(repr=False)
    model: Network = field(repr=False)
    preprocessing: Preprocessing
    class_names: tuple[str, ...]
    """In the order of the logits; empty for a model that gives representations only."""

    def classify(self, images: Sequence[str | Path]) -> list[dict[str, Any]]:
        """[{"image": path, "top": [{"class": name, "probability": p}, ...]}]: the five likeliest classes of each file.

        Raises ValueError for a file that is no image, and for a model without classes.
        """
        from vit_model.predict import classify

        return classify(self.folder, [Path(image) for image in images])


@dataclass(frozen=True)
class StoredDataset:
    """A dataset; `info` is its dataset.json."""

    manifest: Manifest
    data: Dataset

    def __repr__(self) -> str:
        info = self.info
        size = info.image and f"{info.image.height} x {info.image.width} x {info.image.channels}"
        images = ", ".join(f"{count:,} {split}" for split, count in info.splits.items())
        return (
            f"StoredDataset({info.name!r}, key {self.manifest.key[:12]}: {images} images, "
            f"{len(info.class_names)} classes, {size or 'image files of any size'})"
        )

    @property
    def info(self) -> DatasetInfo:
        """Name, classes, the number of images of each split."""
        return self.data.info

    @property
    def class_names(self) -> tuple[str, ...]:
        """In the order of the labels."""
        return self.info.class_names

    def samples(self, split: str = "train") -> pa.Table:
        """A split's images without their pixels, in the order of `images`.

        Columns: sample_id, key (the file's name), width, height, channels (as stored), label, class_name.
        Raises ValueError where there is no such split, or nothing in it.
        """
        import pyarrow as pa

        table = self.data.index(self._require(split)).select(SAMPLE_COLUMNS)
        names = pa.array(self.class_names).take(table["label"].combine_chunks())
        return table.append_column("class_name", names)

    def images(
        self,
        split: str = "train",
        rows: Sequence[int] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> NDArray[np.uint8]:
        """Images [n, side, side, channels], uint8, of these rows of a split (by default the first 16 or fewer).

        As a model with `preprocessing` gets them; without one as they are stored where all have one size and are
        square, else a square of 224 from their middle.
        Raises ValueError for a split or a row that is not there.
        """
        known = self._require(split)
        wanted = range(min(16, self.info.splits[known])) if rows is None else rows
        return self.data.images(known, preprocessing or self._plain(), list(wanted))

    def _require(self, split: str) -> Split:
        from ray_jobs.data.shards import SPLITS

        for known in SPLITS:
            if split == known:
                self.data.require(known)
                return known
        raise UserError(f"{self.info.name} has no split {split!r}{nearest(split, SPLITS)}")

    def _plain(self) -> Preprocessing:
        from vit_model.config import Preprocessing

        size = self.info.image
        channels, side, crop = 3, SIDE, "center"
        if size is not None:
            channels = size.channels
            if size.height == size.width:
                side, crop = size.height, "squash"
        plain = {"mean": (0.0,) * channels, "std": (1.0,) * channels, "channels": channels}
        return Preprocessing.model_validate(plain | {"resolution": side, "crop": crop})
