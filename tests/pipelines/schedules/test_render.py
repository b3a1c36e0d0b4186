"""What is written for other programs' timers, read by those programs' own checkers."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.recipe.load import load_pipeline
from pipelines.schedules import render
from pipelines.schedules.schedule import Schedule
from pipelines.spec import RecipeError
from pipelines.store import open_store
from tests.support.paths import TINY


def make_schedule(**fields: Any) -> Schedule:
    defaults = {"name": "weekly", "pipeline": load_pipeline(str(TINY)), "recipe": "tiny.yaml"}
    return Schedule(**defaults | {"cron": "0 3 * * 1", "timezone": "Europe/Berlin"} | fields)


class OnS3:
    """As much of a store as is written into a unit."""

    def __init__(self, uri: str = "s3://bucket/prefix", **settings: str) -> None:
        self.uri, self.settings = uri, settings


def test_the_service_and_the_timer_are_valid_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    store = open_store(str(tmp_path / 'a "strange" $folder 100%'))
    files = render.systemd(make_schedule(), store)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", *(str(tmp_path / name) for name in files)],
        capture_output=True,
        text=True,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "weekly" not in done.stderr, done.stderr
    assert "OnCalendar=minutely" in files["vitflow-weekly.timer"]
    assert "KillMode=process" in files["vitflow-weekly.service"], "the local Ray outlives the command"


def test_systemd_starts_the_command_with_these_words(tmp_path: Path) -> None:
    text = render.systemd(make_schedule(), OnS3('/a b/"c" $d 100%\\'))["vitflow-weekly.service"]  # type: ignore[arg-type]
    (line,) = [line.removeprefix("ExecStart=") for line in text.splitlines() if line.startswith("ExecStart=")]
    assert line.endswith('--store "/a b/\\"c\\" $$d 100%%\\\\"')


def test_the_crontab_ticks_every_minute_because_only_cronie_knows_time_zones(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "100% of 'it'"))
    (text,) = render.crontab(make_schedule(), store).values()
    (line,) = [line for line in text.splitlines() if not line.startswith("#")]
    assert text.endswith(f"# CRON_TZ=Europe/Berlin\n# {line.replace('* * * * *', '0 3 * * 1')}\n")
    command = line.removeprefix("* * * * * ")
    assert "%" not in command.replace(r"\%", ""), "an unescaped % ends a crontab's command"
    python, *words, silent = shlex.split(command.replace(r"\%", "%"))
    assert python == sys.executable
    assert words == ["-P", "-m", "pipelines", "schedule", "tick", "weekly", "--store", store.uri]
    assert silent == ">/dev/null", "cron mails what is printed"


def test_the_cron_job_is_valid_and_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    schedule = make_schedule(address="http://head.ray:8265", cron="0 3 * * 0,5,6")
    store: Any = OnS3(AWS_ENDPOINT_URL_S3="http://s3:9000")
    (text,) = render.kubernetes(schedule, store, "registry/vitflow:1").values()
    found = yaml.safe_load(text)
    kubernetes_validate.validate(found, "1.35", strict=True)
    spec = found["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 3 * * 0,5,6", "Europe/Berlin")
    assert spec["concurrencyPolicy"] == "Forbid"
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["vitflow", "schedule", "tick", "weekly", "--store", "s3://bucket/prefix"]
    assert container["envFrom"] == [{"secretRef": {"name": "vitflow"}}]
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("fields", "uri", "message"),
    [
        ({}, "s3://b/p", "the local Ray"),
        ({"address": "http://127.0.0.1:8265"}, "s3://b/p", "the local Ray"),
        ({"address": "http://h:8265"}, "/data/store", "a pod does not see this folder"),
        ({"address": "http://h:8265", "name": "a_b"}, "s3://b/p", "add the schedule as 'a-b'"),
        ({"address": "http://h:8265", "cron": "0 3 * * 5-7"}, "s3://b/p", "5-7.*with 0 for Sunday"),
    ],
)
def test_what_could_not_work_in_a_pod(fields: dict[str, Any], uri: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        render.kubernetes(make_schedule(**fields), OnS3(uri))  # type: ignore[arg-type]
