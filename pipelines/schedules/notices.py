"""Notices about the ticks of schedules, for people: sent to a webhook or a command, at least once.

Who is about to write a record that people should hear of, such as the end of a run that failed, first writes
notices/<n>-<event>.json, then the record, and sends the notice; when it was received, the object is removed. So if that
process is killed, or nobody answers, the next look at the schedule by any process finds the object. It sends the notice
if the record is there, and drops it if not. Whoever is not the writer waits for a minute first, so that two servers do
not send the same notice; it can still happen, and receivers drop a second notice with the same `id`.

The receiver is in the environment of the process, never in the store.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from pipelines.cluster.jobs_client import LOOPBACK
from pipelines.environment import environment
from pipelines.schedules.ticks import End, Position, Tick, read_end, read_tick
from pipelines.spec import RecipeError
from pipelines.store import Layout, Store, StoreDamaged, Time, encode, now, read_record, who
from vit_model.fields import Frozen

Event = Literal["failed", "recovered", "promoted", "refused", "skipped"]
Send = Callable[[Mapping[str, Any]], None]
"""Deliver a notice. Raises NotSent."""

URL, SECRET, COMMAND = "VITFLOW_WEBHOOK_URL", "VITFLOW_WEBHOOK_SECRET", "VITFLOW_NOTICE_COMMAND"
SKIPS = 3  # skips in a row that people hear of, once
SEND_SECONDS = 10.0
LOOK_SECONDS = 3600.0  # after which a process looks for notices without reason: a dead one's may have arrived late
OTHERS = timedelta(seconds=60)  # that the writer of a notice has to send it
KEPT = timedelta(days=1)  # that a notice is tried
FIRST_PAUSE, LAST_PAUSE = 10.0, 3600.0  # seconds between two tries, doubled each time


class NotSent(Exception):  # noqa: N818 (named after the state of the notice)
    """A notice was not received; the message does not contain the receiver's address."""


class Notice(Frozen):
    """A notice to send about a tick."""

    number: int
    event: Event
    time: Time
    who: str
    nonce: str


def receiver() -> Send | None:
    """Return how to send notices by this process's environment; None if nobody wants any.

    It takes the variables out of the environment, which the local Ray and its jobs would inherit.

    Raises:
        RecipeError: a variable is missing or invalid.
    """
    url, secret, command = (os.environ.pop(name, "") for name in (URL, SECRET, COMMAND))
    if url and command:
        raise RecipeError(f"{URL} and {COMMAND} are both set; expected one of them")
    if command:
        return partial(_run, shlex.split(command))
    if not url:
        return None
    address = urlsplit(url)
    if address.scheme != "https" and not (address.scheme == "http" and address.hostname in LOOPBACK):
        raise RecipeError(f"{URL}: unusable scheme {address.scheme!r}; expected https, or http on this machine")
    if not secret:
        raise RecipeError(f"{SECRET} is not set; expected the secret that signs notices to {URL}")
    return partial(_post, url, secret.encode())


def announce(store: Store, schedule: str, position: Position, number: int, event: Event) -> None:
    """Write down a notice about a tick before the record that it is about."""
    name = f"{number:08d}-{event}.json"
    notice = Notice(number=number, event=event, time=now(), who=who(), nonce=environment().token_hex(8))
    if store.create(f"{Layout.notices(schedule)}/{name}", encode(notice)):
        position.announced.add(name)
    position.look_at = 0.0


def send_announced(store: Store, schedule: str, position: Position, moment: datetime, send: Send) -> Iterator[str]:
    """Send the notices that are due; yield a line if one could not be sent."""
    if environment().monotonic() < max(position.look_at, position.retry_at):
        return
    folder = Layout.notices(schedule)
    names = store.names(folder)
    if not names:
        position.look_at = environment().monotonic() + LOOK_SECONDS
    for name in names:
        try:
            notice = read_record(store, f"{folder}/{name}", Notice)
            content = None if notice is None else _content(store, schedule, notice)
        except StoreDamaged as error:
            yield f"{error}; ignoring it. Run `vitflow verify`"
            continue
        age = moment - datetime.fromisoformat(notice.time) if notice is not None else OTHERS
        if notice is None or (name not in position.announced and age < OTHERS):
            continue
        if content is not None and age < KEPT:
            try:
                send(content)
            except NotSent as error:
                position.pause = min(max(FIRST_PAUSE, 2 * position.pause), LAST_PAUSE)
                position.retry_at = environment().monotonic() + position.pause
                yield f"cannot send the notice that tick {notice.number} {notice.event}: {error}; retrying"
                return
        elif content is not None:
            yield f"the notice that tick {notice.number} {notice.event} was not received within a day; dropped"
        store.remove([f"{folder}/{name}"])
        position.announced.discard(name)
    position.pause = 0.0


def _content(store: Store, schedule: str, notice: Notice) -> dict[str, Any] | None:
    """Return what to send; None if the record that the notice is about was not written."""
    tick = read_tick(store, schedule, notice.number)
    end = read_end(store, schedule, notice.number)
    if tick is None or not _happened(notice.event, tick, end):
        return None
    why = ", ".join(filter(None, [tick.why, "" if end is None else end.why]))
    return {
        "id": f"{store.id}/{schedule}/{notice.number}/{notice.event}",
        "event": notice.event,
        "text": f"{schedule} {notice.event}: {why or 'every stage succeeded'} ({tick.run})",
        "schedule": schedule,
        "store": store.uri,
        "tick": tick.tick,
        "number": notice.number,
        "run": tick.run,
        "status": end and end.status,
        "stage": end and end.stage,
        "error": end and end.error,
        "alias": end and end.alias and end.alias.model_dump(),
        "failures_in_a_row": tick.failures + 1 if notice.event == "failed" else 0,
        "skips_in_a_row": tick.skips,
        "time": notice.time,
    }


def _happened(event: Event, tick: Tick, end: End | None) -> bool:
    if event == "skipped":
        return tick.decision == "skip" and tick.skips == SKIPS
    if end is None:
        return event == "recovered" and tick.decision == "nothing_new"
    if end.alias is not None and event == end.alias.outcome:
        return True
    return end.failed if event == "failed" else event == "recovered" and not end.failed


def _post(url: str, secret: bytes, content: Mapping[str, Any]) -> None:
    import requests

    body = json.dumps(content).encode()
    signature = hmac.new(secret, body, hashlib.sha256).hexdigest()
    headers = {"Content-Type": "application/json", "X-Vitflow-Signature": f"sha256={signature}"}
    with requests.Session() as session:
        session.trust_env = urlsplit(url).hostname not in LOOPBACK  # no proxy for this machine
        try:
            # `auth`, because a ~/.netrc would add a header; an error's text has the address, which may be secret
            answer = session.post(
                url,
                data=body,
                headers=headers,
                timeout=SEND_SECONDS,
                allow_redirects=False,
                auth=lambda request: request,
            )
        except requests.RequestException as error:
            raise NotSent(f"{URL}: {type(error).__name__}") from None
    if not 200 <= answer.status_code < 300:
        raise NotSent(f"{URL}: HTTP status {answer.status_code}")


def _run(command: list[str], content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    try:
        done = subprocess.run(command, input=body, stdout=subprocess.DEVNULL, timeout=SEND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotSent(f"{COMMAND}: {type(error).__name__}") from None
    if done.returncode != 0:
        raise NotSent(f"{COMMAND}: exit code {done.returncode}")
