"""Studies: members of a matrix by the number that they differ in, averaged over seeds."""

import itertools
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ray_jobs.reporting.drawing import plots
from ray_jobs.reporting.page import templates
from ray_jobs.reporting.studies import best, headline, left_out, studies

NOTHING: dict[str, Any] = {"pretraining": [], "measured_in_training": {}, "accuracies": [], "costs": []}
SETTING = "digits, few-shot linear, 5 labels per class"
SEEDS = [*itertools.product((1, 2), "ab", (0, 1))]


def pretrained(losses: dict[str, float]) -> dict[str, Any]:
    """The lines of report.json of pretrainings with these losses on dev."""
    curves = [{"stage": stage, "artifact": stage} for stage in losses]
    measured = {
        stage: [{"name": "dev", "losses": [9.0, loss], "accuracies": [], "costs": []}] for stage, loss in losses.items()
    }
    return NOTHING | {"pretraining": curves, "measured_in_training": measured}


def scored(stage: str, value: float, method: str = "ViT, pretrained", apart: str | None = None) -> dict[str, Any]:
    line = {"stage": stage, "artifact": stage, "accuracy": value, "method": method, "apart": apart, "task": "digits"}
    return line | {"protocol": "few-shot linear", "labels": "5 labels per class (10 classes)"}


def test_a_line_is_the_mean_over_seeds_with_the_interval_of_their_mean() -> None:
    rng, widths, rates, seeds = np.random.default_rng(0), ("32", "64"), ("0.01", "0.002"), range(3)
    drawn = {
        f"train@width={width},learning_rate={rate},seed={seed}": float(rng.normal())
        for width, rate, seed in itertools.product(widths, rates, seeds)
    }
    (study,) = studies(pretrained(drawn))
    assert study["metric"] == "loss on dev" and study["x"] in ("width", "learning_rate")
    (panel,) = study["panels"]
    other = "learning_rate" if study["x"] == "width" else "width"
    assert {line["name"].partition("=")[0] for line in panel["lines"]} == {other}
    for line in panel["lines"]:
        assert [point["x"] for point in line["points"]] == sorted(study["ticks"].values())
        for point in line["points"]:
            label = next(label for label, x in study["ticks"].items() if x == point["x"])
            of = [v for name, v in drawn.items() if line["name"] in name and f"{study['x']}={label}" in name]
            low, high = stats.t.interval(0.95, 2, np.mean(of), stats.sem(of))
            assert point["mean"] == pytest.approx(np.mean(of)) and point["repeats"] == 3
            assert point["margin"] == pytest.approx((high - low) / 2)


def test_the_longest_axis_of_numbers_is_across_and_the_shorter_ones_are_panels() -> None:
    places = itertools.product(("null", "32"), ("narrow", "wide", "huge"), ("1", "2", "4", "8"))
    losses = {f"t@base={base},model={model},rate={rate}": float(rate) for base, model, rate in places}
    (study,) = studies(pretrained(losses))
    assert study["x"] == "rate" and [panel["name"] for panel in study["panels"]] == ["base=null", "base=32"]
    for panel in study["panels"]:
        assert [line["name"] for line in panel["lines"]] == ["model=narrow", "model=wide", "model=huge"]
        assert all(point["margin"] is None for line in panel["lines"] for point in line["points"])
    assert len(plots.study(study)) == 2


def evaluated(values: dict[str, tuple[float, float]], methods: dict[str, str]) -> dict[str, Any]:
    """The lines of report.json of evaluations, each with the loss on dev and the accuracy on test of its backbone."""
    numbers = pretrained({f"train@{name}": loss for name, (loss, _) in values.items()})
    lines = [
        scored(f"few@{name}", accuracy, method=next(method for part, method in methods.items() if part in name))
        | {"backbone": f"train@{name}"}
        for name, (_, accuracy) in values.items()
    ]
    return numbers | {"accuracies": lines}


