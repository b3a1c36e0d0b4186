"""The contract of a model that is trained on a dataset: architecture, class names, preprocessing. Needs no torch.

`model_contract` is for new weights, `continued_contract` for a model that starts from another model's weights.
"""

from __future__ import annotations

from typing import Literal

from pipelines.spec import EvalCrop, Model
from ray_jobs.data.shards import DatasetInfo
from vit_model.config import Architecture
from vit_model.contract import ModelContract, Preprocessing


def model_contract(
    size: Model,
    resolution: int,
    info: DatasetInfo,
    eval_crop: EvalCrop | None = None,
    classifier: bool = True,
) -> ModelContract:
    """Return the contract of a model of this size trained on a dataset, with or without a classifier."""
    channels = 3 if info.image is None else info.image.channels
    class_names = info.class_names if classifier else ()
    if eval_crop is None:
        square = info.image is not None and info.image.height == info.image.width
        eval_crop = EvalCrop(crop="squash" if square else "center")
    preprocessing = Preprocessing(
        mean=(0.5,) * channels,
        std=(0.5,) * channels,
        **eval_crop.model_dump(exclude_none=True),
        resolution=resolution,
        channels=channels,
    )
    return ModelContract(
        architecture=size.architecture(resolution, channels, len(class_names)),
        class_names=class_names,
        problem_type=_problem_type(info, class_names),
        preprocessing=preprocessing,
        training_data=info.content_digest,
        license=None,
    )


def continued_contract(
    source: ModelContract, architecture: Architecture, info: DatasetInfo, eval_crop: EvalCrop | None = None
) -> ModelContract:
    """Return the contract of a model that starts from the weights of `source` and is trained on a dataset.

    Its images are preprocessed as for `source`, but at the resolution of the new architecture.
    """
    changed = {"resolution": architecture.image_shape[0]} | (
        eval_crop.model_dump(exclude_none=True) if eval_crop else {}
    )
    class_names = info.class_names if architecture.num_classes else ()
    return ModelContract(
        architecture=architecture,
        class_names=class_names,
        problem_type=_problem_type(info, class_names),
        preprocessing=Preprocessing(**(source.preprocessing.model_dump() | changed)),
        training_data=info.content_digest,
        license=source.license,
    )


def _problem_type(
    info: DatasetInfo, class_names: tuple[str, ...]
) -> Literal["single_label_classification", "multi_label_classification"]:
    is_multi = info.multi_label and class_names
    return "multi_label_classification" if is_multi else "single_label_classification"
