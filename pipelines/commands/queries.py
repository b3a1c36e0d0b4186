"""The commands report list, query, compare and show: reports, and the measurements behind them."""

from __future__ import annotations

import json
import math
import os
import resource
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from pipelines.commands.common import (
    ARTIFACT,
    DEFAULT_STORE,
    Commands,
    JsonOption,
    StoreOption,
    console,
    errors,
    open_,
    plain,
    print_csv,
    print_json,
    print_rows,
    say,
    store_option,
)
from pipelines.results.accuracies import (
    BEST_COLUMNS,
    MOST_LINES,
    RESULT_COLUMNS,
    accuracy_table,
    answering,
    list_results,
    metrics_table,
    verdict_lines,
    vtab_table,
)
from pipelines.results.listing import COLUMNS, list_kind
from pipelines.results.lookup import find_artifact
from pipelines.results.sql.columns import described_tables
from pipelines.results.sql.query import query
from pipelines.spec import RecipeError, quantity
from pipelines.store import Manifest, Store, local_files
from pipelines.terminal import write

if TYPE_CHECKING:
    from pipelines.results.sql.query import Answer

MOST_ROWS = 1000  # in a table on the terminal
MEMORY_BYTES = 3 * 2**30
CPU_SECONDS = 90  # of each core; then SIGXCPU ends the process
_NUMBERS = {"FLOAT", "DOUBLE", "INTEGER", "BIGINT", "HUGEINT"}
_NESTED = ("STRUCT", "MAP", "UNION")

app = Commands(name="report", help="Show reports, and query every number behind them.")


