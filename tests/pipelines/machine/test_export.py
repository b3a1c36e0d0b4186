"""A model to give away: its card says what reports say, its code runs, and 8 bits are refused where they lose."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from pipelines.machine import int8
from pipelines.machine.export import in_colour, load
from pipelines.results.accuracies import list_results
from pipelines.spec import RecipeError
from pipelines.store import Manifest, Store, commit, input_ref, read_manifest
from ray_jobs.data.shards import open_artifact
from ray_jobs.evaluation.intervals import mean_interval, paired_difference
from ray_jobs.evaluation.rows import ROWS, Truth, write_table
from tests.support import timm_models
from tests.support.datasets import put_noise
from tests.support.records import committed, make_manifest
from tests.support.scores import Scores, put_scores
from tests.support.vits import TINY, contract_for, randomised
from vit_model.config import ViTConfig
from vit_model.detection.contract import SHOWN, DetectorContract
from vit_model.detection.detector import Detector, save_detector
from vit_model.formats import hugging_face
from vit_model.formats.files import read_license
from vit_model.model import Segmenter, ViT
from vit_model.predict import classify
from vit_model.preprocessing import load_image, normalise
from vit_model.weights import load_model, save_model

NAMES = ("ape|x", "bee", "c`a`t\n")
CONFIG = ViTConfig(**TINY, num_classes=3, gelu="exact")
SIZES = ((8, 8), (9, 23), (61, 40), (40, 13))


def put_world(store: Store, channels: int = 3, **contract: Any) -> Manifest:
    """A data set, a model trained on it, and an evaluation of the model beside a reference."""
    with committed(
        store, "ingest", "da", kind="dataset", config={"source": {"kind": "folder", "root": "some_photos"}}
    ) as folder:
        put_noise(folder, {"train": 9, "dev": 3, "test": 30}, NAMES)
    data = [input_ref(store, read_manifest(store, "ingest", "da"))]
    truth = Truth("noise", [f"{number:02d}" for number in range(30)], np.arange(30) % 3)
    config = CONFIG.model_copy(update={"in_channels": channels})
    with committed(store, "finetune", "ma", kind="model", stage="tune", inputs={"data": data}) as folder:
        fields = {"crop": "center", "crop_fraction": 0.8, "crop_offset": "floor"} | contract
        of_contract = {name: fields.pop(name) for name in ("problem_type", "thresholds") if name in fields}
        made = contract_for(config, NAMES, **fields).model_copy(update=of_contract)
        save_model(folder, randomised(config), made)
        put_scores(folder, Scores("ViT, pretrained", "fine-tuning", 5, answers(0), truth).scored())
    inputs = {"data": data, "backbone": [input_ref(store, read_manifest(store, "finetune", "ma"))]}
    with committed(store, "evaluate", "ea", kind="evaluation", stage="probe", inputs=inputs) as folder:
        found = [
            pair
            for seed, method in ((1, "ViT, pretrained"), (2, "pixels"))
            for pair in Scores(method, "few-shot linear", 1, answers(seed), truth).scored()
        ]
        put_scores(folder, found)
    return read_manifest(store, "finetune", "ma")  # type: ignore[return-value]


def answers(seed: int) -> np.ndarray:
    """Four draws of answers about 30 images, right in two thirds."""
    right = np.random.default_rng(seed).random((4, 30)) < 2 / 3
    return np.where(right, np.arange(30) % 3, 7)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Colour images of odd sizes, in the folder that the test is in."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    files = [Path(f"{number}.png") for number in range(len(SIZES))]
    for file, (width, height) in zip(files, SIZES, strict=True):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file)
    return files


def exported(store: Store, model: Manifest, to: Any, place: str = "out") -> tuple[Path, str]:
    """The folder, and its card."""
    folder = Path(place)
    folder.mkdir()
    load(store, model, "last").write(to, folder, f"local-dir:{place}" if to == "timm" else place)
    return folder, (folder / "README.md").read_text(encoding="utf-8")


def printed_by(card: str, photo: Path) -> str:
    """What the card's code prints about a photograph."""
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    with redirect_stdout(io.StringIO()) as printed:
        exec(code.replace("photo.jpg", str(photo)), {})  # the card's own
    return printed.getvalue()


