"""infra/ without a cluster: manifests fit their schemas, versions are the project's, systemd takes the units."""

import copy
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from pipelines.schedules.cron import check_cron, check_timezone
from pipelines.schedules.schedule import check_name
from tests.support.paths import ROOT, SHARED

INFRA = ROOT / "infra"
CRDS = SHARED / "kuberay-crds"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(INFRA.glob("kuberay/*.yaml"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
CLUSTERS = [MANIFESTS["raycluster"]["spec"], MANIFESTS["rayjob"]["spec"]["rayClusterSpec"]]


def closed(schema: Any) -> Any:
    """A CRD's schema as an API server with strict field validation applies it: what is not named is an error."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if named and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@cache
def validator(kind: str, version: str) -> Any:
    """Of one of KubeRay's kinds; skips where its schemas are not at hand."""
    file = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not file.exists():
        pytest.skip(f"KubeRay's schemas are not at {CRDS}")
    versions = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = next(each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == version)
    # the server itself knows what metadata is, a CRD does not say
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(closed(schema))


def check(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    group, version = manifest["apiVersion"].split("/")
    if group == "ray.io":
        validator(manifest["kind"], version).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def pods(value: Any) -> list[dict[str, Any]]:
    """Every pod's spec in a manifest."""
    if isinstance(value, list):
        return [pod for item in value for pod in pods(item)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else [pod for item in value.values() for pod in pods(item)]


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in pods(manifest) for container in pod["containers"]]


WITH_PODS = [name for name, manifest in MANIFESTS.items() if pods(manifest)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_their_schemas(name: str) -> None:
    check(MANIFESTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PODS)
def test_a_misspelt_field_or_a_wrong_type_is_found_anywhere(name: str) -> None:
    """Of this test's own making: a validation that lets these through would say nothing of the manifests."""
    for spoil in (
        lambda manifest: manifest["spec"].update(tineZone="UTC"),
        lambda manifest: pods(manifest)[-1].update(runsAsNonRoot=True),
        lambda manifest: containers(manifest)[0].update(image=["vitflow"]),
        lambda manifest: containers(manifest)[-1].update(resources={"requests": {"cpu": [4]}}),
        lambda manifest: containers(manifest)[-1]["envFrom"].append({"secret": {"name": "vitflow"}}),
    ):
        manifest = copy.deepcopy(MANIFESTS[name])
        spoil(manifest)
        with pytest.raises(jsonschema.ValidationError):
            check(manifest)


def test_versions_stand_in_one_place() -> None:
    """vitflow's and the oldest Python in pyproject.toml, Ray's in constraints.txt."""
    ray = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert ray
    assert {cluster["rayVersion"] for cluster in CLUSTERS} == {ray[1]}
    images = {container["image"] for manifest in MANIFESTS.values() for container in containers(manifest)}
    assert images == {f"vitflow:{VERSION}"}
    made_of = [INFRA / "kuberay" / f"{name}.yaml" for name in WITH_PODS]
    for path in (INFRA / "Dockerfile", INFRA / "README.md", *made_of):
        tags = set(re.findall(r"\bvitflow:(\d[\w.-]*\w)", path.read_text()))
        assert tags and tags <= {VERSION, f"{VERSION}-cuda"}, path
    python = re.search(r"^ARG PYTHON=(.+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    assert python and PROJECT["project"]["requires-python"] == f">={python[1]}"


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["raycluster", "rayjob"])
def test_a_ray_asks_for_a_token_and_is_closed(cluster: dict[str, Any]) -> None:
    assert cluster["authOptions"] == {"mode": "token", "secretName": "vitflow"}
    head = cluster["headGroupSpec"]
    assert not head.get("enableIngress") and head.get("serviceType", "ClusterIP") == "ClusterIP"
    for pod in pods(cluster):
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_rays_are_open_to_each_other_and_else_at_the_jobs_api_alone() -> None:
    policy = MANIFESTS["networkpolicy"]
    for spoil in ({"podSelectors": {}}, {"ingress": [{"form": []}]}, {"policyTypes": "Ingress"}):
        with pytest.raises(jsonschema.ValidationError):
            check(policy | {"spec": policy["spec"] | spoil})
    rays = policy["spec"]["podSelector"]
    assert rays == {"matchLabels": {"ray.io/is-ray-node": "yes"}}, "as KubeRay labels heads and workers"
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    among, jobs = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": rays}]}
    assert jobs["ports"] == [{"protocol": "TCP", "port": 8265}]


def test_the_cron_job_ticks_a_schedule_once_and_has_no_secrets() -> None:
    spec = MANIFESTS["cronjob"]["spec"]
    assert spec["concurrencyPolicy"] == "Forbid" and spec["startingDeadlineSeconds"] > 0
    assert check_cron(spec["schedule"]) == spec["schedule"] and check_timezone(spec["timeZone"])
    (container,) = containers(MANIFESTS["cronjob"])
    *command, name = container["command"]
    assert command == ["vitflow", "schedule", "tick"]
    assert MANIFESTS["cronjob"]["metadata"]["name"] == f"vitflow-{check_name(name)}"
    assert container["envFrom"] == [{"secretRef": {"name": "vitflow"}}] and "env" not in container


def test_the_image_is_made_of_what_is_there() -> None:
    """What the Dockerfile copies exists and is let through by its ignore file, which lets nothing else through."""
    copied = {
        name.rstrip("/")
        for line in re.findall(r"^COPY (?!--from)(.+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
        for name in line.split()[:-1]
    }
    ignore = (INFRA / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for unit in INFRA.glob("systemd/*"):
        # vitflow need not be installed where it will be
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    timed = [f"vitflow-{name}.{kind}" for name in ("run@a", "tick@a") for kind in ("service", "timer")]
    done = subprocess.run(
        [
            "systemd-analyze",
            "verify",
            "--man=no",
            *(tmp_path / name for name in ("vitflow-schedule.service", *timed)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