def test_the_learning_rate_is_chosen_on_dev_and_never_on_test() -> None:
    rng = np.random.default_rng(0)
    values = {
        f"images={images},model={model},learning_rate={rate},seed={seed}": (float(rng.normal()), float(rng.normal()))
        for images, model, rate, seed in itertools.product((1, 2, 3), "ab", (0.1, 0.2, 0.3, 0.4), (0, 1, 2))
    }
    numbers = evaluated(values, {"model=a": "ViT, pretrained", "model=b": "ResNet, pretrained"})
    study, kept = studies(numbers)[-1], {*values} - {name.removeprefix("few@") for name in left_out(numbers)}
    assert study["x"] == "images" and study["methods"] == "ViT, pretrained and ResNet, pretrained"
    (panel,) = study["panels"]
    for images, model in itertools.product((1, 2, 3), "ab"):
        losses, accuracies = (
            {
                rate: [
                    values[f"images={images},model={model},learning_rate={rate},seed={seed}"][of] for seed in range(3)
                ]
                for rate in (0.1, 0.2, 0.3, 0.4)
            }
            for of in (0, 1)
        )
        chosen = min(losses, key=lambda rate: np.mean(losses[rate]))
        (line,) = (line for line in panel["lines"] if line["name"] == f"model={model}")
        point = line["points"][images - 1]
        assert point["rate"] == str(chosen) and point["mean"] == pytest.approx(np.mean(accuracies[chosen]))
        named = f"images={images},model={model},"
        assert {name for name in kept if name.startswith(named)} == {
            f"{named}learning_rate={chosen},seed={seed}" for seed in range(3)
        }


def test_two_lines_are_subtracted_seed_by_seed() -> None:
    """The seeds' own spread, which is common to both lines, leaves the difference."""
    minus = {1: (0.10, 0.11, 0.12), 10: (-0.01, 0.0, 0.01), 100: (-0.20, -0.21, -0.22)}
    values = {
        f"images={images},model={model},seed={seed}": (0.0, seed / 10 + (by[seed] if model == "b" else 0))
        for model, (images, by), seed in itertools.product("ab", minus.items(), range(3))
    }
    del values["images=10,model=a,seed=2"]
    study = studies(evaluated(values, {"model=": "ViT, pretrained"}))[-1]
    for point in study["panels"][0]["difference"]:
        paired = minus[int(point["x"])][: 2 if point["x"] == 10 else 3]
        low, high = stats.t.interval(0.95, len(paired) - 1, np.mean(paired), stats.sem(paired))
        assert (point["mean"], point["margin"]) == pytest.approx((np.mean(paired), (high - low) / 2))
    assert headline(study) == (
        f"in accuracy on test of few ({SETTING}), model=b lies above model=a at images=1 (11.0 points, 95% interval"
        " 8.5 to 13.5) and below model=a at images=100 (21.0 points, 95% interval 18.5 to 23.5); the seeds do not tell"
        " them apart at images=10 (−0.5 points, 95% interval −6.9 to 5.9)."
    )


def test_of_two_losses_the_lower_is_the_better() -> None:
    higher = {f"t@rate={rate},model={model},seed={seed}": (model == "b") + seed / 100 for rate, model, seed in SEEDS}
    said = headline(studies(pretrained(higher))[0])
    assert said.startswith("in loss on dev of t (lower is better), model=b lies above model=a at rate=1 (1.000, ")


def test_the_page_shows_each_mean_with_its_rate_and_the_difference() -> None:
    values = {
        f"images={images},model={model},learning_rate={rate},seed={seed}": (
            rate,
            seed / 100 + (0.5 if model == "b" else 0.25),
        )
        for images, model, rate, seed in itertools.product((1, 2), "ab", (0.1, 0.2), (1, 2))
    }
    numbers = evaluated(values, {"model=": "ViT, pretrained"})
    numbers["accuracies"].append(scored("few@images=1", 0.83, "pixels"))
    found = studies(numbers)
    figures = {f"study {number} {panel}": "" for number in range(len(found)) for panel in range(2)}
    page = templates().get_template("studies.html.j2").render(studies=found, figures=figures, best=best)
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    margin = f"{stats.t.ppf(0.975, 1) / 2:.1f}"
    assert (
        f"model=b 51.5 ± {margin} rate 0.1 51.5 ± {margin} rate 0.1 model=b minus model=a 25.0 ± 0.0 25.0 ± 0.0" in text
    )
    assert "ViT, pretrained on digits, few-shot linear, 5 labels per class. For comparison: pixels 83.0%." in text
    assert "Rate: the learning rate whose pretraining is best on dev." in text


def test_seeds_alone_are_no_study() -> None:
    for members in (["t"], ["t@seed=0", "t@seed=1"], ["t@rate=1,seed=0", "t@rate=1,seed=1"]):
        assert studies(pretrained(dict.fromkeys(members, 1.0))) == []


