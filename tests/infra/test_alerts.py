"""infra/prometheus: the alerts fire when they should, on the metrics that `schedule serve` writes."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.paths import ROOT

FOLDER = ROOT / "infra" / "prometheus"
METRICS = {
    "vitflow_serve_heartbeat_seconds",
    "vitflow_schedule_failures_in_a_row",
    "vitflow_schedule_skips_in_a_row",
}


def test_the_rules_ask_for_the_metrics_of_serve() -> None:
    (group,) = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    assert {name for rule in group["rules"] for name in re.findall(r"vitflow_\w+", rule["expr"])} == METRICS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_the_alerts_fire_when_they_should() -> None:
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
