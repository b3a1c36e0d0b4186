"""The stages of a pipeline, as recipes define them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from pipelines.spec.augmentation import Augmentation, EvalCrop, RandAugment, mixing
from pipelines.spec.checkpoints import LATEST, Backbone, CheckpointEvery, NamedCheckpoint
from pipelines.spec.fields import Root, Seed, ascending, checkpoint, distinct, execution, marks, takes
from pipelines.spec.optimizer import Optimizer, check_optimizer
from pipelines.spec.search import ASHA, FIXED, Choices, Optuna, Point, Range, Search, placed
from pipelines.spec.shapes import Model, ModelSize, ResNetSize, check_patches, size_of
from pipelines.spec.sources import Source
from vit_model.config import Frozen, LoRAOptions, MaeOptions, ResNetConfig, ViTConfig, later, wrong_field
from vit_model.errors import reasons

Shots = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Dtype = Literal["bfloat16", "float32"]
Objective = Literal["softmax", "sigmoid", "masked_patches", "contrastive", "mae", "distillation"]
WITHOUT_LABELS: tuple[Objective, ...] = ("masked_patches", "contrastive", "mae")
PatchTarget = Literal["mean_colour", "4x4", "pixels"]
SeenInTraining = Literal["fail", "report"]
Method = Literal["majority", "k-NN", "logistic regression", "RBF SVM"]
Probe = Literal["least squares", "k-NN", "DINO k-NN", "nearest class mean", "logistic regression"]
ProbeProtocol = Literal["leave_one_out", "dev", "big_vision", "scenic"]
# as their authors evaluate, for a model of 224 pixels: squashed to 256, of which the middle
_SQUASHED = {"crop": "squash", "crop_fraction": 0.875, "interpolation": "bilinear_aliased"}
PROBE_DEFAULTS: dict[str, dict[str, Any]] = {
    "dev": {"shots": (), "support": "train+dev", "linear_probe": True},
    "big_vision": {"draws": 3, "eval_crop": _SQUASHED},
    "scenic": {"draws": 1, "eval_crop": _SQUASHED},
}


def seen_in_training() -> Any:
    """Declare the field of stages that score a model on test images."""
    return later(
        "fail",
        description="what to do if the backbone or one of its ancestors was trained on test images: fail and say how"
        " many, or report: score them separately, in rows that verdicts and lists of best results leave out",
    )


def activation_checkpointing() -> Any:
    """Declare the field of stages that train."""
    return execution(
        False,
        description="for ViTs: keep only each block's input for the backward pass, and compute the rest again, which"
        " takes less memory and more time",
    )


class _Stage(Frozen):
    """The base of all stages. `VERSION` increases when the same configuration gives another result.

    `CONCERNS` has the versions that changed only some configurations' results, with a function that says whose.
    """

    VERSION: ClassVar[int] = 1
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {}
    KIND: ClassVar[str]
    job: str

    @property
    def version(self) -> int:
        """The last version that changed this configuration's results; it enters the key."""
        return next(
            version
            for version in range(self.VERSION, 0, -1)
            if version not in self.CONCERNS or self.CONCERNS[version](self)
        )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return {field: the stages it names} for every field that takes artifacts and names at least one."""
        inputs = {}
        for field in input_fields(type(self)):
            if value := getattr(self, field):
                one = value.stage if isinstance(value, NamedCheckpoint) else value
                inputs[field] = (one,) if isinstance(one, str) else tuple(one)
        return inputs

    def checkpoints(self) -> dict[str, str]:
        """Return {field: best or step:N} for every field that names a checkpoint of its input other than the last."""
        return {
            field: value.checkpoint
            for field in input_fields(type(self))
            if isinstance(value := getattr(self, field), NamedCheckpoint)
        }


@cache
def input_fields(stage: type[_Stage]) -> dict[str, tuple[str, ...]]:
    """Return {field: the kinds of artifact it takes} for every field of a stage that names other stages."""
    return {
        field: tuple(kinds)
        for field, info in stage.model_fields.items()
        if (kinds := marks(info).get("input"))
    }


class Ingest(_Stage):
    """Ingest: convert a source to validated Parquet shards with fixed splits."""

    VERSION: ClassVar[int] = 6
    KIND: ClassVar[str] = "dataset"
    job: Literal["ingest"]
    source: Source
    duplicates: Literal["keep", "drop"] = later(
        "keep",
        description="keep: list copies and near-duplicates in the set; drop: also leave them out, but no test image."
        " If copies are drawn into different splits, test beats dev and dev beats train in both cases. The log names"
        " identical bytes in two classes; drop leaves all of them out of train and dev",
    )
    max_distance: int | None = later(
        4,
        ge=0,
        le=8,
        description="most differing bits, of 64, between perceptual hashes of near-duplicates and of mirrored,"
        " rotated and cropped copies; null: only identical bytes are copies",
    )
    against: Annotated[tuple[str, ...], AfterValidator(distinct)] = takes(
        "dataset",
        shows_names=True,
        later=True,
        default=(),
        description="data sets; their test images and near-duplicates of them are left out of train and dev here",
    )
    exclude: Root | None = execution(
        None,
        description="a CSV file with a column sample_id, or a text file with an id per line, local or on S3: these"
        " images are left out of train and dev here, such as those that an audit lists; its content enters the key,"
        " its location does not",
    )
    short_side: int | None = later(
        None,
        ge=32,
        description="in pixels; images with a longer shorter side are resized and stored as JPEG of quality 95 (lossy):"
        " reading is 1.7 times as fast at 256; null: store the original bytes",
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="the stage fails if a larger fraction of images is damaged"
    )

    @model_validator(mode="after")
    def _masks_fit(self) -> Self:
        if self.short_side is not None and getattr(self.source, "masks", False):
            raise ValueError(
                f"short_side {self.short_side}: masks are of the original images' size; remove short_side or"
                " source.masks"
            )
        return self


# What the authors' ViTs were trained with (BiT, AugReg, most of timm's), and what torchvision, DeiT and DINO take.
MEAN_AND_STD = {
    "half": {"mean": (0.5,), "std": (0.5,)},
    "imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
}


class GivenPreprocessing(Frozen):
    """The preprocessing of an imported model whose file does not state it: mean and std, or half, or imagenet.

    `null` means what the file states; if it states nothing, bilinear and squash.
    """

    mean: tuple[float, ...] = Field(
        min_length=1, description="of x / 255, one value per channel or one for all channels"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1, description="like mean")
    interpolation: Literal["bilinear", "bicubic"] | None = None
    crop: Literal["squash", "center"] | None = Field(
        None,
        description="squash: resize straight to the square; center: resize the shorter side, then crop the center",
    )
    crop_fraction: float | None = Field(
        None, gt=0, le=1, description="with center: the fraction of the shorter side that is kept"
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in MEAN_AND_STD:
            raise ValueError(
                f"{value!r} is unknown; expected {', '.join(MEAN_AND_STD)}, or {{mean: [0.5], std: [0.5]}}"
            )
        return MEAN_AND_STD[value]


UNSTATED = (
    "does not give the mean and std of its images, and wrong values do harm silently: give --preprocessing half (0.5"
    " and 0.5: Google's, AugReg's and most of timm's ViTs), imagenet (DeiT, DINO, torchvision) or a file with them; in"
    " a recipe, preprocessing: half"
)
"""What an import without mean and std says of its path."""
ONE_FILE = "weights"  # used instead of the name of a single imported file, so that renaming it changes no key


class Import(_Stage):
    """Import pretrained weights: Google's .npz, timm's, a Hugging Face folder, safetensors."""

    VERSION: ClassVar[int] = 2
    KIND: ClassVar[str] = "model"
    job: Literal["import"]
    path: Annotated[str, AfterValidator(checkpoint)] = execution(
        description="a file or a folder, local or on S3, or hf:ORG/NAME[@REVISION]; the key depends on its content,"
        " not on its location",
    )
    preprocessing: GivenPreprocessing | None = Field(
        None,
        description="half, imagenet, or mean and std; null: as the file states; fails if it does not",
    )
    averages: bool = later(
        True,
        description="of a training's checkpoint that has its weights and their moving averages (timm, DeiT), take the"
        " averages, as timm does; false: the weights",
    )


class Contrastive(Frozen):
    """MoCo v3's settings; the defaults are the authors' for ViTs. The networks behind the ViT are thrown away after
    pretraining. The rest of the authors' recipe, from `position: sincos2d_moco` to the rates: docs/training.md."""

    hidden_width: int = Field(4096, ge=1, description="of the projector and the predictor")
    output_width: int = Field(256, ge=1)
    temperature: float = Field(0.2, gt=0)
    momentum: float = Field(
        0.99,
        ge=0,
        le=1,
        description="the initial momentum of the momentum encoder; a cosine schedule raises it to 1",
    )