def test_values_without_numbers_keep_their_order_and_are_not_joined_by_a_line() -> None:
    (study,) = studies(pretrained({"t@position=none": 3.0, "t@position=learned1d": 1.0, "t@position=10": 2.0}))
    assert study["ticks"] == {"none": 0, "learned1d": 1, "10": 2} and not study["has_order"]
    assert headline(study) == "the lowest loss on dev of t is at position=learned1d."
    (plot,) = plots.study(study)
    assert plot.count('class="mark') == 3 and 'class="line' not in plot and "<title>at learned1d: 1<" in plot


def test_backbones_are_compared_by_their_cost_if_that_is_known() -> None:
    lines = [scored(f"few@backbone={name}", 0.5) for name in ("vit", "resnet")]
    assert len(studies(NOTHING | {"accuracies": lines})) == 1
    assert studies(NOTHING | {"accuracies": lines, "costs": [{"lines": []}]}) == []


def test_backbones_of_several_seeds_are_a_study_that_says_by_how_much_the_best_leads() -> None:
    found = {"mae": (0.5, 0.54, 0.52), "dino": (0.6, 0.63, 0.6), "moco": (0.1, 0.2, 0.3)}
    lines = [
        scored(f"few@backbone={name},{name}.seed={seed}", value)
        for name, values in found.items()
        for seed, value in enumerate(values)
    ]
    (study,) = studies(NOTHING | {"accuracies": lines, "costs": [{"lines": []}]})
    minus = np.subtract(found["dino"], found["mae"])
    low, high = stats.t.interval(0.95, 2, minus.mean(), stats.sem(minus))
    assert headline(study) == (
        f"the highest accuracy on test of few ({SETTING}) is at backbone=dino; the next, mae, has"
        f" {100 * minus.mean():.1f} points less (95% interval over seeds {100 * low:.1f} to {100 * high:.1f})."
    )
    once = [scored("few@backbone=longer", 0.9)]
    (study,) = studies(NOTHING | {"accuracies": lines + once, "costs": [{"lines": []}]})
    assert headline(study).endswith("is at backbone=longer, of fewer seeds than others.")
    between = [scored("few@backbone=longer", 0.58), scored("few@backbone=mae,mae.seed=0", 0.57, "pixels")]
    (study,) = studies(NOTHING | {"accuracies": lines + between, "costs": [{"lines": []}]})
    assert "; the next of the same seeds, mae, has" in headline(study)
    losses = {
        f"t@position={name},seed={seed}": value for name, values in found.items() for seed, value in enumerate(values)
    }
    (study,) = studies(pretrained(losses))
    assert "is at position=moco; the next, mae, has 0.320 more" in headline(study)


def test_the_headline_says_for_each_panel_between_which_values_its_lines_are_best() -> None:
    best_rates = {"null": (8, 4, 2), "32": (8, 8, 8)}
    losses = {
        f"t@base_width={base},model={model},learning_rate={rate}": abs(rate - at)
        for base, rates in best_rates.items()
        for model, at in zip("abc", rates, strict=True)
        for rate in (1, 2, 4, 8)
    }
    said = headline(studies(pretrained(losses))[0])
    assert said.endswith(" is at learning_rate=2 to 8 with base_width=null and 8 with base_width=32.")


def test_the_number_of_labels_can_be_what_members_differ_in() -> None:
    lines = [
        scored(f"t@per_class={count},model={model}", 0.5) | {"labels": f"{count} labels per class (10 classes)"}
        for count in (90, 700)
        for model in "ab"
    ]
    (study,) = studies(NOTHING | {"accuracies": lines})
    assert study["x"] == "per_class" and study["setting"] == "digits, few-shot linear"
    assert [len(line["points"]) for line in study["panels"][0]["lines"]] == [2, 2]


