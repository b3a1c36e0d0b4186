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

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from vit_model.config import (
    Frozen,
    ResNetConfig,
    ResNetOptions,
    ViTConfig,
    ViTOptions,
    check_vit_sizes,
    family_of,
)
from vit_model.variants import FAMILIES, RESNETS, variant_sizes


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


def _located(path: str) -> str:
    if path.startswith("s3://"):
        return path
    if "://" in path:
        raise ValueError(f"{path!r} is not a local file or folder, nor s3://bucket/key: fetch it first")
    return _absolute(path)


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

    LATER: ClassVar[frozenset[str]] = frozenset({"family", "stem", *ViTOptions.model_fields}) - {
        "pooling",
        "gelu",
    }

    family: Literal["vit"] = "vit"
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
    def _sizes_fit(self) -> Self:
        check_vit_sizes(self.patch_size, self.width, self.num_heads, self.position, self.stem)
        return self

    def architecture(self, resolution: int, channels: int, num_classes: int) -> ViTConfig:
        """The model of this shape for such images, with a classifier."""
        return ViTConfig(
            image_size=resolution,
            in_channels=channels,
            mlp_dim=round(self.width * self.mlp_ratio),
            num_classes=num_classes,
            **self.model_dump(exclude={"mlp_ratio"}),
        )