class Distillation(Frozen):
    """How a teacher is imitated; the defaults are those of DeiT's code. A model with a distillation token
    (`model.distillation: true`) answers the teacher with it, and the labels with the class token; with kind features,
    the class token does both."""

    kind: Literal["soft", "hard", "features"] = Field(
        "hard",
        description="soft: the teacher's probabilities; hard: its most likely class; features: the direction of its"
        " representation, after a linear map that is thrown away, for which it needs no classifier",
    )
    temperature: float = Field(1.0, gt=0, description="with soft: what both divide their logits by")
    weight: float = Field(
        0.5, gt=0, le=1, description="of the teacher's part in the loss; the labels have the rest"
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.temperature != 1.0 and self.kind != "soft":
            raise ValueError(f"temperature {self.temperature} is for kind soft; kind is {self.kind}")
        if self.weight == 1.0 and self.kind == "features":
            raise ValueError(
                "weight 1 leaves no labels, and kind features trains no classifier; use less than 1"
            )
        return self


class Auxiliary(Frozen):
    """Tasks without labels whose losses are added to the labels'; each image is computed once more for it."""

    masked_patches: float = Field(
        gt=0, description="the weight of masked patch prediction, whose target is patch_target"
    )


class FewShot(Frozen):
    """Few-shot linear evaluation on dev while a pretraining runs."""

    shots: Annotated[tuple[Shots, ...], Field(min_length=1), AfterValidator(distinct)] = Field(
        (5,), description="labels per class, drawn from train"
    )
    draws: int = Field(3, ge=1, description="draws of labels, whose mean accuracy is logged")
    seed: Seed = 0


class Pretrain(_Stage):
    """Pretraining with DeepSpeed ZeRO on Ray Train (paper, section 3.1 and Table 3)."""

    # 6: stochastic depth is drawn per sample. A start that has it was pretrained anew, which changes this stage's key
    # by the digest of its input.
    VERSION: ClassVar[int] = 6
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {
        6: lambda stage: _has_stochastic_depth(stage.model)
    }
    KIND: ClassVar[str] = "model"
    job: Literal["pretrain"]
    data: str = takes("dataset")
    model: Model | None = Field(
        None,
        description="null, with init_from: NAME: as in that model, without the head if it uses no labels",
    )
    init_from: Backbone | None = takes(
        "model",
        default=None,
        later=True,
        description="the model whose weights training starts from, imported ones too: a stage's name; of a pretraining,"
        " {stage: NAME, checkpoint: last | best | step:N}; or latest, the newest model that this stage has made in"
        " earlier runs of the recipe. Steps, rates and the optimizer start anew. null: new weights from the seed",
    )
    resolution: int = Field(ge=4, le=8192, description="side of the training images in pixels")
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1, description="images per step, over all workers")
    gradient_accumulation_steps: int = later(
        1,
        ge=1,
        description="micro-batches per step that each worker divides its share of batch_size into, which takes less"
        " memory; batch_size does not change",
    )
    learning_rate: Rate
    optimizer: Optimizer = Optimizer()
    augment: Augmentation = "none"
    randaugment: RandAugment | None = later(None)
    mixup: float = mixing("mixup")
    cutmix: float = mixing("cutmix")
    eval_crop: EvalCrop | None = later(
        None,
        description="null: the start's; without init_from, squash if all images are square, otherwise center",
    )
    objective: Objective = later(
        "softmax",
        description="cross-entropy by softmax, or by sigmoid and summed over the classes, which goes with"
        " model.head_bias: -10 and model.representation_head: true in the authors' recipe; or, without labels and with"
        " a model without a classifier as the result, the colours of corrupted patches (section 4.6), MoCo v3: which of"
        " two views are of the same image, or a masked autoencoder: the pixels of masked patches; or"
        " cross-entropy by softmax beside the answers of a teacher to the same pixels",
    )
    teacher: Backbone | None = takes(
        "model",
        default=None,
        later=True,
        description="with objective distillation: the model that is imitated, imported ones too: a stage's name; or, of"
        " a pretraining, {stage: NAME, checkpoint: last | best | step:N}. It takes images of the same resolution and"
        " knows all classes of the data, by name",
    )
    distillation: Distillation = later(Distillation())
    patch_target: PatchTarget = later(
        "mean_colour",
        description="the target of masked_patches, as objective or auxiliary: a patch's mean colour at 3 bits per"
        " channel (the paper), that of each of its 4x4 parts, or, by regression, all its pixels",
    )
    contrastive: Contrastive = later(Contrastive())
    mae: MaeOptions = later(MaeOptions())
    auxiliary: Auxiliary | None = later(None, description="with objective softmax or sigmoid, for ViTs")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    dtype: Dtype = "bfloat16"
    zero_stage: Literal[0, 1, 2, 3] = 1
    order: Literal["global", "window"] = later(
        "global",
        description="the order of images: a permutation of them all, or windows of row groups, for data on S3 that is"
        " larger than cache_gib",
    )
    seed: Seed = 0
    workers: int | None = execution(
        None,
        ge=1,
        description="number of Ray Train workers, with a GPU each if there are any; null: one per GPU, or 2 on CPUs",
    )
    min_workers: int = execution(
        1,
        ge=1,
        description="if machines are lost, training continues with fewer workers, but with no fewer than these",
    )
    threads: int = execution(1, ge=1, description="CPU threads per worker")
    activation_checkpointing: bool = activation_checkpointing()
    cache_gib: float = execution(
        64, gt=0, description="GiB of images from S3 that a machine keeps in its cache folder"
    )
    checkpoint_every: CheckpointEvery = execution(
        CheckpointEvery(minutes=10), description="how often a checkpoint to resume from is written"
    )
    keep_checkpoints: int = execution(
        2,
        ge=2,  # an attempt that takes over may just have chosen the one before the newest
        description="number of the newest checkpoints to resume from that are kept until training ends",
    )
    keep_steps: Annotated[tuple[Steps, ...], AfterValidator(distinct), AfterValidator(ascending)] = execution(
        (),
        description="steps whose weights are kept with the result, for backbone: {stage: ..., checkpoint: step:N};"
        " its last and its best weights always are",
    )
    fewshot: FewShot | None = execution(
        None,
        description="log few-shot accuracy on dev 5 times during the training, with any objective: to watch, never to"
        " select; null: do not",
    )

    def inputs(self) -> dict[str, tuple[str, ...]]:
        inputs = super().inputs()
        if self.init_from == LATEST:  # no stage: the store has it, perhaps
            del inputs["init_from"]
        return inputs

    def with_model(self, start: ViTConfig | ResNetConfig) -> Self:
        """Return the stage with the shape of the model that it starts from, if it gives none.

        Raises:
            ValidationError: its other fields do not fit this shape.
        """
        if self.model is not None:
            return self
        model = size_of(start, head=self.objective not in WITHOUT_LABELS)
        return type(self).model_validate(self.model_dump() | {"model": model})

    @model_validator(mode="after")
    def _start_is_known(self) -> Self:
        if self.model is None and self.init_from is None:
            raise ValueError("model is missing; only a stage with init_from: NAME can do without")
        if self.model is None and self.init_from == LATEST:
            raise ValueError("model is missing; with init_from: latest the first run needs it")
        if isinstance(self.init_from, NamedCheckpoint) and self.init_from.stage == LATEST:
            raise ValueError(
                f"init_from {self.init_from}: latest is the newest model with its last weights; write init_from: latest"
            )
        return self

    @model_validator(mode="after")
    def _kept_steps_exist(self) -> Self:
        if self.keep_steps and self.keep_steps[-1] > self.steps:
            raise ValueError(f"keep_steps {self.keep_steps[-1]} is more than steps {self.steps}")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.model is not None:
            check_patches(self.resolution, self.model)
        check_optimizer(self.optimizer, self.steps, None if self.model is None else self.model.family)
        if self.optimizer.name == "muon" and self.zero_stage:
            raise ValueError(
                f"zero_stage {self.zero_stage}: optimizer.name muon needs whole matrices, which ZeRO divides; use"
                " zero_stage: 0"
            )
        if self.workers and self.batch_size % self.workers:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of workers {self.workers}")
        workers, micro_batches = self.workers or 1, self.gradient_accumulation_steps
        if self.batch_size % (workers * micro_batches):
            share = (
                f", which is {self.batch_size // workers} for each of {workers} workers,"
                if workers > 1
                else ""
            )
            raise ValueError(
                f"batch_size {self.batch_size}{share} is not a multiple of gradient_accumulation_steps {micro_batches}"
            )
        if self.activation_checkpointing and isinstance(self.model, ResNetSize):
            raise ValueError(
                f"activation_checkpointing needs the blocks of a ViT; model is a {self.model.family}"
            )
        return self

    @property
    def micro_batch_size(self) -> int:
        """Images per micro-batch, over all workers: the number of workers must divide it."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def passes(self) -> int:
        """How often a step computes each image: whole and corrupted, or two views of it."""
        return 1 if self.auxiliary is None and self.objective != "contrastive" else 2

    @property
    def autoencoder(self) -> MaeOptions | None:
        """The settings of a masked autoencoder, if that is the objective."""
        return self.mae if self.objective == "mae" else None

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        smoothing = self.label_smoothing
        if self.objective == "sigmoid" and smoothing >= 0.5:
            raise ValueError(
                f"label_smoothing {smoothing}: with objective sigmoid it is how often each of a class's answers is"
                " wrong, so it must be below 0.5, such as 0.0001"
            )
        if self.patch_target != "mean_colour" and self.objective != "masked_patches" and not self.auxiliary:
            raise ValueError(f"patch_target {self.patch_target} is for objective masked_patches")
        if self.contrastive != Contrastive() and self.objective != "contrastive":
            raise ValueError("contrastive has settings that only objective contrastive uses; remove it")
        if self.mae != MaeOptions() and self.objective != "mae":
            raise ValueError("mae has settings that only objective mae uses; remove it")
        self._check_distillation()
        if self.objective in WITHOUT_LABELS:
            self._check_no_labels()
        if self.auxiliary is not None:
            self._check_auxiliary()
        return self

    def _check_auxiliary(self) -> None:
        """Raise ValueError for fields that do not apply to an auxiliary task."""
        if self.objective in WITHOUT_LABELS:
            raise ValueError(
                f"auxiliary is beside labels, which objective {self.objective} does not use; remove it"
            )
        if self.objective == "distillation":
            raise ValueError("auxiliary cannot be combined with objective distillation; remove one of them")
        if isinstance(self.model, ResNetSize):
            raise ValueError(
                f"auxiliary needs a ViT, because it uses patches; model is a {self.model.family}"
            )
        if self.model is not None and self.resolution == self.model.patch_size:
            raise ValueError(f"resolution {self.resolution} is a single patch; auxiliary needs two or more")

    def _check_distillation(self) -> None:
        """Raise ValueError for a teacher and settings that do not go with the objective and the model."""
        if self.objective != "distillation":
            if self.teacher is not None:
                raise ValueError(
                    f"teacher {self.teacher} is for objective distillation; objective is {self.objective}"
                )
            if self.distillation != Distillation():
                raise ValueError("distillation has settings that only objective distillation uses; remove it")
        elif self.teacher is None:
            raise ValueError("teacher is missing; objective distillation needs a model to imitate")
        elif self.distillation.weight == 1.0 and getattr(self.model, "distillation", False):
            raise ValueError(
                "distillation.weight 1 leaves no labels to train the class token's classifier; use less than 1, or"
                " model.distillation false"
            )

    def check_teacher(self, resolution: int | None, has_classifier: bool) -> None:
        """Raise ValueError for a teacher that the stage cannot imitate.

        Args:
            resolution: the side of the teacher's images; None: not known yet.
        """
        if resolution is not None and resolution != self.resolution:
            raise ValueError(
                f"takes images of resolution {resolution}, but this stage trains with resolution {self.resolution}, and"
                f" both see the same pixels; use resolution {resolution}, or a teacher fine-tuned at {self.resolution}"
            )
        if not has_classifier and self.distillation.kind != "features":
            raise ValueError(
                f"has no classifier, which distillation.kind {self.distillation.kind} imitates; use kind features, or"
                " fine-tune the teacher"
            )

    def _check_no_labels(self) -> None:
        """Raise ValueError for fields that do not apply to an objective without labels."""
        model = self.model
        if isinstance(model, ResNetSize):
            raise ValueError(
                f"objective {self.objective} needs a ViT, because it uses patches; model is a {model.family}"
            )
        classifier = (False, 0.0) if model is None else (model.representation_head, model.head_bias)
        if (self.label_smoothing, self.mixup, self.cutmix, *classifier) != (0.0, 0.0, 0.0, False, 0.0):
            raise ValueError(
                "label_smoothing, mixup, cutmix, model.representation_head and model.head_bias need labels and a"
                f" classifier, which objective {self.objective} does not use; remove them"
            )
        if self.objective == "contrastive":
            self._check_contrastive()
            return
        if model is None:
            return
        if self.objective == "mae":
            self.mae.check(model.architecture(self.resolution, channels=3, num_classes=0))
            return
        if model.pooling == "map":
            raise ValueError("objective masked_patches does not train model.pooling map; use cls or gap")
        if self.resolution == model.patch_size:
            raise ValueError(
                f"resolution {self.resolution} is a single patch; objective masked_patches needs two or more"
            )

    def _check_contrastive(self) -> None:
        """Raise ValueError for fields that do not apply to MoCo v3."""
        if self.augment == "none":
            raise ValueError(
                "augment none: the two views of objective contrastive would show the same part of an image;"
                " resized_crop_flip is the authors'"
            )
        if self.randaugment is not None:
            raise ValueError(
                "randaugment cannot be combined with objective contrastive, which has its own augmentation"
            )
        if self.zero_stage == 3:
            raise ValueError(
                "zero_stage 3: the momentum encoder of objective contrastive needs whole weights; use 1 or 2"
            )
        if self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}: objective contrastive distinguishes"
                " the images of a whole batch; use 1"
            )
        if self.batch_size < 2:
            raise ValueError(
                "batch_size 1: objective contrastive distinguishes the images of a batch; use 2 or more"
            )


def _has_stochastic_depth(model: Model | None) -> bool:
    return isinstance(model, ModelSize) and model.stochastic_depth > 0


_BACKBONE = "a stage's name; or, of a pretraining, {stage: NAME, checkpoint: last | best | step:N}"


class Labels(Frozen):
    """Which labels a learner may see: all of train (dev chooses), or `per_class` of each class, drawn `draws` times."""

    per_class: int | None = Field(None, ge=2, description="null: all labels, and dev selects the settings")
    draws: int = Field(
        5, ge=1, description="with per_class: number of independent draws, each scored on test"
    )
    folds: int = Field(
        5,
        ge=2,
        description="with per_class, or without dev: folds of the cross-validation that selects the settings",
    )
    seed: Seed = 0
    use_dev: bool = later(
        True,
        description="with all labels; false: dev is left out, as if there were none: settings are selected on folds of"
        " train, which alone is fitted",
    )

    @model_validator(mode="after")
    def _folds_fit(self) -> Self:
        if self.per_class is not None and not self.use_dev:
            raise ValueError("use_dev false: with per_class dev is never used; leave it out")
        if self.per_class is not None and self.folds > self.per_class:
            raise ValueError(
                f"folds {self.folds} is more than per_class {self.per_class}; each fold needs an image of every class"
            )
        return self


class EarlyStopping(Frozen):
    """When a trial of a sweep ends before its last step, and which of its steps counts: the best on held-out images.

    They are dev, or with few labels the fold's; test is never looked at.
    """

    evaluations: int = Field(
        20, ge=2, description="of a trial, at equal distances; the last is after its last step"
    )
    patience: int = Field(
        5, ge=1, description="end a trial after this many evaluations in a row without a new best"
    )


class Finetune(_Stage):
    """A Ray Tune sweep over learning rates or a search, a refit with the best, one look at test (paper, Table 4)."""

    # 7: stochastic depth is drawn per sample. A backbone that has it was pretrained anew, which changes this stage's
    # key by the digest of its input. 8: Optuna tries no point twice.
    VERSION: ClassVar[int] = 8
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {
        7: lambda stage: _has_stochastic_depth(stage.model) or bool(stage.stochastic_depth),
        8: lambda stage: isinstance(stage.search, Optuna),
    }
    KIND: ClassVar[str] = "model"
    job: Literal["finetune"]
    data: str = takes("dataset")
    backbone: Backbone | None = takes("model", default=None, description=_BACKBONE)
    model: Model | None = Field(None, description="instead of a backbone: the model to train from scratch")
    resolution: int | None = Field(
        None, ge=4, le=8192, description="with a backbone: null keeps the backbone's"
    )
    labels: Labels = Labels()
    refits: int = later(
        1,
        ge=1,
        description="with all labels: fits with the chosen settings and the seeds from `seed` on, each scored on test"
        " once; the first one's model is kept. With few labels, labels.draws says how many",
    )
    learning_rates: Annotated[tuple[Rate, ...], AfterValidator(distinct)] = Field(
        (),
        description="the rates to sweep; a single rate is used without a sweep. Needed unless `search` is over"
        " learning_rate",
    )
    search: Search | None = later(
        None,
        description="other fields to sweep, and how: grid, random, asha or optuna. `over` gives each field's"
        " values, or {low, high, scale: linear or log}; fields in others are written as optimizer.weight_decay",
    )
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    gradient_accumulation_steps: int = later(
        1,
        ge=1,
        description="micro-batches per step that batch_size is divided into, which takes less memory; batch_size does"
        " not change",
    )
    early_stopping: EarlyStopping | None = later(
        None,
        description="end a trial when its accuracy on the held-out images no longer rises; the refits end at the best"
        " trial's best step. A single rate gets a trial, too",
    )
    optimizer: Optimizer = Optimizer()
    augment: Augmentation | Literal["vtab"] = Field(
        "none",
        description="vtab: squash_crop_flip, without the crop or the flip for the tasks of VTAB-1k for which BiT leaves"
        " it out",
    )
    randaugment: RandAugment | None = later(None)
    mixup: float = mixing("mixup")
    cutmix: float = mixing("cutmix")
    eval_crop: EvalCrop | None = later(
        None,
        description="null: the backbone's; without a backbone, squash if all images are square, otherwise center",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    freeze: Literal["backbone", "all_but_biases"] | Annotated[int, Field(ge=0)] | None = later(
        None,
        description="what of the backbone is not trained: backbone, so that only the head is; all_but_biases, so that"
        " the head and every bias are, norms' included (BitFit, Ben Zaken et al. 2022); or N, the embeddings and the"
        " first N blocks",
    )
    lora: LoRAOptions | None = later(
        None,
        description="train low-rank changes of the matrices of attention, and the head, and nothing else (LoRA, Hu et"
        " al. 2022); afterwards they are added to the matrices, so that the result is an ordinary ViT",
    )
    stochastic_depth: float | None = later(
        None,
        ge=0,
        lt=1,
        description="of a backbone that is a ViT, in place of its own: how often the last block's branches are left out"
        " in training; the first's never, linear between",
    )
    head_first: int = later(
        0,
        ge=0,
        description="the first steps, in which only the head changes (Kumar et al. 2022); the schedule is that of all"
        " steps",
    )
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0)]] | None = later(
        None,
        description="of the classes in the loss: balanced, n / (classes * images of the class); or {class: weight},"
        " with 1 for the others. Selection and scores are not weighted",
    )
    sampling: Literal["uniform", "balanced"] = later(
        "uniform",
        description="balanced: all classes are equally frequent in training, by repeating the small ones",
    )
    seen_in_training: SeenInTraining = seen_in_training()
    dtype: Dtype = "bfloat16"
    seed: Seed = 0
    workers: int = execution(
        1,
        ge=1,
        description="Ray Train workers that share each batch of a trial or refit, with a GPU each if there are any",
    )
    threads: int = execution(1, ge=1, description="CPU threads per worker of a trial or refit")
    activation_checkpointing: bool = activation_checkpointing()
    cache_gib: float = execution(
        64, gt=0, description="GiB of images from S3 that a machine keeps in its cache folder"
    )
    checkpoint_every: CheckpointEvery = execution(
        CheckpointEvery(minutes=10),
        description="how often each running trial or refit writes a checkpoint to resume from",
    )

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.backbone is None) == (self.model is None):
            raise ValueError(
                "give either backbone (a model stage to start from) or model (a shape to train from scratch)"
            )
        if self.model is not None:
            if self.resolution is None:
                raise ValueError("resolution is required without a backbone")
            check_patches(self.resolution, self.model)
        check_optimizer(self.optimizer, self.steps, None if self.model is None else self.model.family)
        if self.refits > 1 and self.labels.per_class is not None:
            raise ValueError(
                f"refits {self.refits}: with labels.per_class there is one for each of labels.draws; leave refits out"
            )
        if self.batch_size % (self.workers * self.gradient_accumulation_steps):
            shared = f"workers {self.workers} x " if self.workers > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of {shared}gradient_accumulation_steps"
                f" {self.gradient_accumulation_steps}"
            )
        if self.early_stopping is not None and self.early_stopping.evaluations > self.steps:
            raise ValueError(
                f"early_stopping.evaluations {self.early_stopping.evaluations} is more than steps {self.steps}"
            )
        return self

    @property
    def space(self) -> dict[str, Range | Choices]:
        """The values that a trial's fields may have, by path, the learning rate's first."""
        over = {} if self.search is None else self.search.over
        rates: dict[str, Range | Choices] = (
            {} if "learning_rate" in over else {"learning_rate": self.learning_rates}
        )
        return rates | over

    def at(self, point: Point) -> Self:
        """Return the fine-tuning of one trial: with the values of a point, one learning rate, and no search.

        Raises:
            ValueError: the values do not fit this stage; as a ValidationError if it is a single field.
        """
        fields = self.model_dump(exclude={"search", "learning_rates"})
        values = {path: value for path, value in point.items() if path != "learning_rate"}
        return type(self).model_validate(
            placed(fields, values) | {"learning_rates": (point["learning_rate"],)}
        )

    @model_validator(mode="after")
    def _search_fits(self) -> Self:
        if (search := self.search) is None:
            if not self.learning_rates:
                raise ValueError("learning_rates: give at least one")
            return self
        if ("learning_rate" in search.over) == bool(self.learning_rates):
            raise ValueError("give either learning_rates or search.over.learning_rate")
        if isinstance(search, ASHA):
            if self.labels.per_class is not None:
                raise ValueError(
                    f"search.kind {search.kind} needs one held-out part, but labels.per_class has folds: use random or"
                    " optuna"
                )
            if self.early_stopping is not None:
                raise ValueError(f"search.kind {search.kind} ends trials itself: leave out early_stopping")
            if search.evaluations > self.steps:
                raise ValueError(f"search.evaluations {search.evaluations} is more than steps {self.steps}")
        self._check_space()
        return self

    def _check_space(self) -> None:
        """Raise ValueError for fields that cannot be searched, and for values that a trial cannot have or has twice."""
        shared = {*FIXED, "learning_rates"} | {
            name for name, info in type(self).model_fields.items() if marks(info).get("execution")
        }
        values = {
            path: values.samples() if isinstance(values, Range) else values
            for path, values in self.space.items()
        }
        first = {"learning_rate": values["learning_rate"][0]}
        for path in values:
            place = ("search", "over", path)
            if not shared.isdisjoint((path, path.split(".")[0])):
                raise wrong_field(place, f"all trials share {path}, so it cannot be searched")
            trials: list[Finetune] = []
            for value in values[path]:
                try:
                    trials.append(self.at(first | {path: value}))
                except ValidationError as error:
                    raise wrong_field(place, f"value {value!r}: {reasons(error)}") from None
                if trials[-1] in trials[:-1]:
                    raise wrong_field(place, f"duplicate value {value!r}")

    @model_validator(mode="after")
    def _frozen_parts_fit(self) -> Self:
        if self.backbone is None and (self.freeze is not None or self.head_first or self.lora is not None):
            raise ValueError("freeze, head_first and lora are for a backbone; the weights of model are new")
        if self.backbone is None and self.stochastic_depth is not None:
            raise ValueError("stochastic_depth is for a backbone; model.stochastic_depth is for a new model")
        if self.freeze is not None and self.lora is not None:
            raise ValueError(
                f"freeze {self.freeze}: lora trains only its own matrices and the head; leave out freeze or lora"
            )
        if self.freeze == "backbone" and self.head_first:
            raise ValueError(
                f"head_first {self.head_first}: freeze backbone trains only the head in all steps"
            )
        if self.optimizer.name == "muon" and (self.lora is not None or isinstance(self.freeze, str)):
            what = f"freeze {self.freeze}" if self.lora is None else "lora"
            raise ValueError(
                f"optimizer.name muon is for the matrices of the blocks, which {what} does not train; use adamw or sgd"
            )
        if self.head_first >= self.steps:
            raise ValueError(f"head_first {self.head_first} must be less than steps {self.steps}")
        return self


class Evaluate(_Stage):
    """Few-shot linear evaluation (paper, section 4.1) of a frozen backbone, beside raw pixels and untrained weights."""

    VERSION: ClassVar[int] = 6  # untrained weights of several seeds, and the majority class
    KIND: ClassVar[str] = "evaluation"
    job: Literal["evaluate"]
    data: str = takes("dataset")
    backbone: Backbone = takes("model", description=_BACKBONE)
    shots: Annotated[tuple[Shots, ...], AfterValidator(distinct)] = (1, 5, 10, 25)
    draws: int = Field(20, ge=1, description="20; with protocol big_vision 3, with scenic 1")
    protocol: ProbeProtocol = later(
        "leave_one_out",
        description="how labels are drawn and L2 is chosen: by leave-one-out on them; with all labels, on dev, and then"
        " a fit to train and dev; always 1,024, as big_vision; or by the accuracy on test, as scenic, to compare with"
        " its numbers only",
    )
    classifiers: Annotated[tuple[Probe, ...], Field(min_length=1), AfterValidator(distinct)] = later(
        ("least squares",), description="of the frozen features; logistic regression takes all labels"
    )
    support: Literal["train", "train+dev"] = later(
        "train", description="the splits that labels are drawn from; test is scored"
    )
    linear_probe: bool = later(False, description="also evaluate with all labels of the support")
    retrieval: bool = later(
        False,
        description="also rank, for each test image, all other test images by cosine similarity: mean average precision"
        " (mAP), with the images of the query's class as the relevant ones",
    )
    eval_crop: EvalCrop | None = later(
        None, description="how images are made square; null: as the model's contract says"
    )
    resolution: int | None = later(
        None,
        ge=4,
        le=8192,
        description="side of the images in pixels, to which position embeddings are resized; null: the backbone's",
    )
    seen_in_training: SeenInTraining = seen_in_training()
    seed: Seed = 0
    threads: int = execution(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_protocol(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and isinstance(protocol := fields.get("protocol"), str):
            return PROBE_DEFAULTS.get(protocol, {}) | fields
        return fields

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.protocol == "scenic" and self.draws != 1:
            raise ValueError(
                f"draws {self.draws}: with protocol scenic it must be 1: the first images of each class are taken"
            )
        if not self.shots and not self.linear_probe:
            raise ValueError("shots: give at least one, or linear_probe: true")
        if self.protocol == "dev" and (self.shots or not self.linear_probe or self.support != "train+dev"):
            raise ValueError(
                "protocol dev needs linear_probe: true, support: train+dev and shots: [], because it chooses on all of"
                " dev; leave these fields out"
            )
        if "logistic regression" in self.classifiers and not self.linear_probe:
            raise ValueError("classifiers: logistic regression takes all labels; add linear_probe: true")
        return self


class Segment(_Stage):
    """Linear segmentation of a frozen backbone's patch tokens, beside the pixels of patches and untrained weights."""

    VERSION: ClassVar[int] = 2  # mIoU is the mean over the classes in the masks
    KIND: ClassVar[str] = "evaluation"
    job: Literal["segment"]
    data: str = takes("dataset", description="a data set with masks: its source has `masks: true`")
    backbone: Backbone = takes("model", description=_BACKBONE)
    seen_in_training: SeenInTraining = seen_in_training()
    seed: Seed = Field(0, description="of the untrained weights")
    threads: int = execution(1, ge=1)


