"""Records of a store for tests: everything has a default, so that a test gives only what it is about."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.engine.plan import PlannedStage
from pipelines.identity import CODE_SCHEME, code_digest, sha256, source_fingerprint
from pipelines.spec import STAGE_TYPES
from pipelines.store import Attempt, Layout, Manifest, Store, add_event, commit, now
from ray_jobs.process.context import Context


def make_manifest(job: str = "ingest", **fields: Any) -> Manifest:
    """The manifest of an artifact without files and inputs, but for these fields."""
    defaults = {
        "job": job,
        "kind": STAGE_TYPES[job].KIND,
        "key": "k",
        "content_digest": "d",
        "stage": "s",
        "run": "r",
        "attempt": 1,
        "nonce": "n",
        "files": (),
        "inputs": {},
        "config": {},
        "source": None,
        "metrics": {},
        "code": {},
        "environment": {},
        "started": now(),
        "finished": now(),
        "user": "u",
    }
    return Manifest(**defaults | fields)


@contextmanager
def committed(store: Store, job: str, key: str = "k", **fields: Any) -> Iterator[Path]:
    """Yield a folder; afterwards, commit what is in it as an artifact with these fields of its manifest."""
    with store.staging(Layout.files(job, key, 1)) as staging:
        yield staging.path
    commit(store, make_manifest(job, key=key, files=staging.files, **fields))


def make_attempt(job: str = "ingest", **fields: Any) -> Attempt:
    """The first attempt at a stage without inputs, but for these fields."""
    defaults = {
        "job": job,
        "key": "k",
        "number": 1,
        "stage": "s",
        "run": "r",
        "nonce": "n",
        "submission_id": f"{job}-k-1",
        "store_id": "x",
        "store_uri": "u",
        "cluster_address": "a",
        "cluster_session": "c",
        "config": {},
        "inputs": {},
        "source": None,
        "code_digest": "c",
        "created": now(),
    }
    return Attempt(**defaults | fields)


def commit_planned(store: Store, planned: PlannedStage, run: str, **fields: Any) -> Manifest:
    """Commit an artifact for a planned stage, as its job would: another key has another content."""
    assert planned.key is not None and planned.inputs is not None
    config, digest = planned.config, code_digest(planned.config.job)
    made = {
        "key": planned.key,
        "nonce": planned.key,
        "stage": planned.name,
        "run": run,
        "content_digest": sha256(f"content of {planned.key}"),
        "inputs": planned.inputs,
        "config": config.model_dump(mode="json"),
        "source": planned.source,
        "code": {"version": config.version, "scheme": CODE_SCHEME, "digest": digest, "git": "a" * 40},
    }
    add_event(store, run, "stage", stage=planned.name, status="SUCCEEDED", key=planned.key)
    return commit(store, make_manifest(config.job, **made | fields))


def make_context(store: Store, config: Any, **inputs: Manifest) -> Context[Any]:
    """What a stage of this configuration works on, with one artifact for each field that takes one."""
    attempt = make_attempt(
        config.job,
        store_id=store.id,
        store_uri=store.uri,
        config=config.model_dump(mode="json"),
        source=source_fingerprint(config),
    )
    return Context(attempt, config, {name: (given,) for name, given in inputs.items()})


def make_plan(run: str, *stages: str, jobs: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The plan of a run of these stages, of job `ingest` by default; its pipeline is called as the run's id begins."""
    return {
        "run": run,
        "pipeline": {
            "name": run.rsplit("-", 3)[0],
            "stages": {stage: {"job": (jobs or {}).get(stage, "ingest")} for stage in stages},
        },
        "targets": list(stages),
        "stages": list(stages),
        "digest": "d",
        "force": {},
        "created": now(),
    }


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, whose size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    other = path.with_name(f".{path.name}")
    other.write_bytes(data)
    other.replace(path)  # another inode: another version of the file, however coarse the clock


def row(**changes: Any) -> dict[str, Any]:
    """A row of an evaluation: one accuracy."""
    return {
        "task": "digits",
        "protocol": "baseline",
        "method": "k-NN",
        "labels_per_class": 5,
        "draw": 0,
        "split": "test",
        "metric": "accuracy",
        "value": 0.5,
        "num_images": 4,
        "selected_on": "dev",
        "settings": "{}",
    } | changes
