"""SQL over a store: it sees what was committed, with where it is from; and it can do nothing else."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import f1_score

from pipelines.results.accuracies import list_results
from pipelines.results.sql.columns import TABLES
from pipelines.results.sql.query import query
from pipelines.spec import RecipeError
from pipelines.store import InputRef, Layout, LogLine, Store, StoreDamaged, encode_lines, open_store
from ray_jobs.detection.tables import DETECTIONS
from ray_jobs.evaluation.label_issues import FILE, LABEL_ISSUES
from ray_jobs.evaluation.metrics import COMPUTED
from ray_jobs.evaluation.rows import CONFUSION, PREDICTIONS, PROBABILITIES, ROWS, write_parquet, write_table
from ray_jobs.ingest import _write_quarantine
from ray_jobs.sources.archives.entries import Unusable
from tests.conftest import Vitflow
from tests.support.paths import ROOT
from tests.support.records import committed, flip, row


def prediction(**changes: Any) -> dict[str, Any]:
    names = ("task", "protocol", "method", "labels_per_class", "draw")
    return (
        {name: row()[name] for name in names}
        | {"sample_id": "a", "label": 1, "prediction": 1, "correct": True}
        | dict.fromkeys(PROBABILITIES.names)
        | changes
    )


def put(store: Store, key: str, rows: list[Any], predictions: list[Any], job: str = "evaluate", **fields: Any) -> None:
    """Commit an artifact with these tables."""
    with committed(store, job, key, **fields) as folder:
        write_table(folder / "rows.parquet", rows, ROWS)
        write_table(folder / "predictions.parquet", predictions, PREDICTIONS)
        (folder / "secret.txt").write_text("secret")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(str(tmp_path_factory.mktemp("query") / 'it\'s a "store"'))
    # the order of keys, of time and of names differ, so that a row with another's origin would be seen
    for number, key in enumerate(("cc", "aa", "bb")):
        finished = f"2026-01-0{3 - number}T00:00:00+00:00"
        rows = [row(method=key, draw=draw, value=number / 4) for draw in range(number + 1)]
        put(store, key, rows, [prediction(method=key)], stage=f"stage_{key}", finished=finished)
    put(
        store,
        "dd",
        [row(method="dd", labels_per_class=None)],
        [prediction()],
        job="finetune",
        stage="tune",
        finished="2026-02-01T00:00:00+00:00",
        metrics={"loss": 1.5},
    )
    put(store, "ee", [row(method="copy")], [prediction()], job="report")
    with store.staging(Layout.files("evaluate", "ff", 1)) as staging:  # never committed
        write_table(staging.path / "rows.parquet", [row(method="ff")], ROWS)
    return store


def ask(store: Store, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    with query(store, sql, **options) as answer:
        return list(answer.rows)


def test_every_row_stands_beside_the_artifact_that_it_is_from(store: Store) -> None:
    found = ask(
        store,
        "SELECT method, artifact, job, stage, finished, value, count(*) FROM rows GROUP BY ALL ORDER BY 1",
    )
    assert found == [
        ("aa", "aa", "evaluate", "stage_aa", "2026-01-02 00:00:00", 0.25, 2),
        ("bb", "bb", "evaluate", "stage_bb", "2026-01-01 00:00:00", 0.5, 3),
        ("cc", "cc", "evaluate", "stage_cc", "2026-01-03 00:00:00", 0.0, 1),
        ("dd", "dd", "finetune", "tune", "2026-02-01 00:00:00", 0.5, 1),
    ]  # reports hold copies, and what is not committed is not there
    assert ask(store, "SELECT artifact FROM predictions WHERE method = artifact ORDER BY 1") == [
        ("aa",),
        ("bb",),
        ("cc",),
    ]


def test_a_result_is_one_number_whatever_else_has_its_method(tmp_path: Path) -> None:
    """Fine-tuned and probed, with 10 labels and with all, made by one stage and by another: a mean for each."""
    store = open_store(str(tmp_path))
    vit = {"method": "ViT, pretrained", "labels_per_class": 10}
    few_shot = [row(**vit, protocol="few-shot linear", draw=draw, value=0.9 + draw / 100) for draw in (0, 1)]
    put(store, "aa" * 32, few_shot, [prediction(**vit, protocol="few-shot linear")], stage="few_shot")
    tuned = [
        row(**vit | {"labels_per_class": labels}, protocol="fine-tuning", value=value)
        for labels, value in ((10, 0.5), (None, 0.6), (1, 0.4))
    ]
    put(store, "bb" * 32, tuned, [prediction(**vit, protocol="fine-tuning")], stage="tune", job="finetune")
    put(store, "cc" * 32, tuned[:1], [prediction(**vit, protocol="fine-tuning")], stage="tune", job="finetune")
    found = ask(store, "SELECT result, round(avg(value), 3), count(*) FROM rows GROUP BY result ORDER BY result")
    assert found == [
        ("digits, 1 label per class, fine-tuning: ViT, pretrained (tune bbbbbbbb)", 0.4, 1),
        ("digits, 10 labels per class, few-shot linear: ViT, pretrained (few_shot aaaaaaaa)", 0.905, 2),
        ("digits, 10 labels per class, fine-tuning: ViT, pretrained (tune bbbbbbbb)", 0.5, 1),
        ("digits, 10 labels per class, fine-tuning: ViT, pretrained (tune cccccccc)", 0.5, 1),
        ("digits, all labels, fine-tuning: ViT, pretrained (tune bbbbbbbb)", 0.6, 1),
    ]
    matched = ask(store, "SELECT DISTINCT result FROM rows SEMI JOIN predictions USING (result) ORDER BY 1")
    assert [name for (name,) in matched] == [name for name, *_ in found[1:4]]


def test_another_metric_is_another_result_and_pixels_are_beside_their_artifact(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    shared = row(method="ViT", labels_per_class=None, protocol="linear segmentation")
    pixels = [
        {"sample_id": "a", "label": label, "prediction": prediction, "pixels": count * 2**40}
        for label, prediction, count in (
            ("pet", "background", 1),
            ("pet", "pet", 3),
            ("background", "background", 5),
        )
    ]
    with committed(store, "segment", "aa", stage="seg") as folder:
        write_table(folder / "rows.parquet", [shared | {"metric": "mIoU"}, shared], ROWS)
        lines = [{name: (shared | each)[name] for name in CONFUSION.names} for each in pixels]
        table = pa.Table.from_pylist(lines, CONFUSION)
        write_parquet(folder / "confusion.parquet", table)
    name = "digits, all labels, linear segmentation: ViT (seg aa)"
    assert ask(store, "SELECT result FROM rows ORDER BY 1") == [(name,), (f"{name}, mIoU",)]
    assert ask(store, "SELECT DISTINCT result, job, sum(pixels) FROM confusion GROUP BY ALL") == [
        (name, "segment", 9 * 2**40)
    ]
    (documented,) = re.findall(r"```sql needs-hours\n(.*?)```", (ROOT / "docs/queries.md").read_text(), re.DOTALL)
    assert ask(store, documented) == [(name, 0, "background", 5 / 6), (name, 0, "pet", 3 / 4)]


def test_metrics_are_computed_from_predictions(tmp_path: Path) -> None:
    """As scikit-learn does, per draw; with all labels, whose number is null, too; not with several labels per image."""
    store, rng = open_store(str(tmp_path)), np.random.default_rng(0)
    labels = rng.integers(0, 4, 60)
    draws = [np.where(rng.random(60) < 0.6, labels, rng.integers(0, 5, 60)) for _ in range(2)]
    rows, predictions = [], []
    for draw, answers in enumerate(draws):
        for task in ("digits", "digits (ReaL)"):
            common = {"task": task, "labels_per_class": None, "draw": draw}
            rows.append(row(**common, value=float(np.mean(answers == labels)), num_images=60))
            predictions += [
                prediction(**common, sample_id=f"{image:02d}", label=int(label), prediction=int(answer))
                for image, (label, answer) in enumerate(zip(labels, answers, strict=True))
            ]
    put(store, "aa" * 32, [*rows, row(metric="mAP", labels_per_class=None)], predictions, stage="tune")
    sql = "SELECT draw, value, num_images FROM scores WHERE metric = 'macro-F1' ORDER BY draw"
    expected = [(draw, f1_score(labels, answers, average="macro"), 60) for draw, answers in enumerate(draws)]
    assert ask(store, sql) == [pytest.approx(line) for line in expected]
    assert ask(
        store, "SELECT metric, count(*), count(DISTINCT result) FROM scores GROUP BY ALL ORDER BY ALL"
    ) == sorted([("accuracy", 4, 2), ("mAP", 1, 1), *((metric.name, 2, 1) for metric in COMPUTED)])
    assert ask(store, "SELECT DISTINCT metric FROM accuracies") == [("accuracy",)]
    assert list_results(store, None, None, "macro-F1")[0]["mean"] == pytest.approx(
        np.mean([line[1] for line in expected])
    )


def test_a_training_has_its_log_its_trials_and_its_costs(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    line = {"time": "2026-01-01T00:00:00+00:00", "epoch": 0.5, "loss": 2.5, "learning_rate": 0.1}
    log = [
        LogLine.model_validate(line | {"step": 1, "fit": "trial-0-0"}),
        LogLine.model_validate(
            line | {"step": 2, "loss": None, "few_shot": {"5-shot dev": 0.25}, "measures": {"rank": 3.5}}
        ),
    ]
    searched = {"number": 3, "point": {"mixup": 0.2}, "pruned_at": 4}
    trial = {"learning_rate": 0.1, "accuracies": [0.5, 0.75], "losses": [1.0, 2.0]}
    sweeps = {
        "aa": {"trials": [trial, trial | {"learning_rate": 0.2, "steps": [3, 4]}], "chosen": 0.2},
        "bb": {"trials": [trial | searched], "chosen": 0.1, "chosen_trial": 3},
    }
    speed = {"images": 32, "dtype": "float32", "images_per_second": 10.0, "peak_bytes": None}
    cost = {
        "resolution": 8,
        "parameters": 5,
        "gflops": 0.5,
        "device": "a CPU",
        "threads": 1,
        "forward": speed,
    }
    for key, sweep in sweeps.items():
        with committed(store, "finetune", key, stage="tune") as folder:
            (folder / "log.jsonl").write_bytes(encode_lines(log))
            (folder / "sweep.json").write_text(json.dumps(sweep | {"selected_on": "dev"}))
            (folder / "cost.json").write_text(json.dumps(cost | {"training": None}))
    assert ask(store, "SELECT fit, step, loss, few_shot->>'5-shot dev' FROM training_log WHERE artifact = 'aa'") == [
        ("trial-0-0", 1, 2.5, None),
        (None, 2, None, "0.25"),
    ]
    assert ask(store, "SELECT DISTINCT measures->>'rank' FROM training_log WHERE step = 2") == [("3.5",)]
    assert ask(store, "SELECT count(*) FROM training_log WHERE few_shot IS NULL AND stage = 'tune'") == [(2,)]
    assert ask(
        store,
        "SELECT trial, fold, accuracy, best_step, chosen FROM trials WHERE artifact = 'aa' ORDER BY ALL",
    ) == [(0, 0, 0.5, None, False), (0, 1, 0.75, None, False), (1, 0, 0.5, 3, True), (1, 1, 0.75, 4, True)]
    sql = "SELECT trial, fold, loss, point->>'mixup', pruned_at, chosen FROM trials WHERE point IS NOT NULL ORDER BY 2"
    assert ask(store, sql) == [(3, 0, 1.0, "0.2", 4, True), (3, 1, 2.0, "0.2", 4, True)]
    assert ask(store, "SELECT pass, images_per_second, gflops, peak_bytes FROM costs WHERE artifact = 'aa'") == [
        ("forward", 10.0, 0.5, None)
    ]


def test_artifacts_and_runs(store: Store) -> None:
    found = ask(
        store,
        "SELECT artifact, kind, (metrics->>'loss')::DOUBLE FROM artifacts WHERE job <> 'evaluate' ORDER BY 1",
    )
    assert found == [("dd", "model", 1.5), ("ee", "report", None)]
    assert ask(store, "SELECT count(*) FROM runs") == [(0,)]


def test_a_column_that_no_file_has_is_null(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with committed(store, "evaluate", "old") as folder:
        table = pa.Table.from_pylist([prediction()], PREDICTIONS).drop_columns(["probability"])
        write_parquet(folder / "predictions.parquet", table)
    assert ask(store, "SELECT artifact, probability FROM predictions") == [("old", None)]


def test_files_of_any_version_are_read_as_their_union(tmp_path: Path) -> None:
    """With columns in another order, of another width, missing or unknown: as DuckDB unites them from all footers."""
    store, paths, rng = open_store(str(tmp_path)), list[str](), np.random.default_rng(0)
    for number in range(12):
        kinds = {field.name: field.type for field in PREDICTIONS} | {"unknown": pa.int32()}
        if number % 2:
            wider = {pa.int32(): pa.int64(), pa.float32(): pa.float64(), pa.string(): pa.large_string()}
            kinds = {name: wider.get(kind, kind) for name, kind in kinds.items()}
        missing = set(rng.choice([*PROBABILITIES.names, "unknown"], size=number % 5))
        names = [name for name in rng.permutation([*kinds]) if name not in missing]
        top = {"top5": [number, 1], "top5_probabilities": [0.5, 0.25], "nll": number / 4, "probability": 0.5}
        lines = [prediction(draw=draw, unknown=1, **top) for draw in range(number % 3 + 1)]
        with committed(store, "evaluate", f"k{number}") as folder:
            schema = pa.schema([(name, kinds[name]) for name in names])
            pq.write_table(pa.Table.from_pylist(lines, schema), folder / "predictions.parquet")
        paths.append(str(tmp_path / Layout.files("evaluate", f"k{number}", 1) / "predictions.parquet"))
    columns = ", ".join(f'"{name}"' for name in PREDICTIONS.names if not name.startswith("top5"))
    columns += ", to_json(top5), to_json(top5_probabilities)"
    united = f"FROM read_parquet($paths, union_by_name = true) SELECT {columns} ORDER BY ALL"
    expected = duckdb.execute(united, {"paths": paths}).fetchall()
    assert len(expected) == 24
    assert ask(store, f"FROM predictions SELECT {columns} ORDER BY ALL") == expected


@pytest.mark.parametrize(("name", "schema"), [("rows", ROWS), ("predictions", PREDICTIONS), ("confusion", CONFUSION)])
def test_documented_columns_are_those_of_the_files(store: Store, name: str, schema: Any) -> None:
    documented = [(column.name, column.type) for column in TABLES[name] if not column.name.endswith("_name")]
    types = {"string": "VARCHAR", "int32": "INTEGER", "double": "DOUBLE", "float": "FLOAT", "bool": "BOOLEAN"}
    types |= {"int64": "BIGINT", "list<element: int32>": "INTEGER[]", "list<element: float>": "FLOAT[]"}
    assert documented[7:] == [(field.name, types[str(field.type)]) for field in schema]
    for table in TABLES:
        shown = [row[:2] for row in ask(store, f"DESCRIBE {table}")]
        assert shown == [(column.name, column.type) for column in TABLES[table]]


def test_an_empty_store_has_empty_tables(tmp_path: Path) -> None:
    empty = open_store(str(tmp_path))
    assert [ask(empty, f"SELECT count(*) FROM {table}") for table in TABLES] == [[(0,)]] * len(TABLES)
    assert ask(empty, "SELECT value FROM rows") == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM rows ORDER BY value; -- comment",
        "WITH best AS (SELECT * FROM rows) SELECT count(*) FROM best JOIN ROWS USING (artifact)",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t WHERE n < 9) SELECT * FROM t",
        "FROM rows SELECT median(value)",
        "SUMMARIZE rows",
        "PIVOT rows ON method IN ('aa', 'bb') USING avg(value)",
        "SELECT * FROM range(3) r(i), unnest([1, 2])",
        "SELECT (SELECT count(*) FROM predictions), settings->>'x' FROM main.rows",
    ],
)
def test_queries_that_only_read_are_answered(store: Store, sql: str) -> None:
    assert ask(store, sql)


def snapshot(*folders: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


# OUT is a new file, OLD a committed table: both as a path in the SQL
HOSTILE = [
    "COPY rows TO 'OUT'",
    # DuckDB calls these SELECT
    "WITH a AS (COPY rows TO 'OUT') SELECT * FROM a",
    "WITH a AS (COPY (SELECT 1) TO 'OLD' (USE_TMP_FILE false)) SELECT * FROM a",
    "WITH a AS (COPY (SELECT 1) TO (getvariable('paths')[1]) (USE_TMP_FILE false)) SELECT * FROM rows, a",
    "SELECT (WITH a AS (COPY (SELECT 1) TO 'OLD' (USE_TMP_FILE false)) SELECT count(*) FROM a)",
    "SELECT * FROM (WITH a AS (COPY (SELECT 1) TO 'OLD' (USE_TMP_FILE false)) SELECT * FROM a) UNION SELECT 1",
    "SELECT * FROM query('WITH a AS (COPY (SELECT 1) TO ''OUT'') SELECT * FROM a')",
    "WITH a AS (INSERT INTO runs SELECT * FROM runs RETURNING *) SELECT * FROM a",
    "WITH a AS (DELETE FROM artifacts RETURNING *) SELECT * FROM a",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM READ_TEXT('/etc/passwd')",
    "SELECT * FROM main.read_blob('/proc/self/environ')",
    "SELECT * FROM read_parquet('OLD')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM 'OLD'",
    'WITH "OLD" AS (SELECT 1) SELECT * FROM main."OLD"',
    "SELECT * FROM glob('/*')",
    "SELECT * FROM query_table('rows')",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM hidden_variable",
    "ATTACH 'OUT' AS x",
    "INSTALL httpfs",
    "LOAD httpfs",
    "PRAGMA database_list",
    "SET threads = 1",
    "RESET lock_configuration",
    "EXPORT DATABASE 'OUT'",
    "IMPORT DATABASE 'OUT'",
    "CREATE TABLE x AS SELECT 1",
    "CREATE SECRET (TYPE s3, KEY_ID 'a')",
    "DROP VIEW rows",
    "CALL pragma_version()",
    "EXPLAIN ANALYZE SELECT 1",
    "SELECT getenv('HOME')",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY rows TO 'OUT'",
    "",
    "-- nothing",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT " + "[" * 900 + "]" * 900,
    "SELEC 1",
]


@pytest.mark.parametrize("sql", HOSTILE)
def test_sql_that_does_anything_else_is_refused_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(store.uri)
    old = next(root.glob("artifacts/evaluate/aa/attempts/1/files/rows.parquet"))
    before = snapshot(root)
    hidden_variable = [(1,)]
    path = str(old).replace("'", "''").replace('"', '""' if '"OLD"' in sql else '"')
    with pytest.raises(RecipeError) as error:
        ask(store, sql.replace("OUT", str(tmp_path / "out")).replace("OLD", path))
    assert "secret" not in str(error.value)
    assert hidden_variable
    assert snapshot(root, tmp_path) == before


def test_no_file_can_be_reached_from_the_database_itself(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the check of the syntax tree wrong, the database would still refuse all files but the tables' own."""
    monkeypatch.setattr("pipelines.results.sql.query._named_tables", lambda connection, sql: {"rows"})
    secret = next(Path(store.uri).glob("artifacts/evaluate/aa/attempts/1/files/secret.txt"))
    for sql in (
        f"SELECT * FROM read_text('{str(secret).replace(chr(39), chr(39) * 2)}')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        f"WITH a AS (COPY (SELECT 1) TO '{tmp_path}/out' (USE_TMP_FILE false)) SELECT * FROM a",
    ):
        with pytest.raises(RecipeError, match="reads or writes files"):
            ask(store, sql)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sql",
    [
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT * FROM t",
        "SELECT count(*) FROM range(100000000) a, range(100000000) b",
    ],
    ids=["recursive", "product"],
)
def test_what_takes_too_long_is_stopped(store: Store, sql: str) -> None:
    with pytest.raises(RecipeError, match=r"stopped after 0\.5 s"):
        ask(store, sql, seconds=0.5)


