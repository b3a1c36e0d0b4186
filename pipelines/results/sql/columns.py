"""The columns of the tables that SQL sees. `ray_jobs` writes those that Parquet files have, behind `result`."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of a table: its name, its type in DuckDB, and its meaning."""

    name: str
    type: str
    meaning: str


ORIGIN = (
    Column("artifact", "VARCHAR", "key of the artifact that contains the row"),
    Column("job", "VARCHAR", "the job that made it, such as evaluate, finetune, ingest or embed"),
    Column("stage", "VARCHAR", "its stage's name in the recipe"),
    Column("run", "VARCHAR", "the run that made it"),
    Column("finished", "TIMESTAMP", "when it was committed, UTC"),
    Column("vtab_group", "VARCHAR", "natural, specialized or structured for a task of VTAB; else NULL"),
)
OF_FILE = (
    Column("number", "UBIGINT", "DuckDB's number of a Parquet file"),
    Column("place", "BIGINT", "the place of the first class of its data set among the names of classes"),
)
RESULT = Column(
    "result",
    "VARCHAR",
    "the result's name, for GROUP BY: its task, labels, protocol, method, stage, artifact, and metric if not accuracy",
)
# The columns that results share, and what was measured on their test images.
_SHARED = (
    *ORIGIN,
    RESULT,
    Column("task", "VARCHAR", "the dataset's name; a name that ends in ' (ReaL)': scored by ReaL's labels"),
    Column("protocol", "VARCHAR", "few-shot linear, linear probe, fine-tuning, baseline, retrieval, ..."),
    Column("method", "VARCHAR", "what was measured, such as 'ViT, pretrained'"),
    Column("labels_per_class", "INTEGER", "labels per class that it learned from; NULL: all"),
    Column("draw", "INTEGER", "number of the draw of these labels, from 0"),
)
_ROWS = (
    *_SHARED,
    Column("split", "VARCHAR", "the images that it was measured on: test"),
    Column("metric", "VARCHAR", "what was measured"),
    Column("value", "DOUBLE", "the measured number, a fraction"),
    Column("num_images", "INTEGER", "number of images that it was measured on"),
    Column("selected_on", "VARCHAR", "what the settings were selected on"),
    Column("settings", "VARCHAR", "the settings, a JSON object"),
)
_SIDES = "x1 FLOAT, y1 FLOAT, x2 FLOAT, y2 FLOAT"  # left, upper, right, lower
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
    "detections": (
        *_SHARED,
        Column("sample_id", "VARCHAR", "the test image"),
        Column("boxes", f'STRUCT({_SIDES}, "label" VARCHAR, ignored BOOLEAN)[]', "its boxes, in its pixels"),
        Column("found", f'STRUCT({_SIDES}, score FLOAT, "label" VARCHAR)[]', "its detections, the highest score first"),
    ),
    "label_issues": (
        *ORIGIN,
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
        *ORIGIN,
        Column("key", "VARCHAR", "the image's name in the source"),
        Column("reason", "VARCHAR", "why it cannot be used"),
        Column("file", "VARCHAR", "the source's file that contains it"),
    ),
    "images": (
        *ORIGIN,
        Column("sample_id", "VARCHAR", "the image, as in `predictions`"),
        Column("key", "VARCHAR", "its name in the source"),
        Column("split", "VARCHAR", "train, dev or test"),
        Column("label", "VARCHAR", "its class, or its classes joined by '; '; NULL without labels"),
        Column("feature", "FLOAT[]", "of an `embed` stage; else NULL"),
        Column("prediction", "VARCHAR", "the predicted class of a `predict` stage; else NULL"),
        Column("probability", "FLOAT", "its probability"),
    ),
    "training_log": (
        *ORIGIN,
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
        *ORIGIN,
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
        *ORIGIN,
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
        Column("kind", "VARCHAR", "what it is: dataset, model, detector, evaluation, audit, report, ..."),
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
