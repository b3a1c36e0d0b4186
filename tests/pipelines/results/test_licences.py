"""Which models may be published, and under which licence."""

import pytest

from pipelines.results.licences import Origin, license_to_publish
from pipelines.spec import RecipeError

MIT, UNKNOWN, OWN = Origin("a.npz", "MIT"), Origin("b.npz", None), Origin("c", "proprietary")
NONCOMMERCIAL = Origin("hf:org/nc", "cc-by-nc-4.0")


@pytest.mark.parametrize(
    ("stated", "recorded", "origins", "expected"),
    [
        ("apache-2.0", None, [], "apache-2.0"),
        (None, "MIT", [MIT], "mit"),
        ("apache-2.0", "MIT", [MIT], "apache-2.0"),
        ("mit", None, [UNKNOWN], "mit"),
        (None, "cc-by-nc-4.0", [NONCOMMERCIAL, MIT], "cc-by-nc-4.0"),
    ],
)
def test_what_may_be_published(stated: str | None, recorded: str | None, origins: list[Origin], expected: str) -> None:
    assert license_to_publish(stated, recorded, origins) == expected


@pytest.mark.parametrize(
    ("stated", "recorded", "origins", "message"),
    [
        (None, None, [], "the licence of the model is unknown.* with --license ID"),
        (None, None, [MIT, UNKNOWN], "started from b.npz, whose licence is unknown.* with --license ID"),
        ("mit", None, [OWN], "started from c, whose licence is 'proprietary'; the licences known to permit"),
        ("my-own", None, [MIT], "--license my-own: the licences known to permit it are apache-2.0, mit"),
        (
            "mit",
            "cc-by-nc-4.0",
            [NONCOMMERCIAL],
            "hf:org/nc, whose licence cc-by-nc-4.0 permits .* same licence",
        ),
    ],
)
def test_what_may_not(stated: str | None, recorded: str | None, origins: list[Origin], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        license_to_publish(stated, recorded, origins)