class Baselines(_Stage):
    """Classifiers on pixels (scikit-learn), given the same labels and folds as a fine-tuning."""

    VERSION: ClassVar[int] = 6  # images are divided among equally frequent classes
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {6: lambda stage: "majority" in stage.methods}
    KIND: ClassVar[str] = "evaluation"
    job: Literal["baselines"]
    data: str = takes("dataset")
    methods: Annotated[tuple[Method, ...], Field(min_length=1), AfterValidator(distinct)] = (
        "k-NN",
        "logistic regression",
        "RBF SVM",
    )
    labels: Labels = Labels()
    thumbnail: int = Field(32, ge=4, description="side in pixels that larger images are averaged down to")
    max_images: int = Field(
        5_000, ge=100, description="with all labels, use at most this many images (kernels are quadratic)"
    )


class CrossValidation(Frozen):
    """The training that an audit repeats on all folds but one, to judge the labels of that one."""

    folds: int = Field(5, ge=2, description="parts of train and dev; copies and groups stay together")
    model: Model | None = Field(None, description="instead of a backbone: the model to train from scratch")
    resolution: int | None = Field(
        None, ge=4, le=8192, description="with a backbone: null keeps the backbone's"
    )
    learning_rate: Rate
    steps: int = Field(ge=1, description="of each fold")
    batch_size: int = Field(ge=1)
    optimizer: Optimizer = Optimizer()
    augment: Augmentation = "none"
    randaugment: RandAugment | None = None
    mixup: float = mixing("mixup")
    cutmix: float = mixing("cutmix")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    dtype: Dtype = "bfloat16"


