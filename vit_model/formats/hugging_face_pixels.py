"""preprocessor_config.json of Hugging Face and our `Preprocessing`, both ways."""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from vit_model.config import Preprocessing, ViTConfig
from vit_model.errors import UserError
from vit_model.formats.files import read_json

RESAMPLE = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# By the model_type where the file does not name its class.
CLASSES = {
    "deit": "DeiT",
    "dinov2": "Bit",
    "dinov2_with_registers": "Bit",
    "clip": "CLIP",
    "siglip": "Siglip",
}


class Processor(NamedTuple):
    """What a preprocessor_config.json says, its class's defaults filled in."""

    path: Path
    said: dict[str, Any]
    size: Any
    """{"height", "width"} or {"shortest_edge"}."""
    crop: Any
    """{"height", "width"}, or None for no crop."""

    @property
    def side(self) -> int | None:
        """Of the square that it makes of any image; None where it makes none."""
        made = self.crop or self.size
        if not isinstance(made, dict) or not isinstance(made.get("height"), int):
            return None
        return made["height"] if made == {"height": made["height"], "width": made["height"]} else None


def read_processor(folder: Path, kind: str) -> Processor | None:
    """What the folder says of pixels, for a model_type; None where it says nothing. Raises UserError for no JSON."""
    names = ("preprocessor_config.json", "processor_config.json")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return None
    content = read_json(path)
    inner = content.get("image_processor")
    content = inner if isinstance(inner, dict) else content
    name = content.get("image_processor_type") or content.get("feature_extractor_type")
    name = str(name or CLASSES.get(kind.removesuffix("_vision_model"), "ViT"))
    said = {
        "resample": 2 if name.startswith("ViT") else 3,
        "do_center_crop": name.startswith(("CLIP", "Bit", "DeiT")),
        **content,
    }
    size, crop = (
        {"height": edge, "width": edge} if isinstance(edge, int) else edge
        for edge in (said.get("size"), said.get("crop_size"))
    )
    if isinstance(said.get("size"), int) and name.startswith(("CLIP", "Bit")):
        size = {"shortest_edge": said["size"]}
    return Processor(path, said, size, crop if said["do_center_crop"] else None)


def preprocessing_of(
    processor: Processor, architecture: ViTConfig, image_size: tuple[int, int]
) -> tuple[Preprocessing | None, list[str]]:
    """A processor for a model's `image_size`, as far as `Preprocessing` can say it; None and the reason otherwise."""
    _, said, size, crop = processor
    square = {"height": image_size[0], "width": image_size[1]}
    fields: dict[str, Any] = {}
    if image_size[0] == image_size[1] == processor.side:
        shorter = size.get("shortest_edge") if isinstance(size, dict) else None
        if size == square:
            fields = {"crop": "squash"}
        elif isinstance(shorter, int) and shorter >= image_size[0]:
            fields = {"crop": "center", "crop_fraction": image_size[0] / shorter}
    never = [key for key in ("do_resize", "do_rescale", "do_normalize") if not said.get(key, True)]
    channels = architecture.in_channels
    missing = [
        key
        for key in ("image_mean", "image_std")
        if not isinstance(said.get(key), list) or len(said[key]) != channels
    ]
    unlike = [
        *(
            []
            if fields
            else [f"size {size!r} and crop {crop!r} for an image_size of {image_size[0]}x{image_size[1]}"]
        ),
        *([] if said["resample"] in list(RESAMPLE) else [f"resample {said['resample']!r}"]),
        *([f"{' and '.join(never)} false"] if never else []),
        *([] if said.get("rescale_factor", 1 / 255) == 1 / 255 else ["another rescale_factor than 1/255"]),
        *([f"no {' and '.join(missing)} of {channels} numbers"] if missing else []),
    ]
    if unlike:
        return None, [
            f"preprocessing: {processor.path.name} says what cannot be done here: {', '.join(unlike)}."
        ]
    try:
        preprocessing = Preprocessing(
            mean=said["image_mean"],
            std=said["image_std"],
            interpolation=RESAMPLE[said["resample"]],
            resolution=architecture.image_shape[0],
            channels=channels,
            **fields,
        )
    except ValidationError as error:
        raise UserError(f"{processor.path} says no preprocessing: {error}") from error
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
