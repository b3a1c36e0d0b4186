"""preprocessor_config.json of Hugging Face and our `Preprocessing`, both ways."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vit_model.config import Preprocessing, ViTConfig
from vit_model.formats.files import read_json

RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers


def read_preprocessing(
    folder: Path, architecture: ViTConfig, image_size: int
) -> tuple[Preprocessing | None, list[str]]:
    """What preprocessor_config.json says, as far as `Preprocessing` can say it; None and the reason otherwise."""
    path = folder / "preprocessor_config.json"
    if not path.is_file() and (folder / "processor_config.json").is_file():
        path = folder / "processor_config.json"
    if not path.is_file():
        return None, [f"preprocessing: {path.name} is missing."]
    said = read_json(path)
    inner = said.get("image_processor")
    said = inner if isinstance(inner, dict) else said
    size, crop = said.get("size"), said.get("crop_size")
    if isinstance(size, int):
        kind = str(said.get("image_processor_type") or said.get("feature_extractor_type"))
        size = {"shortest_edge": size} if kind.startswith("CLIP") else {"height": size, "width": size}
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    side = image_size
    square = {"height": side, "width": side}
    crops = said.get("do_center_crop", isinstance(size, dict) and "shortest_edge" in size)
    fields: dict[str, Any] = {}
    if isinstance(size, dict) and list(size) == ["shortest_edge"] and crops and crop == square:
        shorter = size["shortest_edge"]
        if isinstance(shorter, int) and shorter >= side:
            fields = {"crop": "center", "crop_fraction": side / shorter}
    elif size == square and (not crops or crop == square):
        fields = {"crop": "squash"}
    unlike = [
        f"size {said.get('size')!r} and crop_size {said.get('crop_size')!r} don't make {side}x{side} pixels"
        if not fields
        else "",
        f"resample is {said.get('resample')!r}" if said.get("resample") not in list(RESAMPLE) else "",
        *(
            f"{key} is not true"
            for key in ("do_resize", "do_rescale", "do_normalize")
            if not said.get(key, True)
        ),
        "rescale_factor is not 1/255" if abs(said.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6 else "",
        *(f"{key} is missing" for key in ("image_mean", "image_std") if not isinstance(said.get(key), list)),
    ]
    if reasons := ", ".join(filter(None, unlike)):
        return None, [f"preprocessing: {path.name} says what cannot be done here: {reasons}."]
    try:
        preprocessing = Preprocessing(
            mean=said["image_mean"],
            std=said["image_std"],
            interpolation=RESAMPLE[said["resample"]],
            resolution=architecture.image_shape[0],
            channels=architecture.in_channels,
            **fields,
        )
    except ValidationError as error:
        raise ValueError(f"{path} says no preprocessing: {error}") from error
    return preprocessing, []


def processor_config(preprocessing: Preprocessing) -> dict[str, Any]:
    side = preprocessing.resolution
    square = {"height": side, "width": side}
    crops = preprocessing.crop == "center"
    return {
        "image_processor_type": "CLIPImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": preprocessing.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": int(side / preprocessing.crop_fraction + 1e-6)} if crops else square,
        "resample": {kind: number for number, kind in RESAMPLE.items()}[preprocessing.interpolation],
        "do_center_crop": crops,
        **({"crop_size": square} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
