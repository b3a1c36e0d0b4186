"""infra/ without a cluster: manifests fit their schemas, versions are the project's, systemd takes the units."""

import copy
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.paths import ROOT, SHARED

INFRA = ROOT / "infra"
CRDS = SHARED / "kuberay-crds"
MANIFESTS: dict[str, dict[str, Any]] = {
    f"{manifest['kind']}/{manifest['metadata']['name']}": manifest
    for path in sorted(INFRA.glob("kuberay/*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
JOB = MANIFESTS["RayJob/vitflow-quickstart"]["spec"]
CLUSTERS = [MANIFESTS["RayCluster/vitflow-ray"]["spec"], JOB["rayClusterSpec"]]
SERVE = MANIFESTS["Deployment/vitflow-serve"]["spec"]
OPEN_SETTINGS = MANIFESTS["ConfigMap/vitflow"]["data"]
WRITABLE = {"/tmp", "/home/vitflow"}


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
    if manifest["apiVersion"] == "ray.io/v1":
        validator(manifest["kind"], "v1").validate(manifest)
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
        lambda manifest: containers(manifest)[0]["envFrom"].append({"secret": {"name": "vitflow"}}),
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
    for path in (INFRA / "Dockerfile", INFRA / "README.md"):
        tags = set(re.findall(r"\bvitflow:(\d[\w.-]*\w)", path.read_text()))
        assert tags and tags <= {VERSION, f"{VERSION}-cuda"}, path
    python = re.search(r"^ARG PYTHON=(.+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    assert python and PROJECT["project"]["requires-python"] == f">={python[1]}"


def test_images_are_named_by_digest_and_vitflows_are_put_in_as_documented(tmp_path: Path) -> None:
    """Until then, their digest is one that no image has."""
    digest = re.compile(r"[\w.:/-]+@sha256:[0-9a-f]{64}")
    base = re.search(r"^ARG BASE=(.+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    assert base and digest.fullmatch(base[1].replace("${PYTHON}", "3.11"))
    for manifest in MANIFESTS.values():
        assert all(digest.fullmatch(container["image"]) for container in containers(manifest))
    shutil.copytree(INFRA / "kuberay", tmp_path / "infra" / "kuberay")
    (command,) = re.findall(r"^sed -i .+$", (INFRA / "README.md").read_text(), re.MULTILINE)
    pushed = f"registry:5000/team/vitflow@sha256:{'12' * 32}"
    subprocess.run(["bash", "-euc", f"image={pushed}\n{command}"], cwd=tmp_path, check=True)
    files = sorted(tmp_path.glob("infra/kuberay/*.yaml"))
    after = [
        container["image"]
        for path in files
        for each in yaml.safe_load_all(path.read_text())
        for container in containers(each)
    ]
    before = [container["image"] for manifest in MANIFESTS.values() for container in containers(manifest)]
    assert after == [pushed if image == f"vitflow@sha256:{'0' * 64}" else image for image in before] != before


@pytest.mark.parametrize("cluster", CLUSTERS, ids=["raycluster", "rayjob"])
def test_a_ray_asks_for_a_token_and_stays_inside(cluster: dict[str, Any]) -> None:
    assert cluster["authOptions"] == {"mode": "token", "secretName": "vitflow-ray"}
    head = cluster["headGroupSpec"]
    assert not head.get("enableIngress") and head.get("serviceType", "ClusterIP") == "ClusterIP"


@pytest.mark.parametrize("name", WITH_PODS)
def test_pods_are_closed_and_write_only_to_folders_of_their_own(name: str) -> None:
    manifest = MANIFESTS[name]
    for pod in pods(manifest):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        for container in pod["containers"]:
            paths = {at["mountPath"] for at in container["volumeMounts"] if at["name"] in empty}
            assert "vitflow" not in container["image"] or paths >= WRITABLE
    autoscaler = manifest["spec"].get("autoscalerOptions")
    for container in [*containers(manifest), *([autoscaler] if autoscaler else [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_secrets_are_files_and_only_the_autoscaler_may_talk_to_kubernetes() -> None:
    """The operator leaves RAY_AUTH_TOKEN as it is where a container has it. AWS's secret may be absent."""
    token, keys = (OPEN_SETTINGS[name] for name in ("RAY_AUTH_TOKEN_PATH", "AWS_SHARED_CREDENTIALS_FILE"))
    for manifest in MANIFESTS.values():
        for pod in pods(manifest):
            (ray, aws) = next(each["projected"]["sources"] for each in pod["volumes"] if each["name"] == "secrets")
            assert (ray["secret"]["name"], ray["secret"].get("optional", False)) == ("vitflow-ray", False)
            assert (aws["secret"]["name"], aws["secret"]["optional"]) == ("vitflow-aws", True)
            files = {item["path"] for each in (ray, aws) for item in each["secret"]["items"]}
            for container in pod["containers"]:
                mounted = {at["name"]: at for at in container["volumeMounts"]}
                assert "kubernetes" not in mounted
                assert not any("valueFrom" in variable for variable in container.get("env", []))
                if "vitflow" in container["image"]:
                    assert {f"{mounted['secrets']['mountPath']}/{name}" for name in files} == {token, keys}
                    assert container["envFrom"] == [{"configMapRef": {"name": "vitflow"}}]
                if container["name"].startswith("ray-"):
                    assert container["env"] == [{"name": "RAY_AUTH_TOKEN", "value": ""}]
    mounts = CLUSTERS[0]["autoscalerOptions"]["volumeMounts"]
    assert "/var/run/secrets/kubernetes.io/serviceaccount" in {at["mountPath"] for at in mounts}
    accounts = {name for name in MANIFESTS if name.startswith("ServiceAccount/")}
    assert {
        f"ServiceAccount/{pod['serviceAccountName']}" for each in MANIFESTS.values() for pod in pods(each)
    } == accounts
    shared = [pod for pod in pods(MANIFESTS) if pod["serviceAccountName"] == "vitflow-head"]
    assert shared == [CLUSTERS[0]["headGroupSpec"]["template"]["spec"]], "KubeRay lets this account scale the cluster"


def test_a_role_comes_before_keys() -> None:
    chain = [each.METHOD for each in botocore.session.get_session().get_component("credential_provider").providers]
    assert chain.index("assume-role-with-web-identity") < chain.index("shared-credentials-file")


@pytest.mark.slow
def test_ray_reads_the_tokens_file_if_the_variable_is_empty(tmp_path: Path) -> None:
    (tmp_path / "ray-token").write_text("12" * 32)
    code = "from ray._raylet import AuthenticationTokenLoader as a; print(a.instance().get_raw_token())"
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "ray-token")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | own, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "12" * 32


def test_workers_with_gpus_scale_on_spot_nodes_and_the_head_stays() -> None:
    cpu, gpu = CLUSTERS[0]["workerGroupSpecs"]
    assert CLUSTERS[0]["enableInTreeAutoscaling"] and cpu["minReplicas"] == cpu["maxReplicas"]
    assert 1 == gpu["minReplicas"] == gpu["replicas"] < gpu["maxReplicas"], (
        "a stage that starts without a GPU uses CPUs"
    )
    (pod,) = pods(gpu)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot"} < {each["key"] for each in pod["tolerations"]}
    assert "tolerations" not in pods(CLUSTERS[0]["headGroupSpec"])[0] | pods(cpu)[0]
    budget = MANIFESTS["PodDisruptionBudget/vitflow-ray-head"]["spec"]
    assert budget["minAvailable"] == 1, "not maxUnavailable: Kubernetes knows no scale of a RayCluster"
    # KubeRay's labels of the head
    assert budget["selector"]["matchLabels"] == {"ray.io/cluster": "vitflow-ray", "ray.io/node-type": "head"}


def test_a_rayjob_submits_once() -> None:
    assert JOB["backoffLimit"] == JOB["submitterConfig"]["backoffLimit"] == 0
    (submitter,) = containers(JOB["submitterPodTemplate"])
    assert "command" not in submitter, "the operator adds it"


def test_the_rays_are_open_to_each_other_and_else_only_what_is_needed_is() -> None:
    policy, others = MANIFESTS["NetworkPolicy/vitflow-ray"], MANIFESTS["NetworkPolicy/vitflow"]["spec"]
    for spoil in ({"podSelectors": {}}, {"ingress": [{"form": []}]}, {"policyTypes": "Ingress"}):
        with pytest.raises(jsonschema.ValidationError):
            check(policy | {"spec": policy["spec"] | spoil})
    rays = policy["spec"]["podSelector"]
    assert rays == {"matchLabels": {"ray.io/is-ray-node": "yes"}}, "as KubeRay labels heads and workers"
    assert policy["spec"]["policyTypes"] == others["policyTypes"] == ["Ingress"]
    among, jobs, metrics = policy["spec"]["ingress"]
    assert among == {"from": [{"podSelector": rays}]}
    assert jobs["ports"] == [{"protocol": "TCP", "port": 8265}]
    ours, operator = jobs["from"]
    assert ours == {"podSelector": others["podSelector"]} and operator["podSelector"]["matchLabels"]
    labels = others["podSelector"]["matchLabels"].items()
    for template in (JOB["submitterPodTemplate"], SERVE["template"]):
        assert template["metadata"]["labels"].items() >= labels
    prometheus = [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}}]
    assert metrics == {"from": prometheus, "ports": [{"protocol": "TCP", "port": 8080}]}
    assert others["ingress"] == [{"from": prometheus, "ports": [{"protocol": "TCP", "port": 9100}]}]


def test_the_server_of_schedules_writes_where_its_sidecar_and_its_probe_look() -> None:
    template = SERVE["template"]
    assert template["metadata"]["labels"] == SERVE["selector"]["matchLabels"]
    server, exporter = containers(template)
    assert server["command"] == ["vitflow", "schedule", "serve"] and "ports" not in server
    (file,) = (each["value"] for each in server["env"] if each["name"] == "VITFLOW_METRICS_FILE")
    assert file in server["livenessProbe"]["exec"]["command"][-1]
    folder, _, name = file.rpartition("/")
    assert f"--collector.textfile.directory={folder}" in exporter["args"] and name.endswith(".prom")
    volumes = [
        next(at["name"] for at in each["volumeMounts"] if at["mountPath"] == folder) for each in (server, exporter)
    ]
    assert volumes[0] == volumes[1]
    assert str(exporter["ports"][0]["containerPort"]) == template["metadata"]["annotations"]["prometheus.io/port"]
    unit = (INFRA / "systemd" / "vitflow-schedule.service").read_text()
    assert re.search(r"^Environment=VITFLOW_METRICS_FILE=\S+\.prom$", unit, re.MULTILINE)


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
