"""Frozen pydantic models of a recipe's stages and sources; `pipelines.recipe.load` reads them from YAML.

A field is *identity* (it changes the result and enters the stage's key) unless it is marked with `execution(...)`
(where and how fast it runs). A field that names another stage declares the kinds of artifact that it takes. Recipes are
validated before anything starts; an error is a `RecipeError`.
"""

from pipelines.spec.archives import ImageNet21kSource as ImageNet21kSource
from pipelines.spec.archives import ImageNetSource as ImageNetSource
from pipelines.spec.archives import WebDatasetSource as WebDatasetSource
from pipelines.spec.augmentation import Augmentation as Augmentation
from pipelines.spec.augmentation import EvalCrop as EvalCrop
from pipelines.spec.augmentation import RandAugment as RandAugment
from pipelines.spec.checkpoints import BACKBONE_FIELDS as BACKBONE_FIELDS
from pipelines.spec.checkpoints import BEST as BEST
from pipelines.spec.checkpoints import LAST as LAST
from pipelines.spec.checkpoints import LATEST as LATEST
from pipelines.spec.checkpoints import CheckpointEvery as CheckpointEvery
from pipelines.spec.checkpoints import NamedCheckpoint as NamedCheckpoint
from pipelines.spec.checkpoints import check_checkpoint as check_checkpoint
from pipelines.spec.checkpoints import recorded_checkpoint as recorded_checkpoint
from pipelines.spec.checkpoints import step_of as step_of
from pipelines.spec.fields import COMMIT as COMMIT
from pipelines.spec.fields import HUB_PATH as HUB_PATH
from pipelines.spec.fields import RecipeError as RecipeError
from pipelines.spec.fields import check_given_name as check_given_name
from pipelines.spec.fields import nearest as nearest
from pipelines.spec.fields import quantity as quantity
from pipelines.spec.optimizer import Optimizer as Optimizer
from pipelines.spec.optimizer import check_optimizer as check_optimizer
from pipelines.spec.records import CIFAR_FILES as CIFAR_FILES
from pipelines.spec.records import FACTORS as FACTORS
from pipelines.spec.records import CifarSource as CifarSource
from pipelines.spec.records import HfParquetSource as HfParquetSource
from pipelines.spec.records import ShapesSource as ShapesSource
from pipelines.spec.records import TfdsSource as TfdsSource
from pipelines.spec.sources import FASHION_MNIST_ROOT as FASHION_MNIST_ROOT
from pipelines.spec.sources import SOURCE_TYPES as SOURCE_TYPES
from pipelines.spec.sources import DigitsSource as DigitsSource
from pipelines.spec.sources import FolderSource as FolderSource
from pipelines.spec.sources import GlyphSource as GlyphSource
from pipelines.spec.sources import IdxSource as IdxSource
from pipelines.spec.sources import Source as Source
from pipelines.spec.stages import STAGE_TYPES as STAGE_TYPES
from pipelines.spec.stages import TRAINED as TRAINED
from pipelines.spec.stages import AnyStage as AnyStage
from pipelines.spec.stages import Stage as Stage
from pipelines.spec.stages import module as module
from pipelines.spec.stages.audit import Audit as Audit
from pipelines.spec.stages.base import Kind as Kind
from pipelines.spec.stages.base import input_fields as input_fields
from pipelines.spec.stages.baselines import Baselines as Baselines
from pipelines.spec.stages.embed import Embed as Embed
from pipelines.spec.stages.embed import Predict as Predict
from pipelines.spec.stages.evaluate import Evaluate as Evaluate
from pipelines.spec.stages.finetune import Finetune as Finetune
from pipelines.spec.stages.finetune import Labels as Labels
from pipelines.spec.stages.import_model import MEAN_AND_STD as MEAN_AND_STD
from pipelines.spec.stages.import_model import ONE_FILE as ONE_FILE
from pipelines.spec.stages.import_model import UNSTATED as UNSTATED
from pipelines.spec.stages.import_model import GivenPreprocessing as GivenPreprocessing
from pipelines.spec.stages.import_model import Import as Import
from pipelines.spec.stages.ingest import Ingest as Ingest
from pipelines.spec.stages.inspect import Inspect as Inspect
from pipelines.spec.stages.pretrain import WITHOUT_LABELS as WITHOUT_LABELS
from pipelines.spec.stages.pretrain import FewShot as FewShot
from pipelines.spec.stages.pretrain import Objective as Objective
from pipelines.spec.stages.pretrain import Pretrain as Pretrain
from pipelines.spec.stages.pretrain import objective_properties as objective_properties
from pipelines.spec.stages.promote import Promote as Promote
from pipelines.spec.stages.report import Report as Report
from pipelines.spec.stages.segment import Segment as Segment
from pipelines.spec.vtab import VtabSource as VtabSource
from vit_model.sizes import Model as Model
from vit_model.sizes import ModelSize as ModelSize
from vit_model.sizes import ResNetSize as ResNetSize
