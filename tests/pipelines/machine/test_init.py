"""`vitflow init` writes a recipe that reads back as it was meant, whatever the folder is called."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pipelines.machine import init
from pipelines.recipe.load import load_pipeline
from pipelines.spec import RecipeError


@pytest.mark.parametrize(
    "name", ["photos: 2024", "x: {y", "2024", "yes", "a #b", "a, b]", "é", "a\nb", "1e3"]
)
def test_a_folder_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_images_per_second", lambda choice: 1000.0)
    images, file = tmp_path / name, tmp_path / "mine.yaml"
    for label in ("red", "blue"):
        (images / label).mkdir(parents=True)
        Image.new("RGB", (8, 8), label).save(images / label / "1.png")
    init.write_recipe(file, images, init.Console(quiet=True))
    pipeline = load_pipeline(str(file))
    source: Any = pipeline.stages["images"].source  # type: ignore[union-attr]
    assert (source.name, source.root) == (name, str(images))
    assert pipeline.description == f"A ViT trained on {name}, beside baselines on pixels."


def test_a_recipe_that_cannot_be_read_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        init.write_checked(tmp_path / "x.yaml", "name: {")
    with pytest.raises(UnicodeEncodeError):
        init.write_checked(tmp_path / "x.yaml", "# \udcff")
    assert not [*tmp_path.iterdir()]
