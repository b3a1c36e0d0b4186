"""Keep a small store of today's layout, so that later versions prove that they read it.

python -m tests.scripts.keep_layout tests/pipelines/store/layouts/NAME.zip
"""

import sys
import tempfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from pipelines.engine import plan
from pipelines.engine.gc import Policy, collect
from pipelines.engine.history import end_run
from pipelines.engine.runs import start_run
from pipelines.recipe.load import load_pipeline
from pipelines.schedules.schedule import Schedule, add_schedule
from pipelines.store import Layout, create_attempt, input_ref, move_alias, open_store, replace_artifact
from tests.support.paths import TINY
from tests.support.records import commit_planned, committed, make_attempt


def keep(archive: Path) -> None:
    """Write a store with a finished run of the tiny recipe, and one object or more of every other kind of record."""
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        pipeline = load_pipeline(str(TINY))
        run = start_run(store, pipeline, tuple(pipeline.stages))
        made = {}
        while waiting := [
            each for each in plan.plan_pipeline(store, pipeline, pipeline.order()) if each.state == "run"
        ]:
            for stage in waiting:
                names = {"key": stage.key, "stage": stage.name, "run": run.id, "inputs": stage.inputs}
                attempt = make_attempt(stage.config.job, **names)
                create_attempt(store, attempt)
                made[stage.name] = commit_planned(store, stage, run.id)
        end_run(store, run.id, "SUCCEEDED")
        digits = made["digits"]
        replace_artifact(store, "baselines", made["pixels"].key, "f" * 64, run.id, "--force")
        create_attempt(store, make_attempt("baselines", key="f" * 64, stage="pixels", run=run.id))
        store.replace(Layout.heartbeat("baselines", "f" * 64, 1), b'{"nonce": "n", "beat": 1}\n')
        move_alias(store, "production", input_ref(store, made["pretrain"]), 0, "person")
        add_schedule(store, Schedule(name="weekly", pipeline=pipeline, recipe=str(TINY.name), cron="0 3 * * 1"))
        with committed(store, "ingest", "e" * 64, finished="2020-01-01T00:00:00+00:00", source=digits.source):
            pass
        assert collect(store, Policy(), grace_hours=0).deleted
        with ZipFile(archive, "w", ZIP_DEFLATED) as kept:
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                kept.write(path, path.relative_to(folder))


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
