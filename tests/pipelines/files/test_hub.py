"""Models on the Hugging Face hub: resolved once, known by the contents of their files, fetched without pickles."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import identity
from pipelines.engine.plan import plan_pipeline
from pipelines.files import hub
from pipelines.files.fetch import fetched
from pipelines.recipe.load import load_pipeline, parse_pipeline
from pipelines.recipe.pipeline import pin
from pipelines.spec import Import, RecipeError
from pipelines.store import StoreError, StoreUnreachable, open_store
from tests.support.hub import Hub, running_hub

FILES = {
    "config.json": b'{"model_type": "vit"}',
    "model.safetensors": b"weights",
    "README.md": b"---\nlicense: mit\n---\n",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"large",
    "model-1/x-of-1.safetensors": b"not at the top",
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def key(path: str | Path) -> str:
    config = Import(job="import", path=str(path))
    return identity.stage_key(config, {}, identity.source_fingerprint(config))


def test_a_revision_is_resolved_once(server: Hub) -> None:
    first = server.commit("org/vit", FILES)
    assert hub.pinned("hf:org/vit") == f"hf:org/vit@{first}"
    known = key("hf:org/vit")
    second = server.commit("org/vit", FILES | {"model.safetensors": b"better weights"})
    assert hub.pinned("hf:org/vit") == hub.pinned("hf:org/vit@main") == f"hf:org/vit@{first}"
    assert key("hf:org/vit") == known, "somebody's push does not repeat anybody's training"
    assert key(f"hf:org/vit@{second}") != known, "the new commit by its name"


def test_what_is_known_here_needs_no_hub(server: Hub) -> None:
    """Nor its library, which takes longer to import than all the rest."""
    server.commit("org/vit", FILES)
    known = key("hf:org/vit")
    server.asked.clear()
    code = (
        "import sys; from tests.pipelines.files.test_hub import key; print(key('hf:org/vit'));"
        "assert 'huggingface_hub' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == known
    assert not server.asked


def test_the_key_is_that_of_the_same_files_in_a_folder(server: Hub, tmp_path: Path) -> None:
    server.commit("org/vit", FILES)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_bytes(FILES[name])
    assert key("hf:org/vit") == key(folder)
    assert not any("safetensors" in path for _, path in server.asked), "planning fetches no weights"


def test_files_that_an_import_reads_are_fetched_and_no_pickles(server: Hub) -> None:
    commit = server.commit("org/vit", FILES)
    with fetched("hf:org/vit") as folder:
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "README.md")}
    assert {path.split("/")[4] for method, path in server.asked if "/resolve/" in path} == {commit}


def test_a_file_that_is_not_the_one_its_digest_says_is_refused(server: Hub) -> None:
    server.commit("org/vit", FILES)
    server.tampered["model.safetensors"] = b"WEIGHTS"
    message = r"hf:org/vit@\w+: model\.safetensors has sha256 \w+, but \w+ was expected"
    with pytest.raises(StoreError, match=message), fetched("hf:org/vit"):
        pass


def test_a_file_is_never_named_by_the_server(server: Hub, tmp_path: Path) -> None:
    server.commit("org/vit", FILES)
    for number, etag in enumerate(("../../../pwned", f"{tmp_path}/pwned", "x/../../pwned")):
        server.etag = etag
        server.commit("org/vit", FILES | {"README.md": b"%d" % number})
        with fetched(f"hf:org/vit@{[*server.commits['org/vit']][-1]}") as folder:
            assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not [*tmp_path.rglob("*pwned*")]


def test_a_broken_connection_is_resumed(server: Hub) -> None:
    server.commit("org/vit", FILES)
    server.cut = {"config.json", "model.safetensors"}
    with fetched("hf:org/vit") as folder:
        assert all(path.read_bytes() == FILES[path.name] for path in folder.iterdir())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_longer_than_stated_is_not_stored(server: Hub, name: str, tmp_path: Path) -> None:
    server.commit("org/vit", FILES)
    server.tampered[name] = FILES[name] + b" " * 2**20
    expected = rf"{name} has more than the expected {len(FILES[name])} bytes"
    with pytest.raises(StoreError, match=expected), fetched("hf:org/vit"):
        pass
    assert max(path.stat().st_size for path in tmp_path.rglob("*")) < 2**19


@pytest.mark.parametrize(
    ("siblings", "message"),
    [
        (
            '[{"rfilename": "config.json", "size": 9, "lfs": {"sha256": "../../../../pwned"}}]',
            "does not answer as",
        ),
        ('[{"rfilename": "config.json", "size": -1}]', "does not answer as"),
        ("[" * 10**4, "does not answer as"),
        (f'["{"x" * 2**16}"]', "has more than the expected 65,536 bytes"),
        (
            '[{"rfilename": "model.safetensors", "size": 1e15}, {"rfilename": "config.json", "size": 1}]',
            "at most",
        ),
    ],
    ids=["a path for a digest", "negative size", "nested", "long", "large"],
)
def test_an_answer_is_limited(server: Hub, monkeypatch: pytest.MonkeyPatch, siblings: str, message: str) -> None:
    monkeypatch.setattr(hub, "SMALL_BYTES", 2**16)
    commit = server.commit("org/vit", FILES)
    server.info_sent = f'{{"sha": "{commit}", "siblings": {siblings}}}'.encode()
    with pytest.raises((StoreError, RecipeError), match=message), fetched("hf:org/vit"):
        pass


def test_a_password_in_the_hubs_address_is_refused_and_not_shown(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint.replace("//", "//me:hunter2@"))
    with pytest.raises(StoreError, match=r"^HF_ENDPOINT contains a user or a password") as raised:
        hub.pinned("hf:org/vit")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf:org/a--b", r"^hf:org/a--b: .*org/a--b"),
        (
            "hf:org/vitt",
            r"^hf:org/vitt: no such model at http://127.0.0.1:\d+. Check the name; for a private",
        ),
        (
            "hf:org/vit@v2",
            r"^hf:org/vit@v2: the model has no such revision; expected a branch, tag or commit",
        ),
        (
            "hf:org/old",
            r"^hf:org/old: missing model.safetensors; .*It contains: config.json, pytorch_model.bin",
        ),
        ("hf:org/empty", r"^hf:org/empty: missing config.json and model.*It contains: nothing$"),
    ],
)
def test_what_is_not_there_is_one_sentence(server: Hub, path: str, message: str) -> None:
    server.commit("org/vit", FILES)
    server.commit("org/empty", {})
    server.commit("org/old", {name: FILES[name] for name in ("config.json", "pytorch_model.bin")})
    with pytest.raises(RecipeError, match=message):
        hub.pinned(path)


def test_a_hub_that_does_not_answer_is_asked_again_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")  # a port that no other test is given
    with pytest.raises(StoreUnreachable, match=r"cannot fetch it from http://127.0.0.1:1: .*elsewhere"):
        hub.pinned("hf:org/vit")


def test_a_server_that_is_no_hub_is_said_so(server: Hub) -> None:
    server.commit("org/vit", FILES)
    server.info_sent = b"<html>"
    with pytest.raises(StoreError, match=r"does not answer as .*HF_ENDPOINT"):
        hub.pinned("hf:org/vit")


def test_the_token_is_sent_and_never_kept(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server.token = "hf_" + "secret"
    server.commit("org/vit", FILES)
    with pytest.raises(RecipeError, match="set HF_TOKEN"):
        hub.pinned("hf:org/vit")
    monkeypatch.setenv("HF_TOKEN", server.token)
    with fetched("hf:org/vit"):
        pass
    settings = open_store(str(tmp_path / "store")).settings
    assert settings["HF_ENDPOINT"] == server.endpoint, "jobs are told where the hub is"
    assert "secret" not in str(settings)
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_plan_records_the_commit(server: Hub, tmp_path: Path) -> None:
    commit = server.commit("org/vit", FILES)
    recipe = tmp_path / "x.yaml"
    recipe.write_text("name: x\nstages: {vit: {job: import, path: 'hf:org/vit'}}")
    pipeline = pin(load_pipeline(str(recipe)), ("vit",))
    (planned,) = plan_pipeline(open_store(str(tmp_path / "store")), pipeline, ("vit",))
    assert json.loads(planned.config.model_dump_json())["path"] == f"hf:org/vit@{commit}"


@pytest.mark.parametrize("path", ["hf://org/vit", "hf:vit", "hf:org/vit@", "hf:org/vit/model.npz", "hf:a/b@x y"])
def test_other_spellings_are_refused(path: str) -> None:
    with pytest.raises(RecipeError, match="expected hf:ORG/NAME or hf:ORG/NAME@REVISION"):
        parse_pipeline({"name": "x", "stages": {"vit": {"job": "import", "path": path}}}, "x")