@pytest.mark.slow
def test_planning_that_takes_too_long_ends_the_process(store: Store) -> None:
    """DuckDB cannot be interrupted while it plans."""
    sql = "SELECT count(*) FROM " + ", ".join(f"rows r{number}" for number in range(600))
    code = "import sys; from pipelines.commands import queries; queries.CPU_SECONDS = 1"
    code += "; queries.report_query(*sys.argv[1:], tables=False, as_csv=False, as_json=False)"
    done = subprocess.run([sys.executable, "-c", code, sql, store.uri], capture_output=True)
    assert done.returncode == -signal.SIGXCPU


def test_sql_that_is_long_to_plan_is_refused(store: Store) -> None:
    with pytest.raises(RecipeError, match=r"has 299,993 characters; at most 20,000"):
        ask(store, " UNION ".join(["SELECT 1"] * 20_000))


def test_what_takes_too_much_memory_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.results.sql.query.MEMORY", "100MiB")
    with pytest.raises(RecipeError, match="more than 100MiB of memory"):
        ask(store, "SELECT list(i) FROM range(100000000) t(i)")


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        ("SELECT nope FROM rows", "LINE 1: SELECT nope FROM rows\n               ^"),
        ("SELECT\n  'x'::INTEGER", "LINE 2:   'x'::INTEGER\n"),
        ("\n" * 9 + "SELECT nope", "LINE 10: SELECT nope"),
        ("\n" * 8 + "SELECT nope", "LINE 9:  SELECT nope\n                ^"),
    ],
)
def test_an_error_shows_the_line_as_it_was_written(store: Store, sql: str, line: str) -> None:
    with pytest.raises(RecipeError) as error:
        ask(store, sql)
    assert line in str(error.value)
    assert "CREATE" not in str(error.value)


