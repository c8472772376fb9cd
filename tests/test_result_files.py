"""Names of result files: an extension is added, and dots of a version number are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mechheads.errors import ResultFileError
from mechheads.result_files import read_table, with_extension, write_table


@pytest.mark.parametrize(
    ("given", "extension", "made"),
    [
        ("locos", ".parquet", "locos.parquet"),
        ("locos.parquet", ".parquet", "locos.parquet"),
        ("llama-3.1", ".parquet", "llama-3.1.parquet"),
        ("llama-3.1.parquet", ".parquet", "llama-3.1.parquet"),
        ("runs/v0.2/a.b", ".parquet", "runs/v0.2/a.b.parquet"),
        (".parquet", ".parquet", ".parquet.parquet"),
        ("page", ".html", "page.html"),
        ("qwen2.5.html", ".html", "qwen2.5.html"),
        ("qwen2.5", ".html", "qwen2.5.html"),
    ],
)
def test_with_extension(given: str, extension: str, made: str) -> None:
    assert with_extension(given, extension) == Path(made)


def test_a_name_with_a_dot_is_found_again_with_and_without_extension(tmp_path: Path) -> None:
    table = pa.table({"a": np.arange(3)})
    path = write_table(tmp_path / "llama-3.1", table, kind="test", header={})
    assert path == tmp_path / "llama-3.1.parquet" and path.is_file()
    for name in ("llama-3.1", "llama-3.1.parquet"):
        assert read_table(tmp_path / name, kind="test")[0].column("a").to_pylist() == [0, 1, 2]
    with pytest.raises(ResultFileError, match=r"llama-3\.2\.parquet does not exist"):
        read_table(tmp_path / "llama-3.2", kind="test")
