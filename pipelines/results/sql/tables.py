"""The tables of a store in DuckDB, from its manifests and Parquet files.

DuckDB reads the Parquet files of the requested tables in place (for S3, in the checked local cache).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pipelines.engine.runs import all_runs
from pipelines.results.sql.columns import OF_FILE, ORIGIN, RESULT, TABLES, Column
from pipelines.spec.vtab import GROUPS
from pipelines.store import LOG, Manifest, Store, all_manifests, finished_log, local_file

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_AT_ONCE = 500  # records written to a table; DuckDB takes 100 kB each to parse them
Groups = dict[str, str | None]  # of VTAB, by artifact
Records = Iterator[dict[str, Any]]

# Rows with the same result are its draws or test images. The method alone does not identify a result, because several
# protocols have methods of the same name.
_RESULT_SQL = """concat(
    task, ', ',
    CASE WHEN labels_per_class IS NULL THEN 'all labels' WHEN labels_per_class = 1 THEN '1 label per class'
         ELSE labels_per_class || ' labels per class' END,
    ', ', protocol, ': ', method, ' (', stage, ' ', artifact[:8], ')')"""
# The tables that are Parquet files, and those that are read from other files.
_FILES = ("rows", "predictions", "confusion", "detections", "label_issues", "quarantine", "images")
_JSON = {"training_log": LOG, "trials": "sweep.json", "costs": "cost.json"}
_OF_RESULTS = {"predictions", "detections"}  # whose classes their data set names
_NOT_READ: dict[str, Any] = {"metrics": {}, "code": {}, "environment": {}}
# The views, each with the tables that it reads.
_VIEWS = {"accuracies": {"rows"}, "scores": {"rows", "predictions", "accuracies"}}


def define_tables(connection: DuckDBPyConnection, store: Store, named: set[str]) -> list[str]:
    """Define TABLES, empty unless named; return the paths of their files, which the connection must be able to read."""
    named = named.union(*(_VIEWS.get(name, ()) for name in named))
    manifests = [*_needed(store, named)] if named - {"runs", "artifacts"} else []
    groups = _vtab_groups(manifests)
    paths: list[str] = []
    for name in (name for name in TABLES if name not in named & _VIEWS.keys()):
        files = _files(store, manifests, name) if name in named and name in _FILES else {}
        if files:
            places = _set_class_names(connection, store, name, manifests, [*files.values()])
            _define_view(connection, name, files, places, groups)
            paths += files
        else:
            read = _RECORDS.get(name) if name in named else None
            records = iter(()) if read is None else read(store, manifests, groups)
            _define_table(connection, name, TABLES[name], records)
    if "accuracies" in named:  # a view opens all files of its table
        connection.execute("CREATE VIEW accuracies AS SELECT * FROM rows WHERE metric = 'accuracy'")
    if "scores" in named:
        _define_scores(connection)
    return paths


def _define_scores(connection: DuckDBPyConnection) -> None:
    """Define the view of all metrics, including metrics that are computed from predictions."""
    from ray_jobs.evaluation.metrics import COMPUTED, of_lists

    parts = ["SELECT * FROM rows"]
    for number, metric in enumerate(COMPUTED):
        types = ["INTEGER[]", "INTEGER[]"]
        connection.create_function(f"metric_{number}", of_lists(metric), types, "DOUBLE", type="arrow")  # type: ignore[call-overload]
        parts.append(
            f"""SELECT accuracies.* REPLACE (concat(result, ', {metric.name}') AS result,
            '{metric.name}' AS metric, metric_{number}(labels, predictions) AS value)
            FROM accuracies JOIN predicted USING (artifact, result, draw)"""  # noqa: S608 (names of ours)
        )
    # With ReaL's labels, an image has several.
    predicted = """SELECT artifact, result, draw, list(label) AS labels, list(prediction) AS predictions
        FROM predictions WHERE NOT ends_with(task, ' (ReaL)') GROUP BY ALL"""
    connection.execute(f"CREATE VIEW scores AS WITH predicted AS ({predicted}) {' UNION ALL '.join(parts)}")


def _needed(store: Store, named: set[str]) -> Iterator[Manifest]:
    """Yield all data sets, and the artifacts with files of these tables, with only what the tables read of them."""
    for manifest in all_manifests(store):
        is_data = manifest.kind == "dataset"
        if is_data or any(_is_of(name, file.path) for file in manifest.files for name in named):
            source = {"source": manifest.config.get("source")}
            yield manifest.model_copy(update=_NOT_READ | {"config": source})


def _vtab_groups(manifests: list[Manifest]) -> Groups:
    """Return, for each artifact whose `data` is one of VTAB's tasks, the group of that task."""
    sources = {manifest.key: manifest.config.get("source") for manifest in manifests}
    found: Groups = {}
    for manifest in manifests:
        source = sources.get(data[0].key) if (data := manifest.inputs.get("data")) else None
        # Another version may have written it differently.
        if isinstance(source, dict) and source.get("kind") == "vtab" and source.get("task") is not None:
            found[manifest.key] = GROUPS.get(source["task"])
    return found


