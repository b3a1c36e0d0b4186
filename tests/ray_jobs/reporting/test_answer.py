"""The sentence that answers a report's question, and what stands beside it, from lines of report.json."""

from decimal import Decimal
from itertools import product
from typing import Any

import pytest

from ray_jobs.reporting.answer import answer, subject
from ray_jobs.reporting.first_screen import cost, model, power, trust
from ray_jobs.reporting.verdicts import decimals, percent, points

NOTHING: dict[str, Any] = {
    "vtab": [],
    "costs": [],
    "verdicts": [],
    "accuracies": [],
    "datasets": [],
    "stages": [],
    "sweeps": [],
}


def accuracy(artifact: str, method: str = "ViT, pretrained", labels: int | None = None, value: float = 0.9) -> Any:
    return {
        "artifact": artifact,
        "method": method,
        "task": "pets",
        "labels_per_class": labels,
        "labels": "all labels" if labels is None else f"{labels} labels per class (up to 50 in total)",
        "protocol": "fine-tuning",
        "accuracy": value,
        "low": value - 0.05,
        "high": value + 0.05,
        "num_images": 100,
        "apart": False,
    }


def verdict(task: str, low: float, high: float, **fields: Any) -> dict[str, Any]:
    conclusion = "above zero" if low > 0 else "below zero" if high < 0 else "not told from zero"
    return (
        accuracy("a")
        | {"task": task, "accuracy": 0.9, "reference": "RBF SVM", "reference_kind": "pixels", "draws": 1}
        | {
            "metric": "accuracy",
            "reference_accuracy": 0.8,
            "difference": (low + high) / 2,
            "low": low,
            "high": high,
            "detectable": 0.031,
            "other_differences": [],
        }
        | {"adjusted_low": low - 0.05, "conclusion": conclusion, "unknown_training": False}
        | fields
    )


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            {"value": -0.021, "low": -0.034, "high": -0.008},
            ", 2.1 points (95% interval 0.8 to 3.4) above wide.",
        ),
        (
            {"value": -0.005, "low": -0.02, "high": 0.01},
            "; wide, 0.5 points lower (95% interval −1.0 to 2.0), cannot be told from it.",
        ),
        (None, "; wide was scored on other images or labels."),
    ],
)
def test_the_best_backbone_is_told_from_the_second_or_not(second: dict[str, float] | None, said: str) -> None:
    lines = [
        {"backbone": name, "artifact": name, "accuracy": 0.9, "minus_best": minus}
        for name, minus in (("small", None), ("wide", second))
    ]
    group = {"task": "pets", "protocol": "fine-tuning", "labels": "all labels", "lines": lines, "backbones": 2}
    found = answer(NOTHING | {"costs": [group], "accuracies": [accuracy("small")]})
    begin = "Small is the most accurate of 2 backbones: 90.0% with all labels (fine-tuned) on 100 test images"
    assert found == {"question": "Which backbone is best?", "headline": begin + said, "advice": ""}
    group |= {"lines": [*lines, lines[1]]}
    several = answer(NOTHING | {"costs": [group], "accuracies": [accuracy("small")]})["headline"]
    assert several.startswith("Small is the most accurate of 3 models from 2 backbones: "), "one was tuned in two ways"


def test_comparisons_on_several_tasks_are_counted() -> None:
    verdicts = [
        verdict("a", 0.1, 0.2),
        verdict("b", -0.2, -0.1),
        verdict("c", -0.1, 0.1),
        verdict("d", 0.1, 0.3),
    ]
    assert answer(NOTHING | {"verdicts": verdicts})["headline"] == (
        "In 4 comparisons with the strongest reference on 4 tasks, the model is better in 2, worse in 1, and"
        " cannot be told apart in 1."
    )


def test_an_accuracy_and_an_miou_of_one_task_are_not_put_into_one_sentence() -> None:
    """The difference in mIoU with all labels was said as if it were one in accuracy."""
    few = verdict("pets", 0.1, 0.2, labels_per_class=5, labels="5 labels per class")
    masks = verdict("pets", 0.2, 0.3, metric="mIoU", mIoU=0.7, reference_mIoU=0.45, protocol="linear segmentation")
    said = answer(NOTHING | {"verdicts": [few, masks]})["headline"]
    assert said.startswith("In 2 comparisons with the strongest reference, the model is better in 2")


