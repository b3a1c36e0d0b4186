"""Weights from outside: known by their content, refused where something is wrong, and out again in other formats."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from pipelines import identity
from pipelines.engine.plan import plan_pipeline
from pipelines.files.fetch import fetched
from pipelines.files.weights import lacks_preprocessing
from pipelines.recipe.load import load_pipeline, parse_pipeline
from pipelines.recipe.pipeline import stage_name
from pipelines.results.lineage import describe_source
from pipelines.spec import STAGE_TYPES, Import, RecipeError, module
from pipelines.store import Store, add_event, commit, create_run, open_store
from tests.conftest import Vitflow
from tests.support.checkpoints import CONTRACT, model_at, put_pretraining
from tests.support.records import committed, make_manifest, make_plan
from tests.support.s3 import Bucket, Server, used
from tests.support.vits import contract_for
from vit_model import formats
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract
from vit_model.model import ViT
from vit_model.weights import save_model


def stage(path: Any, preprocessing: Any = None) -> Import:
    return Import(job="import", path=str(path), preprocessing=preprocessing)


def key(path: Any, preprocessing: Any = None) -> str:
    config = stage(path, preprocessing)
    return identity.stage_key(config, {}, identity.source_fingerprint(config))


# ------------------------------------------------------------------------------------------------- keys


def test_the_key_follows_the_contents_and_not_the_place(tmp_path: Path) -> None:
    first = tmp_path / "vit.npz"
    first.write_bytes(b"weights")
    known = key(first)
    os.utime(first, (1, 1))
    assert key(first) == known, "a touch changes nothing"
    moved = first.rename(tmp_path / "another-name.bin")
    assert key(moved) == known
    moved.write_bytes(b"weightz")
    assert key(moved) != known


def test_the_key_of_a_folder_follows_its_files_and_not_what_lies_below(tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    known = key(folder)
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "optimizer.pt").write_bytes(b"large")
    (folder / ".gitattributes").write_text("lfs")
    assert key(folder) == known
    assert key(folder.rename(tmp_path / "moved")) == known
    (tmp_path / "moved/config.json").write_text("{ }")
    assert key(tmp_path / "moved") != known


def test_the_given_preprocessing_is_in_the_key_by_what_it_means(tmp_path: Path) -> None:
    file = tmp_path / "vit.npz"
    file.write_bytes(b"weights")
    assert len({key(file), key(file, "half"), key(file, "imagenet")}) == 3
    assert key(file, "half") == key(file, {"mean": [0.5], "std": [0.5]})
    assert key(file, "half") != key(file, {"mean": [0.5], "std": [0.5], "crop": "center"})


def test_a_pipeline_of_several_imports_knows_each_by_its_own_file(store: Store, tmp_path: Path) -> None:
    for name in ("one", "two", "same"):
        (tmp_path / name).write_bytes(b"one" if name == "same" else name.encode())
    paths = [str(tmp_path / name) for name in ("one", "two", "same")]
    recipe = tmp_path / "x.yaml"
    recipe.write_text(f"name: x\nstages: {{vit: {{job: import, matrix: {{path: {json.dumps(paths)}}}}}}}")
    pipeline = load_pipeline(str(recipe))
    planned = plan_pipeline(store, pipeline, pipeline.order())
    assert [one.name for one in planned] == ["vit@path=one", "vit@path=two", "vit@path=same"]
    assert [one.key for one in planned] == [key(path) for path in paths]
    assert planned[0].key == planned[2].key != planned[1].key


@pytest.mark.parametrize("content", ["nothing", "empty folder"])
def test_without_files_there_is_no_key(tmp_path: Path, content: str) -> None:
    if content == "empty folder":
        (tmp_path / "x").mkdir()
    with pytest.raises(RecipeError, match=r"no such file or folder|has no files"):
        key(tmp_path / "x")


@pytest.mark.parametrize("job", STAGE_TYPES)
def test_a_stages_code_is_the_module_of_its_job(job: str) -> None:
    assert module(job) == {"import": "import_model", "predict": "embed", "detect": "finetune"}.get(job, job)
    modules = {f"ray_jobs/{module(each)}.py" for each in STAGE_TYPES}
    assert modules & set(identity.import_closure(job)) == {f"ray_jobs/{module(job)}.py"}


# ------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"path": "hf://google/vit"},
            "'hf://google/vit' is not a model on the Hugging Face hub; expected hf:ORG/NAME",
        ),
        ({"path": "https://x/vit.npz"}, "not a local file or folder, or s3://bucket/key; download it first"),
        ({"path": "x", "preprocessing": "imagenett"}, "'imagenett' is unknown; expected half, imagenet"),
        ({"path": "x", "preprocessing": {"mean": [0.5]}}, "preprocessing.std: is missing"),
        ({"path": "x", "preprocessing": {"mean": [0.5], "std": [0]}}, "greater than 0"),
        (
            {"path": "x", "preprocessing": {"mean": [0.5], "std": [1], "interpolate": 1}},
            "did you mean 'interpolation'",
        ),
        ({"path": "x", "preprocessing": {"mean": [float("nan")], "std": [1]}}, "finite"),
    ],
)
def test_mistakes_in_a_recipe_are_said(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        parse_pipeline({"name": "x", "stages": {"vit": {"job": "import", **fields}}}, "x")
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------- S3


@pytest.mark.slow
def test_objects_are_known_by_etag_and_size_and_fetched(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket: Bucket = moto.bucket()
    put = lambda name, data: bucket.client.put_object(Bucket=bucket.name, Key=name, Body=data)  # noqa: E731
    for name, data in (
        ("a/vit.npz", b"one"),
        ("a/vit.npz.bak", b"two"),
        ("a/deep/x", b"x"),
        ("a/.hidden", b"h"),
    ):
        put(name, data)
    with used(moto, monkeypatch):
        file, folder = f"s3://{bucket.name}/a/vit.npz", f"s3://{bucket.name}/a"
        keys = [key(file), key(folder)]
        with fetched(file) as path:
            assert path.read_bytes() == b"one"
        with fetched(folder) as path:
            copies = {part.name: part.read_bytes() for part in path.iterdir()}
        assert copies == {"vit.npz": b"one", "vit.npz.bak": b"two"}
        put("a/vit.npz", b"one")
        put("a/deep/x", b"y")
        assert [key(file), key(folder)] == keys, "the same bytes again, and what lies below"
        put("b/other.npz", b"one")
        assert key(f"s3://{bucket.name}/b/other.npz") == keys[0], "nor the name"
        put("a/vit.npz", b"three")
        assert keys[0] != key(file) and keys[1] != key(folder)
        with pytest.raises(RecipeError, match="no such object or prefix"):
            key(f"s3://{bucket.name}/c")


def test_jobs_learn_where_s3_is_and_never_a_password(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://host:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@host:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    settings = open_store(store.uri).settings
    assert settings["AWS_ENDPOINT_URL_S3"] == "http://host:1"
    assert "secret" not in str(settings)


# ------------------------------------------------------------------------------------------------- looking


def test_its_lineage_and_its_reports_say_where_it_is_from(tmp_path: Path) -> None:
    config = stage("/x/vit.npz", "half").model_dump(mode="json")
    imported = make_manifest("import", key="i", config=config, source="f" * 64)
    assert describe_source(imported) == "import /x/vit.npz"


# ------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def printed(vitflow_here: Vitflow) -> Callable[..., str]:
    """All that a command prints, on one line."""

    def run(*arguments: str | Path, code: int = 0) -> str:
        done = vitflow_here(*arguments, check=code)
        return " ".join((done.stdout + done.stderr).split())

    return run


def put_model(store: Store, name: str = "ma", **fields: Any) -> tuple[ViT, ModelContract]:
    """A model of the store, like one that was fine-tuned; `fields` are of its manifest and of its configuration."""
    torch.manual_seed(0)
    stated = {field: fields.pop(field) for field in ("run", "metrics") if field in fields}
    config = ViTConfig.model_validate(CONTRACT.architecture.model_dump() | fields)
    model = ViT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    contract = contract_for(config, CONTRACT.class_names)
    with committed(store, "finetune", name, stage="tune", **stated) as folder:
        save_model(folder, model, contract)
    return model.eval(), contract


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("weights/ViT-B_16.npz", "vit_b_16"),
        ("s3://bucket/google/vit-base-patch16-224/", "vit_base_patch16_224"),
        ("2024-05.model.safetensors", "model"),
        ("./123", "model"),
        ("hf:google/ViT-Base@refs/pr/1", "vit_base"),
        ("é" * 300 + "x" * 300, "x" * 40),
    ],
)
def test_a_stage_is_called_after_its_file(path: str, name: str) -> None:
    assert stage_name(path) == name
    parse_pipeline({"name": "import", "stages": {name: {"job": "import", "path": path}}}, "x")


@pytest.mark.parametrize("to", ["hf", "timm", "npz", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_export_predicts_as_the_model_in_the_store(
    store: Store, tmp_path: Path, to: str, printed: Callable[..., str]
) -> None:
    put_model(store)
    out, image = tmp_path / "out", tmp_path / "a.png"
    Image.new("RGB", (8, 8), (200, 40, 0)).save(image)
    if to == "npz":
        out.mkdir()  # an empty folder is replaced
    said = printed("export", "ma", "--format", to, "--output", out, "--store", store.uri)
    assert f"wrote {out}: {', '.join(sorted(path.name for path in out.iterdir()))}" in said
    assert {path.name for path in tmp_path.iterdir()} == {"store", "out", "a.png"}, "nothing is left beside it"
    assert out.stat().st_mode & 0o777 == (tmp_path / "store").stat().st_mode & 0o777, "for others to read"
    assert all(path.stat().st_mode & 0o777 == out.stat().st_mode & 0o666 for path in out.iterdir())
    if to == "onnx":
        return
    assert "for the digest sha256:0" in said
    assert ("class_names: the names of 3 classes" in said) is (to == "npz"), "what is lost is said"
    if to == "timm":
        assert "create_model('local-dir:out'" in (out / "README.md").read_text()
    asked = (("ma", "--store", store.uri), (out / "model.npz" if to == "npz" else out, "--store", "nowhere"))
    rows = [json.loads(printed("predict", *which, image, "--json"))[0]["top"] for which in asked]
    likely = [[each["probability"] for each in top] for top in rows]
    assert likely[0] == pytest.approx(likely[1], abs=1e-5)
    if to != "npz":  # which has no names of classes
        assert [each["class"] for each in rows[0]] == [each["class"] for each in rows[1]]


def test_an_import_without_mean_and_std_is_refused_before_a_job_starts(store: Store, tmp_path: Path) -> None:
    """What the small files of a checkpoint state is what its reader finds in it."""
    model, contract = put_model(store)
    folders = {name: tmp_path / name for name in ("hf", "timm", "own")}
    for folder in folders.values():
        folder.mkdir()
    formats.hugging_face.write(folders["hf"], model, contract)
    formats.timm.write(folders["timm"], model, contract)
    save_model(folders["own"], model, contract)
    formats.npz.write(tmp_path / "x.npz", model, contract)
    stated = [folders["hf"], folders["timm"], folders["own"], tmp_path / "x.npz"]
    silent = [tmp_path / "hf_silent", tmp_path / "timm_silent", tmp_path / "x.safetensors", tmp_path / "x.pt"]
    for folder, copy in zip(stated[:2], silent[:2], strict=True):
        shutil.copytree(folder, copy)
    (silent[0] / "preprocessor_config.json").unlink()
    config = json.loads((silent[1] / "config.json").read_text())
    del config["pretrained_cfg"]["mean"]
    (silent[1] / "config.json").write_text(json.dumps(config))
    shutil.copyfile(folders["timm"] / "model.safetensors", silent[2])
    torch.save(load_file(silent[2]), silent[3])
    for path in [*stated, *silent]:
        assert (formats.read(path).preprocessing is None) == (path in silent)
        recipe = {"name": "import", "stages": {"vit": {"job": "import", "path": str(path)}}}
        if path in silent:
            with pytest.raises(RecipeError, match=rf"^stages.vit.preprocessing: {path} does not give the mean"):
                plan_pipeline(store, parse_pipeline(recipe, "x"), ("vit",))
            recipe["stages"]["vit"]["preprocessing"] = "half"  # type: ignore[index]
        (planned,) = plan_pipeline(store, parse_pipeline(recipe, "x"), ("vit",))
        assert planned.state == "run"


@pytest.mark.parametrize("content", ["{", "[]", "[" * 5000, '{"architecture": "x", "pretrained_cfg": 3}'])
def test_what_is_no_checkpoint_is_left_to_its_reader(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert not lacks_preprocessing(str(tmp_path))
    assert not lacks_preprocessing(str(tmp_path / "config.json"))


def test_a_checkpoint_can_be_exported_and_asked(store: Store, tmp_path: Path, printed: Callable[..., str]) -> None:
    put_pretraining(store)
    put_model(store)
    given = ("--output", tmp_path / "out", "--store", store.uri)
    assert "was made without it" in printed("export", "pa", "--format", "hf", "--checkpoint", "step:6", *given, code=2)
    assert "is not a pretraining" in printed("export", "ma", "--format", "hf", "--checkpoint", "best", *given, code=2)
    assert not (tmp_path / "out").exists()
    printed("export", "pa", "--format", "hf", "--checkpoint", "step:10", *given)
    found = formats.read(tmp_path / "out").weights
    torch.testing.assert_close(found, {**model_at(10).state_dict()}, rtol=0, atol=0)

    image = tmp_path / "a.png"
    Image.new("RGB", (8, 8), (200, 40, 0)).save(image)
    ask = ("predict", "pa", image, "--store", store.uri, "--json")
    answers = [json.loads(printed(*ask, "--checkpoint", name)) for name in ("last", "best", "step:5")]
    assert answers[0] == json.loads(printed(*ask)) != answers[1] == answers[2]
    assert "is outside the store" in printed("predict", tmp_path / "out", image, "--checkpoint", "best", code=2)


def test_what_a_format_cannot_say_is_refused_and_leaves_nothing(
    store: Store, tmp_path: Path, printed: Callable[..., str]
) -> None:
    put_model(store, position="relative")
    said = printed("export", "ma", "--format", "timm", "--output", tmp_path / "out", "--store", store.uri, code=2)
    assert "ma as timm: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "nowhere.npz"], "no such file or folder"),
        (["import", "https://x/vit.npz"], "not a local file or folder"),
        (["import", "hf://google/vit"], "expected hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        (["import", "x.npz", "--preprocessing", "halff"], "expected half, imagenet or a file"),
        (["import", "x.npz", "--preprocessing", "bad.yaml"], "there is no such field; did you mean 'mean'"),
        (["import", "x.npz", "--preprocessing", "binary"], "binary: "),
        (["import", "x.npz", "--name", "No Name"], "should match pattern"),
        (["export", "zz", "--format", "hf", "--output", "out"], "no model or detector has a key that begins with 'zz'"),
        (["export", "ma", "--format", "tf", "--output", "out"], "'tf' is not one of"),
        (["export", "ma", "--format", "hf", "--output", "full"], "already exists"),
        (["export", "ma", "--format", "hf", "--output", "x.npz"], "already exists"),
        (["export", "ma", "--format", "hf", "--output", "no/out"], "no is not a folder"),
    ],
)
def test_wrong_requests(
    store: Store,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    printed: Callable[..., str],
) -> None:
    monkeypatch.chdir(tmp_path)
    put_model(store)
    commit(store, make_manifest("ingest", key="da"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").touch()
    (tmp_path / "x.npz").touch()
    (tmp_path / "bad.yaml").write_text("maen: [0.5]\nstd: [0.5]\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    before = set(tmp_path.rglob("*"))
    assert message in printed(*arguments, "--store", store.uri, code=2)
    assert set(tmp_path.rglob("*")) == before, "nothing was begun, and nothing is left"


def test_the_model_that_a_run_and_a_stage_name_is_told(store: Store, tmp_path: Path, vitflow_here: Vitflow) -> None:
    """On stderr, because stdout is for programs. A key already says which."""
    image = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(image)
    for number, accuracy in enumerate((0.5, 0.4), 1):
        run, key = f"mine-2026010{number}-000000-0000", f"{number}a{'0' * 12}"
        put_model(store, key, run=run, metrics={"test_accuracy": accuracy})
        create_run(store, run, make_plan(run, "tune", jobs={"tune": "finetune"}))
        add_event(store, run, "stage", stage="tune", status="SUCCEEDED", key=key)
    asked = vitflow_here("predict", "mine/tune", image, "--store", store.uri)
    assert asked.stderr == "mine/tune: model 2a0000000000 of run mine-20260102-000000-0000, 40.0% test\n"
    assert not vitflow_here("predict", "2a", image, "--store", store.uri).stderr


def test_predict_takes_folders_and_scores_the_good_beside_the_bad(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Callable[..., str]
) -> None:
    put_model(store)
    monkeypatch.chdir(tmp_path)  # short names, which the width of the output does not fold
    folder = Path("images")
    (folder / "below" / ".hidden").mkdir(parents=True)
    for name in ("a.png", "below/b.PNG", "below/.hidden/c.png"):
        Image.new("RGB", (8, 8)).save(folder / name, "PNG")
    (folder / "notes.txt").write_text("not an image")
    given = ["predict", "ma", folder, "--store", store.uri]
    said = printed(*given)
    assert said.count("ape") == 2 and str(folder / "below/b.PNG") in said

    (folder / "broken.jpg").write_text("not an image")
    said = printed(*given, code=1)
    assert said.count("ape") == 2 and f"error: {folder / 'broken.jpg'} cannot be read as an image" in said
    rows = json.loads(printed(*given, "--json", code=1).partition(" error: ")[0])
    assert [row.keys() for row in rows] == [{"image", "top"}, {"image", "top"}, {"image", "error"}]
    said = printed("predict", "ma", "x.png", folder / "a.png", "none", "--store", store.uri, code=1)
    assert said.count("ape") == 1 and {"x.png:", "none:"} < set(said.split())
    assert "not a file or folder" in printed("predict", "ma", "/dev/null", "--store", store.uri, code=2)
    assert "no such file or folder" in printed("predict", "ma", "x.png", "--store", store.uri, code=2)
    assert "no images found" in printed("predict", "ma", store.uri, "--store", store.uri, code=2)
