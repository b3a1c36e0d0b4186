"""`vitflow init` writes a recipe that reads back as it was meant, whatever the folder is called."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipelines.machine import examined, init
from pipelines.recipe.load import load_pipeline
from pipelines.spec import RecipeError
from tests.support.archives import image, tar
from tests.support.boxes import boxed_photos
from tests.support.cifar import members
from tests.support.vits import TINY, contract_for
from vit_model.build import build
from vit_model.config import ResNetConfig, ViTConfig
from vit_model.model import ViT
from vit_model.weights import save_model


def written(file: Path, images: Path, source: str = "folder", *weights: Path) -> Any:
    """Write a recipe, and return what is read from it."""
    init.write_recipe(file, images, source, [*map(str, weights)], "s", init.Console())
    return load_pipeline(str(file))


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "estimate", lambda *_: "")


@pytest.mark.parametrize("name", ["photos: 2024", "x: {y", "2024", "yes", "a #b", "a, b]", "é", "a\nb", "1e3"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    images = tmp_path / name
    for label in ("red", "blue"):
        (images / label).mkdir(parents=True)
        Image.new("RGB", (8, 8), label).save(images / label / "1.png")
    pipeline = written(tmp_path / "mine.yaml", images)
    source = pipeline.stages["images"].source
    assert (source.name, source.root) == (name, str(images))
    assert pipeline.description == f"A ViT trained on {name}, beside baselines on pixels."


@pytest.mark.parametrize("form", ["zip", "gztar"])
def test_an_archive_of_a_folder_is_as_the_folder(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for label in ("red", "blue"):
        (tmp_path / "in/pets" / label).mkdir(parents=True)
        Image.new("RGB", (40, 50), label).save(tmp_path / "in/pets" / label / "1.png")
    archive = shutil.make_archive(str(tmp_path / "pets"), form, tmp_path / "in", "pets")
    said = []
    for number, images in enumerate((tmp_path / "in/pets", Path(archive))):
        file = tmp_path / f"{number}.yaml"
        assert written(file, images).stages["images"].source.root == str(images)
        said.append(capsys.readouterr().out.replace(str(file), "").replace(str(images), ""))
    assert said[0] == said[1] and "2 images of 2 classes" in said[0] and "about 40 pixels" in said[0]


def test_images_with_boxes_get_a_detector(tmp_path: Path) -> None:
    boxed_photos(tmp_path / "photos")
    with pytest.raises(RecipeError, match=r"the layout of COCO, a detection data set.*source\.boxes: coco"):
        (tmp_path / "photos/train/_annotations.coco.json").write_text("{}")
        written(tmp_path / "no.yaml", tmp_path / "photos")
    stages = written(tmp_path / "r.yaml", tmp_path / "photos", "{boxes: kitti}").stages
    assert [stage.job for stage in stages.values()] == ["ingest", "detect", "report"]
    assert stages["detect"].resolution == 128 and stages["detect"].steps == 100


def test_images_with_masks_get_a_model_of_pixels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("images/1.jpg", "masks/1.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("L", (40, 50)).save(tmp_path / name)
    with pytest.raises(RecipeError, match=r'--source "{kind: folder, mask_classes: \[NAME, NAME\]}"'):
        written(tmp_path / "no.yaml", tmp_path)
    source = "{mask_classes: [road, car]}"
    stages = written(tmp_path / "r.yaml", tmp_path, source).stages
    assert "found 1 image with masks of 2 classes, without splits" in capsys.readouterr().out
    assert [stage.job for stage in stages.values()] == ["ingest", "finetune", "report"]
    assert stages["vit"].masks and stages["vit"].class_weights == "balanced"
    resnet = ResNetConfig(image_size=32, units=(1,), num_classes=0)
    save_model(tmp_path / "resnet", build(resnet), contract_for(resnet))
    with pytest.raises(RecipeError, match=r"--from: .*resnet.*: a ResNet has no tokens of patches"):
        written(tmp_path / "n.yaml", tmp_path, source, tmp_path / "resnet")


def test_images_without_labels_are_embedded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, weights = tmp_path / "photos", [tmp_path / name for name in ("a", "b")]
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (40, 50)).save(photos / f"{number}.png")
    for depth, folder in enumerate(weights, 1):
        config = ViTConfig.model_validate(TINY | {"depth": depth})
        save_model(folder, ViT(config), contract_for(config))
    for used, job in (([], "pretrain"), (weights[:1], "import")):
        stages = written(tmp_path / f"{job}.yaml", photos, "folder", *used).stages
        assert [stage.job for stage in stages.values()] == ["ingest", job, "embed", "report"]
        assert stages["images"].source.labels is False
    assert "found 3 files; images without labels" in capsys.readouterr().out
    with pytest.raises(RecipeError, match="without labels nothing tells which is best"):
        written(tmp_path / "x.yaml", photos, "folder", *weights)


def test_folders_that_are_no_classes_are_told(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    for key in ("train/a", "train/b", "test/a", "test/b/old", "empty/a", "empty/b/inside/deep"):
        (photos / key).mkdir(parents=True)
        (photos / key / "1.png").write_bytes(image(1))
    for key in ("train/robots/x", "test/.cache", "test/@eaDir"):
        (photos / key).mkdir(parents=True)
    for file in (photos / "empty").rglob("*.png"):
        file.unlink()
    assert [*examined.examine(photos, "folder").summary()][1:] == [
        "1 folder inside class folders, whose images have the outer folder's class: b/old",
        "2 folders without images: empty, train/robots",
    ]


def test_images_of_other_splits_alone_train_nothing(tmp_path: Path) -> None:
    for key in ("val/a.png", "val/b.png"):
        (tmp_path / "photos" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / key).write_bytes(image(1))
    with pytest.raises(RecipeError, match=r"photos: the train split has no images\. Add training images; or rename"):
        written(tmp_path / "x.yaml", tmp_path / "photos", "{kind: folder, labels: false}")


def test_members_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    archive = tmp_path / "photos.tar"
    archive.write_bytes(tar({f"{name}.png": image(1) for name in ("a/1", "b/2", "../b/3", "b/../../4")}))
    first, *_ = examined.examine(archive, "folder").summary()
    assert first == "2 entries that cannot be used, such as photos.tar/../b/3.png: its path leads outside"


def test_a_folder_of_one_class_leads_to_its_parent(tmp_path: Path) -> None:
    for key in ("photos/cats", "photos/dogs", "alone/cats", "split/train", "split/test"):
        (tmp_path / key).mkdir(parents=True)
        (tmp_path / key / "1.png").write_bytes(image(1))
    (tmp_path / "alone/notes").mkdir()

    def said(key: str) -> list[str]:
        return [*examined.examine(tmp_path / key, "folder").summary()][1:]

    assert said("photos/dogs") == [f"if dogs and cats are classes, give their parent: --images {tmp_path}/photos"]
    assert not said("alone/cats") and not said("split/train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "x.zip is not a tar, zip or RAR"),
        (b"PK\x03\x04", "x.zip is truncated or damaged"),
        (None, r"^--images: .*/x.zip does not exist"),
    ],
)
def test_what_is_no_archive_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        written(tmp_path / "x.yaml", tmp_path / "x.zip")


def test_any_source_with_a_root(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar").write_bytes(tar(members(100, "binary")))
    stages = written(tmp_path / "x.yaml", tmp_path, "{kind: cifar, classes: 100}").stages
    source = stages["images"].source
    assert (source.kind, source.classes, source.root) == ("cifar", 100, str(tmp_path))
    assert stages["vit"].resolution == 32


def test_the_sources_that_init_advises_lead_to_a_recipe_of_several_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each advice keeps the fields that were given. Pixels get no method that needs one label per image."""
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(image(number))
    lines = [f"{number}.png,{('a;b', 'b', 'a')[number % 3]}" for number in range(9)]
    (tmp_path / "metadata.csv").write_text("\n".join(["path,labels", *lines]))
    advised = "{salt: mine}"
    for message in ("needs one column 'file_name'", "looks like several labels"):
        with pytest.raises(RecipeError, match=message) as error:
            written(tmp_path / "x.yaml", tmp_path, advised)
        advised = str(error.value).partition("For init, this is --source ")[2].strip('"')
    stages = written(tmp_path / "x.yaml", tmp_path, advised).stages
    source = stages["images"].source
    assert (source.salt, source.image_column, source.label_column) == ("mine", "path", "labels")
    assert stages.keys() == {"images", "vit", "pixels", "report"}
    assert stages["pixels"].methods == ("majority", "k-NN", "logistic regression")
    assert "found 9 images of 2 classes (a 6, b 6)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("digits", "--source: unknown kind 'digits'; expected one of: folder, "),
        ("vtab", "--source: task .*required"),
        ("{classes", "--source {classes: not YAML"),
    ],
)
def test_a_source_that_does_not_fit_is_named(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        written(tmp_path / "x.yaml", tmp_path, source)


def test_a_recipe_that_cannot_be_read_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        examined.write_checked(tmp_path / "x.yaml", "name: {")
    with pytest.raises(UnicodeEncodeError):
        examined.write_checked(tmp_path / "x.yaml", "# \udcff")
    assert not [*tmp_path.iterdir()]
