"""The stage `pretrain`: train a model on a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, assert_never, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from pipelines.spec.augmentation import Augmentation, EvalCrop
from pipelines.spec.checkpoints import LATEST, Backbone, CheckpointEvery, NamedCheckpoint
from pipelines.spec.dino import DinoOptions
from pipelines.spec.fields import RecipeError, Seed, ascending, distinct
from pipelines.spec.optimizer import check_optimizer
from pipelines.spec.stages.base import Rate, Shots, Steps, TrainingStage, has_stochastic_depth, threads
from vit_model.config import Architecture, MaeOptions
from vit_model.errors import reasons
from vit_model.fields import Frozen, execution, later, takes
from vit_model.sizes import Model, ModelSize, ResNetSize, different_encoders, size_of

Objective = Literal["softmax", "sigmoid", "masked_patches", "contrastive", "mae", "distillation", "dino"]
PatchTarget = Literal["mean_colour", "4x4", "pixels"]


class ObjectiveProperties(NamedTuple):
    """The properties of an objective outside of training; `ray_jobs.training.methods` has the rest."""

    classifier: Literal["softmax", "sigmoid"] | None
    """the cross-entropy that trains the classifier; None: the objective uses no labels, the model has no classifier"""
    views: int = 1
    """differently augmented views of each image that a step compares, at the model's resolution"""
    compares_images: bool = False
    """whether the loss compares the images of a batch, which then cannot be divided into micro-batches"""
    settings: str | None = None
    """the stage's field with settings that only this objective uses"""


def objective_properties(objective: Objective) -> ObjectiveProperties:
    """Return the properties of an objective."""
    match objective:
        case "softmax":
            return ObjectiveProperties("softmax")
        case "sigmoid":
            return ObjectiveProperties("sigmoid")
        case "masked_patches":
            return ObjectiveProperties(None)
        case "contrastive":
            return ObjectiveProperties(None, views=2, compares_images=True, settings="contrastive")
        case "mae":
            return ObjectiveProperties(None, settings="mae")
        case "distillation":
            return ObjectiveProperties("softmax", settings="distillation")
        case "dino":
            return ObjectiveProperties(None, views=2, settings="dino")
        case _:
            assert_never(objective)


WITHOUT_LABELS = tuple(name for name in get_args(Objective) if objective_properties(name).classifier is None)


class Contrastive(Frozen):
    """MoCo v3's settings; the defaults are the authors' for ViTs. The networks behind the ViT are discarded after
    pretraining. The rest of the authors' recipe, from `position: sincos2d_moco` to the rates: docs/training.md."""

    hidden_width: int = Field(4096, ge=1, description="hidden width of the projector and the predictor")
    output_width: int = Field(256, ge=1)
    temperature: float = Field(0.2, gt=0)
    momentum: float = Field(
        0.99,
        ge=0,
        le=1,
        description="the initial momentum of the momentum encoder; a cosine schedule raises it to 1",
    )