class ResNetSize(ResNetOptions):
    """The shape of the paper's baseline, a ResNet of BiT, or the name of one (`model: R50x1`)."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return variant_sizes(given) if isinstance(given, str) else given

    def architecture(self, resolution: int, channels: int, num_classes: int) -> ResNetConfig:
        """The model of this shape for such images, with a classifier."""
        return ResNetConfig(
            image_size=resolution, in_channels=channels, num_classes=num_classes, **self.model_dump()
        )


def _family(given: Any) -> str:
    return "resnet" if isinstance(given, str) and given in RESNETS else family_of(given)


Model = Annotated[
    Annotated[ModelSize, Tag("vit")] | Annotated[ResNetSize, Tag("resnet")],
    Discriminator(
        _family,
        custom_error_type="unknown_family",
        custom_error_message=f"family must be one of {', '.join(FAMILIES)}",
    ),
]


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
Objective = Literal["softmax", "sigmoid", "masked_patches"]
Method = Literal["majority", "k-NN", "logistic regression", "RBF SVM"]


class _Stage(Frozen):
    """What all stages share. `VERSION` goes up when the same configuration gives another result."""

    VERSION: ClassVar[int] = 1
    KIND: ClassVar[str]
    job: str

    def files(self) -> Iterator[tuple[str, Path]] | None:
        """(name, path) of every file from outside that the result depends on; None: it takes artifacts only."""
        return None

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

    def files(self) -> Iterator[tuple[str, Path]]:
        return self.source.files()


# What the authors' ViTs were trained with (BiT, AugReg, most of timm's), and what torchvision, DeiT and DINO take.
MEAN_AND_STD = {
    "half": {"mean": (0.5,), "std": (0.5,)},
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
}


class GivenPreprocessing(Frozen):
    """What images go through before a foreign model, where its file does not say; or half, or imagenet.

    `null` is what the file says, and where it says nothing bilinear and squash.
    """

    mean: tuple[float, ...] = Field(
        min_length=1, description="of x / 255, for each channel; one value for all of them"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1, description="as mean")
    interpolation: Literal["bilinear", "bicubic"] | None = None
    crop: Literal["squash", "center"] | None = Field(
        None, description="straight to the square, or the middle after the shorter side was brought to size"
    )
    crop_fraction: float | None = Field(None, gt=0, le=1, description="with center: of that shorter side")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given not in MEAN_AND_STD:
            raise ValueError(
                f"{given!r} is none of {', '.join(MEAN_AND_STD)}; or write mean and std: {{mean: [0.5], std: [0.5]}}"
            )
        return MEAN_AND_STD[given]


ONE_FILE = "weights"  # stands for the name of a file that is imported alone, which may change


class Import(_Stage):
    """Weights that others trained become a model: Google's .npz, timm's, Hugging Face's folder, safetensors."""

    KIND: ClassVar[str] = "model"
    job: Literal["import"]
    path: Annotated[str, AfterValidator(_located)] = Field(
        description="a file or a folder; where it lies does not enter the key, what is in it does",
        json_schema_extra={"execution": True},
    )
    preprocessing: GivenPreprocessing | None = Field(
        None,
        description="half, imagenet, or mean and std; null: as the file says, and refused where it does not",
    )

    def files(self) -> Iterator[tuple[str, Path]]:
        path = Path(self.path)
        if path.is_dir():
            # a training's folder has checkpoints below it, which nothing reads
            files = (file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
            yield from ((file.name, file) for file in files)
        elif path.is_file():
            yield ONE_FILE, path
        else:
            raise RecipeError(f"path: there is no file and no folder {self.path}")


class Pretrain(_Stage):
    """Pretraining with DeepSpeed ZeRO on Ray Train (paper, section 3.1 and Table 3)."""

    KIND: ClassVar[str] = "model"
    LATER: ClassVar[frozenset[str]] = frozenset({"objective"})
    job: Literal["pretrain"]
    data: str = takes("dataset")
    model: Model
    resolution: int = Field(ge=4, le=8192, description="images are brought to this many pixels a side")
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1, description="images a step, over all workers together")
    learning_rate: Rate
    optimizer: Optimizer = Optimizer()
    augment: Augmentation = "none"
    objective: Objective = Field(
        "softmax",
        description="cross-entropy by softmax, or by sigmoid and summed over the classes, which goes with"
        " model.head_bias: -10 and model.representation_head: true in the authors' recipe; or, without labels, the"
        " mean colours of corrupted patches (section 4.6), which gives a model without a classifier",
    )
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
        _check_patches(self.resolution, self.model)
        if self.workers and self.batch_size % self.workers:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of workers {self.workers}")
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        smoothing = self.label_smoothing
        if self.objective == "sigmoid" and smoothing >= 0.5:
            raise ValueError(
                f"label_smoothing {smoothing}: with objective sigmoid it is how often each of a class's answers is"
                " wrong, so it must be below 0.5, such as 0.0001"
            )
        if self.objective == "masked_patches":
            self._check_masked_patches()
        return self

    def _check_masked_patches(self) -> None:
        """Raise ValueError for what does not go with that objective."""
        if not isinstance(self.model, ModelSize):
            raise ValueError(
                f"objective masked_patches is about a ViT's patches; model is a {self.model.family}"
            )
        if (self.label_smoothing, self.model.representation_head, self.model.head_bias) != (0.0, False, 0.0):
            raise ValueError(
                "label_smoothing, model.representation_head and model.head_bias are about a classifier, which"
                " objective masked_patches has not"
            )
        if self.model.pooling == "map":
            raise ValueError(
                "objective masked_patches would not train model.pooling map; cls or gap would fit"
            )
        if self.resolution == self.model.patch_size:
            raise ValueError(
                f"resolution {self.resolution} is a single patch; objective masked_patches needs two or more"
            )


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

    VERSION: ClassVar[int] = 2
    KIND: ClassVar[str] = "model"
    job: Literal["finetune"]
    data: str = takes("dataset")
    backbone: str | None = takes("model", default=None)
    model: Model | None = Field(None, description="instead of a backbone: train this shape from scratch")
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
            _check_patches(self.resolution, self.model)
        return self


class Evaluate(_Stage):
    """Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside raw pixels and untrained weights."""

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


Stage = Annotated[
    Ingest | Import | Pretrain | Finetune | Evaluate | Baselines | Report, Field(discriminator="job")
]
STAGE_TYPES: dict[str, type[_Stage]] = {
    "ingest": Ingest,
    "import": Import,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "evaluate": Evaluate,
    "baselines": Baselines,
    "report": Report,
}
AnyStage = Ingest | Import | Pretrain | Finetune | Evaluate | Baselines | Report


def module(job: str) -> str:
    """The module of `ray_jobs` that does a job."""
    return "import_model" if job == "import" else job  # a keyword can't be the name of one


def _check_patches(resolution: int, model: ModelSize | ResNetSize) -> None:
    if isinstance(model, ModelSize) and resolution % model.patch_size:
        patch_size = model.patch_size
        lower = resolution // patch_size * patch_size
        fits = f"{lower} or {lower + patch_size}" if lower else f"{patch_size}"
        raise ValueError(
            f"resolution {resolution} is not a multiple of patch_size {patch_size}: {fits} would be"
        )


def nearest(given: str, known: Any) -> str:
    """', did you mean ...?' for the nearest known name; otherwise the list of them."""
    found = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are: {', '.join(known)}"