def _files(store: Store, manifests: list[Manifest], name: str) -> dict[str, Manifest]:
    """Return {local path: manifest} of a table's files, except the copies in reports."""
    entries, origins = [], []
    for manifest in manifests:
        folder = manifest.folder.removeprefix("artifacts/")
        for file in manifest.files:
            if _is_of(name, file.path) and manifest.kind != "report":
                entries.append(file.model_copy(update={"path": f"{folder}/{file.path}"}))
                origins.append(manifest)
    root = store.local("artifacts", entries)
    return {f"{root}/{entry.path}": manifest for entry, manifest in zip(entries, origins, strict=True)}


def _is_of(table: str, path: str) -> bool:
    """Return whether a file of an artifact contains rows of a table."""
    is_image = table == "images" and path.startswith(("index.parquet", "images/"))
    return is_image or path == _JSON.get(table, f"{table}.parquet")


def _define_view(
    connection: DuckDBPyConnection,
    name: str,
    files: dict[str, Manifest],
    places: list[int | None],
    groups: Groups,
) -> None:
    """Define a view of Parquet files, joined with what is known of each file."""
    each_file = enumerate(zip(files.values(), places, strict=True))
    known = (_origin(made, groups) | {"number": number, "place": place} for number, (made, place) in each_file)
    _define_table(connection, f"{name}_files", (*ORIGIN, *OF_FILE), known)
    connection.execute(f"SET VARIABLE {name}_paths = $paths", {"paths": list(files)})
    origin = [f'of_file."{column.name}" AS "{column.name}"' for column in ORIGIN]
    has_result = RESULT in TABLES[name]
    written = TABLES[name][len(ORIGIN) + has_result :]
    columns = [f'{_value(name, column)} AS "{column.name}"' for column in written]
    metric = "CASE WHEN metric = 'accuracy' THEN '' ELSE ', ' || metric END" if name == "rows" else "''"
    result = [f"concat({_RESULT_SQL}, {metric}) AS {RESULT.name}"] if has_result else []
    shown = ", ".join([*origin, *result, *columns])
    # With the columns given, DuckDB opens each file once, and a column that a file lacks is NULL.
    of_files = [(column.name, column.type.replace('"label" VARCHAR', '"label" INTEGER')) for column in written]
    of_files += [("labels", "INTEGER[]")] if name == "images" else []
    given = ", ".join(f"'{of}': {{name: '{of}', type: '{type_}', default_value: NULL}}" for of, type_ in of_files)
    files_read = f"read_parquet(getvariable('{name}_paths'), schema = MAP {{{given}}})"
    # A subquery, because DuckDB takes the files for one row long and would build the hash table of a join from them.
    of_file = f"(SELECT known FROM {name}_files AS known WHERE number = file_index) AS of_file"  # noqa: S608 (names of ours)
    joined = f"(SELECT *, {of_file} FROM {files_read})"  # noqa: S608
    connection.execute(f"CREATE VIEW {name} AS SELECT {shown} FROM {joined}")  # noqa: S608


def _set_class_names(
    connection: DuckDBPyConnection, store: Store, name: str, manifests: list[Manifest], made: list[Manifest]
) -> list[int | None]:
    """Set a variable to the names of classes; return, for each file of a table, the place of its data set's first one.

    None: the file has names, or its data set was removed.
    """
    inputs = [manifest.inputs.get("data") if name in _OF_RESULTS else None for manifest in made]
    keys = [data[0].key if data else manifest.key for data, manifest in zip(inputs, made, strict=True)]
    needed, class_names, places = set(keys), list[str](), dict[str, int]()
    used = [manifest for manifest in manifests if manifest.key in needed]
    for manifest, dataset in _read_json(store, used, "dataset.json"):
        places[manifest.key] = len(class_names)
        class_names += dataset["class_names"] or [""]  # without classes, every image has label 0
    connection.execute(f"SET VARIABLE {name}_classes = $names::VARCHAR[]", {"names": class_names})
    return [places.get(key) for key in keys]


