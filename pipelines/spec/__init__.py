"""What a pipeline is: frozen pydantic models of a recipe and its stages (`pipelines.recipe` reads them from YAML).

A field is *identity* (it changes the result and enters the stage's key) unless it is marked with `execution(...)`
(where and how fast it runs). A field that names an earlier stage says which kind of artifact it takes.
Everything that a recipe can get wrong is found here, before anything starts, as a `RecipeError`.
"""

from pipelines.spec.fields import RecipeError, nearest
from pipelines.spec.shapes import Model, ModelSize, ResNetSize
from pipelines.spec.sources import (
    FASHION_MNIST_ROOT,
    SOURCE_TYPES,
    DigitsSource,
    FolderSource,
    GlyphSource,
    IdxSource,
    Source,
)
from pipelines.spec.stages import (
    MEAN_AND_STD,
    ONE_FILE,
    STAGE_TYPES,
    AnyStage,
    Baselines,
    Evaluate,
    Finetune,
    GivenPreprocessing,
    Import,
    Ingest,
    Labels,
    Optimizer,
    Pretrain,
    Report,
    Stage,
    input_fields,
    module,
)
from pipelines.spec.vtab import VtabSource

__all__ = [
    "FASHION_MNIST_ROOT",
    "MEAN_AND_STD",
    "ONE_FILE",
    "SOURCE_TYPES",
    "STAGE_TYPES",
    "AnyStage",
    "Baselines",
    "DigitsSource",
    "Evaluate",
    "Finetune",
    "FolderSource",
    "GivenPreprocessing",
    "GlyphSource",
    "IdxSource",
    "Import",
    "Ingest",
    "Labels",
    "Model",
    "ModelSize",
    "Optimizer",
    "Pretrain",
    "RecipeError",
    "Report",
    "ResNetSize",
    "Source",
    "Stage",
    "VtabSource",
    "input_fields",
    "module",
    "nearest",
]
