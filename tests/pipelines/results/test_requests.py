"""What a command costs on S3 does not grow with the store: its requests, on stores of 100 and of 1,000 runs."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pytest

from pipelines.engine import plan, runs
from pipelines.recipe.load import load_pipeline
from pipelines.store import Layout, encode, open_store, read_manifest
from tests.conftest import Vitflow
from tests.support.documented import prepare
from tests.support.requests import counted

RUN = "quickstart"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    prepare(folder)
    return folder


def with_runs(prepared: Path, folder: Path, number: int) -> Path:
    """The prepared store with older runs of its recipe, one an hour, each of which took in other digits."""
    store = folder / str(number)
    shutil.copytree(prepared / "runs", store)
    (newest,) = (store / "runs").iterdir()
    plan_, over = (json.loads((newest / f"{name}.json").read_text()) for name in ("plan", "over"))
    opened = open_store(str(store))
    digits = next(stage for stage in over["stages"] if stage["stage"] == "digits")
    manifest = read_manifest(opened, "ingest", digits["key"])
    assert manifest is not None
    for age in range(1, number):
        started = datetime.now(UTC) - timedelta(hours=age)
        run, key = f"{RUN}-{started:%Y%m%d-%H%M%S}-{age:04x}", sha256(str(age).encode()).hexdigest()
        digits["key"] = key
        made = manifest.model_copy(update={"key": key, "run": run, "own_sha256": None})
        for name, record in (
            (f"{Layout.run(run)}/plan.json", plan_ | {"run": run}),
            (f"{Layout.run(run)}/over.json", over),
            (Layout.manifest("ingest", key), made),
        ):
            (store / name).parent.mkdir(parents=True, exist_ok=True)
            (store / name).write_bytes(encode(record))
    return store


def test_the_requests_of_a_command_do_not_grow_with_the_store(
    vitflow_here: Vitflow, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (report,) = (prepared / "runs" / "artifacts" / "report").iterdir()
    models = sorted((prepared / "runs" / "artifacts" / "finetune").iterdir())
    image = prepared / "digit.png"

    def start(store: Path) -> None:
        opened = open_store(str(store))
        continued = load_pipeline(RUN, ("pretrain.init_from=latest",))
        assert runs.start_run(opened, continued, tuple(continued.stages)).latest["pretrain"] is not None
        changed = load_pipeline(RUN, ("pretrain.steps=99",))
        plan.plan_pipeline(opened, changed, changed.order())

    def command(*words: object) -> Callable[[Path], object]:
        return lambda store: vitflow_here(*words, "--store", store)

    commands: dict[str, tuple[int, Callable[[Path], object]]] = {
        "status": (45, command("status")),
        "status RUN": (45, command("status", RUN)),
        # the manifest of the report and of each of its ten ancestors, and what replaced it
        "lineage KEY": (25, command("lineage", report.name[:12])),
        # a list per job, and four manifests
        "lineage KEY of a model": (25, command("lineage", models[0].name[:12])),
        "predict KEY": (25, command("predict", models[0].name[:12], image)),
        "predict RUN/STAGE": (25, command("predict", f"{RUN}/finetune_all", image)),
        "report show RUN": (25, command("report", "show", RUN)),
        "plan": (60, command("plan", RUN, "--set", "pretrain.steps=99")),
        "run, all cached": (60, command("run", RUN)),
        "the start of a run": (60, start),
    }
    requests = counted(monkeypatch)
    made: dict[int, dict[str, int]] = {}
    for number in (100, 1_000):
        store, made[number] = with_runs(prepared, tmp_path, number), {}
        for name, (_, run) in commands.items():
            requests.clear()
            run(store)
            made[number][name] = requests.total()
    assert made[100] == made[1_000]
    assert {name: count for name, count in made[100].items() if count > commands[name][0]} == {}, made[100]


def test_a_list_reads_what_is_new_and_lists_a_thousand_objects_per_request(
    vitflow_here: Vitflow, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = with_runs(prepared, tmp_path, 1_000)
    commands = (("list",), ("list", "--kind", "datasets"), ("list", "--kind", "models"), ("report", "list"))
    before = [vitflow_here(*words, "--store", store).stdout for words in commands]
    requests, counts = counted(monkeypatch), []
    for words, shown in zip(commands, before, strict=True):
        requests.clear()
        assert vitflow_here(*words, "--store", store).stdout == shown
        counts.append(dict(requests))
    # `read`: of store.json. Three objects per run, two per artifact; models come from three jobs, and have aliases
    expected = [{"read": 1, "versions": lists} for lists in (3, 3, 3, 1)]
    expected[2]["names"] = 1
    assert counts == expected
    (newest,) = (run for run in (store / "runs").iterdir() if (run / "events").exists())
    shutil.copytree(newest, store / "runs" / f"{RUN}-20200101-000000-0000")
    requests.clear()
    vitflow_here("list", "--store", store)
    assert requests["read"] == 3  # store.json, the plan and the end of the new run