@app.command("list")
def report_list(
    store: StoreOption = DEFAULT_STORE,
    task: Annotated[str | None, typer.Option(help="only results on this dataset")] = None,
    stage: Annotated[str | None, typer.Option(help="only results of stages with this name")] = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="only the best result per task, protocol and number of labels"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the reports in the store; with --task, --stage or --best, list results.

    A result is the mean on test over the draws of one artifact, method and number of labels. Lists start with the
    oldest. The best result has the highest mean; of equal ones the newest is listed. With --best, `judged` is the
    number of results on this test set in the same setting, and `optimism` an upper bound of how much the best of so
    many equally good results is expected to exceed its true accuracy (accuracy only).
    """
    opened = open_(store, create=False)
    if task is None and stage is None and best is None:
        rows, columns = list_kind(opened, "reports"), COLUMNS["reports"]
    else:
        rows = list_results(opened, task, stage, best)
        columns = RESULT_COLUMNS if best is None else BEST_COLUMNS
    print_rows(rows, columns, as_json)
    if best is not None and not as_json:
        say(
            "judged: results on this test set in the same setting, of which this is the best; optimism: at most so much"
            " of its accuracy is expected to be luck of this choice"
        )


@app.command("query")
def report_query(
    sql: Annotated[str | None, typer.Argument(metavar="SQL", help="one SELECT statement in DuckDB's dialect")] = None,
    store: StoreOption = DEFAULT_STORE,
    tables: Annotated[bool, typer.Option("--tables", help="list the tables and their columns")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header")] = False,
    as_json: JsonOption = False,
) -> None:
    """Query every committed result in the store with SQL.

    The SQL can read only the tables that --tables lists, for at most one minute and with 2 GiB of memory. --json
    prints a list of objects; NULL, NaN and infinity become null.
    """
    if (sql is None) != tables or (as_csv and as_json):
        raise RecipeError("give either SQL or --tables, and at most one of --csv and --json")
    if sql is None:
        listed = described_tables()
        if as_csv:
            print_csv(tuple(listed[0]), (tuple(row.values()) for row in listed))
        else:
            print_rows(listed, tuple(listed[0]), as_json)
        return
    _limit_process()
    with query(open_(store, create=False), sql) as answer:
        if as_csv:
            print_csv(answer.columns, answer.rows)
        elif as_json:
            _print_objects(answer)
        else:
            _print_answer(answer)


def _limit_process() -> None:
    """Limit this process, because DuckDB does not check its limits while it plans and in some allocations."""
    seconds = int(CPU_SECONDS * (os.cpu_count() or 1))
    for name, most in ((resource.RLIMIT_DATA, MEMORY_BYTES), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(name)
        resource.setrlimit(name, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _print_objects(answer: Answer) -> None:
    """Print a JSON list of objects, one per line."""
    names = [_dump(name) for name in answer.columns]
    before = "[\n"
    for row in answer.rows:
        pairs = zip(names, map(_as_json, row, answer.types), strict=True)
        write(before + "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}", end="")
        before = ",\n"
    write("[]" if before == "[\n" else "\n]")


def _as_json(value: Any, kind: str) -> str:
    if isinstance(value, float):
        return _dump(value if math.isfinite(value) else None)
    if value is not None and _is_decimal(kind):
        return f"{Decimal(value):f}"  # as a float it would lose digits
    if isinstance(value, str) and (kind == "JSON" or kind.endswith("]") or kind.startswith(_NESTED)):
        constants: list[str] = []  # NaN and infinity, which JSON does not have
        parsed = json.loads(value, parse_constant=constants.append)
        # unchanged if possible, because decimals would lose digits
        return _dump(parsed) if constants or "\n" in value else value
    return _dump(value)


def _is_decimal(kind: str) -> bool:
    return kind.startswith("DECIMAL") and kind.endswith(")")  # not a list of them


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _print_answer(answer: Answer) -> None:
    """Print a table of at most MOST_ROWS rows."""
    table = Table(box=None, pad_edge=False)
    for name, kind in zip(answer.columns, answer.types, strict=True):
        table.add_column(
            Text(name), overflow="fold", justify="right" if kind in _NUMBERS or _is_decimal(kind) else "left"
        )
    for row in islice(answer.rows, MOST_ROWS):
        table.add_row(*(Text("NULL", "dim") if value is None else Text(str(value)) for value in row))
    console.print(table)
    more = sum(1 for _ in answer.rows)
    if more:
        errors.print(f"{more:,} more rows are not shown; --csv and --json print all")


@app.command("compare")
def report_compare(
    a: Annotated[str, typer.Argument(help=ARTIFACT)],
    b: Annotated[str, typer.Argument(help="the same, for the other result")],
    store: StoreOption = DEFAULT_STORE,
    metric: Annotated[
        str,
        typer.Option(
            help="what to compare: a metric computed from predictions, or accuracy; for results without one, that means"
            " mAP (several labels per image), AP (boxes) or mIoU (masks)"
        ),
    ] = "accuracy",
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--gate",
            metavar="MAX_LOSS",
            min=0,
            max=1,
            help="exit code 0 only if B may replace A: the lower end of the paired 95% interval of each B - A is above"
            " -MAX_LOSS, such as 0.005; else 1",
        ),
    ] = None,
    as_markdown: Annotated[
        bool,
        typer.Option("--markdown", help="for a pull request: a table, the images that flipped, the classes that lost"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the test accuracies of two reports, evaluations, fine-tuned models or runs.

    Accuracies with the same task, protocol, method and number of labels are shown side by side, with 95% intervals
    over draws and test images. If one side has a single method, it is also compared with the other side's methods on
    the same images. The difference is B - A. It is paired, on the images that both have, if they were scored with the
    same draws of labels; otherwise it is computed as for two independent measurements.
    """
    from pipelines.results import compare, gate  # with numpy and scipy

    if as_json and as_markdown:
        raise RecipeError("--json and --markdown cannot be combined; use one of them")
    opened = open_(store, create=False)
    compared = compare.match(opened, a, b, metric)
    opinion = None if max_loss is None else gate.gate(compared, max_loss)
    lines = opinion.lines if opinion else []
    if as_json:
        print_json(compare.as_json(compared))
    elif as_markdown:
        write("\n".join([*gate.markdown(opened, compared), *(f"\n{line}" for line in lines)]))
    else:
        console.print(compare.comparison_table(compare.as_json(compared)))
        for line in lines:
            say(line)
    if opinion is not None and not opinion.is_open:
        raise typer.Exit(1)


@app.command("show")
def report_show(
    report: Annotated[
        str | None, typer.Argument(help="a report: its key, a unique key prefix, or RUN; default: the newest")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Print a report's verdict and its table of accuracies."""
    opened = open_(store, create=False)
    manifest = find_artifact(opened, report, "report")
    if as_json:
        print_json(json.loads((local_files(opened, manifest) / "report.json").read_text()))
    else:
        show_report(opened, manifest)


def show_report(store: Store, manifest: Manifest, is_brief: bool = False) -> None:
    """Print a report's tables (VTAB's too), its verdict, and the address of its page.

    A brief report has only the accuracies or mAP that its answer is about, or VTAB's, and the answer. More than
    MOST_LINES accuracies are only on the page.
    """
    folder = local_files(store, manifest)
    report = json.loads((folder / "report.json").read_text())
    scores = [score for score in report.get("vtab", []) if score["trained"]]
    everything = report["accuracies"]
    whole = everything if len(everything) <= MOST_LINES else []
    lines = whole if not is_brief else [] if scores else answering(report)
    if lines:
        console.print(accuracy_table(report | {"accuracies": lines}))
    compared = {verdict.get("metric") for verdict in report["verdicts"]}
    metrics = report.get("other_metrics", [])
    if metrics := [line for line in metrics if not is_brief or line["metric"] in compared]:
        console.print(metrics_table(metrics))
    for score in scores:
        console.print(vtab_table(score))
    for line in verdict_lines(report, is_brief):
        console.print(plain(line))
    if rest := len(everything) - len(lines):
        command = f"vitflow report show {manifest.key[:12]}{store_option(store.uri)}"
        more = quantity(rest, "more accuracy", "more accuracies")
        say(f"{more}: {command}" if whole else f"{more} on the report's page")
    if (groups := folder / "groups.csv").is_file():
        console.print(f"the group of each image: {plain(groups.as_uri())}", soft_wrap=True)
    console.print(f"report: [bold]{plain((folder / 'report.html').as_uri())}[/]", soft_wrap=True)
