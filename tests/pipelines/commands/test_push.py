"""A model goes to the hub and comes back the same; nothing becomes public, or goes anywhere, without being told to."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pipelines.files import hub as files_hub
from pipelines.store import Store
from tests.conftest import Vitflow
from tests.support.checkpoints import CONTRACT
from tests.support.hub import Hub, running_hub
from tests.support.records import committed
from tests.support.vits import contract_for, randomised
from vit_model import formats
from vit_model.config import ViTConfig
from vit_model.model import ViT
from vit_model.weights import save_model

# the hub's client uploads large files in a way that its own HTTP library deprecates
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
TOKEN = "hf_verysecret"
CONFIG = ViTConfig.model_validate(CONTRACT.architecture.model_dump() | {"gelu": "exact"})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        running.token = TOKEN
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # if it was imported before
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield running


@pytest.fixture
def push(vitflow_here: Vitflow, store: Store) -> Callable[..., str]:
    """All that a push of the model "ma" prints."""

    def run(*options: str, target: str = "hf:org/pets", code: int = 0) -> str:
        done = vitflow_here("push", "ma", target, *options, "--store", store.uri, check=code)
        assert TOKEN not in done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    return run


def put_model(store: Store) -> ViT:
    model: ViT = randomised(CONFIG)
    with committed(store, "finetune", "ma", kind="model", stage="tune") as folder:
        save_model(folder, model, contract_for(CONFIG, CONTRACT.class_names))
    return model


@pytest.mark.parametrize("to", ["hf", "timm"])
def test_a_pushed_model_is_the_same_when_it_is_imported(
    hub: Hub, store: Store, push: Callable[..., str], tmp_path: Path, to: str
) -> None:
    model = put_model(store)
    said = push("--license", "apache-2.0", "--format", to)
    assert said.endswith("pushed hf:org/pets: private, license apache-2.0")
    assert hub.private == {"org/pets": True} and len(hub.commits["org/pets"]) == 1
    pinned = files_hub.pinned("hf:org/pets")
    (tmp_path / "fetched").mkdir()
    found = formats.read(files_hub.fetch(pinned, tmp_path / "fetched"))
    torch.testing.assert_close(found.weights, {**model.state_dict()}, rtol=0, atol=0)
    assert (found.class_names, found.license) == (CONTRACT.class_names, "apache-2.0")
    card = hub.commits["org/pets"][pinned.partition("@")[2]]["README.md"].decode()
    assert f"'{'hf-hub:' * (to == 'timm')}org/pets'" in card, "the code loads it from the hub"


def test_a_second_push_is_a_commit_that_keeps_other_files(hub: Hub, store: Store, push: Callable[..., str]) -> None:
    put_model(store)
    hub.commit("org/pets", {"notes.txt": b"mine", "README.md": b"old"})
    hub.private["org/pets"] = True
    push("--license", "mit")
    assert len(hub.commits["org/pets"]) == 2
    last = [*hub.commits["org/pets"].values()][-1]
    assert last["notes.txt"] == b"mine" and last["README.md"] != b"old"
    assert json.loads(last["config.json"])["model_type"] == "vit"


def test_what_becomes_public_is_told(hub: Hub, store: Store, push: Callable[..., str]) -> None:
    put_model(store)
    hub.private["org/pets"] = False
    assert "this repository is public. Give --public, or another name" in push("--license", "mit", code=2)
    assert "org/pets" not in hub.commits or not hub.commits["org/pets"]
    assert ": public" in push("--license", "mit", "--public")
    assert ": public" in push("--license", "mit", "--public", target="hf:org/new")
    hub.private["org/old"] = True
    assert "change its visibility on the hub" in push("--license", "mit", "--public", target="hf:org/old")
    assert hub.private == {"org/pets": False, "org/new": False, "org/old": True}


def test_nothing_is_asked_of_the_hub_before_the_licence_is_known(
    hub: Hub, store: Store, push: Callable[..., str]
) -> None:
    put_model(store)
    assert "state its licence with --license ID" in push("--public", code=2)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("end", "status", "code", "message"),
    [
        ("/create", 401, 2, "does not accept HF_TOKEN"),
        ("/create", 403, 2, "does not let HF_TOKEN write there"),
        ("/create", 404, 2, "has no such user or organisation"),
        ("/main", 400, 2, "refuses the files or the model card"),
        ("/commit/main", 418, 1, "HTTP status 418"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line_of_ours(
    hub: Hub, store: Store, push: Callable[..., str], end: str, status: int, code: int, message: str
) -> None:
    put_model(store)
    hub.refused[end] = status
    said = push("--license", "mit", code=code)
    assert said.startswith("error: hf:org/pets: ") and message in said and f"HTTP status {status}" in said
    assert "untrusted" not in said


def test_a_hub_that_answers_nonsense_or_nothing(
    hub: Hub, store: Store, push: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_model(store)
    hub.refused["/create"] = 200
    assert "does not answer as the Hugging Face hub does" in push("--license", "mit", code=1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot push it to http://127.0.0.1:9" in push("--license", "mit", code=1)


def test_without_a_token_or_a_name_nothing_begins(
    hub: Hub, push: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in ("org/pets", "hf:pets", "hf:org/pets@main", "hf:org/pets/more"):
        assert "expected hf:ORG/NAME" in push(target=target, code=2)
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\x01")
    assert "HF_TOKEN contains" in push(code=1)
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN is not set" in push(code=2)
    assert hub.asked == []