def test_a_model_with_unknown_training_images_and_the_most_frequent_class_are_called_that() -> None:
    one = verdict("a", 0.1, 0.2, unknown_training=True, reference="most frequent class")
    said = answer(NOTHING | {"verdicts": [one]})["headline"]
    assert "(fine-tuned, training images unknown)" in said
    assert said.endswith("above always answering the most frequent class at 80.0%.")
    probe = verdict("a", 0.1, 0.2, protocol="few-shot linear", reference="pixels")
    assert answer(NOTHING | {"verdicts": [probe]})["headline"].endswith("above the same probe on pixels at 80.0%.")


@pytest.mark.parametrize(
    ("ends", "fields", "said"),
    [
        ((0.1, 0.2), {"reference_kind": "scratch"}, "above the model trained from scratch at 80.0%."),
        ((-0.2, -0.1), {}, "(95% interval 10.0 to 20.0) below the best classifier on pixels, RBF SVM at 80.0%."),
    ],
)
def test_a_difference_is_above_or_below_its_reference(ends: Any, fields: dict[str, Any], said: str) -> None:
    assert answer(NOTHING | {"verdicts": [verdict("pets", *ends, **fields)]})["headline"].endswith(said)


def test_without_a_comparison_the_accuracy_or_what_there_is_answers() -> None:
    found = answer(NOTHING | {"accuracies": [accuracy("s", "RBF SVM")]})
    assert found["question"] == "How good is the model?" and found["headline"].startswith("RBF SVM reaches 90.0%")
    stages = [{"kind": kind} for kind in ("dataset", "model", "dataset")]
    assert answer(NOTHING | {"stages": stages})["headline"] == "It shows 2 datasets, 1 model; nothing was scored."


def test_power_is_said_once_for_each_number_of_labels() -> None:
    few = {"labels_per_class": 5, "labels": "5 labels per class (up to 50 in total)", "draws": 20}
    assert power([verdict("a", 0.1, 0.2, **few), verdict("a", 0.1, 0.2)]) == (
        "A true difference of 3.1 points with 20 draws of 5 labels per class and 100 test images, or of 3.1 points with"
        " all labels and 100 test images is detected with a probability of 80%, a smaller one less often."
    )
    assert power([]) == ""


def stage(name: str, seconds: float, finished: str, earlier_seconds: float = 0.0, **metrics: Any) -> dict[str, Any]:
    fields = {"stage": name, "artifact": name, "kind": "model", "seconds": seconds, "metrics": metrics}
    fields["earlier_seconds"] = earlier_seconds
    return fields | {"finished": f"2026-11-25T{finished}+00:00"}


def test_the_time_counts_parallel_stages_once_and_cores_as_often_as_they_were_there() -> None:
    stages = [stage("a", 60, "10:01:00"), stage("b", 60, "10:01:30"), stage("c", 30, "11:00:00")]
    machines = [
        {"cluster": {"CPU": 4.0, "memory": 1e9}, "stages": ["a", "b"]},
        {"cluster": {"CPU": 2.0, "GPU": 1.0}, "stages": ["c"]},
    ]
    found = cost(stages, machines)
    assert found["clock"] == pytest.approx(90 + 30)
    # 540 core-seconds and 30 GPU-seconds: a bound is never rounded down
    assert found["hours"] == {"core": 0.2, "GPU": 0.1}
    assert [each["stage"] for each in found["longest"]] == ["a", "b", "c"]
    # a first attempt of ten minutes, whose work c used, ran before all of them
    stages[2] = stage("c", 630, "11:00:00", earlier_seconds=600)
    found = cost(stages, machines)
    assert found["clock"] == pytest.approx(90 + 630) and found["longest"][0]["stage"] == "c"


