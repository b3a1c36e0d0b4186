"""Image files as they are found: what ingest says of them, and that training then sees the pixels that are meant.

The truth is numpy's arithmetic, on files that Pillow or OpenCV wrote.
"""

import io
import random
import struct
import warnings
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from ray_jobs.data import images
from ray_jobs.data.images import examine
from ray_jobs.data.jpeg import plain_jpeg
from tests.support import archives
from tests.support.fuzz import mutated
from vit_model.contract import Preprocessing
from vit_model.preprocessing import load_image

SIDE = 24
RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (SIDE, SIDE), np.uint8)
RGB = RNG.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
ALPHA = RNG.integers(0, 256, (SIDE, SIDE), np.uint8)
DEEP_GREY = RNG.integers(0, 2**16, (SIDE, SIDE), np.uint16)
DEEP_RGB = RNG.integers(0, 2**16, (SIDE, SIDE, 3), np.uint16)


def saved(image: Image.Image | np.ndarray, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, form, **options)
    return file.getvalue()


def by_opencv(pixels: np.ndarray, ending: str) -> bytes:
    return bytes(cv2.imencode(ending, pixels[..., ::-1] if pixels.ndim == 3 else pixels)[1])


def rgb(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[..., None], 3, 2)


def on_white(pixels: np.ndarray) -> np.ndarray:
    alpha = ALPHA[..., None] / 255
    return pixels * alpha + 255 * (1 - alpha)


def palette() -> Image.Image:
    image = Image.fromarray(GREY % 8, "L").convert("P")
    image.putpalette(RGB[0, :8].tobytes())
    return image


def frames(form: str) -> bytes:
    rest = [Image.fromarray(RGB[::-1]), Image.fromarray(RGB[:, ::-1])]
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "subsampling": "4:4:4"}}.get(form, {})
    return saved(RGB, form, save_all=True, append_images=rest, duration=100, **options)


