"""A report's page in a real browser: what fits, what it fetches, what a keyboard and a screen reader find."""

import asyncio
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.ray_jobs.reporting.test_report import ALL, Artifacts, artifacts
from tests.support.browser import CHROMIUM, CONTRAST, OVERFLOW, Tab, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium"),
]
__all__ = ["artifacts"]  # the fixture

WIDTHS, SCHEMES = (390, 900, 1200), ("light", "dark")

STRUCTURE = """(() => {
  const all = selector => [...document.querySelectorAll(selector)], ids = all("[id]").map(each => each.id);
  const levels = all("h1, h2, h3").map(each => Number(each.tagName[1]));
  return {
    broken: all("a").map(each => each.getAttribute("href")).filter(link => !document.getElementById(link.slice(1))),
    twice: ids.filter((id, place) => ids.indexOf(id) !== place),
    skipped: levels.filter((level, place) => level > 1 + (levels[place - 1] ?? 0)),
    landmarks: ["header", "nav", "main", "h1"].map(name => all(name).length),
    unnamed: [
      ...all("table").filter(each => !each.caption?.textContent),
      ...all("th").filter(each => !each.scope),
      ...all("img").filter(each => each.getAttribute("alt") === null),
      ...all("section, .scroll, .plot").filter(each => !each.matches("[aria-label], [aria-labelledby]")),
      ...all("svg [role=img]").filter(each => !each.querySelector("title")?.textContent),
      ...all("input, button").filter(each => !each.textContent && !each.getAttribute("aria-label")),
    ].map(each => each.outerHTML.slice(0, 80)),
  };
})()"""
SORTED = """(() => {
  const table = document.querySelector("#accuracy table"), button = table.querySelectorAll("thead button")[1];
  const numbers = body => [...body.querySelectorAll("[data-value]")].map(cell => Number(cell.dataset.value));
  const values = () => [...table.tBodies].map(numbers);
  button.click(); const down = values();
  button.click(); const up = values();
  const input = document.querySelector("#accuracy input");
  input.value = "10 labels svm"; input.dispatchEvent(new Event("input"));
  const left = [...table.querySelectorAll("tbody tr:not([hidden])")].map(row => row.cells[0].textContent);
  return [down, up, left];
})()"""
HOVER = """(() => {
  const mark = document.querySelector("#answer .dots [role=img]"), said = mark.querySelector("title").textContent;
  mark.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  const tip = document.getElementById("tip");
  return [said, tip.hidden, tip.textContent, mark.getAttribute("aria-label")];
})()"""


@pytest.fixture(scope="module")
def page(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(artifacts.make(*ALL, note="A note.")["report.html"])
    return path


@pytest.fixture(scope="module")
def seen(page: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a browser finds on the page, by name."""

    async def look(tab: Tab) -> dict[str, Any]:
        await tab.open(page)
        found: dict[str, Any] = {"structure": await tab.evaluate(STRUCTURE)}
        for width, scheme in product(WIDTHS, SCHEMES):
            await tab.show(width, scheme)
            found[f"{width} {scheme}"] = [await tab.evaluate(OVERFLOW), await tab.evaluate(CONTRAST)]
        found["pdf"] = await tab.pdf()
        found["sorted"], found["hover"] = await tab.evaluate(SORTED), await tab.evaluate(HOVER)
        return found | {"events": tab.events}

    async def browse() -> dict[str, Any]:
        async with chromium(tmp_path_factory.mktemp("profile")) as tab:
            return await look(tab)

    return asyncio.run(browse())


@pytest.mark.parametrize(("width", "scheme"), [*product(WIDTHS, SCHEMES)])
def test_nothing_is_cut_and_every_text_is_legible(seen: dict[str, Any], width: int, scheme: str) -> None:
    (scrolls, wide), faint = seen[f"{width} {scheme}"]
    assert not scrolls and wide == [] and faint == []


def test_it_is_one_small_file_without_network_or_errors(page: Path, seen: dict[str, Any]) -> None:
    assert page.stat().st_size < 1_000_000
    methods = [method for method, _ in seen["events"]]
    assert not {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"} & set(methods)
    urls = {event["request"]["url"] for method, event in seen["events"] if method == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith("data:")} == {page.as_uri()}


def test_a_printed_report_has_at_most_six_pages(seen: dict[str, Any]) -> None:
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", seen["pdf"])) <= 6


def test_a_screen_reader_finds_landmarks_headings_names_and_links(seen: dict[str, Any]) -> None:
    assert seen["structure"] == {
        "broken": [],
        "twice": [],
        "skipped": [],
        "landmarks": [1, 1, 1, 1],
        "unnamed": [],
    }


def test_tables_sort_and_filter_and_marks_say_what_they_show(seen: dict[str, Any]) -> None:
    down, up, left = seen["sorted"]
    assert down == [sorted(group, reverse=True) for group in down] and up == [sorted(group) for group in up]
    assert len(left) == 1 and left[0].startswith("RBF SVM")
    said, hidden, tip, label = seen["hover"]
    assert "95% interval" in said and not hidden and said == tip == label


def test_without_its_script_the_page_has_the_same_content(page: Path) -> None:
    """The script adds buttons, inputs and a tip, and no text."""
    script = re.findall(r"<script>(.*?)</script>", page.read_text(), re.DOTALL)
    assert len(script) == 1 and not re.search(r"fetch|XMLHttp|import\b|innerHTML|eval", script[0])
    assert json.dumps(script[0]).count("\\n") < 70