def test_the_card_has_the_numbers_of_reports_and_says_what_is_unknown(store: Store, photos: list[Path]) -> None:
    _, card = exported(store, put_world(store), "timm")
    for seed, protocol in ((0, "fine-tuning"), (1, "few-shot linear")):
        value, low, high = (f"{100 * number:.1f}" for number in mean_interval(answers(seed) == np.arange(30) % 3))
        [line] = [line for line in card.splitlines() if f"| {protocol} |" in line]
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[1:3] == ["noise", protocol]
        assert cells[6:10] == [value, f"{low} to {high}", "4", "30"]
    listed = {row["method"]: row["mean"] for row in list_results(store, None, None, None)}
    assert "pixels" in listed and "| pixels |" not in card, "a reference is not this model"
    header = yaml.safe_load(card.split("---\n")[1])
    means = [result["metrics"][0]["value"] for result in header["model-index"][0]["results"]]
    assert sorted(means) == sorted(
        round(row["mean"], 5) for row in list_results(store, None, None, None) if row["method"] != "pixels"
    )
    assert header["datasets"] == ["noise"] and "license" not in header
    assert "9 training, 3 dev and 30 test images, 3 classes; source folder; licence unknown" in card
    assert "The licence of the model: unknown." in card
    assert r"ape\|x, bee, c\`a\`t\\n." in card, "names are no markup"


@pytest.mark.parametrize("license_name", ["Apache-2.0", "my own: terms", None])
def test_the_license_is_found_again_in_the_card(store: Store, photos: list[Path], license_name: str | None) -> None:
    model = load(store, put_world(store), "last")
    contract = model.contract.model_copy(update={"license": license_name})
    model._replace(contract=contract).write("hf", Path(), "here")
    assert read_license(Path()) == (license_name.lower() if license_name == "Apache-2.0" else license_name)


def test_a_model_without_results_says_so(store: Store, photos: list[Path]) -> None:
    with committed(store, "import", "ia", kind="model", stage="vit", config={"path": "hf:org/vit"}) as folder:
        save_model(folder, randomised(CONFIG), contract_for(CONFIG, NAMES, "mit"))
    _, card = exported(store, read_manifest(store, "import", "ia"), "timm")  # type: ignore[arg-type]
    assert "# vit, a Vision Transformer exported with vitflow" in card
    assert "Not evaluated: the store has no test results" in card
    assert "was taught by, the weights hf:org/vit, licence mit" in card


SEVERAL = "multi_label_classification"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"problem_type": SEVERAL}, {"problem_type": SEVERAL, "thresholds": (0.575, 0.64, 0.61)}]
)
@pytest.mark.parametrize("to", ["hf", "timm", "onnx"])
def test_the_code_on_the_card_finds_the_classes_that_vitflow_finds(
    store: Store,
    photos: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    fields: dict[str, Any],
) -> None:
    """With several classes per image, it finds those that reach their own threshold."""
    model = put_world(store, crop_offset="round" if to != "hf" else "floor", **fields)
    if to == "timm":  # its transforms are torchvision's, which may be missing

        def our_transform(**_: object) -> Callable[[Image.Image], torch.Tensor]:
            pixels = load_model(store.local(model.folder, model.files))[1].preprocessing
            return lambda image: normalise(torch.from_numpy(load_image(image, pixels))[None], pixels, torch.float32)[0]

        monkeypatch.setattr(timm_models.load().data, "create_transform", our_transform)
    _, card = exported(store, model, to)
    rows = classify(store.local(model.folder, model.files), photos)
    assert not fields or {len(row["classes"]) for row in rows} != {1}
    for photo, row in zip(photos, rows, strict=True):
        said = printed_by(card, photo)
        lines = {line["class"]: f"{line['class']} {line['probability']:.1%}\n" for line in row["top"]}
        if not fields:
            assert repr(row["top"][0]["class"])[1:-1] in said or row["top"][0]["class"] in said, photo
        else:
            orders = permutations(lines[name] for name in row["classes"])
            assert said in map("".join, orders), photo


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification"])
def test_a_pipeline_of_transformers_runs_the_folder_as_it_is(
    store: Store, photos: list[Path], channels: int, kind: str
) -> None:
    from transformers import pipeline

    model = put_world(store, channels, problem_type=kind)
    folder, _ = exported(store, model, "hf")
    theirs = pipeline("image-classification", model=str(folder), device="cpu")
    ours = classify(store.local(model.folder, model.files), photos)
    for photo, row in zip(photos, ours, strict=True):
        found = {line["label"]: line["score"] for line in theirs(str(photo), top_k=3)}
        expected = {line["class"]: line["probability"] for line in row["top"]}
        # grey is rounded to 8 bits
        assert found == pytest.approx(expected, abs=1e-5 if channels == 3 else 5e-3)