def test_a_file_that_has_changed_is_named_and_not_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    put(store, "aa", [row()], [prediction()])
    flip(tmp_path / "artifacts/evaluate/aa/attempts/1/files/rows.parquet")
    assert ask(store, "SELECT count(*) FROM predictions") == [(1,)]
    with pytest.raises(StoreDamaged, match=r"aa/attempts/1/files/rows.parquet is damaged: it has sha256"):
        ask(store, "SELECT * FROM rows")


MIXED = """SELECT 'a "b", c' AS text, NULL AS nothing, 'nan'::DOUBLE AS nan, [1.5, 2] AS list,
    {'x': 'inf'::DOUBLE} AS s,
    DATE '2020-01-02' AS day, TIMESTAMPTZ '2020-01-01 00:00:00+00' AS t, 1.25 AS d, 1 AS text, 2::HUGEINT ** 2 AS h,
    1e20::DECIMAL(38) AS large, 0.00001 AS small, -0.5::DECIMAL(38, 38) AS below,
    {'in': [12345678901234567890.125::DECIMAL(38, 3)]} AS nested"""


def test_json_csv_and_the_table(vitflow_here: Vitflow, store: Store) -> None:
    def run(*arguments: str, check: int = 0) -> Any:
        return vitflow_here("report", "query", *arguments, "--store", store.uri, check=check)

    printed = run(MIXED, "--json").stdout
    assert '"nested": {"in":[12345678901234567890.125]}' in printed
    (found,) = json.loads(printed)
    del found["nested"]
    assert found.pop("t").startswith(("2020-01-01", "2019-12-31"))
    assert found == {
        "text": 'a "b", c',
        "nothing": None,
        "nan": None,
        "list": [1.5, 2.0],
        "s": {"x": None},
        "day": "2020-01-02",
        "d": 1.25,
        "text_1": 1,
        "h": 4,
        "large": 10**20,
        "small": 0.00001,
        "below": -0.5,
    }
    header, line = csv.reader(io.StringIO(run(MIXED, "--csv").stdout))
    texts = dict(zip(header, line, strict=True))
    assert (texts["text"], texts["large"], texts["small"]) == ('a "b", c', "1" + "0" * 20, "0.00001")
    assert json.loads(run("SELECT * FROM rows WHERE false", "--json").stdout) == []
    table = run("SELECT range AS n, NULL AS x, '[red]' AS y FROM range(1003)")
    assert "3 more rows" in table.stderr
    assert "NULL" in table.stdout and "[red]" in table.stdout
    refused = run("SELECT 1; SELECT 2", check=2)
    assert refused.stderr.startswith("error: the SQL is SELECT and SELECT") and not refused.stdout
    assert "Traceback" not in run(check=2).stderr