def test_detectors_are_studied_by_ap() -> None:
    line = {"metric": "AP", "method": "ViT, pretrained", "task": "birds", "protocol": "detection", "apart": False}
    line |= {"labels_per_class": None, "artifact": "k"}
    detectors = [line | {"stage": f"detect@width={width}", "value": width / 100} for width in (16, 32, 64)]
    detectors.append(detectors[0] | {"method": "the median box", "value": 0.9})
    (study,) = studies(NOTHING | {"detectors": detectors, "costs": [{}]})
    assert [point["mean"] for point in study["panels"][0]["lines"][0]["points"]] == [0.16, 0.32, 0.64]
    where = "the highest AP on test of detect (birds, detection, all labels) is at width=64"
    assert headline(study) == f"{where}. All are below the median box (90.0%)."
    (plot,) = plots.study(study)
    assert "<title>at 64: 64.0%<" in plot and ">40%</text>" in plot, "in percent, as in the table"
    values = [(width, seed, width * (1 + seed) / 100) for width in (8, 32) for seed in (0, 1)]
    seeds = [line | {"stage": f"detect@width={width},seed={seed}", "value": value} for width, seed, value in values]
    (plot,) = plots.study(studies(NOTHING | {"detectors": seeds})[0])
    spans = "L".join(re.findall(r'd="M([^"]*)" class="line s1 faint"', plot))
    heights = [float(height) for height in re.findall(r" ([-\d.]+)", spans)]
    assert len(heights) == 4 and 24 <= min(heights) < max(heights) <= 230, "no interval of two seeds leaves the plot"


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_equal_values_are_all_the_best(seeds: tuple[int, ...]) -> None:
    losses = {f"t@learning_rate={rate},seed={seed}": 1.0 for rate in (0.02, 0.01) for seed in seeds}
    losses |= {f"t@learning_rate=0.03,seed={seed}": 2.0 for seed in seeds}
    (study,) = studies(pretrained(losses))
    assert headline(study) == "the lowest loss on dev of t is at learning_rate=0.01 and 0.02."
    page = templates().get_template("studies.html.j2").render(studies=[study], figures={"study 0 0": ""}, best=best)
    assert page.count("<b>1.000</b>") == 2 and "<b>2.000" not in page


def test_best_values_of_fewer_seeds_are_counted() -> None:
    losses = {
        f"t@model={model},w={width},seed={seed}": 1 / width
        for model in "abc"
        for width in (1, 2, 4)
        for seed in (0, 1)
        if (model, width, seed) != ("a", 4, 1)
    }
    said = headline(studies(pretrained(losses))[0])
    assert said.endswith(" is at w=4 in all 3 settings; 1 of these best values is of fewer seeds than others.")


def test_a_missing_member_leaves_a_gap() -> None:
    (study,) = studies(pretrained({"t@rate=1,model=a": 1.0, "t@rate=2,model=a": 2.0, "t@rate=1,model=b": 3.0}))
    a, b = study["panels"][0]["lines"]
    assert [point["x"] for point in a["points"]] == [1.0, 2.0] and [point["x"] for point in b["points"]] == [1.0]


def test_models_are_studied_on_test_and_references_are_not() -> None:
    lines = [
        each
        for images, value in (("100", 0.25), ("200", 0.5))
        for each in (
            scored(f"few@images={images}", value),
            scored(f"few@images={images}", 0.9, method="pixels"),
            scored(f"few@images={images}", 0.9, apart="seen in training"),
        )
    ]
    (study,) = studies(NOTHING | {"accuracies": lines})
    assert (study["metric"], study["methods"]) == ("accuracy on test", "ViT, pretrained")
    (line,) = study["panels"][0]["lines"]
    assert [(point["x"], point["mean"]) for point in line["points"]] == [(100, 0.25), (200, 0.5)]
    assert study["references"] == {"pixels": (0.9, 0.9)}
    where = f"the highest accuracy on test of few ({SETTING}) is at images=200"
    assert headline(study) == f"{where}. All are below pixels (90.0%)."


@pytest.mark.parametrize(
    ("lowest", "said"),
    [
        ((2, 2), "is at rate=2 in all 2 settings."),
        ((1, 2), "is at rate=1 in 1 and 2 in 1 of 2 settings."),
    ],
)
def test_the_headline_counts_where_the_lines_are_lowest(lowest: tuple[int, int], said: str) -> None:
    losses = {
        f"t@model={model},rate={rate}": abs(rate - at)
        for model, at in zip("ab", lowest, strict=True)
        for rate in (1, 2, 3)
    }
    (study,) = studies(pretrained(losses))
    assert headline(study) == f"the lowest loss on dev of t {said}"
    assert [best(study, line) for line in study["panels"][0]["lines"]] == [[place] for place in lowest]
