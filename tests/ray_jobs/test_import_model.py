"""An import's contract says what the file says, or what was given in its place, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.spec import Import
from pipelines.store import open_store
from ray_jobs.import_model import contract_of, describe, import_model
from tests.support.records import make_context
from tests.support.vits import TINY
from vit_model.config import ViTConfig
from vit_model.contract import ModelContract, Preprocessing
from vit_model.errors import UserError
from vit_model.formats import Imported, hugging_face, npz, timm
from vit_model.model import ViT
from vit_model.weights import load_model, save_model

HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SAID = Preprocessing(
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
    interpolation="bicubic",
    crop="center",
    crop_fraction=0.5,
    resolution=8,
    channels=3,
)


def imported(said: Preprocessing | None = None, **fields: Any) -> Imported:
    sizes = {"width": 8, "depth": 1, "num_heads": 1, "mlp_dim": 8, "num_classes": 2}
    config = ViTConfig.model_validate(TINY | sizes | fields)
    return Imported(config, {}, said, ("0", "1"), "apache-2.0", ())


def stage(preprocessing: Any = None) -> Import:
    return Import(job="import", path="/x/vit.npz", preprocessing=preprocessing)


def test_what_the_file_says_is_taken_as_it_is() -> None:
    contract = contract_of(imported(SAID), stage())
    assert contract.preprocessing == SAID
    assert (contract.class_names, contract.license) == (("0", "1"), "apache-2.0")
    assert contract.training_data == "unknown", "no data set's digest: nobody knows what these weights saw"


def test_where_nobody_says_mean_and_std_it_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"/x/vit\.npz does not give the mean and std .*--preprocessing half .*imagenet"
    ):
        contract_of(imported(), stage())


@pytest.mark.parametrize(
    ("given", "channels", "mean", "std"),
    [
        ("half", 3, HALF, HALF),
        ("half", 1, (0.5,), (0.5,)),
        ("imagenet", 3, *IMAGENET),
        ({"mean": [0.1], "std": [0.2]}, 3, (0.1,) * 3, (0.2,) * 3),
        ({"mean": [0.1, 0.2, 0.3], "std": [0.2]}, 3, (0.1, 0.2, 0.3), (0.2,) * 3),
    ],
)
def test_what_is_given_fills_what_is_not_said(given: Any, channels: int, mean: Any, std: Any) -> None:
    pixels = contract_of(imported(in_channels=channels), stage(given)).preprocessing
    assert pixels == Preprocessing(mean=mean, std=std, resolution=8, channels=channels)


def test_what_is_given_stands_before_what_the_file_says_and_leaves_the_rest() -> None:
    pixels = contract_of(imported(SAID), stage("half")).preprocessing
    assert pixels == SAID.model_copy(update={"mean": HALF, "std": HALF})
    squashed = contract_of(imported(SAID), stage({"mean": [0.5], "std": [0.5], "crop": "squash"})).preprocessing
    assert (squashed.crop, squashed.crop_fraction) == ("squash", 1.0), "the fraction was the other rule's"


@pytest.mark.parametrize(
    ("found", "given", "message"),
    [
        (imported(SAID, image_size=(8, 12)), None, "image_size 8 x 12; only square images"),
        (imported(in_channels=4), "half", "channels Input should be 1 or 3"),
        (imported(in_channels=1), "imagenet", "must have 1 values, as many as channels"),
        (imported(SAID, image_size=16), None, "preprocessing.resolution is 8, architecture.image_size 16"),
        (imported(SAID, in_channels=1), None, "preprocessing.channels is 3, architecture.in_channels 1"),
        (imported(SAID, num_classes=3), None, "class_names has 2 names, num_classes is 3"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(found: Imported, given: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        contract_of(found, stage(given))
    assert message in str(error.value) and str(error.value).startswith("/x/vit.npz: ")
    assert "\n" not in str(error.value)


def test_what_was_taken_is_said() -> None:
    said = "\n".join(describe(contract_of(imported(SAID), stage()), SAID))
    assert "preprocessing, from the file: mean 0.1" in said and "not used" not in said
    assert "mean 0.1, 0.2, 0.3, std 0.4, 0.5, 0.6; bicubic, shorter side to 16, the middle 8 x 8" in said
    assert "classes: 2 (0, 1)" in said and "license: apache-2.0" in said
    said = "\n".join(describe(contract_of(imported(), stage("half")), None))
    assert "preprocessing, as given: mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5; bilinear, squashed to 8 x 8" in said
    said = "\n".join(describe(contract_of(imported(SAID), stage("half")), SAID))
    assert "preprocessing in the file, not used: mean 0.1, 0.2, 0.3" in said


# of the code before crop_offset and problem_type, which such models do not have
DIGESTS = {
    "own": "be7c45653b624d0dcbad3249126a788919e0b1abdea7ff28ad8a0dd87829c550",
    "npz": "61afe42c53943b77717b1e0bf34efacec4bad9f3fb2fc3baaef6afa4f71355d1",
    "hf": "e7c08cca9afaac4f4a0dc637482664f3c8f186cc40a96aa2c9cfeadcb652dfc4",
    "hf clip": "3a9be08a77a7316081ed41b3db713b3fae707b73cc6f2f3c8c2bfba074512e8c",
    "timm": "b1ec85a1b7ed9db24fc601d1b513d4d6840305ac57b68af8d71ff13537447c21",
    "timm file": "ffa04103b83cb7aed05d46fc2eead524fde14c4b9e52a9feb7a3a261b49052b9",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_an_import_that_nothing_new_concerns_keeps_its_digest(name: str, tmp_path: Path) -> None:
    fields = TINY | {"width": 64, "depth": 1, "num_heads": 1, "mlp_dim": 8}
    fields |= {"norm_first": True, "patch_bias": False} if "clip" in name else {"num_classes": 2}
    model = ViT(ViTConfig(**fields, gelu="exact" if name.startswith("timm") else "tanh"))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) % (97 + number) / 128).view_as(parameter))
    pixels = Preprocessing(
        mean=HALF,
        std=HALF,
        resolution=8,
        channels=3,
        crop="center" if name in ("own", "timm") else "squash",
        crop_fraction=0.75 if name in ("own", "timm") else 1.0,
    )
    names = ("a", "b") if model.config.num_classes else ()
    contract = ModelContract(
        architecture=model.config,
        class_names=names,
        preprocessing=pixels,
        training_data="unknown",
        license="mit",
    )
    path = tmp_path / "model"
    if name == "own":
        save_model(path, model, contract)
    elif name == "npz":
        npz.write(path, model, contract)
    else:
        (hugging_face if name.startswith("hf") else timm).write(path, model, contract)
        (path / "README.md").write_text("---\nlicense: mit\n---\n")
    if name == "timm file":
        path /= "model.safetensors"
    config = Import(job="import", path=str(path), preprocessing="half" if name == "timm file" else None)
    context = make_context(open_store(str(tmp_path / "store")), config)
    assert import_model(context).content_digest == DIGESTS[name]


def test_a_strangers_names_do_not_steer_the_terminal() -> None:
    hostile = imported(SAID)._replace(class_names=("\x1b]0;owned\x07", "x" * 10_000), license="mit\n\x1b[2Jerror: x")
    lines = list(describe(contract_of(hostile, stage()), SAID))
    assert all(line.isprintable() and len(line) < 300 for line in lines)


# ------------------------------------------------------------------------------------------------- reading


def write_checkpoint(path: Path) -> ViT:
    """A file of Google's form with random weights."""
    torch.manual_seed(0)
    config = imported().architecture
    model = ViT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    contract = ModelContract(
        architecture=config,
        class_names=("ape", "bee"),
        training_data="d",
        license=None,
        preprocessing=Preprocessing(mean=HALF, std=HALF, resolution=8, channels=3),
    )
    npz.write(path, model, contract)
    return model


