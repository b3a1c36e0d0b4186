"""Conversion between Hugging Face's preprocessor_config.json and our `Preprocessing`."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from vit_model.config import ViTConfig
from vit_model.contract import Preprocessing
from vit_model.errors import UserError
from vit_model.formats.files import read_json

RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# By model_type, if the file does not name its class.
CLASSES = {
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
    "clip": "CLIP",
    "siglip": "Siglip",
}


class Processor(NamedTuple):
    """A preprocessor_config.json with the defaults of its class filled in."""

    path: Path
    config: dict[str, Any]
    size: Any
    """{"height", "width"} or {"shortest_edge"}."""
    crop: Any
    """{"height", "width"}, or None for no crop."""

    @property
    def side(self) -> int | None:
        """The side of the square that it makes of any image; None if it does not make squares."""
        shape = self.crop or self.size
        if not isinstance(shape, dict) or not isinstance(shape.get("height"), int):
            return None
        return shape["height"] if shape == {"height": shape["height"], "width": shape["height"]} else None


def read_processor(folder: Path, kind: str) -> Processor | None:
    """Read the folder's processor for a model_type; None if there is none. Raises UserError for invalid JSON."""
    names = ("preprocessor_config.json", "processor_config.json")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return None
    content = read_json(path)
    inner = content.get("image_processor")
    content = inner if isinstance(inner, dict) else content
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    name = str(name or CLASSES.get(kind.removesuffix("_vision_model"), "ViT"))
    config = {
        "resample": 2 if name.startswith("ViT") else 3,
        "do_center_crop": name.startswith(("CLIP", "Bit", "DeiT")),
        **content,
    }
    size, crop = (
        {"height": edge, "width": edge} if isinstance(edge, int) else edge
        for edge in (config.get("size"), config.get("crop_size"))
    )
    if isinstance(config.get("size"), int) and name.startswith(("CLIP", "Bit")):
        size = {"shortest_edge": config["size"]}
    return Processor(path, config, size, crop if config["do_center_crop"] else None)


def preprocessing_of(
    processor: Processor, architecture: ViTConfig, image_size: tuple[int, int]
) -> tuple[Preprocessing | None, list[str]]:
    """Convert a processor for a model's `image_size` if `Preprocessing` can express it, else None and the reason."""
    _, config, size, crop = processor
    fields: dict[str, Any] = {}
    if image_size[0] == image_size[1] == processor.side:
        shorter = size.get("shortest_edge") if isinstance(size, dict) else None
        edge = size.get("height") if isinstance(size, dict) else None
        if size == {"height": edge, "width": edge} and isinstance(edge, int) and edge >= image_size[0]:
            fields = {"crop": "squash", "crop_fraction": image_size[0] / edge}
        elif isinstance(shorter, int) and shorter >= image_size[0]:
            fields = {"crop": "center", "crop_fraction": image_size[0] / shorter}
    never = [key for key in ("do_resize", "do_rescale", "do_normalize") if not config.get(key, True)]
    channels = architecture.in_channels
    missing = [
        key
        for key in ("image_mean", "image_std")
        if not isinstance(config.get(key), list) or len(config[key]) != channels
    ]
    unlike = [
        *([] if fields else [f"size {size!r} and crop {crop!r} for an image_size of {image_size[0]}x{image_size[1]}"]),
        *([] if config["resample"] in list(RESAMPLE) else [f"resample {config['resample']!r}"]),
        *([f"{' and '.join(never)} false"] if never else []),
        *([] if config.get("rescale_factor", 1 / 255) == 1 / 255 else ["a rescale_factor other than 1/255"]),
        *([f"no {' and '.join(missing)} of {channels} numbers"] if missing else []),
    ]
    if unlike:
        return None, [f"preprocessing: {processor.path.name} has unsupported settings: {', '.join(unlike)}."]
    try:
        preprocessing = Preprocessing(
            mean=config["image_mean"],
            std=config["image_std"],
            interpolation=RESAMPLE[config["resample"]],
            resolution=architecture.image_shape[0],
            channels=channels,
            **fields,
        )
    except ValidationError as error:
        raise UserError(f"{processor.path} has no valid preprocessing: {error}") from error
    if preprocessing.offset_matters:
        preprocessing = preprocessing.model_copy(update={"crop_offset": "floor"})
    return preprocessing, []


def processor_config(preprocessing: Preprocessing) -> dict[str, Any]:
    """Return the content of a preprocessor_config.json, which has no crop_offset: transformers rounds it down.

    Raises:
        UserError: transformers has no such interpolation.
    """
    if preprocessing.interpolation not in RESAMPLE.values():
        raise UserError(
            f"interpolation {preprocessing.interpolation} cannot be written: transformers does not support it"
        )
    side = preprocessing.resolution
    square = {"height": side, "width": side}
    resized = preprocessing.resized
    crops = preprocessing.crop == "center" or resized != side
    size = {"shortest_edge": resized} if preprocessing.crop == "center" else {"height": resized, "width": resized}
    return {
        "image_processor_type": "CLIPImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": preprocessing.channels == 3,
        "do_resize": True,
        "size": size,
        "resample": {kind: number for number, kind in RESAMPLE.items()}[preprocessing.interpolation],
        "do_center_crop": crops,
        **({"crop_size": square} if crops else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing.mean),
        "image_std": list(preprocessing.std),
    }
