"""The promotion's decision: by the ends of a paired interval, on images that no model has seen, over equal classes."""

import json
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines import store as st
from pipelines.results.accuracies import verdict_lines
from pipelines.spec import Promote
from pipelines.store import Manifest, Store
from ray_jobs.evaluation.intervals import paired_difference
from ray_jobs.promote import Accuracy, decide, images_needed, promote
from tests.support import datasets
from tests.support.checkpoints import put_untrained
from tests.support.records import make_context, make_manifest
from tests.support.reports import make_report
from vit_model.errors import UserError

PROMOTE = {"job": "promote", "data": "frozen", "candidate": "train", "against": "@production", "floor": 0.5}


def config(**fields: Any) -> Promote:
    return Promote.model_validate(PROMOTE | fields)


def pair(images: int, won: int, lost: int, right: float = 0.8) -> tuple[Accuracy, Accuracy]:
    """Return whether candidate and rival have each image right: `won` only the candidate, `lost` only the rival."""
    rival = np.arange(images) < right * images
    candidate = rival.copy()
    candidate[:lost] = False
    candidate[images - won :] = True
    return Accuracy(candidate), Accuracy(rival)


def verdict(images: int, won: int, lost: int, **fields: Any) -> str:
    candidate, rival = pair(images, won, lost)
    return decide(config(**fields), {"candidate": candidate, "against": rival}).verdict


def test_the_end_of_the_interval_decides_whatever_the_number_of_images() -> None:
    assert verdict(100_000, 300, 300) == "promoted"
    assert verdict(2_000, 60, 20) == "promoted"
    assert verdict(2_000, 20, 100) == "worse"
    assert verdict(2_000, 30, 30) == "not shown", "no loss was measured, but one of 0.5 points is possible"
    assert verdict(2_000, 30, 30, max_loss=0.02) == "promoted"
    assert verdict(10, 1, 0) == "not shown"


@pytest.mark.parametrize(("won", "lost"), [(30, 30), (30, 36), (20, 38), (0, 0)])
def test_about_so_many_images_would_tell(won: int, lost: int) -> None:
    """With the same shares, a tenth more images than said decide, and a tenth fewer do not."""
    candidate, rival = pair(200 if won == lost == 0 else 2_000, won, lost)
    needed = images_needed(candidate, rival, 0.005)
    assert needed is not None and needed > rival.num_images

    def at(images: float) -> str:
        scale = images / 2_000
        return verdict(round(images), round(won * scale), round(lost * scale))

    assert at(needed * 1.1) == ("promoted" if lost - won < 10 else "worse")
    assert at(needed * 0.9) == "not shown"
    reason = decide(config(), {"candidate": candidate, "against": rival}).reason
    assert f"about {needed:,} images would tell" in reason


def test_many_small_losses_are_bounded_by_the_anchor() -> None:
    candidate, rival = pair(100_000, 100, 300)
    lost_before = Accuracy(rival.correct | (np.arange(100_000) >= 97_000))
    tests = {"candidate": candidate, "against": rival}
    assert decide(config(anchor="@anchor"), tests).verdict == "promoted"
    refused = decide(config(anchor="@anchor"), tests | {"anchor": lost_before})
    assert refused.verdict == "worse" and "against @anchor" in refused.reason
    assert refused.metrics["difference"] == pytest.approx(-0.002)
    assert refused.metrics["total"] == pytest.approx(-0.032)
    assert decide(config(anchor="@anchor", max_total_loss=0.1), tests | {"anchor": lost_before}).verdict == "promoted"


def test_the_first_model_needs_the_floor() -> None:
    right = Accuracy(np.arange(100) < 50)
    assert decide(config(floor=0.5), {"candidate": right}).verdict == "promoted"
    assert decide(config(floor=0.51), {"candidate": right}).verdict == "below the floor"


# ------------------------------------------------------------------------------------------------- the stage


NONE = range(0)


def data(store: Store, name: str, test: range, train: range = NONE, names: tuple[str, ...] = ("a", "b")) -> Manifest:
    with store.staging(st.Layout.files("ingest", name, 1)) as staging:
        info = datasets.put_numbered(staging.path, name, names, {"train": train, "dev": NONE, "test": test})
    made = make_manifest("ingest", key=name, stage=name, content_digest=info.content_digest, files=staging.files)
    return st.commit(store, made)