def test_an_import_is_an_ordinary_model_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, path = open_store(str(tmp_path / "store")), tmp_path / "vit.npz"
    theirs = write_checkpoint(path)
    context = make_context(store, Import(job="import", path=str(path)))
    result = import_model(context)
    said = capsys.readouterr().out
    assert "classes: 2 (0, 1)" in said and "mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5" in said
    assert {entry.path for entry in result.files} == {"model.safetensors", "config.json"}
    ours, contract = load_model(tmp_path / "store/artifacts/import/k/attempts/1/files")
    assert contract.preprocessing.mean == HALF, "what Google's files mean, which they don't say"
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in ours.state_dict().items())
    assert result.metrics == {"parameters": theirs.config.num_parameters, "classes": 2}
    again = import_model(make_context(store, Import(job="import", path=str(path.rename(tmp_path / "moved")))))
    assert again == result, "the same bytes, wherever they come from"


def test_files_that_change_after_the_plan_are_not_taken(tmp_path: Path) -> None:
    store, path = open_store(str(tmp_path / "store")), tmp_path / "vit.npz"
    write_checkpoint(path)
    context = make_context(store, Import(job="import", path=str(path)))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="the source changed before it was read"):
        import_model(context)


def test_what_is_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    store, path = open_store(str(tmp_path / "store")), tmp_path / "vit.npz"
    write_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"vit\.npz"):
        import_model(make_context(store, Import(job="import", path=str(path))))
    assert not list((tmp_path / "store").glob("artifacts/**/files/*"))


def test_a_model_of_vitflows_own_comes_over_as_it_is(tmp_path: Path) -> None:
    """From another store, say: with its names, its pixels, and what it was trained on."""
    config, folder = imported().architecture, tmp_path / "model"
    contract = ModelContract(
        architecture=config,
        class_names=("ape", "bee"),
        preprocessing=SAID,
        training_data="d" * 64,
        license="mit",
    )
    save_model(folder, ViT(config), contract)
    import_model(make_context(open_store(str(tmp_path / "store")), Import(job="import", path=str(folder))))
    files = tmp_path / "store/artifacts/import/k/attempts/1/files"
    for name in ("model.safetensors", "config.json"):
        assert (files / name).read_bytes() == (folder / name).read_bytes()
