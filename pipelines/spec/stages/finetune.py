"""The stages `finetune` and `detect`: adapt a model to another data set, with the best of the tried settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from pipelines.spec.augmentation import Augmentation, EvalCrop
from pipelines.spec.checkpoints import Backbone, CheckpointEvery
from pipelines.spec.fields import Seed, distinct
from pipelines.spec.optimizer import check_optimizer
from pipelines.spec.search import ASHA, FIXED, Choices, Optuna, Point, Range, Search, placed
from pipelines.spec.stages.base import (
    BACKBONE,
    Kind,
    Rate,
    SeenInTraining,
    TrainingStage,
    has_stochastic_depth,
    seen_in_training,
    threads,
)
from vit_model.config import LoRAOptions
from vit_model.detection.contract import RANGES
from vit_model.errors import reasons
from vit_model.fields import Frozen, execution, later, marks, takes, wrong_field
from vit_model.sizes import Model, ModelSize


class Labels(Frozen):
    """The labels for training: all of train (dev selects), or `per_class` of each class, drawn `draws` times."""

    per_class: int | None = Field(None, ge=2, description="null: all labels, and dev selects the settings")
    draws: int = Field(5, ge=1, description="with per_class: number of independent draws, each scored on test")
    folds: int = Field(
        5,
        ge=2,
        description="with per_class, or without dev: folds of the cross-validation that selects the settings",
    )
    seed: Seed = 0
    use_dev: bool = later(
        True,
        description="with all labels; false: ignore dev: settings are selected on folds of train, and the final model"
        " is trained on train alone",
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
    """When a trial of a sweep ends before its last step; its best step on held-out images counts.

    Held-out images are dev, or with few labels the fold's; never test.
    """

    evaluations: int = Field(
        20, ge=2, description="evaluations of a trial, at equal distances; the last is after its last step"
    )
    patience: int = Field(5, ge=1, description="end a trial after this many evaluations in a row without a new best")


class Finetune(TrainingStage):
    """A Ray Tune sweep over learning rates or a search, a refit with the best, one look at test (paper, Table 4)."""

    # 7: stochastic depth is drawn per sample. A backbone that has it was pretrained anew, which changes this stage's
    # key by the digest of its input. 8: Optuna tries no point twice.
    VERSION = 9
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {
        7: lambda stage: has_stochastic_depth(stage.model) or bool(stage.stochastic_depth),
        8: lambda stage: isinstance(stage.search, Optuna),
        9: lambda stage: stage.class_weights is not None,  # in the rows' settings
    }
    KIND: ClassVar[Kind] = "model"
    job: Literal["finetune"]
    data: str = takes("dataset")
    backbone: Backbone | None = takes("model", default=None, description=BACKBONE)
    model: Model | None = Field(None, description="instead of a backbone: the model to train from scratch")
    resolution: int | None = Field(None, ge=4, le=8192, description="with a backbone: null keeps the backbone's")
    masks: bool = later(
        False,
        description="true: classify the pixels of the data's masks, by the tokens of their patches (linear decoder of"
        " Strudel et al. 2021); scored by mIoU",
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
    batch_size: int = Field(ge=1)
    gradient_accumulation_steps: int = later(
        1,
        ge=1,
        description="micro-batches per step that batch_size is divided into, which takes less memory; batch_size does"
        " not change",
    )
    select_by: Literal["accuracy", "macro-F1", "balanced accuracy"] = later(
        "accuracy",
        description="the metric on the held-out images that ranks trials and, with early_stopping, their evaluations;"
        " with several labels per image it is mAP, and accuracy is left as it is",
    )
    early_stopping: EarlyStopping | None = later(
        None,
        description="end a trial when it no longer gets better on the held-out images; the refits end at the best"
        " trial's best step. A single rate gets a trial, too",
    )
    augment: Augmentation | Literal["vtab"] = Field(
        "none",
        description="vtab: squash_crop_flip, without the crop or the flip for the tasks of VTAB-1k for which BiT leaves"
        " it out",
    )
    eval_crop: EvalCrop | None = later(
        None,
        description="null: the backbone's; without a backbone, squash if all images are square, otherwise center",
    )
    freeze: Literal["backbone", "all_but_biases"] | Annotated[int, Field(ge=0)] | None = later(
        None,
        description="the frozen part: backbone: only the head is trained; all_but_biases: the head and every bias are"
        " trained, norms' included (BitFit, Ben Zaken et al. 2022); N: the embeddings and the first N blocks are"
        " frozen",
    )
    lora: LoRAOptions | None = later(
        None,
        description="train only the head and low-rank changes of the attention matrices (LoRA, Hu et al. 2022); they"
        " are merged afterwards, so that the result is an ordinary ViT",
    )
    stochastic_depth: float | None = later(
        None,
        ge=0,
        lt=1,
        description="for a ViT backbone, instead of its own value: the probability of dropping the last block's"
        " branches in training; the first block's is 0, linear between",
    )
    head_first: int = later(
        0,
        ge=0,
        description="the number of first steps that train only the head (Kumar et al. 2022); the schedule covers all"
        " steps",
    )
    class_weights: Literal["balanced"] | dict[str, Annotated[float, Field(ge=0)]] | None = later(
        None,
        description="weights of the classes in the loss: balanced, n / (classes * images of the class), of pixels with"
        " masks; or {class: weight}, with 1 for the others. Selection and scores are not weighted",
    )
    sampling: Literal["uniform", "balanced"] = later(
        "uniform",
        description="balanced: all classes are equally frequent in training, by repeating the small ones",
    )
    seen_in_training: SeenInTraining = seen_in_training()
    workers: int = execution(
        1,
        ge=1,
        description="Ray Train workers that share each batch of a trial or refit, with a GPU each if there are any",
    )
    threads: int | None = threads("worker of a trial or refit")
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
            if isinstance(self.model, ModelSize):
                self.model.check_side("resolution", self.resolution)
        check_optimizer(self.optimizer, self.steps, None if self.model is None else self.model.family)
        if self.backbone is not None and self.optimizer.base_width is not None:
            raise ValueError(
                f"optimizer.base_width {self.optimizer.base_width} is for a new model; a sweep finds the rate of this"
                " backbone"
            )
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

    def uses_labels(self) -> bool:
        return not self.masks

    def needs_one_label(self) -> str | None:
        """Return which field needs one label per image; None if there is none."""
        fields = {
            "labels.per_class": self.labels.per_class is not None,
            f"select_by {self.select_by}": self.select_by != "accuracy",
            "class_weights": self.class_weights is not None,
            "sampling balanced": self.sampling == "balanced",
        }
        needs = [name for name, is_given in fields.items() if is_given]
        return f"{needs[0]} needs one label per image; leave it out" if needs else None

    @property
    def space(self) -> dict[str, Range | Choices]:
        """The possible values of a trial's fields, by path, the learning rate's first."""
        over = {} if self.search is None else self.search.over
        rates: dict[str, Range | Choices] = {} if "learning_rate" in over else {"learning_rate": self.learning_rates}
        return rates | over

    def at(self, point: Point) -> Self:
        """Return the fine-tuning of one trial: with the values of a point, one learning rate, and no search.

        Raises:
            ValueError: the values do not fit this stage; a ValidationError if a single field is wrong.
        """
        fields = self.model_dump(exclude={"search", "learning_rates"})
        values = {path: value for path, value in point.items() if path != "learning_rate"}
        return type(self).model_validate(placed(fields, values) | {"learning_rates": (point["learning_rate"],)})

    @model_validator(mode="after")
    def _search_fits(self) -> Self:
        if (search := self.search) is None:
            if not self.learning_rates:
                raise ValueError("learning_rates: give at least one")
            return self
        if ("learning_rate" in search.over) == bool(self.learning_rates):
            raise ValueError("give either learning_rates or search.over.learning_rate")
        if isinstance(search, ASHA):
            if self.workers > 1:
                raise ValueError(
                    f"search.kind {search.kind} ends trials of one worker only, not of workers {self.workers}: use"
                    " workers: 1, or random or optuna"
                )
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
        """Raise ValueError for fields that cannot be searched, and for invalid or duplicate values."""
        shared = {*FIXED, "learning_rates"} | {
            name for name, info in type(self).model_fields.items() if marks(info).get("execution")
        }
        values = {
            path: values.samples() if isinstance(values, Range) else values for path, values in self.space.items()
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
            raise ValueError(f"head_first {self.head_first}: freeze backbone trains only the head in all steps")
        if self.optimizer.name == "muon" and (self.lora is not None or isinstance(self.freeze, str)):
            what = f"freeze {self.freeze}" if self.lora is None else "lora"
            raise ValueError(
                f"optimizer.name muon is for the matrices of the blocks, which {what} does not train; use adamw or sgd"
            )
        if self.head_first >= self.steps:
            raise ValueError(f"head_first {self.head_first} must be less than steps {self.steps}")
        return self

    @model_validator(mode="after")
    def _targets_are_in_images(self) -> Self:
        if not (self.masks or isinstance(self, Detect)):
            return self
        what = "detect" if isinstance(self, Detect) else "masks true"
        for name in (*_OF_IMAGES, *(("lora", "masks", "class_weights") if isinstance(self, Detect) else ())):
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name}: {what} has no such setting; leave it out")
        if self.augment in ("shift", "shift_flip", "vtab"):
            raise ValueError(f"augment {self.augment}: {what} needs a policy that crops or flips, such as flip")
        if self.masks and self.model is not None and not isinstance(self.model, ModelSize):
            raise ValueError("masks true: a ResNet has no tokens of patches; give a ViT's model")
        return self


_OF_IMAGES = (
    *("labels", "select_by", "eval_crop", "sampling"),
    *("randaugment", "mixup", "cutmix", "label_smoothing"),
)
"""Settings of labels of whole images."""


class Detect(Finetune):
    """A fine-tuning that detects objects, by FCOS's head on a ViT's simple feature pyramid; scored by COCO's AP."""

    VERSION = 1
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {}
    KIND = "detector"
    job: Literal["detect"]  # type: ignore[assignment]
    data: str = takes("dataset", description="a data set with boxes: a folder with `boxes`, or scenes")
    augment: Augmentation | Literal["vtab"] = Field(
        "flip",
        description="a policy that crops or flips; boxes of which a crop shows less than a quarter are not learned",
    )
    channels: int = Field(256, ge=32, multiple_of=32, description="of the pyramid's maps and of the head")
    convs: int = Field(4, ge=1, le=8, description="convolutions in each of the head's two towers")
    scales: tuple[Literal[4, 2, 1, 0.5], ...] = Field(  # type: ignore[valid-type]
        (4, 2, 1, 0.5),
        min_length=1,
        description="the pyramid's maps, as multiples of the grid of patches: neighbours, the largest first",
    )

    @model_validator(mode="after")
    def _is_of_boxes(self) -> Self:
        if tuple(map(float, self.scales)) not in RANGES:
            raise ValueError(f"scales {[*self.scales]}: give neighbours among 4, 2, 1, 0.5, the largest first")
        if self.optimizer.base_width is not None:
            raise ValueError("optimizer.base_width: detect has no such setting; leave it out")
        return self