def test_the_best_of_several_models_is_called_that() -> None:
    several = [verdict("a", 0.1, 0.2, accuracy=value, artifact=str(value)) for value in (0.8, 0.9, 0.7)]
    assert "(fine-tuned, the best of 3 by test accuracy)" in answer(NOTHING | {"verdicts": several})["headline"]
    others = [verdict("a", 0.1, 0.2, accuracy=value, protocol=f"few-shot {value}") for value in (0.8, 0.9)]
    assert "(0.9, the best of 2 by test accuracy)" in answer(NOTHING | {"verdicts": others})["headline"]


def test_the_best_score_on_some_of_vtabs_tasks_is_called_the_best_of_several_too() -> None:
    column = {"tasks": 4, "labels": "all 50"}
    scores = [
        {"trained": True, "method": method, "tasks": [{}] * 19, "columns": [column | {"mean": mean}]}
        for method, mean in (("ViT, pretrained", 0.5), ("ViT, pretrained, k-NN", 0.4))
    ]
    said = "The pretrained ViT reaches 50.0% with all 50 labels, the mean of 4 of the 19 tasks"
    assert answer(NOTHING | {"vtab": scores})["headline"] == f"{said}, the best of 2 scores."
    assert answer(NOTHING | {"vtab": scores[:1]})["headline"] == f"{said}."


def test_lines_apart_are_no_answer_but_the_others_are() -> None:
    chosen = accuracy("s", "ViT, pretrained, settings chosen on test") | {"apart": True}
    seen = accuracy("s", "ViT, pretrained, on test images seen in training", value=1.0) | {"apart": True}
    pixels = accuracy("s", "pixels")
    for lines, said in (
        ([chosen, pixels], "settings were chosen on test"),
        ([seen, pixels], "was trained on some of the test images"),
        ([seen, accuracy("t")], "reaches 90.0%"),
    ):
        assert said in answer(NOTHING | {"accuracies": lines})["headline"]


def test_labels_that_limit_the_numbers_are_said() -> None:
    names = [f"c{number}" for number in range(6)]
    sound = {"name": "pets", "quarantined": 0, "num_classes": 7, "conflicting": 0, "untested": [], "few": []}
    sound["few_dev"] = names[:2]
    poor = sound | {"conflicting": 6, "untested": ["lonely"], "few": names}
    scored = NOTHING | {"accuracies": [accuracy("s")]}
    assert trust(scored | {"datasets": [sound]}) == [] == trust(NOTHING | {"datasets": [poor]})
    notes = trust(scored | {"datasets": [poor]})
    assert [note["text"] for note in notes] == [
        "pets: 6 images have the same bytes as an image of another class.",
        "pets: 1 of 7 classes with no test image (lonely).",
        "pets: 6 of 7 classes with fewer than 5 training images (c0, c1, c2, c3 and 2 more).",
    ]
    assert not any(note["is_good"] for note in notes)
    line = {"task": "pets", "settings": [{"thresholds": "dev, by mAP"}]}
    for dev, said in (("pets", ["c0, c1"]), ("others", [])):
        notes = trust(NOTHING | {"datasets": [sound], "other_metrics": [line | {"task": dev}]})
        assert [note["text"].rpartition("(")[2].rstrip(").") for note in notes] == said
        assert all("a threshold from fewer than 10 dev images" in note["text"] for note in notes)


def test_groups_are_the_choice_of_the_report_and_few_images_make_weak_features() -> None:
    data = {"name": "flat", "quarantined": 0, "splits": {"train": 300}}
    grouped = NOTHING | {"datasets": [data], "embeddings": [{"clusters": [{"images": 150}] * 2}]}
    for job, weak in (("pretrain", True), ("import", False)):
        notes = trust(grouped | {"stages": [stage("vit", 1, "10:00:00") | {"job": job}]})
        assert notes[0]["text"] == "2 groups: the report's choice, not a property of the images."
        assert ["300 training images are few" in note["text"] for note in notes[1:]] == [True] * weak
    both = [{"stage": "a", "clusters": [{"images": 9}]}, {"stage": "b", "clusters": [{"images": 3}, {"images": 6}]}]
    assert answer(NOTHING | {"embeddings": both})["headline"].startswith(
        "A sorts 9 training images into 1 group; b sorts 9 training images into 2 groups of 3 to 6 images that look"
    )
    assert trust(NOTHING | {"embeddings": both})[0]["text"].startswith("1 group and 2 groups: ")


