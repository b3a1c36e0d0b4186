"""The tiny pipeline with its store on S3, on a Ray of its own: the same results as in a folder, and no key anywhere."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipelines.store import open_store
from tests.support.paths import TINY
from tests.support.s3 import Bucket, Server, end_to_end_server, used
from tests.support.stores import manifests, repeated

STAGES = (
    "digits",
    "pretrain",
    "pixels",
    "report",
)  # one of each kind; tests/end_to_end/test_clusters.py has all
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]
Do = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Finished:
    """A run of the tiny pipeline on S3, and how to ask for more in the same environment."""

    uri: str
    server: Server
    bucket: Bucket
    do: Do
    ray_folder: Path


def command(environment: dict[str, str]) -> Do:
    """The command line with nothing of the user's AWS settings but what is given."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}

    def run(*arguments: str | Path, check: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pipelines", *map(str, arguments)],
            env=plain | environment,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="module")
def own_ray() -> Iterator[Path]:
    """The folder of a local Ray that no other test has started, so that it has no key in its environment."""
    folder = Path(tempfile.mkdtemp(prefix="vf3-"))
    yield folder / "ray"
    from pipelines.cluster.local import shut_down

    assert shut_down(folder / "ray"), "somebody uses it still"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = yaml.safe_load(TINY.read_text())
    raw["stages"] = {name: raw["stages"][name] for name in STAGES}
    raw["stages"]["report"]["of"] = list(STAGES[:-1])
    path = tmp_path_factory.mktemp("recipe") / "part.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home folder for both servers: the local Ray, and so its jobs, keep the one that started it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".aws").mkdir()
    return folder


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, own_ray: Path, recipe: Path, home: Path) -> Finished:
    """Run once; the keys are in a file of the home folder, where jobs find them too."""
    server: Server = request.getfixturevalue(end_to_end_server())
    keys = f"aws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
    (home / ".aws" / "credentials").write_text(f"[default]\n{keys}")
    do = command({"AWS_ENDPOINT_URL_S3": server.endpoint, "HOME": str(home), "VITFLOW_RAY_DIR": str(own_ray)})
    bucket = server.bucket()
    uri = f"s3://{bucket.name}/some/prefix"
    assert "report.html" in do("run", recipe, "--store", uri).stdout
    return Finished(uri, server, bucket, do, own_ray)


def test_everything_is_committed_with_its_files_and_logs(finished: Finished) -> None:
    found, objects = finished.bucket.manifests(), finished.bucket.objects()
    assert set(found) == set(STAGES)
    for manifest in found.values():
        attempt = f"some/prefix/artifacts/{manifest['job']}/{manifest['key']}/attempts/{manifest['attempt']}"
        there = {name: size for name, size in objects.items() if name.startswith(f"{attempt}/files/")}
        assert there == {f"{attempt}/files/{file['path']}": file["size"] for file in manifest["files"]}
        assert f"committed {manifest['job']}" in finished.bucket.read(f"{attempt}/log.txt").decode()


def test_it_can_be_looked_at(finished: Finished) -> None:
    do, store = finished.do, ("--store", finished.uri)
    (row,) = json.loads(do("list", *store, "--json").stdout)
    assert row["status"] == "SUCCEEDED"
    status = json.loads(do("status", row["run"], *store, "--json").stdout)
    assert {stage["status"] for stage in status["stages"]} == {"SUCCEEDED"}
    assert "committed baselines" in do("logs", row["run"], "pixels", *store).stdout
    assert json.loads(do("report", "show", *store, "--json").stdout)["title"] == "Tiny"
    models = json.loads(do("list", "--kind", "models", *store, "--json").stdout)
    assert {model["stage"] for model in models} == {"pretrain"}


def test_a_rerun_touches_nothing(finished: Finished, recipe: Path) -> None:
    before = finished.bucket.objects()
    assert finished.do("run", recipe, "--store", finished.uri).stdout.count("CACHED") == len(STAGES)
    assert finished.bucket.objects() == before


def test_it_is_what_a_folder_gets(finished: Finished, tiny_store: Path) -> None:
    ours, theirs = finished.bucket.manifests(), manifests(tiny_store)
    for stage in set(STAGES) - {"report"}:  # here it is of fewer stages
        assert ours[stage]["key"] == theirs[stage]["key"]
        assert repeated(ours[stage]["files"]) == repeated(theirs[stage]["files"])


def test_no_secret_is_anywhere(finished: Finished) -> None:
    """Neither in an object, nor in what the cluster says of its jobs, nor in a file that Ray keeps of them."""
    import requests

    secrets = [finished.server.secret_key.encode(), finished.server.access_key.encode()]

    def clean(data: bytes) -> bool:
        return not any(secret in data for secret in secrets)

    for name in finished.bucket.objects():
        assert clean(finished.bucket.read(name)), name
    head = json.loads((finished.ray_folder / "head.json").read_text())
    token = (finished.ray_folder / "token").read_text().strip()
    with requests.Session() as session:
        session.trust_env = False
        jobs = session.get(
            f"{head['address']}/api/jobs/", headers={"Authorization": f"Bearer {token}"}, timeout=30
        )
    assert jobs.status_code == 200
    assert finished.server.endpoint in jobs.text, "the settings are there"
    assert clean(jobs.content)
    files = [
        path for path in Path(head["temp_folder"]).rglob("*") if path.is_file() and not path.is_symlink()
    ]
    assert any("job-driver" in path.name for path in files)
    assert all(clean(path.read_bytes()) for path in files)


def test_without_keys_on_the_nodes_it_is_said_where_to_put_them(
    moto: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has them in its environment; the Ray that it uses was started by somebody who had not."""
    folder = Path(tempfile.mkdtemp(prefix="vf4-"))
    common = {"VITFLOW_RAY_DIR": str(folder / "ray"), "AWS_EC2_METADATA_DISABLED": "true"}
    from pipelines.cluster.local import shut_down

    try:
        starts = "from pipelines.cluster.local import hold\nwith hold(): pass"
        plain = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        subprocess.run([sys.executable, "-c", starts], env=plain | common, check=True, timeout=120)
        with used(moto, monkeypatch) as server:
            bucket = server.bucket()
            do = command(server.environment | common)
            done = do("run", TINY, "--store", f"s3://{bucket.name}", "--only", "digits", check=1)
            store = open_store(f"s3://{bucket.name}")
        assert "~/.aws/credentials" in done.stdout
        assert "nodes" in done.stdout
        assert "Traceback" not in done.stdout
        (key,) = store.names("artifacts/ingest")
        assert store.names(f"artifacts/ingest/{key}/attempts") == ["1"], "it is not tried again"
    finally:
        assert shut_down(folder / "ray")
        shutil.rmtree(folder)
