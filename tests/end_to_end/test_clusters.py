"""A Ray started by hand with a token: submit from one home, look and stop from another; nodes and drivers that die."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest
import requests

from pipelines.recipe.load import load_pipeline
from pipelines.store import Store, all_manifests, checkpoints, open_store, read_events
from tests.support.clusters import RayCluster, end, home, ray_cluster, wait_for
from tests.support.local_runs import a_local_ray, finish, ray_processes, start
from tests.support.paths import TINY
from tests.support.s3 import Bucket, Server, end_to_end_server
from tests.support.stores import manifests

PIPELINE = os.environ.get("VITFLOW_CLUSTER_PIPELINE", str(TINY))  # `make test-cluster` submits the quickstart
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head that computes nothing, and a node with a home of its own that does."""
    with ray_cluster([0, 2]) as started:
        yield started


def vitflow(environment: dict[str, str], *arguments: str | Path, check: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelines", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def submit(environment: dict[str, str], cluster: RayCluster, *arguments: str | Path) -> str:
    """The id of a run that was submitted to the cluster."""
    done = vitflow(environment, "submit", *arguments, "--address", cluster.address, "--token-file", cluster.token)
    return done.stdout.split()[1]


def status(environment: dict[str, str], run: str, *arguments: str | Path) -> dict:  # type: ignore[type-arg]
    return dict(json.loads(vitflow(environment, "status", run, "--json", *arguments).stdout))


def driver(run: str) -> psutil.Process:
    """The process of a submitted run's driver."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (line := process.info["cmdline"] or []) and line[3:6] == ["pipelines", "drive", run]
    ]
    assert found, "the driver does not run"
    return found[0]


@pytest.mark.full
@pytest.mark.parametrize("server", [end_to_end_server()])
def test_submitted_from_one_home_and_followed_from_another(
    cluster: RayCluster, server: str, tiny_store: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The store is on S3; keys are in the homes of people and of nodes, and nowhere else."""
    s3: Server = request.getfixturevalue(server)
    bucket = s3.bucket()
    store = f"s3://{bucket.name}/some/prefix"
    settings = {name: value for name, value in s3.environment.items() if name not in s3.keys}
    here, there = (home(tmp_path / name, **settings) for name in ("here", "there"))
    for folder in (tmp_path / "here", tmp_path / "there", *cluster.folder.glob("home-*")):
        put_keys(folder, s3)
    at = ("--store", store, "--address", cluster.address, "--token-file", cluster.token)
    command = [sys.executable, "-m", "pipelines", "submit", PIPELINE, *at]
    started = time.monotonic()
    with subprocess.Popen(list(map(str, command)), env=here, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        run = client.stdout.readline().split()[1]
        client.kill()
    assert time.monotonic() - started < 20, "it returns at once"
    assert status(there, run, *at)["status"] == "RUNNING"
    logs = vitflow(there, "logs", run, "-f", *at).stdout
    assert all(f"committed {job}/" in logs for job in ("pretrain", "finetune", "report"))
    wait_for(lambda: status(there, run, *at)["status"] == "SUCCEEDED")
    check_stored(bucket)
    if Path(PIPELINE) == TINY:
        assert results(bucket.manifests()) == results(manifests(tiny_store)), "as in a folder"

    stages = load_pipeline(PIPELINE).stages
    assert json.loads(vitflow(there, "list", "--store", store, "--json").stdout)[0]["run"] == run
    shown = json.loads(vitflow(there, "report", "show", "--store", store, "--json").stdout)
    assert shown["accuracies"]
    asked = "SELECT count(DISTINCT stage) FROM rows WHERE run = '" + run + "'"
    answer = vitflow(there, "report", "query", asked, "--store", store, "--csv").stdout
    measured = [stage for stage in stages.values() if stage.job in {"finetune", "evaluate", "baselines"}]
    assert answer.split()[-1] == str(len(measured))
    assert not (tmp_path / "here" / "ray").exists(), "no local Ray was started"
    assert not (tmp_path / "there" / "ray" / "head.json").exists()
    before = bucket.objects()
    again = vitflow(here, "submit", PIPELINE, *at)
    assert again.stdout.count("CACHED") == len(stages), "and nothing is submitted"
    assert bucket.objects() == before
    check_secrets(cluster, s3, bucket)


def check_stored(bucket: Bucket) -> None:
    """Each stage's files are there as its manifest has them, no other, and its log."""
    objects = bucket.objects()
    for made in bucket.manifests().values():
        attempt = f"some/prefix/artifacts/{made['job']}/{made['key']}/attempts/{made['attempt']}"
        there = {name: size for name, size in objects.items() if name.startswith(f"{attempt}/files/")}
        assert there == {f"{attempt}/files/{file['path']}": file["size"] for file in made["files"]}
        assert f"committed {made['job']}" in bucket.read(f"{attempt}/log.txt").decode()


def check_secrets(cluster: RayCluster, server: Server, bucket: Bucket) -> None:
    """Neither an object, nor what the cluster says of its jobs, nor a file that Ray keeps of them has a key."""
    with requests.Session() as session:
        session.trust_env = False
        token = {"Authorization": f"Bearer {cluster.token.read_text()}"}
        jobs = session.get(f"{cluster.address}/api/jobs/", headers=token, timeout=30)
    assert server.endpoint in jobs.text, "the settings are there"
    files = [path for path in (cluster.folder / "r").rglob("*") if path.is_file() and not path.is_symlink()]
    assert any("job-driver" in path.name for path in files)
    kept = [jobs.content, *bucket.read_all(), *(path.read_bytes() for path in files)]
    secrets = [cluster.token.read_text().encode(), *(value.encode() for value in server.keys.values())]
    assert not [secret for secret in secrets for data in kept if secret in data]


def results(manifests: dict[str, dict]) -> dict[str, tuple[str, str]]:  # type: ignore[type-arg]
    """Stage -> key and digest of what it made."""
    return {stage: (made["key"], made["content_digest"]) for stage, made in manifests.items()}


def put_keys(folder: Path, server: Server) -> None:
    """In ~/.aws/credentials."""
    (folder / ".aws").mkdir(exist_ok=True)
    keys = f"aws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
    (folder / ".aws" / "credentials").write_text(f"[default]\n{keys}")


@pytest.mark.full
def test_run_drives_a_cluster_from_the_foreground(cluster: RayCluster, tmp_path: Path) -> None:
    environment = home(tmp_path / "here", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(cluster.token))
    arguments = ("run", TINY, "--only", "digits", "--store", tmp_path / "store")
    out = vitflow(environment, *arguments, "--address", cluster.address).stdout
    assert "SUCCEEDED" in out
    assert not (tmp_path / "here" / "ray").exists(), "no local Ray was started"


def gauges(cluster: RayCluster, name: str) -> str:
    """The lines of a gauge that Prometheus would get from the nodes."""
    (found,) = (cluster.folder / "r").glob("session_2*/prom_metrics_service_discovery.json")
    lines = []
    for address in json.loads(found.read_text())[0]["targets"]:
        with suppress(OSError), urlopen(f"http://{address}/metrics", timeout=5) as answer:
            lines += [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return "\n".join(lines)


@pytest.mark.full
def test_stop_from_elsewhere_and_go_on(cluster: RayCluster, tmp_path: Path) -> None:
    store, here, there = tmp_path / "store", home(tmp_path / "here"), home(tmp_path / "there")
    long = ("--set", "pretrain.steps=200000", "--only", "pretrain", "--store", store)
    run = submit(here, cluster, TINY, *long)
    at = ("--store", store, "--address", cluster.address, "--token-file", cluster.token)
    running = {"stage": "pretrain", "status": "RUNNING"}
    wait_for(lambda: any(running.items() <= event.items() for event in read_events(open_store(str(store)), run)))
    wait_for(lambda: f'run="{run}"' in gauges(cluster, "ray_vitflow_step"))
    process = driver(run)
    said = vitflow(there, "stop", run, *at).stdout
    assert f"stopped driver-{run}-" in said
    assert "stopped pretrain-" in said
    process.wait(timeout=30)
    assert status(there, run, *at)["status"] == "STOPPED"
    wait_for(lambda: not [p for p in psutil.process_iter(["cmdline"]) if is_stage_of(p, store)], 30)
    assert vitflow(there, "stop", run, *at).stdout.endswith("has already ended\n")
    again = submit(there, cluster, TINY, "--only", "pretrain", "--store", store)
    assert again != run
    wait_for(lambda: status(there, again, *at)["status"] == "SUCCEEDED")


def is_stage_of(process: psutil.Process, store: Path) -> bool:
    return any(str(store) in word for word in process.info["cmdline"] or [])


def listening(environment: dict[str, str]) -> set[tuple[str, str]]:
    """(name, address) of every process of a local Ray that listens."""
    found = set()
    for process in ray_processes(environment):
        with suppress(psutil.Error):
            sockets = process.net_connections("inet")
            found |= {(process.name(), each.laddr.ip) for each in sockets if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.full
def test_a_local_run_beside_this_ray_finds_its_own_and_listens_on_loopback_only(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Two workers train."""
    seen: set[tuple[str, str]] = set()
    with a_local_ray() as environment:
        run = start(tmp_path / "s", environment, "pretrain")
        while run.poll() is None:
            seen |= listening(environment)
            time.sleep(0.1)
        said = finish(run)
    assert "multiple active Ray instances" not in said and "Exception in thread" not in said
    assert any(name.startswith("ray::RayTrainWorker") for name, _ in seen), "it was looked at while it trained"
    assert {ip for _, ip in seen if not ip_address(ip.removeprefix("::ffff:")).is_loopback} == set()


@pytest.mark.full
def test_a_node_that_dies_during_pretraining(tmp_path: Path) -> None:
    """Both training workers are on the second node; it dies; one worker continues on the first, in the same attempt."""
    store, here = tmp_path / "store", home(tmp_path / "here")
    arguments = ("--set", "pretrain.steps=1500", "--set", "pretrain.checkpoint_every.steps=50")
    with ray_cluster([1, 2]) as cluster:
        at = ("--store", store, "--address", cluster.address, "--token-file", cluster.token)
        run = submit(here, cluster, TINY, *arguments, "--only", "pretrain", "--store", store)
        opened = open_store(str(store))
        wait_for(lambda: checkpoint_steps(opened))
        end(cluster.nodes[1])
        wait_for(lambda: status(here, run, *at)["status"] == "SUCCEEDED")
    [manifest] = [each for each in all_manifests(opened) if each.job == "pretrain"]
    assert (manifest.attempt, manifest.metrics["workers"]) == (1, 1)
    assert int(manifest.metrics["continued_at_step"]) >= 50
    assert checkpoint_steps(opened) == [], "removed after the commit"


def checkpoint_steps(store: Store) -> list[int]:
    """Return the steps after which the pretraining can continue."""
    return [each.step for key in store.names("artifacts/pretrain") for each in checkpoints(store, "pretrain", key)]