class Distillation(Frozen):
    """How a teacher is imitated; the defaults follow DeiT's code. A model with a distillation token
    (`model.distillation: true`) answers the teacher with it, and the labels with the class token; with kind features,
    the class token does both."""

    kind: Literal["soft", "hard", "features"] = Field(
        "hard",
        description="soft: the teacher's probabilities; hard: its most likely class; features: the direction of its"
        " representation, through a linear map that is discarded; the teacher then needs no classifier",
    )
    temperature: float = Field(1.0, gt=0, description="with soft: the divisor of both models' logits")
    weight: float = Field(
        0.5, gt=0, le=1, description="weight of the teacher's part in the loss; the labels have the rest"
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.temperature != 1.0 and self.kind != "soft":
            raise ValueError(f"temperature {self.temperature} is for kind soft; kind is {self.kind}")
        if self.weight == 1.0 and self.kind == "features":
            raise ValueError("weight 1 leaves no labels, and kind features trains no classifier; use less than 1")
        return self


class Auxiliary(Frozen):
    """Tasks without labels; their losses are added to the labels' loss, at the cost of another forward pass."""

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


class Pretrain(TrainingStage):
    """Pretraining with DeepSpeed ZeRO on Ray Train (paper, section 3.1 and Table 3)."""

    # 6: stochastic depth is drawn per sample. A start that has it was pretrained anew, which changes this stage's key
    # by the digest of its input.
    VERSION = 6
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {6: lambda stage: has_stochastic_depth(stage.model)}
    KIND = "model"
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
        description="the model whose weights training starts from, also an imported one: a stage's name; for a"
        " pretraining, {stage: NAME, checkpoint: last | best | step:N}; latest, the newest model of this stage in"
        ' earlier runs of the recipe; or "@NAME", the model that an alias names when the run is planned. Steps, rates'
        " and the optimizer start anew. null, or if there is no such model: new weights from the seed",
    )
    resolution: int = Field(ge=4, le=8192, description="side of the training images in pixels")
    batch_size: int = Field(ge=1, description="images per step, over all workers")
    gradient_accumulation_steps: int = later(
        1,
        ge=1,
        description="micro-batches per step that each worker divides its share of batch_size into, which takes less"
        " memory; batch_size does not change",
    )
    learning_rate: Rate
    augment: Augmentation = "none"
    eval_crop: EvalCrop | None = later(
        None,
        description="null: the start's; without init_from, squash if all images are square, otherwise center",
    )
    objective: Objective = later(
        "softmax",
        description="cross-entropy by softmax, or by sigmoid and summed over the classes, which goes with"
        " model.head_bias: -10 and model.representation_head: true in the authors' recipe; or, without labels and with"
        " a model without a classifier as the result, the colours of corrupted patches (section 4.6), MoCo v3: which of"
        " two views are of the same image, or a masked autoencoder: the pixels of masked patches, or"
        " DINO: what a moving average of the model answers to other views of the image; or cross-entropy by softmax"
        " beside the answers of a teacher to the same pixels",
    )
    teacher: Backbone | None = takes(
        "model",
        default=None,
        later=True,
        description="with objective distillation: the model to imitate, also an imported one: a stage's name; or, for a"
        " pretraining, {stage: NAME, checkpoint: last | best | step:N}. It takes images of the same resolution and has"
        " all classes of the data, by name",
    )
    distillation: Distillation = later(Distillation())
    patch_target: PatchTarget = later(
        "mean_colour",
        description="the target of masked_patches, as objective or auxiliary: a patch's mean colour at 3 bits per"
        " channel (the paper), the mean colours of its 4x4 parts, or, by regression, all its pixels",
    )
    contrastive: Contrastive = later(Contrastive())
    mae: MaeOptions = later(MaeOptions())
    dino: DinoOptions = later(DinoOptions())
    auxiliary: Auxiliary | None = later(None, description="with objective softmax or sigmoid, for ViTs")
    zero_stage: Literal[0, 1, 2, 3] = 1
    order: Literal["global", "window"] = later(
        "global",
        description="the order of images: a permutation of them all, or windows of row groups, for data on S3 that is"
        " larger than cache_gib",
    )
    workers: int | None = execution(
        None,
        ge=1,
        description="number of Ray Train workers, with a GPU each if there are any; null: one per GPU, or 2 on CPUs",
    )
    min_workers: int = execution(
        1,
        ge=1,
        description="if machines are lost, training continues with fewer workers, down to this number",
    )
    threads: int | None = threads("worker")
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
        " the last and the best weights are always kept",
    )
    fewshot: FewShot | None = execution(
        None,
        description="log few-shot accuracy on dev 5 times during the training, with any objective, only for monitoring;"
        " null: do not",
    )

    def uses_labels(self) -> bool:
        return self.objective not in WITHOUT_LABELS or self.fewshot is not None

    @property
    def view_sides(self) -> tuple[int, ...]:
        """The side in pixels of each view of an image that a step computes."""
        local = (self.dino.local_size,) * self.dino.local_crops if self.objective == "dino" else ()
        return (self.resolution,) * objective_properties(self.objective).views + local

    def with_model(self, start: Architecture) -> Self:
        """Return the stage with the shape of the model that it starts from, if it gives none.

        Raises:
            ValidationError: its other fields do not fit this shape.
        """
        if self.model is not None:
            return self
        model = size_of(start, head=self.objective not in WITHOUT_LABELS)
        return type(self).model_validate(self.model_dump() | {"model": model})

    def check_start(self, where: str, start: Architecture, classes: int = 0) -> Architecture:
        """Return the architecture of the stage's model, which takes over the encoder of another one.

        Raises:
            RecipeError: the stage does not fit the shape of the start, or has another encoder; the message begins with
                `where`.
        """
        try:
            model = self.with_model(start).model
        except ValidationError as error:
            raise RecipeError(f"{where}: {reasons(error)}") from None
        assert model is not None
        ours = model.architecture(self.resolution, start.in_channels, classes)
        if different := different_encoders(ours, start):
            raise RecipeError(f"{where} does not match model: {different}")
        return ours

    @model_validator(mode="after")
    def _start_is_known(self) -> Self:
        if self.model is None and self.init_from is None:
            raise ValueError("model is missing; only a stage with init_from: NAME can do without")
        if self.model is None and "init_from" in self.from_store():
            raise ValueError(f"model is missing; with init_from: {self.init_from} the first run needs it")
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
        if isinstance(self.model, ModelSize):
            self.model.check_side("resolution", self.resolution)
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
            share = f", which is {self.batch_size // workers} for each of {workers} workers," * (workers > 1)
            raise ValueError(
                f"batch_size {self.batch_size}{share} is not a multiple of gradient_accumulation_steps {micro_batches}"
            )
        if self.activation_checkpointing and isinstance(self.model, ResNetSize):
            raise ValueError(f"activation_checkpointing needs the blocks of a ViT; model is a {self.model.family}")
        return self

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        smoothing = self.label_smoothing
        if self.objective == "sigmoid" and smoothing >= 0.5:
            raise ValueError(
                f"label_smoothing {smoothing}: with objective sigmoid it is the assumed error rate of each label, so it"
                " must be below 0.5, such as 0.0001"
            )
        if self.patch_target != "mean_colour" and self.objective != "masked_patches" and not self.auxiliary:
            raise ValueError(f"patch_target {self.patch_target} is for objective masked_patches")
        for objective in get_args(Objective):
            field = objective_properties(objective).settings
            if field and objective != self.objective and getattr(self, field) != type(getattr(self, field))():
                raise ValueError(f"{field} has settings that only objective {objective} uses; remove it")
        if self.optimizer.base_width is not None and (self.objective not in ("softmax", "sigmoid") or self.auxiliary):
            raise ValueError(
                f"optimizer.base_width {self.optimizer.base_width} is for objectives softmax and sigmoid without"
                " auxiliary, whose parts all belong to the ViT"
            )
        self._check_distillation()
        if self.objective in WITHOUT_LABELS:
            self._check_no_labels()
        self._check_compared_images()
        if self.auxiliary is not None:
            self._check_auxiliary()
        return self

    def _check_auxiliary(self) -> None:
        """Raise ValueError for fields that do not apply to an auxiliary task."""
        if self.objective in WITHOUT_LABELS:
            raise ValueError(f"auxiliary is beside labels, which objective {self.objective} does not use; remove it")
        if self.objective == "distillation":
            raise ValueError("auxiliary cannot be combined with objective distillation; remove one of them")
        if isinstance(self.model, ResNetSize):
            raise ValueError(f"auxiliary needs a ViT, because it uses patches; model is a {self.model.family}")
        if self.model is not None and self.resolution == self.model.patch_size:
            raise ValueError(f"resolution {self.resolution} is a single patch; auxiliary needs two or more")

    def _check_distillation(self) -> None:
        """Raise ValueError for a teacher and settings that do not go with the objective and the model."""
        if self.objective != "distillation":
            if self.teacher is not None:
                raise ValueError(f"teacher {self.teacher} is for objective distillation; objective is {self.objective}")
        elif self.teacher is None:
            raise ValueError("teacher is missing; objective distillation needs a model to imitate")
        elif self.distillation.weight == 1.0 and getattr(self.model, "distillation", False):
            raise ValueError(
                "distillation.weight 1 leaves no labels to train the class token's classifier; use less than 1, or"
                " model.distillation false"
            )

    def check_teacher(self, where: str, resolution: int | None, has_classifier: bool) -> None:
        """Raise RecipeError for a teacher that the stage cannot imitate.

        Args:
            where: the beginning of the message.
            resolution: the side of the teacher's images; None: not known yet.
        """
        if resolution is not None and resolution != self.resolution:
            raise RecipeError(
                f"{where} takes images of resolution {resolution}, but this stage trains with resolution"
                f" {self.resolution}, and both see the same pixels; use resolution {resolution}, or a teacher"
                f" fine-tuned at {self.resolution}"
            )
        if not has_classifier and self.distillation.kind != "features":
            raise RecipeError(
                f"{where} has no classifier, which distillation.kind {self.distillation.kind} imitates; use kind"
                " features, or fine-tune the teacher"
            )

    def _check_no_labels(self) -> None:
        """Raise ValueError for fields that do not apply to an objective without labels."""
        model = self.model
        if isinstance(model, ResNetSize):
            names = {"contrastive": "MoCo v3", "dino": "DINO"}
            name = names.get(self.objective)
            reason = "it uses patches" if name is None else f"{name} is only implemented for ViTs"
            raise ValueError(f"objective {self.objective} needs a ViT, because {reason}; model is a {model.family}")
        classifier = (False, 0.0) if model is None else (model.representation_head, model.head_bias)
        if (self.label_smoothing, self.mixup, self.cutmix, *classifier) != (0.0, 0.0, 0.0, False, 0.0):
            raise ValueError(
                "label_smoothing, mixup, cutmix, model.representation_head and model.head_bias need labels and a"
                f" classifier, which objective {self.objective} does not use; remove them"
            )
        if self.objective == "dino":
            self._check_dino()
        if model is None:
            return
        if self.objective == "mae":
            self.mae.check(model.architecture(self.resolution, channels=3, num_classes=0))
        if self.objective == "masked_patches":
            if model.pooling == "map":
                raise ValueError("objective masked_patches does not train model.pooling map; use cls or gap")
            if self.resolution == model.patch_size:
                raise ValueError(
                    f"resolution {self.resolution} is a single patch; objective masked_patches needs two or more"
                )

    def _check_dino(self) -> None:
        """Raise ValueError for fields that do not go with DINO's views and teacher, whose weights are the result."""
        assert not isinstance(self.model, ResNetSize)
        self.dino.check(self.resolution, self.model)
        if self.augment not in ("none", "resized_crop_flip"):
            raise ValueError(
                f"augment {self.augment}: objective dino has crops of its own, dino.global_scale and"
                " dino.local_scale; use resized_crop_flip"
            )
        if self.optimizer.ema is not None:
            raise ValueError(
                f"optimizer.ema {self.optimizer.ema}: the result of objective dino is its teacher, which is a moving"
                " average already (dino.momentum); remove it"
            )

    def _check_compared_images(self) -> None:
        """Raise ValueError for fields that do not apply to an objective that compares views or images."""
        properties = objective_properties(self.objective)
        if properties.views > 1 and self.augment == "none":
            raise ValueError(
                f"augment none: both views of objective {self.objective} would show the same part of an image; use"
                " resized_crop_flip, as the authors do"
            )
        for name in ("randaugment", "color_jitter"):
            if properties.views > 1 and getattr(self, name):
                raise ValueError(
                    f"{name} cannot be combined with objective {self.objective}, which has its own augmentation"
                )
        if properties.compares_images and self.gradient_accumulation_steps > 1:
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps}: objective {self.objective} compares"
                " the images of a whole batch; use 1"
            )
        if properties.compares_images and self.batch_size < 2:
            raise ValueError(f"batch_size 1: objective {self.objective} compares the images of a batch; use 2 or more")
        if self.objective in ("contrastive", "dino") and self.zero_stage == 3:
            raise ValueError(
                f"zero_stage 3: the moving average of objective {self.objective} needs whole weights; use 1 or 2"
            )
