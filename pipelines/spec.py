"""What a pipeline is: frozen pydantic models of a recipe and its stages (`pipelines.recipe` reads them from YAML).

A field is *identity* (it changes the result and enters the stage's key) unless it is marked with `execution(...)`
(where and how fast it runs). A field that names an earlier stage says which kind of artifact it takes.
Everything that a recipe can get wrong is found here, before anything starts, as a `RecipeError`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from vit_model.config import Frozen, ViTOptions, variant_sizes


class RecipeError(ValueError):
    """A recipe, or a request about one, that can't be run; the message says what would be right."""


def execution(default: Any, **constraints: Any) -> Any:
    """A field that never changes the result, so it stays out of the key: workers, threads, paths."""
    return Field(default, json_schema_extra={"execution": True}, **constraints)


def takes(*kinds: str, shows_names: bool = False, **constraints: Any) -> Any:
    """A field that names one earlier stage (a tuple: several) whose artifact is of one of these kinds.

    What a stage is called does not enter a key, but where the result shows the names.
    """
    return Field(json_schema_extra={"input": list(kinds), "shows_names": shows_names}, **constraints)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"{list(values)} has a value twice")
    return values


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(values))


def _absolute(folder: str) -> str:
    """A job runs in another working folder."""
    return str(Path(folder).expanduser().absolute())


# ---------------------------------------------------------------------------------------------------- sources


class GlyphSource(Frozen):
    """Letters and symbols of all scripts, rendered from matplotlib's Unicode text fonts into 8x8 block counts."""

    kind: Literal["glyphs"]
    images: int = Field(57_000, ge=1_000, description="how many to render, balanced over the classes")
    dev_images: int = Field(2_000, ge=100, description="rendered beside them, to watch pretraining on")
    seed: Seed = 0

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name, path) of every file that the result depends on."""
        fonts = _package_folder("matplotlib") / "mpl-data" / "fonts" / "ttf"
        yield from ((path.name, path) for path in sorted(fonts.glob("*.ttf")))


class DigitsSource(Frozen):
    """The 1,797 handwritten digits that scikit-learn ships (8x8, the test part of UCI's set, by 13 writers)."""

    kind: Literal["digits"]

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name, path) of every file that the result depends on."""
        path = _package_folder("sklearn") / "datasets" / "data" / "digits.csv.gz"
        yield path.name, path


class FolderSource(Frozen):
    """Your own images: class folders, train/val/test folders of class folders, or a metadata.csv."""

    kind: Literal["folder"]
    name: str = Field("images", description="what reports call these images")
    root: Annotated[str, AfterValidator(_absolute)] = Field(
        description="the folder; where it lies does not enter the key, what is in it does",
        json_schema_extra={"execution": True},
    )
    salt: str = Field(
        "vitflow", description="images without a given split are split by a hash with this salt"
    )

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name relative to the root, path) of every file that the result depends on."""
        root = Path(self.root)
        if not root.is_dir():
            raise RecipeError(f"source.root: {self.root} is not a folder")
        for folder, folders, files in os.walk(root):
            # hidden folders (.git) and macOS's shadows are none of the images' business
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
            for name in sorted(name for name in files if not name.startswith(".")):
                path = Path(folder) / name
                yield path.relative_to(root).as_posix(), path


FASHION_MNIST_ROOT = "/usr/share/datasets/fashion-mnist"
FASHION_MNIST = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
                 "Ankle boot")  # fmt: skip


class IdxSource(Frozen):
    """Fashion-MNIST, MNIST and others in their authors' four IDX files; their test is test, 1/12 of train is dev."""

    kind: Literal["idx"]
    name: str = Field("Fashion-MNIST", description="what reports call these images")
    root: Annotated[str, AfterValidator(_absolute)] = execution(
        FASHION_MNIST_ROOT, description="the folder of the four files, gzipped or not"
    )
    class_names: Annotated[tuple[str, ...], AfterValidator(_distinct)] = Field(
        FASHION_MNIST, min_length=2, max_length=256, description="of the labels 0, 1, ... in the files"
    )
    classes: Annotated[tuple[int, ...], AfterValidator(_distinct), AfterValidator(_ascending)] | None = Field(
        None, min_length=2, description="labels to keep, which become 0, 1, ... in their order; null: all"
    )

    @model_validator(mode="after")
    def _classes_have_names(self) -> Self:
        for label in self.classes or ():
            if not 0 <= label < len(self.class_names):
                raise ValueError(f"classes: {label} is not from 0 to {len(self.class_names) - 1}")
        return self

    def kept(self) -> tuple[int, ...]:
        """The labels to keep, ascending."""
        return self.classes or tuple(range(len(self.class_names)))

    def files(self) -> Iterator[tuple[str, Path]]:
        """(name without .gz, path) of the four files."""
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            plain = Path(self.root, f"{name}-ubyte")
            zipped = plain.with_name(f"{plain.name}.gz")
            if not zipped.is_file() and not plain.is_file():
                raise RecipeError(
                    f"source.root: {self.root} has neither {zipped.name} nor {plain.name}; Fashion-MNIST's files"
                    f" come with Debian's package, apt-get install dataset-fashion-mnist, in {FASHION_MNIST_ROOT}"
                )
            yield plain.name, zipped if zipped.is_file() else plain


