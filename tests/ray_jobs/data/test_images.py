"""Images from anywhere: what they are, and a short reason for each that can't be used."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from ray_jobs.data.images import examine, shrunk
from tests.support.archives import png_claiming


def encoded(form: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, I am a text", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded("JPEG")[:-200], "truncated"),
        (encoded("PNG")[:-200], "truncated"),
        (encoded("PNG")[:50] + b"\0" * 100 + encoded("PNG")[150:], "damaged"),
        (png_claiming(9_000, 9_000), r"too many pixels \(bomb\)"),
        (png_claiming(12_000, 12_000), r"too many pixels \(bomb\)"),
        (png_claiming(100_000, 100_000), r"too many pixels \(bomb\)"),
    ],
)
def test_examine_gives_a_short_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        examine(data)


@pytest.mark.parametrize(
    ("form", "mode", "size", "stored"),
    [
        ("JPEG", "RGB", (90, 60), (48, 32)),
        ("PNG", "RGBA", (60, 91), (32, 49)),
        ("JPEG", "L", (64, 64), (32, 32)),
        ("WEBP", "RGB", (700, 33), (679, 32)),
    ],
)
def test_what_is_stored_smaller_is_the_image_resized(
    form: str, mode: str, size: tuple[int, int], stored: tuple[int, int]
) -> None:
    """Against torch's antialiased bilinear resize of the decoded image; a JPEG of quality 95 is near it."""
    gradients = np.stack(np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(255, 0, size[1])), -1)
    pixels = np.concatenate([gradients, gradients[..., :1]], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, form)
    data = file.getvalue()
    facts = examine(data)
    smaller, found = shrunk(data, facts, 32)
    assert found == facts._replace(format="jpeg", width=stored[0], height=stored[1])
    assert examine(smaller)[:4] == found[:4]
    with Image.open(io.BytesIO(data)) as image, Image.open(io.BytesIO(smaller)) as ours:
        whole = np.asarray(image.convert("L" if mode == "L" else "RGB"), np.float32)
        whole = whole.reshape(*whole.shape[:2], -1)
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(whole).permute(2, 0, 1)[None], stored[::-1], mode="bilinear", antialias=True
        )
        expected = expected[0].permute(1, 2, 0).numpy()
        assert np.abs(np.asarray(ours, np.float32).reshape(expected.shape) - expected).mean() < 2


def test_what_is_small_stays_as_it_is_and_what_was_turned_is_stored_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = encoded("JPEG", exif=exif)
    facts = examine(data)
    assert shrunk(data, facts, 30) == (data, facts)
    smaller, found = shrunk(data, facts, 15)
    with Image.open(io.BytesIO(smaller)) as image:
        assert image.size == (15, 20) == (found.width, found.height) and not image.getexif()
