"""Frozen pydantic models of a recipe's stages and sources; `pipelines.recipe.load` reads them from YAML.

A field is *identity* (it changes the result and enters the stage's key) unless it is marked with `execution(...)`
(where and how fast it runs). A field that names another stage declares the kinds of artifact that it takes. Recipes are
validated before anything starts; an error is a `RecipeError`.
"""

from pipelines.spec.archives import ImageNet21kSource, ImageNetSource, WebDatasetSource
from pipelines.spec.augmentation import Augmentation, EvalCrop, RandAugment
from pipelines.spec.checkpoints import (
    BACKBONE_FIELDS,
    BEST,
    LAST,
    LATEST,
    CheckpointEvery,
    NamedCheckpoint,
    check_checkpoint,
    recorded_checkpoint,
    step_of,
)
from pipelines.spec.fields import COMMIT, HUB_PATH, RecipeError, nearest, quantity
from pipelines.spec.optimizer import Optimizer, check_optimizer
from pipelines.spec.records import (
    CIFAR_FILES,
    FACTORS,
    CifarSource,
    HfParquetSource,
    ShapesSource,
    TfdsSource,
)
from pipelines.spec.sources import (
    FASHION_MNIST_ROOT,
    SOURCE_TYPES,
    DigitsSource,
    FolderSource,
    GlyphSource,
    IdxSource,
    Source,
)
from pipelines.spec.stages import STAGE_TYPES, TRAINED, AnyStage, Stage, module
from pipelines.spec.stages.audit import Audit
from pipelines.spec.stages.base import Kind, input_fields
from pipelines.spec.stages.baselines import Baselines
from pipelines.spec.stages.evaluate import Evaluate
from pipelines.spec.stages.finetune import Finetune, Labels
from pipelines.spec.stages.import_model import MEAN_AND_STD, ONE_FILE, UNSTATED, GivenPreprocessing, Import
from pipelines.spec.stages.ingest import Ingest
from pipelines.spec.stages.pretrain import WITHOUT_LABELS, FewShot, Objective, Pretrain, objective_properties
from pipelines.spec.stages.report import Report
from pipelines.spec.stages.segment import Segment
from pipelines.spec.vtab import VtabSource
from vit_model.sizes import Model, ModelSize, ResNetSize

__all__ = [
    "BACKBONE_FIELDS",
    "BEST",
    "CIFAR_FILES",
    "COMMIT",
    "FACTORS",
    "FASHION_MNIST_ROOT",
    "HUB_PATH",
    "LAST",
    "LATEST",
    "MEAN_AND_STD",
    "ONE_FILE",
    "SOURCE_TYPES",
    "STAGE_TYPES",
    "TRAINED",
    "UNSTATED",
    "WITHOUT_LABELS",
    "AnyStage",
    "Audit",
    "Augmentation",
    "Baselines",
    "CheckpointEvery",
    "CifarSource",
    "DigitsSource",
    "EvalCrop",
    "Evaluate",
    "FewShot",
    "Finetune",
    "FolderSource",
    "GivenPreprocessing",
    "GlyphSource",
    "HfParquetSource",
    "IdxSource",
    "ImageNet21kSource",
    "ImageNetSource",
    "Import",
    "Ingest",
    "Kind",
    "Labels",
    "Model",
    "ModelSize",
    "NamedCheckpoint",
    "Objective",
    "Optimizer",
    "Pretrain",
    "RandAugment",
    "RecipeError",
    "Report",
    "ResNetSize",
    "Segment",
    "ShapesSource",
    "Source",
    "Stage",
    "TfdsSource",
    "VtabSource",
    "WebDatasetSource",
    "check_checkpoint",
    "check_optimizer",
    "input_fields",
    "module",
    "nearest",
    "objective_properties",
    "quantity",
    "recorded_checkpoint",
    "step_of",
]
