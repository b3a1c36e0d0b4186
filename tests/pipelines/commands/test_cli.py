"""What a wrong request gets: one message that says what would be right, exit code 2, and nothing started."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from pipelines.identity import git_state
from tests.support.paths import TINY

SEARCH = "search={kind: asha, trials: 2, over: {learning_rate: [0.01, 0.1]}}"
CHANGES = ("labels={}", "learning_rates=[]", SEARCH, "steps=60", "workers=2")
ASHA = [word for change in CHANGES for word in ("--set", f"finetune.{change}")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["run", "mine"], "did you mean 'mine.yaml'"),
        (
            ["run", TINY, "--set", "pretrain.stepz=3"],
            "error: --set pretrain.stepz=3: there is no such field; did you mean 'pretrain.steps'?",
        ),
        (
            ["run", TINY, "--set", "pretrain.optimizer={clip: 1}"],
            "error: --set pretrain.optimizer={clip: 1}: pretrain.optimizer.clip: there is no such field",
        ),
        (["run", TINY, "--set", "pretrain.steps=no"], "error: --set pretrain.steps=no: "),
        (["run", TINY, "--only", "pretran"], "did you mean 'pretrain'"),
        (["run", TINY, "--force", "prob"], "did you mean 'probe'"),
        (["run", TINY, "--store", "s3://KEY:SECRET@bucket/x"], "which would end up in logs"),
        (["run", TINY, "--store", "gs://bucket/x"], "a folder or s3://bucket/prefix"),
        (["run", TINY, "--store", "/dev/null/x"], "cannot write"),
        (["plan", TINY, *ASHA], "search.kind asha ends trials of one worker only, not of workers 2"),
        (["status", "--store", "nowhere"], "is not a store"),
        (["predict", "abc", "x.png", "--store", "nowhere"], "is not a store"),
        (["list"], "Name the store of your results with --store"),
        (["init", "x.yaml", "--images", "nowhere"], "error: --images: /"),
        (["init", "mine.yaml", "--images", "nowhere", "--from", "nowhere"], "error: mine.yaml exists; use"),
        (["predict", "abc"], "give IMAGES, or --split test for the test images of abc"),
        (["init", "/proc/x.yaml", "--images", "."], "/proc/x.yaml: cannot write to /proc: "),
        (["runn"], "No such command 'runn'. Did you mean 'run'?"),
        (["train", TINY], "no such command 'train'; did you mean `vitflow run PIPELINE`?"),
        (["list", "models"], "did you mean `vitflow list --kind models`?"),
        (["init", "x.yaml", "--images", ".", "--from", "google/vit"], "did you mean hf:google/vit, on the"),
        (["run", TINY, "--store", "\udcff"], "\\udcff': not UTF-8"),
        (["run", "\udcff.yaml"], "\\udcff.yaml: no such file"),
        (["plan", TINY, "--set", r'digits.source={kind: folder, name: x, root: "\udcff"}'], "is not UTF-8"),
        (["import", "\udcff.npz"], "\\udcff.npz: not UTF-8; rename it"),
        (["predict", "abc", "\udcff.png", "--store", "\udcff"], "\\udcff': not UTF-8"),
        (["run", TINY, "--address", "http://127.0.0.1:1", "--token-file", "."], ".: cannot be read"),
    ],
)
def test_wrong_requests(vitflow_here, tmp_path: Path, arguments: list[str], message: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    done = vitflow_here(*arguments, check=2)
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/runs")), "no run was begun"


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "what"), [("run", "damaged"), ("list", "damaged"), ("schedule tick often", "silent")])
def test_a_store_that_is_damaged_or_does_not_answer_is_no_wrong_request(  # type: ignore[no-untyped-def]
    vitflow, tmp_path: Path, verb: str, what: str
) -> None:
    """Exit code 1: a unit of systemd tries again, and is not stopped by RestartPreventExitStatus=2."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "store.json").write_text("{")
    store = tmp_path / "s" if what == "damaged" else "s3://some-bucket/s"
    arguments = ["run", TINY] if verb == "run" else verb.split()
    nobody = {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    done = vitflow(*arguments, "--store", store, check=1, **nobody)
    assert ("cannot be read as a store's record" if what == "damaged" else "cannot read store.json") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_cluster_that_does_not_answer_is_no_wrong_request(vitflow, tmp_path: Path, verb: str) -> None:  # type: ignore[no-untyped-def]
    done = vitflow(verb, TINY, "--store", tmp_path / "s", "--address", "http://127.0.0.1:9", check=1)
    assert "--address: no usable Ray cluster" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s" / "runs").exists(), "no run was begun"


def test_plan_of_an_empty_store_changes_nothing(vitflow_here, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = ("--store", tmp_path / "s", "--force", "digits", "--json")
    rows = json.loads(vitflow_here("plan", TINY, *options).stdout)
    assert (rows[0]["stage"], rows[0]["why"]) == ("digits", "--force")
    states = {row["stage"]: row["state"] for row in rows}
    expected = dict.fromkeys(("pretrain", "pixels", "finetune", "probe", "report"), "pending")
    assert states == {"digits": "run"} | expected
    assert not list(tmp_path.iterdir()), "not even the store is made"


def test_schema_is_a_json_schema_that_knows_the_jobs(vitflow_here) -> None:  # type: ignore[no-untyped-def]
    schema = json.loads(vitflow_here("schema").stdout)
    assert {"Ingest", "Pretrain", "Finetune", "Evaluate", "Baselines", "Report"} <= set(schema["$defs"])


def test_starting_imports_neither_torch_nor_ray(vitflow, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = vitflow("plan", TINY, "--store", tmp_path / "s", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "numpy", "pyarrow", "deepspeed", "matplotlib"}


def test_the_version_is_the_packages_with_the_commit_of_a_checkout(vitflow) -> None:  # type: ignore[no-untyped-def]
    said = vitflow("--version").stdout
    assert said.startswith(f"vitflow {version('vitflow')}")
    assert said.partition("commit ")[2][:12] == git_state().get("git", "")[:12]


def test_help_of_import_shows_how_a_revision_is_given(vitflow_here) -> None:  # type: ignore[no-untyped-def]
    assert "hf:ORG/NAME[@REVISION]" in vitflow_here("import", "--help").stdout


def test_help_shows_no_type_beside_a_flag(vitflow_here) -> None:  # type: ignore[no-untyped-def]
    for command in ((), ("run",), ("report",), ("report", "list"), ("schedule", "serve")):
        said = vitflow_here(*command, "--help").stdout
        assert "--help" in said and "bool" not in said, command


def test_a_shell_completes_commands(vitflow) -> None:  # type: ignore[no-untyped-def]
    given = {"_VITFLOW_COMPLETE": "complete_bash", "COMP_WORDS": "vitflow sched", "COMP_CWORD": "1"}
    assert vitflow("sched", **given).stdout.split() == ["schedule"]