def test_a_learning_rate_at_an_end_of_those_tried_is_said() -> None:
    for chosen, said in ((0.1, "the lowest"), (0.2, None), (0.3, "the highest")):
        trials = [{"learning_rate": rate} for rate in (0.1, 0.2, 0.3)]
        notes = trust(NOTHING | {"sweeps": [{"stage": "vit", "chosen": chosen, "trials": trials}]})
        assert [f"{said} of the 3 tried" in note["text"] and not note["is_good"] for note in notes] == [True] * bool(
            said
        )
    search = {"stage": "vit", "kind": "random", "chosen_trial": 0, "trials": trials}
    assert trust(NOTHING | {"sweeps": [search]}) == []


def test_settings_chosen_on_test_are_not_trusted() -> None:
    lines = [accuracy("s", "ViT, pretrained, settings chosen on test")]
    assert {"text": "Some settings were chosen on test; these methods say so.", "is_good": False} in trust(
        NOTHING | {"accuracies": lines}
    )


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"seen": 0}, ["No test image was used in training."]),
        ({"seen": 0, "copies": 3}, ["Up to 3 test images have a copy among the training images."]),
        ({"seen": 0, "near": 3}, ["Up to 3 test images have a near-copy among the training images."]),
        ({"seen": 7}, ["(7 in s); these are scored apart."]),
        ({"seen": 0, "unknown": "x"}, ["test images may be among them."]),
        ({"seen": 7, "unknown": "x"}, ["(7 in s); these are scored apart.", "test images may be among them."]),
        ({"seen": 0, "unknown": "x", "copies": 3}, ["may be among them.", "have a copy among the training images."]),
    ],
)
def test_trust_begins_with_leakage(metrics: dict[str, Any], said: list[str]) -> None:
    """Unknown training images hid the copies that are known, and images that were seen hid both."""
    names = {
        "seen": "test_images_seen_in_training",
        "near": "test_images_near_training_images",
        "copies": "test_images_also_in_train",
        "unknown": "unknown_training",
    }
    measured = stage("s", 1, "10:00:00", **{names[name]: value for name, value in metrics.items()})
    notes = trust(NOTHING | {"accuracies": [accuracy("s")], "stages": [measured]})
    first, is_none = notes[0], metrics.keys() <= {"seen", "near"} and not metrics["seen"]
    assert ("No test image" in first["text"]) == is_none and first["is_good"] == (metrics == {"seen": 0})
    assert [note["text"].endswith(end) for note, end in zip(notes, said, strict=True)] == [True] * len(said)
    audit = stage("audit", 1, "10:00:00", unknown_training="x") | {"kind": "audit"}
    assert trust(NOTHING | {"accuracies": [accuracy("s")], "stages": [measured, audit]}) == notes


def test_the_model_to_use_has_seen_the_most_labels_and_was_best_on_held_out_images() -> None:
    lines = [
        accuracy("few", labels=10, value=0.99),
        accuracy("all"),
        accuracy("scratch", "ViT, from scratch", value=0.95),
        accuracy("pixels", "RBF SVM", value=1.0),
    ]
    held_out = {"few": 0.9, "all": 0.8, "scratch": 0.7}
    stages = [stage(name, 1, "10:00:00", validation_accuracy=value) for name, value in held_out.items()]
    assert model(NOTHING | {"accuracies": lines, "stages": stages}) == "all"
    assert model(NOTHING | {"accuracies": lines[3:], "stages": stages}) is None


@pytest.mark.parametrize(
    ("method", "low", "is_advised"),
    [("ViT, from scratch", -0.1, True), ("ViT, from scratch", 0.1, False), ("ViT, pretrained", -0.1, False)],
)
def test_training_from_scratch_that_does_not_beat_pixels_is_advised_against(
    method: str, low: float, is_advised: bool
) -> None:
    found = answer(NOTHING | {"verdicts": [verdict("pets", low, 0.2, method=method)]})
    assert ("start from pretrained weights" in found["advice"]) == is_advised
    assert "vitflow" not in found["headline"], "a headline is an answer"


