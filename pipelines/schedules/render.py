"""A schedule's files for other timers: systemd, cron, Kubernetes. They start `vitflow schedule tick`.

Kubernetes and cronie read the cron line and its time zone themselves. systemd, which has other lines, and Debian's
cron, which has no time zones, call `schedule tick` every minute; it does something only when the schedule is due.

The decision on a tick is in the store, so a timer does no harm if it fires twice, or beside `schedule serve`. The files
contain no secrets: the timer's program provides keys and tokens.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version

import yaml

from pipelines.engine.submission import is_loopback
from pipelines.schedules.schedule import Schedule
from pipelines.spec import RecipeError
from pipelines.store import Store

DEADLINE_SECONDS = 600  # the latest start of a tick's pod in Kubernetes
SECRET = "vitflow"  # noqa: S105 (the name of the Secret with the AWS keys and RAY_AUTH_TOKEN)


def systemd(schedule: Schedule, store: Store) -> dict[str, str]:
    """Return {file name: text} of a service and its timer, for ~/.config/systemd/user or /etc/systemd/system."""
    service = [
        "[Unit]",
        f"Description=vitflow schedule {schedule.name}",
        "",
        "[Service]",
        "Type=oneshot",
        "EnvironmentFile=-%h/.config/vitflow/environment",
        *(f"Environment={_systemd_quoted(f'{name}={value}')}" for name, value in store.settings.items()),
        f"ExecStart={' '.join(map(_systemd_quoted, _command(schedule, store)))}",
    ]
    if _is_local(schedule):
        service.append("KillMode=process")  # the local Ray outlives the command that starts it
    timer = [
        "[Unit]",
        f"Description=vitflow schedule {schedule.name}: {schedule.cron} {schedule.timezone}",
        "",
        "[Timer]",
        "OnCalendar=minutely",
        "AccuracySec=1s",
        "",
        "[Install]",
        "WantedBy=timers.target",
    ]
    name = f"vitflow-{schedule.name}"
    return {f"{name}.service": "\n".join(service) + "\n", f"{name}.timer": "\n".join(timer) + "\n"}


def crontab(schedule: Schedule, store: Store) -> dict[str, str]:
    """Return {file name: text} with the lines for `crontab -e`."""
    command = shlex.join(_command(schedule, store)).replace("%", r"\%")
    lines = [
        f"# vitflow schedule {schedule.name}: {schedule.cron} {schedule.timezone}, checked every minute.",
        *(f"{name}={value}" for name, value in store.settings.items()),
        f"* * * * * {command} >/dev/null",
        "# With cronie, which reads CRON_TZ, these two lines instead start it only when it is due:",
        f"# CRON_TZ={schedule.timezone}",
        f"# {schedule.cron} {command} >/dev/null",
    ]
    return {f"vitflow-{schedule.name}.crontab": "\n".join(lines) + "\n"}


def kubernetes(schedule: Schedule, store: Store, image: str | None = None) -> dict[str, str]:
    """Return {file name: YAML} of a batch/v1 CronJob.

    Args:
        image: a container image with vitflow; by default vitflow:<this version>.

    Raises:
        RecipeError: a pod cannot reach the schedule's cluster or store, or Kubernetes does not allow the name or the
            cron line.
    """
    if _is_local(schedule):
        raise RecipeError(
            f"{schedule.name} runs on the local Ray, which would end with the pod; "
            "set the cluster's address with `schedule add ... --address http://HOST:8265`"
        )
    if not store.uri.startswith("s3://"):
        raise RecipeError(f"--store {store.uri}: a pod does not see this folder; use s3://bucket/prefix")
    if not re.fullmatch(r"[a-z0-9-]*[a-z0-9]", schedule.name):
        better = schedule.name.replace("_", "-").rstrip("-")
        raise RecipeError(
            f"{schedule.name!r} is not a valid name in Kubernetes; add the schedule as {better!r}"
        )
    if "7" in schedule.cron.split()[-1]:
        raise RecipeError(
            f"{schedule.name} has the cron line {schedule.cron!r}, but Kubernetes knows no day 7 of the week; "
            "add the schedule with 0 for Sunday"
        )
    name = f"vitflow-{schedule.name}"
    container = {
        "name": "tick",
        "image": image or f"vitflow:{version('vitflow')}",
        "command": ["vitflow", *_arguments(schedule, store)],
        "env": [{"name": key, "value": value} for key, value in store.settings.items()],
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    cron_job = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "vitflow"}},
        "spec": {
            "schedule": schedule.cron,
            "timeZone": schedule.timezone,
            "concurrencyPolicy": "Forbid",
            "startingDeadlineSeconds": DEADLINE_SECONDS,
            "jobTemplate": {"spec": {"backoffLimit": 3, "template": {"spec": pod}}},
        },
    }
    return {f"{name}.yaml": yaml.safe_dump(cron_job, sort_keys=False)}


def _is_local(schedule: Schedule) -> bool:
    return schedule.address is None or is_loopback(schedule.address)


def _command(schedule: Schedule, store: Store) -> list[str]:
    """Return the command with the absolute path of Python, because timers have a minimal PATH.

    Python takes no modules from the working folder (-P), which may have a random.py.
    """
    return [sys.executable, "-P", "-m", "pipelines", *_arguments(schedule, store)]


def _arguments(schedule: Schedule, store: Store) -> list[str]:
    return ["schedule", "tick", schedule.name, "--store", store.uri]


def _systemd_quoted(text: str) -> str:
    """Quote a word of a unit file, so that systemd takes all its characters literally."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@:./,=+%$-]+", text) else f'"{escaped}"'