class Audit(_Stage):
    """A list of likely wrong labels in train and dev, by confident learning on out-of-sample probabilities."""

    KIND: ClassVar[str] = "audit"
    job: Literal["audit"]
    data: str = takes("dataset")
    backbone: Backbone | None = takes("model", default=None, description=_BACKBONE)
    cross_validation: CrossValidation | None = Field(
        None,
        description="probabilities of each fold from a training on the others, from the backbone's weights or from"
        " scratch, which is better and takes longer; null: leave-one-out least squares on the backbone's frozen"
        " features",
    )
    seed: Seed = 0
    threads: int = execution(1, ge=1, description="CPU threads per fold, or per task that computes features")
    cache_gib: float = execution(
        64, gt=0, description="GiB of images from S3 that a machine keeps in its cache folder"
    )

    @model_validator(mode="after")
    def _source_is_whole(self) -> Self:
        if self.cross_validation is not None:
            try:
                self.fine_tuning()
            except ValidationError as error:
                raise ValueError(f"cross_validation: {reasons(error)}") from None
        elif self.backbone is None:
            raise ValueError(
                "backbone is missing; give a model stage whose features are used, or cross_validation with a model to"
                " train from scratch"
            )
        return self

    def fine_tuning(self) -> Finetune:
        """Return the fine-tuning that has the settings of the cross-validation's fits."""
        assert self.cross_validation is not None
        fields = self.cross_validation.model_dump(exclude={"folds", "learning_rate"})
        own = self.model_dump(include={"data", "backbone", "seed", "threads", "cache_gib"})
        rates = {"learning_rates": (self.cross_validation.learning_rate,)}
        return Finetune.model_validate({"job": "finetune"} | fields | own | rates)