def test_an_open_comparison_answers_that_and_names_both_numbers() -> None:
    """k-NN was higher once, and the answer to "Which method is best?" did not name it."""
    one = verdict("pets", -0.25, 0.125, method="ViT, from scratch", reference="k-NN", accuracy=0.469)
    said = answer(NOTHING | {"verdicts": [one | {"reference_accuracy": 0.531}]})["headline"]
    assert said == (
        "It cannot be told: the ViT trained from scratch reaches 46.9% with all labels (all weights trained) on 100"
        " test images, not clearly different from the best classifier on pixels, k-NN at 53.1% (95% interval"
        " of the difference: −25.0 to 12.5 points)."
    )


def test_another_metric_that_is_told_is_said_beside_the_one_that_is_not() -> None:
    """mAP was not told from zero, and macro-F1 clearly lower, which only small print said."""
    lower = {"metric": "macro-F1", "value": -0.095, "low": -0.172, "high": -0.019}
    open_ = {"metric": "micro-F1", "value": -0.05, "low": -0.12, "high": 0.02}
    fields = {"metric": "mAP", "mAP": 0.31, "reference_mAP": 0.38, "difference": -0.07}
    one = verdict("pets", -0.15, 0.01, other_differences=[lower, open_], **fields)
    said = answer(NOTHING | {"verdicts": [one]})["headline"]
    assert said.startswith("It cannot be told by mAP: the pretrained ViT reaches 31.0% mAP")
    assert said.endswith("; macro-F1 is lower (−9.5 points, 95% interval −17.2 to −1.9).")
    assert answer(NOTHING | {"verdicts": [one | {"other_differences": [open_]}]})["headline"].startswith(
        "It cannot be told: "
    )


def test_nothing_has_no_minus_sign() -> None:
    """Two backbones of one accuracy were −0.0 points apart."""
    assert (points(-0.0), points(-0.0004, sign=""), points(-0.0006)) == ("+0.0", "0.0", "−0.1")


def test_the_numbers_of_a_sentence_subtract() -> None:
    """31.04% and 37.78% were 31.0% and 37.8%, with a difference of −6.7 points."""
    assert decimals(0.5204, 0.4694, 0.0510) == 1
    assert decimals(0.3104, 0.3778, -0.0674) == 2
    for ours, theirs in product(range(0, 98, 7), range(42)):
        value, reference = ours / 98, theirs / 42
        digits = decimals(value, reference, value - reference)
        shown = percent(value, digits), percent(reference, digits), points(value - reference, "", digits)
        first, second, gap = (Decimal(text.strip("%").replace("−", "-")) for text in shown)
        assert first - second == gap, shown


def test_methods_become_subjects() -> None:
    assert subject("ViT, pretrained, LoRA") == "the pretrained ViT (LoRA)"
    assert subject("ViT, from scratch") == "the ViT trained from scratch"
    assert subject("pixels, standardised") == "pixels, standardised"


def test_a_report_of_many_values_is_about_them_and_one_of_two_about_its_models() -> None:
    def study(*values: float) -> dict[str, Any]:
        points = [{"x": value, "mean": -value, "repeats": 1} for value in values]
        said = {"stage": "vit", "metric": "loss on dev", "setting": "", "x": "width", "has_order": True}
        panels = [{"lines": [{"points": points}], "difference": []}]
        return said | {"ticks": {f"{value:g}": value for value in values}, "panels": panels}

    numbers = NOTHING | {"accuracies": [accuracy("s")]}
    assert answer(numbers | {"studies": [study(16, 32, 64)]})["question"] == "Which width is best?"
    assert answer(numbers | {"studies": [study(16, 32)]})["question"] == "How good is the model?"
    alone = answer(NOTHING | {"studies": [study(16, 32)]})
    assert alone["headline"] == "The lowest loss on dev of vit is at width=32."