Source = Annotated[GlyphSource | DigitsSource | FolderSource | IdxSource, Field(discriminator="kind")]


def _package_folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise RecipeError(f"the package {package} is not installed: `make install`")
    return Path(found.submodule_search_locations[0])


# ---------------------------------------------------------------------------------------------------- stages


class ModelSize(ViTOptions):
    """The shape of a Vision Transformer, or the name of one (`model: B/16`); resolution and channels come from data."""

    LATER: ClassVar[frozenset[str]] = frozenset({"stem", *ViTOptions.model_fields}) - {"pooling", "gelu"}

    patch_size: int = Field(ge=1)
    width: int = Field(ge=8)
    depth: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    mlp_ratio: float = Field(4.0, gt=0)
    stem: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None, description="a hybrid: units in each stage of the convolutional stem"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        sizes = variant_sizes(given)
        return sizes | {"mlp_ratio": sizes.pop("mlp_dim") / sizes["width"]}

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        return self


class Optimizer(Frozen):
    """AdamW with linear warm-up and a decay to zero; the weight decay is multiplied by the learning rate."""

    weight_decay: float = Field(0.05, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    warmup_fraction: float = Field(0.1, ge=0, lt=1)
    schedule: Literal["cosine", "linear"] = "cosine"
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this global norm")


Shots = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]
Augmentation = Literal["none", "shift", "shift_flip", "crop_flip"]
Dtype = Literal["bfloat16", "float32"]
Method = Literal["majority", "k-NN", "logistic regression", "RBF SVM"]


class _Stage(Frozen):
    """What all stages share. `VERSION` goes up when the same configuration gives another result."""

    VERSION: ClassVar[int] = 1
    KIND: ClassVar[str]
    job: str

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Field -> the stages it names, for every field that takes an artifact and has one."""
        found = {}
        for field in input_fields(type(self)):
            if (value := getattr(self, field)) is not None:
                found[field] = (value,) if isinstance(value, str) else tuple(value)
        return found


@cache
def input_fields(stage: type[_Stage]) -> dict[str, tuple[str, ...]]:
    """Field -> the kinds of artifact it takes, for every field of a stage that names earlier stages."""
    found = {}
    for field, info in stage.model_fields.items():
        extra = info.json_schema_extra
        if isinstance(extra, dict) and isinstance(kinds := extra.get("input"), list):
            found[field] = tuple(map(str, kinds))
    return found


class Ingest(_Stage):
    """A source becomes validated Parquet shards with fixed splits."""

    KIND: ClassVar[str] = "dataset"
    job: Literal["ingest"]
    source: Source
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="more damaged images than this fail the stage"
    )


class Pretrain(_Stage):
    """Supervised pretraining with DeepSpeed ZeRO on Ray Train (paper, section 3.1 and Table 3)."""

    VERSION: ClassVar[int] = 2
    KIND: ClassVar[str] = "model"
    job: Literal["pretrain"]
    data: str = takes("dataset")
    model: ModelSize
    resolution: int = Field(ge=4, le=8192, description="images are brought to this many pixels a side")
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1, description="images a step, over all workers together")
    learning_rate: Rate
    optimizer: Optimizer = Optimizer()
    augment: Augmentation = "none"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    dtype: Dtype = "bfloat16"
    zero_stage: Literal[1, 2, 3] = 1
    seed: Seed = 0
    workers: int | None = execution(
        None,
        ge=1,
        description="Ray Train workers, each with a GPU where there are some; null: all GPUs, or 2 on CPUs",
    )
    threads: int = execution(1, ge=1, description="CPU threads a worker")

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        _check_patches(self.resolution, self.model.patch_size)
        if self.workers and self.batch_size % self.workers:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of workers {self.workers}")
        return self


class Labels(Frozen):
    """Which labels a learner may see: all of train (dev chooses), or `per_class` of each class, drawn `draws` times."""

    per_class: int | None = Field(None, ge=2, description="null: all; dev chooses the settings")
    draws: int = Field(5, ge=1, description="with per_class: independent draws, each scored on test")
    folds: int = Field(
        5, ge=2, description="with per_class, or where there is no dev: cross-validation chooses"
    )
    seed: Seed = 0

    @model_validator(mode="after")
    def _folds_fit(self) -> Self:
        if self.per_class is not None and self.folds > self.per_class:
            raise ValueError(
                f"folds {self.folds} is more than per_class {self.per_class}: a fold needs each class"
            )
        return self


class Finetune(_Stage):
    """A Ray Tune sweep over learning rates, a refit with the best, and one look at test (paper, Table 4's protocol)."""

    VERSION: ClassVar[int] = 3
    KIND: ClassVar[str] = "model"
    job: Literal["finetune"]
    data: str = takes("dataset")
    backbone: str | None = takes("model", default=None)
    model: ModelSize | None = Field(None, description="instead of a backbone: train this shape from scratch")
    resolution: int | None = Field(
        None, ge=4, le=8192, description="with a backbone: null keeps the backbone's"
    )
    labels: Labels = Labels()
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=1), AfterValidator(_distinct)] = Field(
        description="to choose from; a single one is taken as it is, without a sweep"
    )
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    optimizer: Optimizer = Optimizer()
    augment: Augmentation = "none"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    dtype: Dtype = "bfloat16"
    seed: Seed = 0
    threads: int = execution(1, ge=1, description="CPU threads a trial")

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.backbone is None) == (self.model is None):
            raise ValueError(
                "give either backbone (a model stage to start from) or model (a shape to train from scratch)"
            )
        if self.model is not None:
            if self.resolution is None:
                raise ValueError("resolution is needed where there is no backbone to take it from")
            _check_patches(self.resolution, self.model.patch_size)
        return self