class Report(_Stage):
    """One page of everything: a table, curves, sheets of images, and the rows behind them."""

    VERSION: ClassVar[int] = (
        9  # verdicts name what they compare with; VTAB's scores are of one classifier each
    )
    KIND: ClassVar[str] = "report"
    job: Literal["report"]
    title: str
    note: str = Field("", description="a note for readers, shown beside the verdict")
    of: tuple[str, ...] = takes("dataset", "model", "evaluation", "audit", shows_names=True, min_length=1)
    missing: tuple[str, ...] = later(
        (), description="set by a run: members of a matrix that could not be built and were removed from `of`"
    )


Stage = Annotated[
    Ingest | Import | Pretrain | Finetune | Evaluate | Segment | Baselines | Audit | Report,
    Field(discriminator="job"),
]
STAGE_TYPES: dict[str, type[_Stage]] = {
    "ingest": Ingest,
    "import": Import,
    "pretrain": Pretrain,
    "finetune": Finetune,
    "evaluate": Evaluate,
    "segment": Segment,
    "baselines": Baselines,
    "audit": Audit,
    "report": Report,
}
AnyStage = Ingest | Import | Pretrain | Finetune | Evaluate | Segment | Baselines | Audit | Report


def module(job: str) -> str:
    """Return the name of the `ray_jobs` module for a job."""
    return "import_model" if job == "import" else job  # `import` is a keyword
