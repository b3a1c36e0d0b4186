"""Checks of local files of pretrained weights that need neither the weights nor torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_LARGEST = 16 << 20  # bytes of a config.json


def lacks_preprocessing(path: str) -> bool:
    """Return whether a local file or folder of weights certainly does not state the mean and std of its images.

    `vit_model.formats` reads the files later, and refuses all others.
    """
    place = Path(path)
    if place.is_file():
        return _is_tensors_alone(place)
    config = _read_json(place / "config.json")
    if "model_type" in config:  # Hugging Face's
        return not any((place / name).is_file() for name in _PROCESSORS)
    if isinstance(config.get("architecture"), str):  # timm's
        settings = config.get("pretrained_cfg", config)
        return isinstance(settings, dict) and not {"mean", "std"} <= settings.keys()
    return False


def _is_tensors_alone(file: Path) -> bool:
    """Return whether a file is of safetensors or torch.save; Google's .npz have the authors' preprocessing."""
    try:
        with file.open("rb") as opened:
            begin = opened.read(9)
        if begin[8:] == b"{" or begin[:2] == b"\x80\x02":
            return True
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; empty if it cannot be read."""
    try:
        content = json.loads(file.read_bytes()) if file.stat().st_size <= _LARGEST else None
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
