"""From files to tensors: crops, orientation, transparency, hostile files. Run: pytest tests/vit_model."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.support.archives import png_claiming
from vit_model.contract import Preprocessing
from vit_model.preprocessing import load_image, normalise


def preprocessing(channels: int = 3, **fields: Any) -> Preprocessing:
    values: dict[str, Any] = {"mean": (0.5,) * channels, "std": (0.25,) * channels, "resolution": 8}
    return Preprocessing.model_validate(values | {"channels": channels} | fields)


def random_pixels(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **({"format": "PNG"} | options))
    return file.getvalue()


def test_path_bytes_image_and_array_are_the_same_image(tmp_path: Path) -> None:
    pixels = random_pixels(8, 8)
    image = Image.fromarray(pixels)
    (tmp_path / "image.png").write_bytes(encoded(image))
    for source in (tmp_path / "image.png", str(tmp_path / "image.png"), encoded(image), image, pixels):
        loaded = load_image(source, preprocessing())
        assert loaded.dtype == np.uint8
        np.testing.assert_array_equal(loaded, pixels)  # of the right size already: no pixel changes


def test_grey_models_get_one_channel_and_colour_models_three() -> None:
    grey = random_pixels(8, 8, 1)
    np.testing.assert_array_equal(load_image(grey, preprocessing(1)), grey)
    np.testing.assert_array_equal(load_image(grey, preprocessing(3)), np.repeat(grey, 3, axis=2))
    colour = random_pixels(8, 8)
    luma = (colour @ np.array([0.299, 0.587, 0.114]))[..., None]
    assert np.abs(load_image(colour, preprocessing(1)) - luma).max() <= 1


def test_squash_keeps_the_whole_image_and_center_its_middle() -> None:
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :4], pixels[:, 12:] = 255, 255  # white thirds left and right of a black square
    squashed = load_image(pixels, preprocessing(crop="squash"))
    assert squashed[:, 0].min() == squashed[:, -1].min() == 255
    assert load_image(pixels, preprocessing(crop="center")).max() == 0
    upright = load_image(pixels.transpose(1, 0, 2).copy(), preprocessing(crop="center"))
    assert upright.shape == (8, 8, 3)
    assert upright.max() == 0


def test_center_crop_with_a_fraction_is_resize_then_crop() -> None:
    pixels = random_pixels(60, 90)
    loaded = load_image(pixels, preprocessing(crop="center", crop_fraction=0.8, interpolation="bicubic"))
    # 8 / 0.8 = 10 on the shorter side
    resized = Image.fromarray(pixels).resize((15, 10), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(loaded, np.asarray(resized)[1:9, 4:12])  # (15 - 8) / 2 rounds to 4


def test_squash_with_a_fraction_is_the_middle_of_a_larger_square() -> None:
    pixels = random_pixels(60, 90)
    loaded = load_image(pixels, preprocessing(crop="squash", crop_fraction=0.8))
    resized = Image.fromarray(pixels).resize((10, 10), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(loaded, np.asarray(resized)[1:9, 1:9])


@pytest.mark.parametrize("shape", [(60, 90), (5, 13), (8, 5), (8, 8)])
@pytest.mark.parametrize("channels", [1, 3])
def test_bilinear_without_antialiasing_is_torchs(shape: tuple[int, int], channels: int) -> None:
    pixels = random_pixels(*shape, channels)
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].float(), (8, 8), mode="bilinear", antialias=False
    )[0].permute(1, 2, 0)
    ours = load_image(pixels, preprocessing(channels, interpolation="bilinear_aliased"))
    # rounded down, as big_vision does; a float just below a whole number may be another one's just above
    assert ((theirs.numpy() - ours) > -1e-3).all()
    assert ((theirs.numpy() - ours) < 1 + 1e-3).all()


def test_exif_orientation_is_honoured() -> None:
    pixels = random_pixels(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned a quarter clockwise
    rotated = load_image(encoded(Image.fromarray(pixels), exif=exif), preprocessing())
    np.testing.assert_array_equal(rotated, np.rot90(pixels, k=-1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    image.paste((0, 0, 0, 0), (0, 0, 4, 8))
    loaded = load_image(encoded(image.convert(mode)), preprocessing())
    assert loaded[:, :4].min() == 255
    assert loaded[:, 4:].max() == 0


@pytest.mark.parametrize(("width", "height"), [(9_000, 9_000), (10_000, 10_000), (60_000, 60_000)])
def test_decompression_bombs_are_refused_before_decoding(width: int, height: int) -> None:
    with pytest.raises(ValueError, match="at most 67108864 pixels are read"):
        load_image(png_claiming(width, height), preprocessing())


def test_a_thread_of_pixels_cannot_grow_into_a_bomb() -> None:
    thread = np.zeros((1, 60_000, 3), np.uint8)
    with pytest.raises(ValueError, match="13440000 x 224 pixels"):
        load_image(thread, preprocessing(crop="center", resolution=224))


@pytest.mark.parametrize(
    "content",
    [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", png_claiming(8, 8)],
    ids=["empty", "text", "PostScript", "no pixels"],
)
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="image cannot be read as an image"):
        load_image(content, preprocessing())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_truncated_files_are_refused(kind: str) -> None:
    content = encoded(Image.fromarray(random_pixels(40, 40)), format=kind)
    with pytest.raises(ValueError, match="image cannot be read as an image"):
        load_image(content[: len(content) // 2], preprocessing())


@pytest.mark.parametrize("kind", ["EPS", "PCX"])
def test_other_formats_are_not_even_opened(kind: str) -> None:
    with pytest.raises(ValueError, match="cannot identify image file"):
        load_image(encoded(Image.fromarray(random_pixels(8, 8)), format=kind), preprocessing())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.png cannot be read"):
        load_image(tmp_path / "none.png", preprocessing())


def test_of_sixteen_bits_the_higher_eight_are_kept_and_floats_are_refused() -> None:
    pixels = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    found = load_image(encoded(Image.fromarray(pixels)), preprocessing(1))
    assert (found == load_image((pixels // 256).astype(np.uint8), preprocessing(1))).all()
    with pytest.raises(ValueError, match="Pillow mode 'F'\\); use 8 or 16 bits per channel"):
        load_image(encoded(Image.fromarray(pixels.astype(np.float32)), format="TIFF"), preprocessing(1))
    with pytest.raises(ValueError, match="array is float64"):
        load_image(np.zeros((8, 8)), preprocessing(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalise_is_its_formula(dtype: torch.dtype) -> None:
    pixels = random_pixels(8, 8)[None]
    given = preprocessing(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
    out = normalise(torch.from_numpy(pixels), given, dtype)
    expected = ((pixels / 255 - np.array(given.mean)) / np.array(given.std)).transpose(0, 3, 1, 2)
    assert out.dtype == dtype
    assert out.is_contiguous()
    np.testing.assert_allclose(out.float().numpy(), expected, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_normalise_refuses_what_is_not_uint8_images() -> None:
    with pytest.raises(ValueError, match=r"images are torch\.float32"):
        normalise(torch.zeros(1, 8, 8, 3), preprocessing(), torch.float32)
    with pytest.raises(ValueError, match=r"expected uint8 \[b, h, w, 3\]"):
        normalise(torch.zeros(1, 8, 8, 1, dtype=torch.uint8), preprocessing(), torch.float32)
