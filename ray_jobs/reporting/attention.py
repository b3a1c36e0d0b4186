"""Where a model looked: attention rollout (Abnar and Zuidema 2020) over the images that the page shows.

In: the artifact of a fine-tuned ViT and rows of a test split. Out: the images as the model saw them, as `data:` URLs,
tinted by how much of each patch reaches the representation. Costs one read of the model's file and a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from pipelines.store import Manifest, Store, local_files
from ray_jobs.data.shards import Dataset
from ray_jobs.reporting.pictures import PHOTO, jpeg_url
from vit_model.inspection import attention_rollout
from vit_model.model import ViT
from vit_model.preprocessing import normalise
from vit_model.weights import CONTRACT_FILE, WEIGHTS_FILE, load_model

MOST_BYTES = 2**29
"""The largest model that is read, above ViT-B in float32; its pass over 24 images takes 0.8 TFLOPs."""
TINT, STRENGTH = (255, 90, 0), 0.65
LEVELS = 16  # of attention, so that a last bit of difference does not show


def overlays(store: Store, model: Manifest, dataset: Dataset, rows: Sequence[int]) -> list[str]:
    """Return a tinted image for each of these rows of test; none for a larger model, or one that is no plain ViT."""
    files = [file for file in model.files if file.path in (WEIGHTS_FILE, CONTRACT_FILE)]
    size = sum(file.size for file in files)
    if len(files) < 2 or size > MOST_BYTES or not rows:
        return []
    print(f"attention of {len(rows)} images: reads {model.stage}, {size / 2**20:,.1f} MiB", flush=True)
    network, contract = load_model(local_files(store, model, files))
    if not isinstance(network, ViT) or network.config.axial:
        return []
    pixels = dataset.images("test", contract.preprocessing, np.asarray(rows))
    looked = attention_rollout(
        network, normalise(torch.from_numpy(pixels), contract.preprocessing, torch.float32)
    )
    return [_tinted(image, attention) for image, attention in zip(pixels, looked, strict=True)]


def _tinted(pixels: np.ndarray, attention: np.ndarray) -> str:
    """Tint an image, uint8 [side, side, channels], by its attention [rows, columns], the highest most."""
    side = min(PHOTO, pixels.shape[0] * max(1, 64 // pixels.shape[0]))
    image = Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).convert("RGB")
    kind = Image.Resampling.NEAREST if side > pixels.shape[0] else Image.Resampling.BILINEAR
    share = (attention - attention.min()) / max(float(np.ptp(attention)), 1e-9)
    level = Image.fromarray(np.round(share * (LEVELS - 1)).astype(np.uint8) * (255 // (LEVELS - 1)))
    weight = np.asarray(level.resize((side, side), Image.Resampling.BILINEAR))[..., None] / 255 * STRENGTH
    mixed = np.asarray(image.resize((side, side), kind)) * (1 - weight) + np.array(TINT) * weight
    return jpeg_url(Image.fromarray(np.round(mixed).astype(np.uint8)))
