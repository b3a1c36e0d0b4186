"""What `schedule serve` shows of itself: metrics for Prometheus, in a text file, and signs of life for systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipelines.environment import environment
from pipelines.schedules.ticks import Position

METRICS_FILE = "VITFLOW_METRICS_FILE"
_GAUGES = """\
# HELP vitflow_serve_heartbeat_seconds When the server last read the schedules, in seconds since 1970.
# TYPE vitflow_serve_heartbeat_seconds gauge
vitflow_serve_heartbeat_seconds {now:.3f}
# HELP vitflow_schedule_failures_in_a_row Runs of a schedule that failed in a row.
# TYPE vitflow_schedule_failures_in_a_row gauge
{failures}# HELP vitflow_schedule_skips_in_a_row Ticks of a schedule that were skipped in a row.
# TYPE vitflow_schedule_skips_in_a_row gauge
{skips}"""


def write_metrics(positions: Mapping[str, Position]) -> None:
    """Write the file that the environment names, if it names one; readers see the old text or the new.

    Args:
        positions: those of the schedules that are served, by name.

    Raises:
        OSError: the file cannot be written.
    """
    if not (name := os.environ.get(METRICS_FILE)):
        return
    path = Path(name)

    def gauges(name: str, values: Mapping[str, int]) -> str:
        return "".join(f'vitflow_schedule_{name}_in_a_row{{schedule="{of}"}} {values[of]}\n' for of in sorted(values))

    text = _GAUGES.format(
        now=environment().utc().timestamp(),
        failures=gauges("failures", {name: position.failures for name, position in positions.items()}),
        skips=gauges("skips", {name: position.skips for name, position in positions.items()}),
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.chmod(0o644)  # Prometheus's exporter is another user
    temporary.replace(path)


def notify_watchdog() -> None:
    """Send systemd a sign of life, as sd_notify(3) does; do nothing without systemd."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:  # it misses the sign of life
        out.settimeout(1.0)
        out.sendto(b"WATCHDOG=1", "\0" + address[1:] if address.startswith("@") else address)
