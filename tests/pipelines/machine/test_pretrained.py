"""`vitflow init --from` writes a recipe that runs, or says what is wrong with the weights; nothing is started."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from pipelines.engine.plan import plan_pipeline
from pipelines.machine import budget, init, pretrained
from pipelines.machine.pretrained import Backbone, common_resolution
from pipelines.recipe.load import load_pipeline
from pipelines.spec import Evaluate, Finetune, Import, Pretrain
from pipelines.store import Store, open_store
from tests.conftest import Vitflow
from tests.support.records import committed
from tests.support.vits import TINY, contract_for, randomised
from vit_model.config import Architecture, ResNetConfig, ViTConfig
from vit_model.contract import ModelContract
from vit_model.formats import npz, timm
from vit_model.model import ViT
from vit_model.weights import save_model


def model(**fields: object) -> tuple[ViT, ModelContract]:
    config = ViTConfig.model_validate(TINY | fields)
    return randomised(config), contract_for(config)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photographs, Google's .npz, a vitflow folder with the same name, and weights without a mean and std."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (9, 9), (40 * number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "b" / "images").mkdir(parents=True)
    npz.write(tmp_path / "images.npz", *model())
    save_model(tmp_path / "b" / "images", *model(image_size=16, depth=1))
    timm.write(tmp_path / "silent", *model(width=32))
    (tmp_path / "silent" / "model.safetensors").rename(tmp_path / "silent.safetensors")
    (tmp_path / "copy.npz").write_bytes((tmp_path / "images.npz").read_bytes())
    (tmp_path / "notes.txt").write_text("not weights")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "estimate", lambda *_: "about 1 minute")
    return tmp_path


def test_the_recipe_compares_them_under_one_protocol(vitflow_here: Vitflow, folder: Path) -> None:
    said = vitflow_here("init", "b.yaml", "--images", "photos", "--from", "images.npz", "b/images").stdout
    pipeline = load_pipeline("b.yaml")
    imports = {name: stage.path for name, stage in pipeline.stages.items() if isinstance(stage, Import)}
    assert imports == {"images_2": str(folder / "images.npz"), "images_3": str(folder / "b" / "images")}, (
        "a stage of the recipe is already called images"
    )
    for kind in (Finetune, Evaluate):
        stages = [stage for stage in pipeline.stages.values() if isinstance(stage, kind)]
        assert {str(stage.backbone) for stage in stages} == set(imports)
        assert len({stage.model_dump_json(exclude={"backbone"}) for stage in stages}) == 1, "one protocol"
    [resolution] = {stage.resolution for stage in pipeline.stages.values() if isinstance(stage, Finetune | Evaluate)}
    assert resolution == 8, "of those that they were trained at, the lowest"
    planned = plan_pipeline(open_store("s"), pipeline, pipeline.needed_for(("report",)))
    assert {stage.name for stage in planned} == set(pipeline.stages)
    for text in ("12 images of 2 classes", "at 16 pixels", "chose resolution 8", "about 1 minute"):
        assert text in said
    assert said.endswith("wrote b.yaml; next: vitflow run b.yaml\n")


def test_weights_without_a_mean_and_std_are_named_with_what_to_set(vitflow_here: Vitflow, folder: Path) -> None:
    said = vitflow_here("init", "b.yaml", "--images", "photos", "--from", "images.npz", "silent.safetensors").stdout
    command = "vitflow run b.yaml --set silent.preprocessing=half"
    assert f"next: {command}" in said and f"#   {command}\n" in Path("b.yaml").read_text()
    pipeline = load_pipeline("b.yaml", ("silent.preprocessing=half",))
    silent = pipeline.stages["silent"]
    assert isinstance(silent, Import) and silent.preprocessing is not None


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (["images.npz", "nowhere.npz"], "nowhere.npz: no such file or folder, and no model in runs"),
        (["images.npz", "copy.npz"], "--from copy.npz: the same weights as images.npz"),
        (["images.npz", "empty"], "--from empty: its source has no files"),
        (["images.npz", "notes.txt"], "notes.txt has an unknown format"),
        (["images.npz", "hf:x"], "'hf:x' is not a model on the Hugging Face hub"),
        ([], "unexpected argument"),
    ],
)
def test_wrong_weights_are_refused(vitflow_here: Vitflow, folder: Path, weights: Sequence[str], message: str) -> None:
    given = ["--from", *weights] if weights else ["more.npz"]
    done = vitflow_here("init", "b.yaml", "--images", "photos", *given, check=2)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (folder / "b.yaml").exists()


def test_one_backbone_is_fine_tuned_beside_pixels_and_nothing_else(vitflow_here: Vitflow, folder: Path) -> None:
    said = vitflow_here("init", "one.yaml", "--images", "photos", "--from", "images.npz").stdout
    pipeline = load_pipeline("one.yaml")
    assert pipeline.jobs() == {
        "images": "ingest",
        "images_2": "import",
        "vit": "finetune",
        "pixels": "baselines",
        "report": "report",
    }
    assert "images_2: ViT of width 16" in said and "GFLOPs per image" in said


def test_without_weights_few_images_start_from_scratch_and_the_way_to_weights_is_named(
    vitflow_here: Vitflow, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(init, "images_per_second", lambda *_: [(9.0, 10.0)])
    said = vitflow_here("init", "new.yaml", "--images", "photos", "--store", "s").stdout
    (estimated,) = re.findall("^about .*measured here$", said, re.MULTILINE)
    assert estimated in vitflow_here("plan", "new.yaml", "--store", "s").stdout
    assert "12 images are few" in said
    for weights in re.findall(r"--from (\S+)", said):
        assert Import(job="import", path=weights).path in pretrained.EXAMPLES
    assert [*load_pipeline("new.yaml").jobs()] == ["images", "vit", "pixels", "report"]
    assert not Path("s").exists()


@pytest.mark.parametrize("weights", [(), ("--from", "images.npz")])
@pytest.mark.parametrize("swept", [12, 13])
def test_dev_chooses_the_rate_if_it_has_enough_images_whatever_training_starts_from(
    vitflow_here: Vitflow, folder: Path, monkeypatch: pytest.MonkeyPatch, weights: Sequence[str], swept: int
) -> None:
    """There are 12 images."""
    monkeypatch.setattr(init, "estimate", lambda *_: "about 1 minute")
    monkeypatch.setattr(pretrained, "SWEPT_IMAGES", swept)
    vitflow_here("init", "x.yaml", "--images", "photos", *weights)
    stage = load_pipeline("x.yaml").stages["vit"]
    assert isinstance(stage, Finetune)
    assert (len(stage.learning_rates) > 1) == (swept == 12) == ("Dev chooses" in Path("x.yaml").read_text())


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [("avx2 fma", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16 amx_tile", "bfloat16"), ("fp bf16", "bfloat16")],
)
def test_trainings_have_the_dtype_that_is_fast_on_this_machine(
    vitflow_here: Vitflow, folder: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)  # no GPU
    cpuinfo = folder / "cpuinfo"
    cpuinfo.write_text(f"flags : {flags}")
    monkeypatch.setattr(budget, "CPUINFO", cpuinfo)
    monkeypatch.setattr(budget, "write_cache", lambda *_: None)
    measured = []
    for module in (init, pretrained):
        monkeypatch.setattr(module, "estimate", budget.estimate)
        monkeypatch.setattr(module, "images_per_second", lambda *given: measured.append(given[-1]) or [(9.0, 10.0)])
    for number, more in enumerate(
        [
            ("--images", "photos"),
            ("--images", "photos", "--from", "images.npz"),
            ("--images", "photos", "--from", "images.npz", "--from", "b/images"),
            ("--images", "photos/cat"),
        ]
    ):
        vitflow_here("init", f"{number}.yaml", *more)
        stages = load_pipeline(f"{number}.yaml").stages.values()
        assert {stage.dtype for stage in stages if isinstance(stage, Finetune | Pretrain)} == {dtype}
    assert measured == [dtype] * 4


def test_few_images_start_from_weights_that_were_imported(
    vitflow_local: Vitflow, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MIN_SIDE", 8)
    vitflow_local("import", "images.npz", "--name", "found", "--store", "s")
    said = vitflow_local("init", "one.yaml", "--images", "photos", "--store", "s").stdout
    assert "starting from found, which is in s" in said
    stages = load_pipeline("one.yaml").stages
    planned = plan_pipeline(open_store("s"), load_pipeline("one.yaml"), ("found",))
    assert [stage.state for stage in planned] == ["cached"], "the same weights are not imported again"
    for selector in ("import/found", planned[0].key or ""):
        vitflow_local("init", f"{len(selector)}.yaml", "--images", "photos", "--store", "s", "--from", selector)
        assert load_pipeline(f"{len(selector)}.yaml").stages == stages
    (folder / "images.npz").unlink()
    vitflow_local("init", "copy.yaml", "--images", "photos", "--store", "s", "--from", "import/found")
    copy = load_pipeline("copy.yaml").stages["found"]
    assert isinstance(copy, Import) and copy.path.startswith(str(folder / "s")), "the store still has them"


def test_a_resnet_of_the_store_is_not_taken_for_masks(store: Store) -> None:
    resnet = ResNetConfig(image_size=64, units=(1,), num_classes=0)
    with committed(store, "import", stage="bit", config={"job": "import", "path": "gone"}) as folder:
        save_model(folder, randomised(resnet), contract_for(resnet))
    assert [each.name for each in pretrained.imported_before(store.uri, has_masks=False)] == ["bit"]
    assert pretrained.imported_before(store.uri, has_masks=True) == []


@pytest.mark.parametrize(
    ("trained_at", "side", "gpus", "resolution"),
    [(224, 500, 1, 224), (224, 500, 0, 160), (224, 138, 0, 128), (8, 500, 0, 8), (224, 138, 1, 128)],
)
def test_the_resolution_fits_images_and_machine(trained_at: int, side: int, gpus: int, resolution: int) -> None:
    backbone = Backbone("b", Import(job="import", path="p"), vit(trained_at, 16 if trained_at > 16 else 4), True)
    assert pretrained._resolution(backbone, side, gpus) == resolution


def vit(image_size: int, patch_size: int) -> Architecture:
    return ViTConfig.model_validate(TINY | {"image_size": image_size, "patch_size": patch_size})


@pytest.mark.parametrize(
    ("architectures", "resolution"),
    [
        ([vit(224, 16), vit(224, 16), vit(384, 16)], 224),
        ([vit(384, 16), vit(384, 16), vit(224, 16)], 384),
        ([vit(224, 16), vit(518, 14)], 224),
        ([vit(256, 16), vit(518, 14)], 224),  # neither 256 / 14 nor 518 / 16 is whole
        ([vit(384, 16), ResNetConfig(units=(1,), image_size=160)], 160),
    ],
)
def test_the_resolution_fits_all_patches(architectures: list[Architecture], resolution: int) -> None:
    assert (
        common_resolution([Backbone("b", Import(job="import", path="p"), each, True) for each in architectures])
        == resolution
    )


def test_the_shipped_recipe_gives_each_backbone_the_same_budget() -> None:
    pipeline = load_pipeline("bakeoff", ("images.source.root=photos",))
    tuned = [stage for stage in pipeline.stages.values() if isinstance(stage, Finetune)]
    assert len(tuned) == len([stage for stage in pipeline.stages.values() if isinstance(stage, Import)]) == 4
    assert len({stage.model_dump_json(exclude={"backbone"}) for stage in tuned}) == 1
    resolutions = {stage.resolution for stage in pipeline.stages.values() if isinstance(stage, Finetune | Evaluate)}
    assert len(resolutions) == 1
    assert [f"{rate:.1e}" for rate in tuned[0].learning_rates] == [
        f"{float(rate):.1e}" for rate in pretrained.LEARNING_RATES
    ]
    assert (tuned[0].steps, tuned[0].batch_size) == (pretrained.MAX_STEPS, pretrained.BATCH_SIZE)