def test_the_list_of_an_audit_is_a_table(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert ask(store, "SELECT * FROM label_issues") == []
    row = (1, "a1", "cat/1.png", "train", "cat", "dog", 0.25, 0.75)
    with committed(store, "audit", "aa", stage="audit") as folder:
        table = pa.Table.from_pylist([dict(zip(LABEL_ISSUES.names, row, strict=True))], LABEL_ISSUES)
        write_parquet(folder / FILE, table)
    names = ", ".join(LABEL_ISSUES.names)
    assert ask(store, f"SELECT artifact, job, {names} FROM label_issues ORDER BY rank") == [("aa", "audit", *row)]


def test_quarantined_images_are_a_table(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with committed(store, "ingest", "ii", stage="images") as folder:
        unusable = [Unusable("b.jpg", "cut off", "b.jpg"), Unusable("a.jpg", "empty")]
        _write_quarantine(folder / "quarantine.parquet", unusable)
    assert ask(store, "SELECT stage, key, reason, file FROM quarantine ORDER BY key") == [
        ("images", "a.jpg", "empty", ""),
        ("images", "b.jpg", "cut off", "b.jpg"),
    ]


def test_numbers_of_classes_have_the_names_of_their_own_data_set(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    columns = {"sample_id": pa.string(), "key": pa.string(), "split": pa.string(), "label": pa.int32()}
    index = pa.schema([*columns.items(), ("labels", pa.list_(pa.int32()))])
    data = {
        "aa": (["cat", "dog"], [(1, None), (0, None)]),
        "bb": (["3", "0"], [(0, [0, 1]), (-1, [1, 0]), (-1, [])]),
        "cc": ([], [(0, None)]),
    }
    for key, (names, labels) in data.items():
        with committed(store, "ingest", key) as folder:
            (folder / "dataset.json").write_text(json.dumps({"class_names": names}))
            rows = [("s", f"{key}{number}", "test", *label) for number, label in enumerate(labels)]
            write_table(folder / "index.parquet", [dict(zip(index.names, each, strict=True)) for each in rows], index)
        reference = InputRef(job="ingest", key=key, content_digest="d", manifest_sha256="m")
        put(store, f"e{key}", [], [prediction(label=1, prediction=0)], inputs={"data": [reference]})
    put(store, "removed", [], [prediction()])
    with committed(store, "predict", "dd") as folder:  # it has names
        named = pa.schema([*(columns | {"label": pa.string()}).items(), ("prediction", pa.string())])
        (folder / "images").mkdir()
        row = {"sample_id": "s", "key": "dd0", "split": "test", "label": "1", "prediction": "0"}
        write_table(folder / "images/0.parquet", [row], named)
    assert ask(store, "SELECT key, label FROM images ORDER BY key") == [
        ("aa0", "dog"),
        ("aa1", "cat"),
        ("bb0", "3"),
        ("bb1", "0; 3"),
        ("bb2", None),
        ("cc0", None),
        ("dd0", "1"),
    ]
    sql = "SELECT artifact, label_name, prediction_name FROM predictions ORDER BY artifact"
    assert ask(store, sql)[:2] == [("eaa", "dog", "cat"), ("ebb", "0", "3")]
    assert ask(store, sql)[3:] == [("removed", None, None)]


def test_boxes_and_detections_have_the_names_of_their_classes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with committed(store, "ingest", "aa") as folder:
        (folder / "dataset.json").write_text(json.dumps({"class_names": ["car", "bus"]}))
    reference = InputRef(job="ingest", key="aa", content_digest="d", manifest_sha256="m")
    place = {"x1": 1.0, "y1": 2.0, "x2": 3.0, "y2": 4.5}
    row = {"task": "road", "protocol": "detection", "method": "ViT", "draw": 0, "sample_id": "s"}
    row["boxes"] = [place | {"label": 0, "ignored": False}, place | {"label": -1, "ignored": True}]
    row["found"] = [place | {"score": 0.5, "label": 1}]
    with committed(store, "finetune", "ee", inputs={"data": [reference]}) as folder:
        write_table(folder / "detections.parquet", [row], DETECTIONS)
    sql = "SELECT b.label, b.ignored, b.y2 FROM (SELECT unnest(boxes) AS b FROM detections)"
    assert ask(store, sql) == [("car", False, 4.5), (None, True, 4.5)]
    assert ask(store, "SELECT sample_id, found[1].label, found[1].score FROM detections") == [("s", "bus", 0.5)]
