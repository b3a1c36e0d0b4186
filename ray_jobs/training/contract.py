"""The contract of a model that is trained on a dataset: architecture, class names, preprocessing. Needs no torch.

`model_contract` is for new weights, `continued_contract` for a model that starts from another model's weights.
"""

from __future__ import annotations

from typing import Any, Literal

from pipelines.spec import EvalCrop, Model
from ray_jobs.data.shards import DatasetInfo
from vit_model.config import Architecture
from vit_model.contract import ModelContract, Preprocessing

Head = Literal["classes", "pixels"] | None
"""What a model's head classifies: images, or the pixels of their masks; None: it has none."""


def model_contract(
    size: Model,
    resolution: int,
    info: DatasetInfo,
    eval_crop: EvalCrop | None = None,
    head: Head = "classes",
) -> ModelContract:
    """Return the contract of a model of this size trained on a dataset, with this head or none."""
    channels = 3 if info.image is None else info.image.channels
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
        architecture=size.architecture(resolution, channels, num_outputs(info, head)),
        **_outputs(info, head),
        preprocessing=preprocessing,
        training_data=info.content_digest,
        license=None,
    )


def continued_contract(
    source: ModelContract,
    architecture: Architecture,
    info: DatasetInfo,
    eval_crop: EvalCrop | None = None,
    head: Head = "classes",
) -> ModelContract:
    """Return the contract of a model that starts from the weights of `source` and is trained on a dataset.

    Its images are preprocessed as for `source`, but at the resolution of the new architecture.
    """
    changed = {"resolution": architecture.image_shape[0]} | (
        eval_crop.model_dump(exclude_none=True) if eval_crop else {}
    )
    return ModelContract(
        architecture=architecture,
        **_outputs(info, head if architecture.num_classes else None),
        preprocessing=Preprocessing(**(source.preprocessing.model_dump() | changed)),
        training_data=info.content_digest,
        license=source.license,
    )


def num_outputs(info: DatasetInfo, head: Head) -> int:
    """Return how many outputs a head for a dataset has."""
    outputs = _outputs(info, head)
    return len(outputs["class_names"]) + len(outputs["mask_classes"])


def _outputs(info: DatasetInfo, head: Head) -> dict[str, Any]:
    """Return the fields of a contract about the outputs of the head."""
    is_multi = head == "classes" and info.multi_label and bool(info.class_names)
    return {
        "class_names": info.class_names if head == "classes" else (),
        "mask_classes": info.mask_classes if head == "pixels" else (),
        "problem_type": "multi_label_classification" if is_multi else "single_label_classification",
    }