@torch.no_grad()
def test_a_grey_model_in_colour_has_the_same_outputs_for_grey_images(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"in_channels": 1})
    model, contract = randomised(config).eval(), contract_for(config, NAMES)
    coloured, its_contract = in_colour(model, contract)
    grey = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(coloured(grey.expand(-1, 3, -1, -1)), model(grey))
    hugging_face.write(tmp_path, coloured, its_contract)
    type(its_contract).model_validate(its_contract.model_dump())


# ------------------------------------------------------------------------------------------------- 8 bits


@pytest.mark.slow
def test_8_bits_are_measured_beside_float32_on_the_same_images(
    store: Store, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.setattr(int8, "_speeds", lambda *_: (2.0, 3.0))
    model, folder = put_world(store), Path("small")
    folder.mkdir()
    said = load(store, model, "last").write_int8(folder, "small", 100.0)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list(NAMES)

    network, contract = load_model(store.local(model.folder, model.files))
    dataset = open_artifact(store, read_manifest(store, "ingest", "da"))  # type: ignore[arg-type]
    pixels = dataset.images("test", contract.preprocessing).transpose(0, 3, 1, 2)
    images = ((pixels / 255 - 0.5) / 0.5).astype(np.float32)
    (small,) = session.run(None, {"images": images})
    large = network.eval()(torch.from_numpy(images)).detach().numpy()
    assert 1e-4 < np.abs(small - large).max() < 0.1 * np.abs(large).max(), "near, and not the same"
    right = [(logits.argmax(1) == dataset.labels("test"))[None] for logits in (small, large)]
    value, low, _ = (100 * number for number in paired_difference(*right))
    card = (folder / "README.md").read_text(encoding="utf-8")
    measured = f"{100 * right[0].mean():.1f}% in 8 bits, {100 * right[1].mean():.1f}% in float32: {value:+.2f} points"
    [line] = [line for line in said if line.startswith("accuracy: ")]
    assert line.startswith(f"accuracy: {measured} on 30 of 30 test images of noise (95% interval {low:+.2f} to")
    assert f"- {line}" in card
    assert "- speed: 3 images/s in 8 bits, 2 in float32, 32 at a time (1.50 times as fast)" in card


@pytest.mark.parametrize(
    ("speeds", "wrong", "message"),
    [
        ((20.0, 10.0), 4, None),
        ((20.0, 10.0), 5, r"accuracy changes by -2\.50 points on some \(.*\); --max-drop allows 2\."),
        ((20.0, 9.9), 0, "slower than float32: 9.9 images/s in 8 bits, 10 in float32, 32 at a time, on"),
    ],
)
def test_8_bits_that_lose_are_refused(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speeds: tuple[float, float],
    wrong: int,
    message: str | None,
) -> None:
    labels = np.zeros(200, int)
    found = ("some", labels, labels, labels + (np.arange(200) < wrong))
    monkeypatch.setattr(int8, "_session", lambda *_: None)
    monkeypatch.setattr(int8, "_speeds", lambda *given: (10.0, speeds[given[2] > 1]))
    monkeypatch.setattr(int8, "_classes", lambda *_: found)
    files = (tmp_path / "a", tmp_path / "b")
    for file in files:
        file.touch()
    with nullcontext() if message is None else pytest.raises(RecipeError, match=message):
        int8.measure(store, make_manifest("finetune"), contract_for(CONFIG), files, 2.0)


def test_only_onnx_has_8_bits(vitflow_here: Callable[..., Any], store: Store) -> None:
    commit(store, make_manifest("ingest", key="da"))
    given = ("--output", "out", "--store", store.uri)
    done = vitflow_here("export", "ma", "--format", "hf", "--int8", *given, check=2)
    assert "use --format onnx" in done.stderr
    done = vitflow_here("export", "ma", "--format", "onnx", "--max-drop", "0.5", *given, check=2)
    assert "give --int8 too" in done.stderr


@pytest.mark.slow
def test_the_code_on_a_detectors_card_finds_the_objects_that_vitflow_finds(
    vitflow_here: Callable[..., Any], store: Store, photos: list[Path]
) -> None:
    """And `predict --output` writes them in COCO's format, with a picture of each image."""
    pytest.importorskip("onnxruntime")
    with committed(store, "detect", "de", kind="detector", stage="find") as folder:
        backbone = ViT(CONFIG.model_copy(update={"num_classes": 0, "image_size": 16}))
        detector = randomised_detector(backbone)
        contract = DetectorContract(
            backbone=contract_for(backbone.config, (), crop="squash"),
            class_names=NAMES,
            channels=32,
            convs=1,
            scales=(2, 1),
        )
        save_detector(folder, detector, contract)
        write_table(folder / "rows.parquet", [], ROWS)
    vitflow_here("export", "de", "--format", "onnx", "--output", "out", "--store", store.uri)
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert "It finds objects of 3 classes" in card and yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == (
        "object-detection"
    )
    done = vitflow_here("predict", "de", *photos, "--json", "--output", "found", "--store", store.uri)
    content = json.loads(Path("found/detections.json").read_text())
    assert [image["file_name"] for image in content["images"]] == [str(photo) for photo in photos]
    assert len(list(Path("found/pictures").iterdir())) == len(photos)
    names = {category["id"]: category["name"] for category in content["categories"]}
    for image, row in zip(content["images"], json.loads(done.stdout), strict=True):
        said = re.findall(r"(.*?\d\.\d\d) \[(.*?)\]\n", printed_by(card, image["file_name"]), re.DOTALL)
        expected = [each for each in row["objects"] if each["score"] >= SHOWN]
        assert sorted(name for name, _ in said) == sorted(f"{each['class']} {each['score']:.2f}" for each in expected)
        assert expected and sum(float(sides.split(",")[0]) for _, sides in said) == pytest.approx(
            sum(each["bbox"][0] for each in expected), abs=0.1 * len(expected)
        )
        stored = [each for each in content["annotations"] if each["image_id"] == image["id"]]
        assert [(names[each["category_id"]], each["score"], each["bbox"]) for each in stored] == [
            (each["class"], each["score"], each["bbox"]) for each in row["objects"]
        ]
    refused = vitflow_here("export", "de", "--format", "hf", "--output", "hf", "--store", store.uri, check=2)
    assert "de is a detector, which --format onnx exports" in refused.stderr


@pytest.mark.slow
def test_the_code_on_the_card_of_a_model_of_pixels_finds_the_mask(
    vitflow_here: Callable[..., Any], store: Store, photos: list[Path]
) -> None:
    """And `predict --output` writes it."""
    pytest.importorskip("onnxruntime")
    with committed(store, "finetune", "pix", kind="model", stage="segment") as folder:
        contract = contract_for(CONFIG, (), crop="squash").model_copy(update={"mask_classes": NAMES})
        segmenter = Segmenter(CONFIG)
        segmenter.load_state_dict(randomised(CONFIG).state_dict())
        save_model(folder, segmenter, contract)
        write_table(folder / "rows.parquet", [], ROWS)
    model = read_manifest(store, "finetune", "pix")
    assert model is not None
    with pytest.raises(RecipeError, match="classifies pixels; use --format onnx"):
        load(store, model, "last").write("hf", Path(), "out")
    _, card = exported(store, model, "onnx")
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "image-segmentation"
    done = vitflow_here("predict", "pix", *photos, "--json", "--output", "found", "--store", store.uri)
    written = json.loads(Path("found/masks.json").read_text())
    assert written["classes"] == [*NAMES] and [each["file_name"] for each in written["images"]] == [*map(str, photos)]
    rows = zip(json.loads(done.stdout), written["images"], strict=True)
    for photo, (width, height), (row, image) in zip(photos, SIZES, rows, strict=True):
        pixels = torch.from_numpy(load_image(photo, contract.preprocessing)[None])
        with torch.no_grad():
            logits = segmenter.eval()(normalise(pixels, contract.preprocessing, torch.float32))
        large = torch.nn.functional.interpolate(logits, (height, width), mode="bilinear")
        mask = large.argmax(1)[0].numpy()
        np.testing.assert_array_equal(np.asarray(Image.open(Path("found") / image["mask"])), mask)
        shares = [float((mask == number).mean()) for number in range(3)]
        assert {each["class"]: each["share"] for each in row["pixels"]} == pytest.approx(
            dict(zip(NAMES, shares, strict=True))
        )
        lines = printed_by(card, photo).splitlines()
        said = [float(line.rpartition(" ")[2].rstrip("%")) for line in lines if "%" in line]
        assert said == pytest.approx([100 * share for share in shares], abs=1.0)


def randomised_detector(backbone: ViT) -> Detector:
    """A detector of random weights that is sure of something everywhere."""
    detector = Detector(backbone, len(NAMES), 32, 1, (2, 1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in detector.parameters():
            weight.normal_(std=0.2, generator=generator)
        detector.head.sides.bias.fill_(1.0)
    return detector