class Evaluate(_Stage):
    """Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside raw pixels and untrained weights."""

    VERSION: ClassVar[int] = 2
    KIND: ClassVar[str] = "evaluation"
    job: Literal["evaluate"]
    data: str = takes("dataset")
    backbone: str = takes("model")
    shots: Annotated[tuple[Shots, ...], Field(min_length=1), AfterValidator(_distinct)] = (1, 5, 10, 25)
    draws: int = Field(20, ge=1)
    seed: Seed = 0
    threads: int = execution(1, ge=1)


class Baselines(_Stage):
    """Classifiers on pixels (scikit-learn), given the same labels and folds as a fine-tuning."""

    VERSION: ClassVar[int] = 2
    KIND: ClassVar[str] = "evaluation"
    job: Literal["baselines"]
    data: str = takes("dataset")
    methods: Annotated[tuple[Method, ...], Field(min_length=1), AfterValidator(_distinct)] = (
        "k-NN",
        "logistic regression",
        "RBF SVM",
    )
    labels: Labels = Labels()
    thumbnail: int = Field(32, ge=4, description="larger images are averaged down to this many pixels a side")
    max_images: int = Field(
        5_000, ge=100, description="of all labels, at most this many are used (kernels are quadratic)"
    )


class Report(_Stage):
    """One page of everything: a table, curves, sheets of images, and the rows behind them."""

    KIND: ClassVar[str] = "report"
    job: Literal["report"]
    title: str
    note: str = Field("", description="what a reader should know beside the verdict")
    of: tuple[str, ...] = takes("dataset", "model", "evaluation", shows_names=True, min_length=1)


Stage = Annotated[Ingest | Pretrain | Finetune | Evaluate | Baselines | Report, Field(discriminator="job")]
STAGE_TYPES: dict[str, type[_Stage]] = {
    "ingest": Ingest,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "evaluate": Evaluate,
    "baselines": Baselines,
    "report": Report,
}
AnyStage = Ingest | Pretrain | Finetune | Evaluate | Baselines | Report


def _check_patches(resolution: int, patch_size: int) -> None:
    if resolution % patch_size:
        lower = resolution // patch_size * patch_size
        fits = f"{lower} or {lower + patch_size}" if lower else f"{patch_size}"
        raise ValueError(
            f"resolution {resolution} is not a multiple of patch_size {patch_size}: {fits} would be"
        )


def nearest(given: str, known: Any) -> str:
    """', did you mean ...?' for the nearest known name; otherwise the list of them."""
    found = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are: {', '.join(known)}"
