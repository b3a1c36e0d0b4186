"""The stage `baselines`: the accuracy of classifiers on pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipelines.spec.fields import distinct
from pipelines.spec.stages.base import BaseStage
from pipelines.spec.stages.finetune import Labels
from vit_model.fields import takes

Method = Literal["majority", "k-NN", "logistic regression", "RBF SVM"]


class Baselines(BaseStage):
    """Classifiers on pixels (scikit-learn), given the same labels and folds as a fine-tuning."""

    VERSION = 6  # images are divided among equally frequent classes
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {6: lambda stage: "majority" in stage.methods}
    KIND = "evaluation"
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

    def needs_one_label(self) -> str | None:
        """Return which field needs one label per image; None if there is none."""
        if self.labels.per_class is not None:
            return "labels.per_class needs one label per image; leave it out"
        if "RBF SVM" in self.methods:
            return "RBF SVM needs one label per image; set methods, such as [majority, k-NN, logistic regression]"
        return None