def model(store: Store, name: str, of: Manifest, seed: int, start: Manifest | None = None) -> Manifest:
    """An untrained model that says that it was trained on a dataset's train, and on what its start was."""
    starts = [] if start is None else [st.input_ref(store, start)]
    made = put_untrained(store, of, name, seed=seed)
    inputs = {"data": [st.input_ref(store, of)], "init_from": starts}
    return st.commit(store, made.model_copy(update={"inputs": inputs, "stage": name, "nonce": name}))


def test_both_are_scored_on_the_images_that_no_ancestor_of_either_has_seen(store: Store) -> None:
    frozen = data(store, "frozen", range(60))
    first = model(store, "first", data(store, "one", NONE, range(10, 100)), seed=1)
    rival = model(store, "rival", data(store, "two", NONE, range(100, 120)), seed=2, start=first)
    candidate = model(store, "candidate", data(store, "three", NONE, range(50, 130)), seed=3)
    context = make_context(store, config(max_loss=0.9), data=frozen, candidate=candidate, against=rival)
    result = promote(context)
    table = pq.read_table(store.local(st.Layout.files("promote", "k", 1), ()) / "predictions.parquet")
    assert result.metrics["verdict"] == "promoted" and (result.metrics["images"], result.metrics["excluded"]) == (
        10,
        50,
    )
    assert {row["method"] for row in table.to_pylist()} == {"candidate", "@production"}
    assert {*table["sample_id"].to_pylist()} == {f"frozen-test-{number:04d}" for number in range(10)}
    candidate_right, rival_right = (
        table.filter(table["method"].to_numpy() == name)["correct"].to_numpy()[None]
        for name in ("candidate", "@production")
    )
    expected = paired_difference(candidate_right, rival_right)
    assert [result.metrics[name] for name in ("difference", "lower", "upper")] == [*expected]


def test_a_report_says_what_was_decided_and_does_not_repeat_the_scores(store: Store) -> None:
    frozen = data(store, "frozen", range(40))
    seen = data(store, "seen", NONE, range(100, 110))
    one, two = (model(store, name, seen, seed=3) for name in ("one", "two"))
    context = make_context(store, config(max_loss=0.001), data=frozen, candidate=one, against=two)
    result = promote(context)
    made = {"files": result.files, "metrics": result.metrics, "config": context.attempt.config}
    made |= {
        "code": {"version": 1, "digest": "0" * 64},
        "environment": {"cluster": {}, "packages": {}, "python": "", "machine": "", "processor": ""},
    }
    decided = make_manifest("promote", stage="promote", inputs={"data": [st.input_ref(store, frozen)]}, **made)
    files = make_report(store, [st.commit(store, decided)])
    numbers, page = json.loads(files["report.json"]), files["report.html"].decode()
    (promotion,) = numbers["promotions"]
    sentence = "@production: refused, not shown: +0.00 points (95% CI "
    assert promotion["sentence"].startswith(sentence) and sentence in page
    assert numbers["accuracies"] == []
    assert verdict_lines(numbers)[0] == promotion["sentence"]


def test_classes_are_compared_by_name(store: Store) -> None:
    frozen = data(store, "frozen", range(40))
    turned = model(store, "turned", data(store, "one", NONE, range(100, 110), ("b", "a")), seed=1)
    same = model(store, "same", data(store, "two", NONE, range(110, 120)), seed=1)
    promote(make_context(store, config(max_loss=0.9), data=frozen, candidate=turned, against=same))
    table = pq.read_table(store.local(st.Layout.files("promote", "k", 1), ()) / "predictions.parquet")
    first, second = (table["prediction"].to_numpy()[rows] for rows in (slice(0, 40), slice(40, 80)))
    np.testing.assert_array_equal(first, 1 - second, "the same outputs, with the names exchanged")
    grown = model(store, "grown", data(store, "three", NONE, range(120, 130), ("a", "b", "c")), seed=1)
    with pytest.raises(UserError, match=r"candidate: grown \(pretrain grown\) has the classes c, which frozen lacks"):
        promote(make_context(store, config(), data=frozen, candidate=grown, against=same))


def test_a_candidate_that_is_the_alias_s_model_is_no_news(store: Store) -> None:
    frozen = data(store, "frozen", range(20))
    one = model(store, "one", data(store, "two", NONE, range(100, 110)), seed=1)
    assert promote(make_context(store, config(), data=frozen, candidate=one, against=one)).metrics["verdict"] == "same"


def test_a_test_set_that_a_model_has_seen_whole_is_refused(store: Store) -> None:
    frozen = data(store, "frozen", range(20))
    one = model(store, "one", data(store, "two", NONE, range(30)), seed=1)
    with pytest.raises(UserError, match="trained on all 20 test images of frozen"):
        promote(make_context(store, config(), data=frozen, candidate=one))
