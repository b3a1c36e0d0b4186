"""The site of a store: what it shows is what was computed; names from the store run nothing; nothing is read twice."""

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipelines.pages import collect
from pipelines.pages.write import place
from pipelines.results.accuracies import list_results
from pipelines.spec import RecipeError
from pipelines.store import Store, all_manifests, open_store, read_plan
from tests.conftest import Vitflow
from tests.support.browser import CHROMIUM, CONTRAST, OVERFLOW, Tab, chromium
from tests.support.documented import put_quickstart
from tests.support.many_runs import HOSTILE, put_many_runs
from tests.support.s3 import Server

WIDTHS, SCHEMES = (390, 900, 1200), ("light", "dark")
ODD = "x'; reboot; '"  # the name of an alias in a store that somebody else has written
PAGES = ("overview", "runs", "models", "schedules", "reports", "task/digits", "run/{run}", "compare/{run}/{other}")
PAGES += ("model/{model}", "search/{model}")
# a matrix has other members and another value of `steps`; the report is of other stages
BEFORE = {"a@x=1": {"steps": "2"}, "a@x=2": {"steps": "2"}, "c": {"job": '"audit"'}, "report": {"of": '["a@x=1", "c"]'}}
AFTER = {"a@x=1": {"steps": "3"}, "a@x=2": {"steps": "3"}, "b@y=1": {"steps": "4"}, "b@y=2": {"steps": "4"}}
AFTER |= {"report": {"of": '["a@x=1", "a@x=2", "b@y=1", "b@y=2"]'}}
CHANGED = AFTER | {"c": {"job": None}}
DIFFERENCES = (
    "const map = named => new Map(Object.entries(named));"
    "const fields = stages => new Map([...map(stages)].map(([name, own]) => [name, map(own)]));"
    f"differences({{changed: {json.dumps(CHANGED)}, stages: []}}, {{stages: []}}, fields({json.dumps(BEFORE)}),"
    f" fields({json.dumps(AFTER)}))"
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(str(tmp_path_factory.mktemp("filled") / "store"))
    put_quickstart(store)
    put_many_runs(store, range(20))
    record = store.read("aliases/production/1.json")
    assert record is not None
    store.create(f"aliases/{ODD}/1.json", record)
    store.create("aliases/broken/1.json", b"{")
    (Path(store.uri) / "aliases" / "empty").mkdir()  # by a process that was killed
    return store


@pytest.fixture
def data(filled: Store) -> dict[str, Any]:
    return site_of(filled)


def site_of(store: Store) -> dict[str, Any]:
    return collect.collect(store, [*all_manifests(store)])


def test_results_are_those_of_report_list(filled: Store, data: dict[str, Any]) -> None:
    shown = {
        (key, *data["settings"][line[0]][2:6]): (pytest.approx(line[1], abs=1e-5), line[4], line[5])
        for key, lines in data["results"].items()
        for line in lines
    }
    listed = {
        (row["key"][:12], *(row[name] for name in ("protocol", "method", "labels_per_class", "metric"))): (
            row["mean"],
            row["draws"],
            row["num_images"],
        )
        for row in list_results(filled, None, None, None)
    }
    assert shown == listed


def test_results_on_other_test_images_are_on_another_board(data: dict[str, Any]) -> None:
    few_shot = [each for each in data["boards"] if each["protocol"] == "few-shot linear"]
    judged = {(each["images"], each["labels_per_class"]): each["judged"] for each in few_shot}
    assert judged == {(539, 1): 1, (539, 5): 1, (539, 10): 1, (539, 25): 1, (400, 1): 18, (400, 5): 18}


def test_a_model_has_its_inputs_and_the_results_that_others_measured_on_it(data: dict[str, Any]) -> None:
    models = {each["key"]: each for each in data["models"]}
    assert all(model["inputs"] for model in models.values())
    measured = {key for key in data["results"] if data["artifacts"][key]["name"].endswith("/fewshot")}
    for key in measured:
        (model,) = data["artifacts"][key]["of"]
        assert models[model]["run"] == data["artifacts"][key]["run"]


def test_a_schedule_shows_the_failures_up_to_its_last_run(data: dict[str, Any]) -> None:
    (schedule,) = data["schedules"]
    assert [tick["status"] for tick in schedule["ticks"][:2]] == ["FAILED", "SUCCEEDED"]
    assert schedule["failures"] == 1


def test_a_damaged_or_empty_alias_is_left_out(data: dict[str, Any]) -> None:
    assert data["aliases"].keys() == {"production", ODD}


def test_a_later_site_measures_only_what_is_new(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = site_of(filled)
    monkeypatch.setattr(collect, "measurements", pytest.fail)
    monkeypatch.setattr(collect, "plan_of", pytest.fail)
    after = site_of(filled)
    assert after | {"made": ""} == before | {"made": ""}


def test_the_site_on_s3_is_that_of_a_folder(vitflow: Vitflow, filled: Store, moto: Server, tmp_path: Path) -> None:
    bucket = moto.bucket()
    for to in (str(tmp_path / "site"), f"s3://{bucket.name}/site"):
        for _ in range(2):
            vitflow("site", "--store", filled.uri, "--to", to, **moto.environment)
    files = [path for path in (tmp_path / "site").rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        name = f"site/{path.relative_to(tmp_path / 'site')}"
        ours, theirs = path.read_bytes(), bucket.read(name)
        assert re.sub(rb'"made":"[^"]*"', b"", ours) == re.sub(rb'"made":"[^"]*"', b"", theirs)


def test_a_folder_with_other_files_is_refused(vitflow: Vitflow, filled: Store, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    assert place(str(tmp_path)).reports == set(), "it was interrupted"
    (tmp_path / "reports").rmdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RecipeError, match="cannot write there: Not a directory"):
        place(str(tmp_path / "thesis.tex"))
    refused = vitflow("site", "--store", filled.uri, "--to", tmp_path, check=2)
    assert "there are other files" in refused.stderr and [*tmp_path.iterdir()] == [tmp_path / "thesis.tex"]


# ------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def seen(filled: Store, vitflow: Vitflow, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a browser finds, by page and size."""
    folder = tmp_path_factory.mktemp("site") / "site"
    vitflow("site", "--store", filled.uri, "--to", folder)
    *_, other, run = (name for name in filled.names("runs") if name.startswith("nightly"))
    model = next(each["key"] for each in site_of(filled)["models"] if each["run"] == other)

    async def look(tab: Tab) -> dict[str, Any]:
        await tab.open(folder / "index.html")
        found: dict[str, Any] = {"run": run, "other": other, "model": model}
        for page, width, scheme in product(PAGES, WIDTHS, SCHEMES):
            await tab.show(width, scheme)
            place = page.format(run=run, other=other, model=model)
            await tab.evaluate(f"location.hash = {json.dumps(place)}; show();")
            found[page, width, scheme] = [await tab.evaluate(OVERFLOW), await tab.evaluate(CONTRAST)]
            found[page] = await tab.evaluate("document.body.innerText")
        fields = (
            f"[...fieldsOf.get(byRun.get({json.dumps(run)}))].map(([stage, own]) => [stage, Object.fromEntries(own)])"
        )
        found["fields"] = dict(await tab.evaluate(fields))
        found["differences"] = await tab.evaluate(DIFFERENCES)
        found["title"] = await tab.evaluate("document.title")
        found["images"] = await tab.evaluate("document.images.length")
        return found | {"events": tab.events, "folder": folder}

    async def browse() -> dict[str, Any]:
        async with chromium(tmp_path_factory.mktemp("profile")) as tab:
            return await look(tab)

    yield asyncio.run(browse())


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_cut_and_every_text_is_legible(seen: dict[str, Any], page: str) -> None:
    for width, scheme in product(WIDTHS, SCHEMES):
        (scrolls, wide), faint = seen[page, width, scheme]
        assert (scrolls, wide, faint) == (False, [], []), (width, scheme)


@pytest.mark.slow
@in_browser
def test_it_reads_its_own_files_only_and_a_hostile_name_runs_nothing(seen: dict[str, Any]) -> None:
    assert HOSTILE in seen["run/{run}"] or HOSTILE in seen["schedules"] or HOSTILE in seen["runs"]
    assert (seen["title"], seen["images"]) == ("vitflow", 0)
    methods = {method for method, _ in seen["events"]}
    assert not {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"} & methods
    urls = {event["request"]["url"] for method, event in seen["events"] if method == "Network.requestWillBeSent"}
    own = {(seen["folder"] / name).as_uri() for name in ("index.html", "site.css", "data.js", "site.js")}
    assert {url.partition("#")[0] for url in urls if not url.startswith("data:")} == own


@pytest.mark.slow
@in_browser
def test_a_search_for_a_key_finds_the_model_and_its_run(seen: dict[str, Any]) -> None:
    rows = [line.split("\t") for line in seen["search/{model}"].splitlines() if "\t" in line]
    assert {("model", f"nightly/train {seen['model']}"), ("run", seen["other"])} == {tuple(row[:2]) for row in rows[1:]}
    assert "few-shot linear, 5 labels per class" in seen["model/{model}"]


@pytest.mark.slow
@in_browser
def test_members_of_a_matrix_are_one_change(seen: dict[str, Any]) -> None:
    assert seen["differences"] == ["a (2).steps 2 → 3", "report.of + a@x=2", "new: b (2)", "gone: c"]


@pytest.mark.slow
@in_browser
def test_a_hostile_name_stays_one_word_of_a_command(seen: dict[str, Any]) -> None:
    lines = [line for line in seen["models"].splitlines() if line.startswith("vitflow ")]
    assert ["vitflow", "alias", "history", ODD] in [shlex.split(line)[:4] for line in lines]


@pytest.mark.slow
@in_browser
def test_a_runs_fields_are_those_of_its_plan(seen: dict[str, Any], filled: Store) -> None:
    plan = read_plan(filled, seen["run"])
    assert plan is not None

    def value(stage: str, path: str) -> Any:
        found: Any = plan["pipeline"]["stages"][stage]
        for part in path.split("."):
            found = found[part]
        return found

    assert seen["fields"].keys() == plan["pipeline"]["stages"].keys() and len(seen["fields"]["train"]) > 80
    for stage, fields in seen["fields"].items():
        assert all(json.loads(text) == value(stage, path) for path, text in fields.items())
