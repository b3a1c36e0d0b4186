"""The tables of a store in DuckDB, for SQL: their columns, and their rows from manifests and Parquet files.

DuckDB reads the Parquet files of the requested tables in place (for S3, in the checked local cache).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.engine.runs import all_runs
from pipelines.spec.vtab import GROUPS
from pipelines.store import LOG, Manifest, Store, all_manifests, finished_log, local_file

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


_AT_ONCE = 500  # records written to a table; DuckDB takes 100 kB each to parse them
Groups = dict[str, str | None]  # of VTAB, by artifact
Records = Iterator[dict[str, Any]]


class Column(NamedTuple):
    """A column of a table: its name, its type in DuckDB, and its meaning."""

    name: str
    type: str
    meaning: str


_ORIGIN = (
    Column("artifact", "VARCHAR", "key of the artifact that contains the row"),
    Column("job", "VARCHAR", "the job that made it, such as evaluate, finetune, ingest or embed"),
    Column("stage", "VARCHAR", "its stage's name in the recipe"),
    Column("run", "VARCHAR", "the run that made it"),
    Column("finished", "TIMESTAMP", "when it was committed, UTC"),
    Column("vtab_group", "VARCHAR", "natural, specialized or structured for a task of VTAB; else NULL"),
)
_OF_FILE = (
    Column("number", "UBIGINT", "DuckDB's number of a Parquet file"),
    Column("place", "BIGINT", "the place of the first class of its data set among the names of classes"),
)
_RESULT = Column(
    "result",
    "VARCHAR",
    "the result's name, for GROUP BY: its task, labels, protocol, method, stage, artifact, and metric if not accuracy",
)
# The columns that `rows`, `predictions` and `confusion` share.
_SHARED = (
    *_ORIGIN,
    _RESULT,
    Column("task", "VARCHAR", "the dataset's name; a name that ends in ' (ReaL)': scored by ReaL's labels"),
    Column("protocol", "VARCHAR", "few-shot linear, linear probe, fine-tuning, baseline, retrieval, ..."),
    Column("method", "VARCHAR", "what was measured, such as 'ViT, pretrained'"),
    Column("labels_per_class", "INTEGER", "labels per class that it learned from; NULL: all"),
    Column("draw", "INTEGER", "number of the draw of these labels, from 0"),
)
# Rows with the same result are its draws or test images. The method alone does not identify a result, because several
# protocols have methods of the same name.
_RESULT_SQL = """concat(
    task, ', ',
    CASE WHEN labels_per_class IS NULL THEN 'all labels' WHEN labels_per_class = 1 THEN '1 label per class'
         ELSE labels_per_class || ' labels per class' END,
    ', ', protocol, ': ', method, ' (', stage, ' ', artifact[:8], ')')"""
_ROWS = (
    *_SHARED,
    Column("split", "VARCHAR", "the images that it was measured on: test"),
    Column("metric", "VARCHAR", "what was measured"),
    Column("value", "DOUBLE", "the measured number, a fraction"),
    Column("num_images", "INTEGER", "number of images that it was measured on"),
    Column("selected_on", "VARCHAR", "what the settings were selected on"),
    Column("settings", "VARCHAR", "the settings, a JSON object"),
)
# The tables of Parquet files; ray_jobs.evaluation.rows and ray_jobs.segment define the columns after `result`.
_FILES = ("rows", "predictions", "confusion", "label_issues", "quarantine", "images")
# The other tables of files.
_JSON = {"training_log": LOG, "trials": "sweep.json", "costs": "cost.json"}
_NOT_READ: dict[str, Any] = {"metrics": {}, "code": {}, "environment": {}}
# The views, each with the tables that it reads.
_VIEWS = {"accuracies": {"rows"}, "scores": {"rows", "predictions", "accuracies"}}
TABLES = {
    "rows": _ROWS,
    "accuracies": _ROWS,
    "scores": _ROWS,
    "predictions": (
        *_SHARED,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("label", "INTEGER", "its class"),
        Column("label_name", "VARCHAR", "its class's name"),
        Column("prediction", "INTEGER", "the predicted class"),
        Column("prediction_name", "VARCHAR", "the predicted class's name"),
        Column("correct", "BOOLEAN", "whether it is right; for a task '... (ReaL)' by ReaL's labels"),
        Column("probability", "FLOAT", "probability of the prediction; NULL if the method has none"),
        Column("nll", "FLOAT", "negative log-likelihood of the label, nats"),
        Column("top5", "INTEGER[]", "the five most probable classes, the most probable first"),
        Column("top5_probabilities", "FLOAT[]", "their probabilities"),
        Column("calibrated_probability", "FLOAT", "probability after temperature scaling; NULL without it"),
        Column("calibrated_nll", "FLOAT", "nll after temperature scaling"),
    ),
    "confusion": (
        *_SHARED,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("label", "VARCHAR", "the class of pixels in its mask"),
        Column("prediction", "VARCHAR", "their predicted class"),
        Column("pixels", "BIGINT", "how many of the image's pixels have this label and this prediction"),
    ),
    "label_issues": (
        *_ORIGIN,
        Column("rank", "INTEGER", "1: the most likely wrong label of its audit"),
        Column("sample_id", "VARCHAR", "the image, as `ingest: exclude` takes it"),
        Column("file", "VARCHAR", "its name in the source"),
        Column("split", "VARCHAR", "train or dev"),
        Column("label", "VARCHAR", "its class"),
        Column("suggested", "VARCHAR", "the class that the audit suggests"),
        Column("label_probability", "FLOAT", "the probability of its class, out of sample"),
        Column("suggested_probability", "FLOAT", "the probability of the suggested class, out of sample"),
    ),
    "quarantine": (
        *_ORIGIN,
        Column("key", "VARCHAR", "the image's name in the source"),
        Column("reason", "VARCHAR", "why it cannot be used"),
        Column("file", "VARCHAR", "the source's file that contains it"),
    ),
    "images": (
        *_ORIGIN,
        Column("sample_id", "VARCHAR", "the image, as in `predictions`"),
        Column("key", "VARCHAR", "its name in the source"),
        Column("split", "VARCHAR", "train, dev or test"),
        Column("label", "VARCHAR", "its class, or its classes joined by '; '; NULL without labels"),
        Column("feature", "FLOAT[]", "of an `embed` stage; else NULL"),
        Column("prediction", "VARCHAR", "the predicted class of a `predict` stage; else NULL"),
        Column("probability", "FLOAT", "its probability"),
    ),
    "training_log": (
        *_ORIGIN,
        Column("time", "TIMESTAMP", "when the line was written, UTC"),
        Column("fit", "VARCHAR", "the trial or refit of a fine-tuning; NULL in a pretraining"),
        Column("step", "BIGINT", "steps done"),
        Column("epoch", "DOUBLE", "images so far, divided by the number of training images"),
        Column("loss", "DOUBLE", "the mean since the point or line before"),
        Column("learning_rate", "DOUBLE", "the learning rate of the step"),
        Column("gradient_norm", "DOUBLE", "the norm of the step's gradients, before clipping"),
        Column("images_per_second", "DOUBLE", "of all workers, since the line before"),
        Column("data_wait", "DOUBLE", "the fraction of that time that the first worker waited for images"),
        Column("mfu", "DOUBLE", "model FLOPs utilisation; NULL on CPUs"),
        Column("seconds_left", "DOUBLE", "estimated time until the last step"),
        Column("dev_loss", "DOUBLE", "loss on dev, or on a trial's held-out images"),
        Column("dev_accuracy", "DOUBLE", "accuracy on dev, or on a trial's held-out images; AP of detections"),
        Column("few_shot", "JSON", "few-shot accuracies on dev by name; NULL if not measured"),
        Column("measures", "JSON", "the objective's measures by name; NULL if there are none"),
    ),
    "trials": (
        *_ORIGIN,
        Column("trial", "INTEGER", "number of the trial in its sweep, from 0"),
        Column("fold", "INTEGER", "number of the held-out part, from 0"),
        Column("accuracy", "DOUBLE", "accuracy on the held-out images"),
        Column("selected_by", "DOUBLE", "the metric of `select_by` on them; NULL if that is accuracy"),
        Column("loss", "DOUBLE", "loss on the held-out images"),
        Column("learning_rate", "DOUBLE", "the trial's learning rate"),
        Column("point", "JSON", "the trial's values of all searched fields; NULL without a search"),
        Column("best_step", "BIGINT", "with early stopping, the step with this accuracy; NULL: the last"),
        Column("pruned_at", "BIGINT", "the step after which ASHA ended the trial; NULL if it did not"),
        Column("chosen", "BOOLEAN", "whether the refits have the trial's values"),
        Column("selected_on", "VARCHAR", "the held-out images, and the metric if not accuracy"),
    ),
    "costs": (
        *_ORIGIN,
        Column("resolution", "INTEGER", "side of the images in pixels"),
        Column("parameters", "BIGINT", "number of the model's parameters"),
        Column("gflops", "DOUBLE", "10^9 operations of one image's forward pass"),
        Column("device", "VARCHAR", "the GPU or the processor"),
        Column("threads", "INTEGER", "threads of a CPU; NULL on a GPU"),
        Column("pass", "VARCHAR", "forward, or training: whole steps"),
        Column("images", "INTEGER", "images in a pass"),
        Column("dtype", "VARCHAR", "the precision"),
        Column("images_per_second", "DOUBLE", "of the fastest pass"),
        Column("peak_bytes", "BIGINT", "most memory that model and passes took; NULL if unknown"),
    ),
    "artifacts": (
        Column("artifact", "VARCHAR", "key"),
        Column("job", "VARCHAR", "the job that made it"),
        Column("kind", "VARCHAR", "dataset, model, evaluation, audit or report"),
        Column("stage", "VARCHAR", "its stage's name in the recipe"),
        Column("run", "VARCHAR", "the run that made it"),
        Column("attempt", "INTEGER", "the attempt that succeeded, from 1"),
        Column("started", "TIMESTAMP", "UTC"),
        Column("finished", "TIMESTAMP", "when it was committed, UTC"),
        Column("user", "VARCHAR", "who ran it, user@host"),
        Column("bytes", "BIGINT", "size of its files"),
        Column("content_digest", "VARCHAR", "digest of its content"),
        Column("config", "JSON", "the stage's fields"),
        Column("inputs", "JSON", "field -> the artifacts that the stage used"),
        Column("metrics", "JSON", "the metrics that the stage recorded"),
        Column("code", "JSON", "version, digest and commit of its code"),
        Column("environment", "JSON", "machine and versions of packages"),
    ),
    "runs": (
        Column("run", "VARCHAR", "id"),
        Column("pipeline", "VARCHAR", "the recipe's name"),
        Column("status", "VARCHAR", "RUNNING (also if its driver is gone), SUCCEEDED, FAILED or STOPPED"),
        Column("created", "TIMESTAMP", "UTC"),
        Column("stages", "INTEGER", "number of stages"),
    ),
}


def described_tables() -> list[dict[str, str]]:
    """Return {table, column, type, meaning} of every column."""
    from ray_jobs.evaluation.metrics import METRICS

    stored = "; ".join(f"{metric.name}: {metric.meaning}" for metric in METRICS if metric.of_class is None)
    metrics = {
        "rows": stored,
        "accuracies": "accuracy",
        "scores": "; ".join(f"{metric.name}: {metric.meaning}" for metric in METRICS),
    }
    return [
        {"table": name, "column": column.name, "type": column.type}
        | {"meaning": metrics[name] if column.name == "metric" else column.meaning}
        for name, columns in TABLES.items()
        for column in columns
    ]


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
    _define_table(connection, f"{name}_files", (*_ORIGIN, *_OF_FILE), known)
    connection.execute(f"SET VARIABLE {name}_paths = $paths", {"paths": list(files)})
    origin = [f'of_file."{column.name}" AS "{column.name}"' for column in _ORIGIN]
    has_result = _RESULT in TABLES[name]
    written = TABLES[name][len(_ORIGIN) + has_result :]
    columns = [f'{_value(name, column)} AS "{column.name}"' for column in written]
    metric = "CASE WHEN metric = 'accuracy' THEN '' ELSE ', ' || metric END" if name == "rows" else "''"
    result = [f"concat({_RESULT_SQL}, {metric}) AS {_RESULT.name}"] if has_result else []
    shown = ", ".join([*origin, *result, *columns])
    # With the columns given, DuckDB opens each file once, and a column that a file lacks is NULL.
    of_files = [(column.name, column.type) for column in written]
    of_files += [("labels", "INTEGER[]")] if name == "images" else []
    given = ", ".join(f"'{of}': {{name: '{of}', type: '{type_}', default_value: NULL}}" for of, type_ in of_files)
    files_read = f"read_parquet(getvariable('{name}_paths'), schema = MAP {{{given}}})"
    # A subquery, because DuckDB takes the files for one row long and would build the hash table of a join from them.
    of_file = f"(SELECT known FROM {name}_files AS known WHERE number = file_index) AS of_file"  # noqa: S608 (names of ours)
    joined = f"(SELECT *, {of_file} FROM {files_read})"  # noqa: S608
    view = f"SELECT * FROM (SELECT {shown} FROM {joined}){_left_out(name)}"  # noqa: S608
    connection.execute(f"CREATE VIEW {name} AS {view}")


def _set_class_names(
    connection: DuckDBPyConnection, store: Store, name: str, manifests: list[Manifest], made: list[Manifest]
) -> list[int | None]:
    """Set a variable to the names of classes; return, for each file of a table, the place of its data set's first one.

    None: the file has names, or its data set was removed.
    """
    inputs = [manifest.inputs.get("data") if name == "predictions" else None for manifest in made]
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
    if (table, column.name) == ("images", "label"):  # -1: several or none, in `labels`
        several = f"nullif(array_to_string([{named.format('x')} for x in labels], '; '), '')"
        one = named.format("try_cast(label AS INTEGER)")
        return f"CASE WHEN of_file.place IS NULL THEN label WHEN label = '-1' THEN {several} ELSE {one} END"
    return f'"{column.name}"::{column.type}'


def _left_out(name: str) -> str:
    """Return the condition that leaves out rows of the old "majority", the lowest of equally frequent classes."""
    if name not in ("rows", "predictions"):
        return ""
    drawn = "(job = 'evaluate' OR job = 'baselines' AND labels_per_class IS NOT NULL)"
    return f" WHERE NOT (method = 'majority' AND {drawn})"


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
