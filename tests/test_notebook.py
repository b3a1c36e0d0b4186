"""docs/tour.ipynb runs from top to bottom on a store as the quickstart leaves it, and shows what it says."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from pipelines.identity import PROJECT
from pipelines.store import open_store
from tests.support.documented import put_quickstart

TOUR = PROJECT / "docs" / "tour.ipynb"


def test_the_tour_is_kept_without_outputs() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.full
# traitlets and zmq, not ours: an event loop of the kernel's client is left to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_the_tour_runs_on_the_quickstarts_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_quickstart(open_store(str(tmp_path / "store")))
    monkeypatch.setenv("VITFLOW_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    notebook = nbformat.read(TOUR, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(TOUR.parent)}}).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in shown} <= {"stream", "execute_result", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in shown) == 2, "a plot of rows, a grid of images"
    table, said = shown[0]["data"]["text/plain"], "".join(output.get("text", "") for output in shown)
    assert "ViT, pretrained" in table
    assert "digits {'train': 1008, 'dev': 250, 'test': 539}" in said
    assert "a handwritten" in said
    assert said.count("%  ") == 5, "the five likeliest classes"
