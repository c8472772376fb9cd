"""Every notebook runs from top to bottom and shows its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.smollm2
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, smollm2_folder: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "commit notebooks without outputs"
    NotebookClient(book, timeout=600, kernel_name="python3").execute()
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error"]
    assert [out for out in outputs if "application/vnd.plotly.v1+json" in out.get("data", {})]