def _value(table: str, column: Column) -> str:
    """Return the SQL for a column of a table's files; numbers of classes become names."""
    named = f"nullif(getvariable('{table}_classes')[of_file.place + {{}} + 1], '')"
    if table == "predictions" and column.name.endswith("_name"):
        return named.format(column.name.removesuffix("_name"))
    if table == "detections" and column.name in ("boxes", "found"):
        of_class = f"CASE WHEN x.label >= 0 THEN {named.format('x.label')} END"  # -1: a region of no class
        return f"[struct_update(x, label := {of_class}) for x in {column.name}]"
    if (table, column.name) == ("images", "label"):  # -1: several or none, in `labels`
        several = f"nullif(array_to_string([{named.format('x')} for x in labels], '; '), '')"
        one = named.format("try_cast(label AS INTEGER)")
        return f"CASE WHEN of_file.place IS NULL THEN label WHEN label = '-1' THEN {several} ELSE {one} END"
    return f'"{column.name}"::{column.type}'


def _define_table(connection: DuckDBPyConnection, name: str, columns: Sequence[Column], records: Records) -> None:
    shape = json.dumps([{column.name: column.type for column in columns}])
    write = f"CREATE TABLE {name} AS"
    while (some := [*islice(records, _AT_ONCE)]) or write.startswith("CREATE"):
        values = json.dumps([{column.name: record[column.name] for column in columns} for record in some])
        unnested = "SELECT unnest(from_json($records, $shape), recursive := true)"
        connection.execute(f"{write} {unnested}", {"records": values, "shape": shape})
        write = f"INSERT INTO {name}"


def _origin(manifest: Manifest, groups: Groups) -> dict[str, Any]:
    origin = manifest.model_dump(include={"job", "stage", "run", "finished"})
    return origin | {"artifact": manifest.key, "vtab_group": groups.get(manifest.key)}


def _artifacts(store: Store, manifests: list[Manifest], groups: Groups) -> Records:
    for manifest in all_manifests(store):
        size = sum(file.size for file in manifest.files)
        yield manifest.model_dump(exclude={"files"}) | {"artifact": manifest.key, "bytes": size}


def _runs(store: Store, manifests: list[Manifest], groups: Groups) -> Records:
    for run in all_runs(store):
        yield run.model_dump()


def _training_log(store: Store, manifests: list[Manifest], groups: Groups) -> Records:
    for manifest in manifests:
        for line in finished_log(store, manifest):
            yield _origin(manifest, groups) | line.model_dump(mode="json")


def _trials(store: Store, manifests: list[Manifest], groups: Groups) -> Records:
    for manifest, sweep in _read_json(store, manifests, _JSON["trials"]):
        for place, trial in enumerate(sweep["trials"]):
            number, rate = trial.get("number", place), trial["learning_rate"]
            is_chosen = number == sweep["chosen_trial"] if "chosen_trial" in sweep else rate == sweep["chosen"]
            none = [None] * len(trial["accuracies"])
            (by,) = trial.get("selected_by", {"accuracy": none}).values()
            folds = zip(trial["accuracies"], by, trial["losses"], trial.get("steps", none), strict=True)
            for fold, (accuracy, value, loss, step) in enumerate(folds):
                measured = {"accuracy": accuracy, "selected_by": value, "loss": loss}
                measured |= {"best_step": step, "learning_rate": rate}
                settings = {"point": trial.get("point"), "pruned_at": trial.get("pruned_at")}
                of_sweep = {"chosen": is_chosen, "selected_on": sweep["selected_on"]}
                numbers = {"trial": number, "fold": fold}
                yield _origin(manifest, groups) | numbers | measured | settings | of_sweep


def _costs(store: Store, manifests: list[Manifest], groups: Groups) -> Records:
    for manifest, cost in _read_json(store, manifests, _JSON["costs"]):
        for name in ("forward", "training"):
            if cost.get(name) is not None:
                yield _origin(manifest, groups) | cost | {"pass": name} | cost[name]


def _read_json(store: Store, manifests: list[Manifest], name: str) -> Iterator[tuple[Manifest, Any]]:
    """Yield each artifact that has a file of this name, with its content."""
    for manifest in manifests:
        if (path := local_file(store, manifest, name)) is not None:
            yield manifest, json.loads(path.read_text("utf-8"))


_RECORDS: dict[str, Callable[[Store, list[Manifest], Groups], Records]] = {
    "artifacts": _artifacts,
    "runs": _runs,
    "training_log": _training_log,
    "trials": _trials,
    "costs": _costs,
}
