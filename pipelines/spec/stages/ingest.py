"""The stage `ingest`: convert a source to a data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pipelines.spec.fields import Root, distinct
from pipelines.spec.sources import Source
from pipelines.spec.stages.base import BaseStage
from vit_model.fields import execution, later, takes


class Ingest(BaseStage):
    """Convert a source to validated Parquet shards with fixed splits."""

    # 7: the splits that lists of YOLO and VOC name; the background of COCO's outlines; notes about masks
    # 8: lists of splits in ImageSets for masks and KITTI
    # 9: names of splits such as trainA and TestData
    # 10: masks of grey with 1, 2 or 4 bits
    VERSION = 10
    CONCERNS: ClassVar[dict[int, Callable[[Any], bool]]] = {
        7: lambda stage: stage.source.has_masks or getattr(stage.source, "boxes", None) in ("yolo", "voc"),
        8: lambda stage: stage.source.has_masks or getattr(stage.source, "boxes", None) in ("voc", "kitti"),
        9: lambda stage: stage.source.kind in ("folder", "webdataset", "hf_parquet"),
        10: lambda stage: stage.source.kind == "folder" and stage.source.has_masks,
    }
    KIND = "dataset"
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
        description="largest number of differing bits, of 64, between perceptual hashes of near-duplicates and of"
        " mirrored, rotated and cropped copies; null: only identical bytes are copies",
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
        description="in pixels; images with a longer shorter side are resized and stored as JPEG of quality 95 (lossy),"
        " which makes reading 1.7 times as fast at 256; null: store the original bytes",
    )
    max_bad_fraction: float = Field(
        0.01, ge=0, le=1, description="the stage fails if a larger fraction of images is damaged"
    )

    @model_validator(mode="after")
    def _masks_fit(self) -> Self:
        beside = "boxes" if self.source.has_boxes else "masks" if self.source.has_masks else None
        if self.short_side is not None and beside is not None:
            raise ValueError(
                f"short_side {self.short_side}: {beside} are of the original images' size; remove short_side, or read"
                f" the images without {beside}"
            )
        return self