def turned(form: str, pixels: np.ndarray, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    return saved(pixels, form, exif=exif, **options)


def cmyk() -> bytes:
    return saved(Image.fromarray(RGB // 2).convert("CMYK"), "TIFF")


def png(depth: int, values: np.ndarray, **chunks: bytes) -> bytes:
    """A PNG of these values [h, w] or [h, w, 3], with chunks before its pixels."""
    size = struct.pack(">II5B", *values.shape[1::-1], depth, 2 if values.ndim == 3 else 0, 0, 0, 0)
    if depth < 8:
        bits = (values[..., None] >> np.arange(depth - 1, -1, -1)) & 1
        rows = np.packbits(bits.reshape(len(values), -1), axis=1)
    else:
        rows = values.astype(">u2").reshape(len(values), -1).view(np.uint8)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return archives.png(IHDR=size, **chunks, IDAT=pixels, IEND=b"")


def tiff(bits: int, photometric: int, data: bytes) -> bytes:
    """An uncompressed grey TIFF of SIDE x SIDE pixels."""
    tags = {
        256: SIDE,
        257: SIDE,
        258: bits,
        259: 1,
        262: photometric,
        273: 122,
        277: 1,
        278: SIDE,
        279: len(data),
    }
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


def twelve_bits(values: np.ndarray) -> bytes:
    bits = (values[..., None] >> np.arange(11, -1, -1)) & 1
    return np.packbits(bits.reshape(len(values), -1), axis=1).tobytes()


def bitmap(alpha: np.ndarray) -> bytes:
    """A BMP of 32 bits with an alpha channel."""
    masks = struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    sizes = struct.pack("<IiiHHIIiiII", 108, SIDE, -SIDE, 1, 32, 3, SIDE * SIDE * 4, 0, 0, 0, 0)
    header = sizes + masks + b"BGRs" + bytes(48)
    pixels = np.dstack([RGB[..., ::-1], alpha]).tobytes()
    return b"BM" + struct.pack("<IHHI", 14 + len(header) + len(pixels), 0, 0, 14 + len(header)) + header + pixels


MIB = 2**20
TEXT = zlib.compress(bytes(MIB + 1))
HIDDEN = int(DEEP_GREY[3, 4])
# of an earlier decoder: the images that it read differently
CORRECTED: dict[str, tuple[bytes, str, int, np.ndarray]] = {
    "16-bit TIFF, white is 0": (tiff(16, 0, DEEP_GREY.tobytes()), "tiff", 1, rgb(255 - DEEP_GREY // 256)),
    "12-bit TIFF": (tiff(12, 1, twelve_bits(DEEP_GREY // 16)), "tiff", 1, rgb(DEEP_GREY // 256)),
    "16-bit grey PNG with a transparent value": (
        png(16, DEEP_GREY, tRNS=struct.pack(">H", HIDDEN)),
        "png",
        1,
        rgb(np.where(DEEP_GREY == HIDDEN, 255, DEEP_GREY // 256)),
    ),
    "2-bit grey PNG with a transparent value": (
        png(2, GREY % 4, tRNS=b"\0\1"),
        "png",
        1,
        rgb(np.where(GREY % 4 == 1, 255, GREY % 4 * 85)),
    ),
    "4-bit grey PNG with a transparent value": (
        png(4, GREY % 16, tRNS=b"\0\7"),
        "png",
        1,
        rgb(np.where(GREY % 16 == 7, 255, GREY % 16 * 17)),
    ),
    "16-bit RGB PNG with a transparent colour": (
        png(16, DEEP_RGB, tRNS=DEEP_RGB[3, 4].astype(">u2").tobytes()),
        "png",
        3,
        np.where((DEEP_RGB[3, 4] == DEEP_RGB).all(2, keepdims=True), 255, DEEP_RGB // 256),
    ),
    "32-bit BMP with alpha 0 everywhere": (bitmap(np.zeros_like(ALPHA)), "bmp", 3, RGB),
}
FILES: dict[str, tuple[bytes, str, int, np.ndarray]] = CORRECTED | {
    "16-bit grey PNG without its transparent value": (
        png(16, DEEP_GREY // 2, tRNS=b"\xff\xff"),
        "png",
        1,
        rgb(DEEP_GREY // 512),
    ),
    "32-bit BMP": (bitmap(ALPHA), "bmp", 3, on_white(RGB)),
    "16-bit PGM": (saved(DEEP_GREY, "PPM"), "ppm", 1, rgb(DEEP_GREY // 256)),
    "10-bit PGM": (
        f"P5 {SIDE} {SIDE} 1023\n".encode() + (DEEP_GREY // 64).astype(">u2").tobytes(),
        "ppm",
        1,
        rgb(DEEP_GREY // 64 / 1023 * 255),
    ),
    "large compressed text": (png(16, DEEP_RGB, zTXt=b"a\0\0" + TEXT), "png", 3, DEEP_RGB // 256),
    "large international text": (
        png(16, DEEP_RGB, iTXt=b"a\0\1\0en\0a\0" + TEXT, tEXt=b"b\0c"),
        "png",
        3,
        DEEP_RGB // 256,
    ),
    "large colour profile": (png(16, DEEP_RGB, iCCP=b"a\0\0" + TEXT), "png", 3, DEEP_RGB // 256),
    "larger text": (png(16, DEEP_RGB, iTXt=b"a\0\0\0en\0a\0" + bytes(65 * MIB)), "png", 3, DEEP_RGB // 256),
    "16-bit grey PNG": (saved(DEEP_GREY, "PNG"), "png", 1, rgb(DEEP_GREY // 256)),
    "16-bit grey TIFF": (saved(DEEP_GREY, "TIFF"), "tiff", 1, rgb(DEEP_GREY // 256)),
    "big-endian 16-bit grey TIFF": (saved(DEEP_GREY.astype(">u2"), "TIFF"), "tiff", 1, rgb(DEEP_GREY // 256)),
    "16-bit RGB PNG": (by_opencv(DEEP_RGB, ".png"), "png", 3, DEEP_RGB // 256),
    "16-bit RGB TIFF": (by_opencv(DEEP_RGB, ".tiff"), "tiff", 3, DEEP_RGB // 256),
    "1-bit": (saved(Image.fromarray(GREY).convert("1", dither=0), "PNG"), "png", 1, rgb(GREY // 128 * 255)),
    "palette": (saved(palette(), "PNG"), "png", 3, RGB[0, :8][GREY % 8]),
    "palette with transparency": (
        saved(palette(), "PNG", transparency=0),
        "png",
        3,
        np.where((GREY % 8 == 0)[..., None], 255, RGB[0, :8][GREY % 8]),
    ),
    "LA": (saved(np.dstack([GREY, ALPHA]), "PNG"), "png", 1, on_white(rgb(GREY))),
    "RGBA": (saved(np.dstack([RGB, ALPHA]), "PNG"), "png", 3, on_white(RGB)),
    "CMYK": (cmyk(), "tiff", 3, RGB // 2),
    "CMYK JPEG": (
        saved(Image.new("CMYK", (SIDE, SIDE), (0, 255, 255, 0)), "JPEG"),
        "jpeg",
        3,
        np.broadcast_to([255, 0, 0], (SIDE, SIDE, 3)),
    ),
    "animated GIF": (
        saved(palette(), "GIF", save_all=True, append_images=[Image.fromarray(GREY)]),
        "gif",
        3,
        RGB[0, :8][GREY % 8],
    ),
    "animated WebP": (frames("WEBP"), "webp", 3, RGB),
    "animated PNG": (frames("PNG"), "png", 3, RGB),
    "AVIF": (saved(rgb(GREY), "AVIF", quality=100, subsampling="4:4:4"), "avif", 3, rgb(GREY)),
    "grey AVIF": (saved(GREY, "AVIF", quality=100), "avif", 1, rgb(GREY)),
    "animated AVIF": (frames("AVIF"), "avif", 3, RGB),
    "turned AVIF": (
        turned("AVIF", rgb(GREY), quality=100, subsampling="4:4:4"),
        "avif",
        3,
        np.rot90(rgb(GREY), -1),
    ),
    "turned PNG": (turned("PNG", RGB), "png", 3, np.rot90(RGB, -1)),
    "turned JPEG": (
        turned("JPEG", rgb(GREY // 64 * 64)[:8, :16].repeat(3, 0), quality=100, subsampling=0),
        "jpeg",
        3,
        np.rot90(rgb(GREY // 64 * 64)[:8, :16].repeat(3, 0), -1),
    ),
    "several JPEGs in one file": (
        saved(rgb(ALPHA), "MPO", save_all=True, append_images=[Image.fromarray(RGB)], quality=100, subsampling=0),
        "jpeg",
        3,
        rgb(ALPHA),
    ),
    "grey JPEG": (saved(GREY, "JPEG", quality=100), "jpeg", 1, rgb(GREY)),
}


@pytest.mark.parametrize("name", FILES)
def test_odd_files_are_what_they_hold_and_train_as_they_look(name: str) -> None:
    data, form, channels, truth = FILES[name]
    height, width, _ = truth.shape
    facts = examine(data)
    assert facts[:4] == (form, width, height, channels)
    assert facts.decoding == (images.DECODING if name in CORRECTED else None)
    preprocessing = Preprocessing(resolution=SIDE, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    meant = load_image(truth.round().astype(np.uint8), preprocessing).astype(int)
    assert np.abs(load_image(data, preprocessing) - meant).max() <= (6 if form in ("jpeg", "avif") else 1)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "TIFF"])
def test_an_image_that_nobody_can_see_is_refused(form: str) -> None:
    blank = saved(Image.new("RGBA", (SIDE, SIDE), (9, 9, 9, 0)), form)
    with pytest.raises(ValueError, match=r"^wholly transparent$"):
        examine(blank)
    preprocessing = Preprocessing(resolution=8, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(ValueError, match="image cannot be used: wholly transparent"):
        load_image(blank, preprocessing)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF"])
def test_a_file_without_its_end_is_refused_wherever_it_ends(form: str) -> None:
    pixels = RNG.integers(0, 256, (64, 64, 3), np.uint8)
    data = saved(pixels, form)
    assert examine(data).format == form.lower()
    # what ends a PNG, a GIF or a JPEG may be missing after its last pixel; a TIFF's directory lies first
    for size in range(0, len(data) - 64, 97):
        with pytest.raises(ValueError, match=r"^(truncated|damaged|not an image|empty file)$"):
            examine(data[:size])


def test_floats_and_32_bits_are_refused_by_name() -> None:
    for pixels in (DEEP_GREY.astype(np.float32), DEEP_GREY.astype(np.int32)):
        with pytest.raises(ValueError, match=r"pixels of Pillow's mode [FI], not 8 or 16 bits a channel"):
            examine(saved(pixels, "TIFF"))


def test_a_jpeg_of_endless_scans_is_refused_before_it_is_decoded() -> None:
    data = saved(Image.new("L", (64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    scans = data[:last] + data[last:-2] * 1000 + data[-2:]
    with pytest.raises(ValueError, match=r"^too many scans \(bomb\)$"):
        examine(scans)
    assert examine(data[:last] + data[last:-2] * 3 + data[-2:]).format == "jpeg"


def photo(height: int, width: int) -> np.ndarray:
    """Noise whose strength falls with its frequency, as that of photographs does."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None])
    frequency[0, 0] = 1
    grey = np.real(np.fft.ifft2(np.fft.fft2(RNG.normal(size=(height, width))) / frequency))
    scaled = (grey - grey.mean()) / grey.std() * 50 + 128
    return (scaled[..., None] * [0.8, 1.0, 1.2]).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("size", [(375, 500), (90, 1200), (20, 30)])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
def test_the_quick_way_through_a_jpeg_says_what_pillow_says(
    size: tuple[int, int], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(photo(*size), "JPEG", quality=90, **options)
    quick = examine(data)
    found = plain_jpeg(data)
    assert found == (*size, 3, "progressive" not in options)
    assert images._decoded_plain(data) is not None
    monkeypatch.setattr(images, "_decoded_plain", lambda _: None)
    slow = examine(data)
    assert quick._replace(hashes=slow.hashes) == slow
    assert (quick.hashes.phash ^ slow.hashes.phash).bit_count() <= 4


def test_a_jpeg_with_a_warning_is_left_to_pillow() -> None:
    data = saved(photo(100, 100), "JPEG")
    odd = data[:-2] + b"\0\0\0garbage" + data[-2:]  # libjpeg: "extraneous bytes before marker"
    assert images._decoded_plain(odd) is None
    assert examine(odd)[:4] == examine(data)[:4]


def test_what_pillow_warns_of_is_no_noise_in_the_log() -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\xff\xff"  # a directory of 65,535 entries, and none of them
    data = saved(photo(40, 60), "JPEG")
    data = data[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2) + exif + data[2:]
    with pytest.warns(UserWarning, match="Corrupt EXIF"):
        Image.open(io.BytesIO(data)).getexif()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert examine(data)[:4] == ("jpeg", 60, 40, 3)


def test_a_jpeg_with_a_scan_for_each_channel_has_its_scans_counted() -> None:
    """Sequential, so that it is not progressive, and still gone over as often as it says."""
    data = saved(photo(64, 64), "JPEG", subsampling=0)
    scan = data.index(b"\xff\xda")
    one, rest = bytes.fromhex("ffda 0008 01 01 00 00 3f 00"), data[scan + 14 :]
    assert data[scan : scan + 5] == bytes.fromhex("ffda 000c 03")
    apart = data[:scan] + one + rest
    assert plain_jpeg(data) == (64, 64, 3, True) and plain_jpeg(apart) == (64, 64, 3, False)
    with pytest.raises(ValueError, match=r"^too many scans \(bomb\)$"):
        examine(data[:scan] + (one + b"\0") * 1000 + rest)


def test_jpegs_that_readers_take_differently_are_left_to_pillow() -> None:
    data = saved(photo(40, 60), "JPEG")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned
    turned = saved(photo(40, 60), "JPEG", exif=exif)
    exif[0x0112] = 1
    upright = saved(photo(40, 60), "JPEG", exif=exif)
    assert (plain_jpeg(data), plain_jpeg(upright)) == ((40, 60, 3, True),) * 2
    assert plain_jpeg(turned) is None and examine(turned)[1:3] == (40, 60)
    for harmless in (b"\xff\xfe\0\x07hello", b"\xff\xe0\0\x10JFXX" + bytes(10)):
        assert plain_jpeg(data[:2] + harmless + data[2:]) == (40, 60, 3, True)
    # what Pillow can't read, and libjpeg does not look at
    for odd in (
        b"\xe0\0\x06JFIF",
        b"\xee\0\x07Adobe",
        b"\xe2\0\x0eICC_PROFILE\0",
        b"\xed\0\x16Photoshop 3.0\0" + b"8BIM\4\4",
    ):
        with pytest.raises(ValueError, match=r"^(damaged|not an image)$"):
            examine(data[:2] + b"\xff" + odd + data[2:])
    inks = saved(Image.new("CMYK", (8, 8)), "JPEG")
    red_green_blue = saved(photo(8, 8), "JPEG", keep_rgb=True)
    behind = b"x" + data
    for other in (inks, red_green_blue, behind, data[:30], b"", saved(photo(8, 8), "PNG")):
        assert plain_jpeg(other) is None


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("larger")])
@pytest.mark.filterwarnings("ignore")
def test_what_ingest_passes_training_can_load_and_nothing_else_comes_out(name: str) -> None:
    preprocessing = Preprocessing(resolution=8, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    rng, refused = random.Random(0), 0
    for _ in range(40):
        data = mutated(FILES[name][0], [FILES[name][0]], rng)
        try:
            examine(data)
        except ValueError:
            refused += 1
        else:
            load_image(data, preprocessing)
    assert refused > 0
