"""Importing the package is light, and a saved result opens and draws without torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

import mechheads as mh

# Stands for a machine where these were never installed.
BLOCK = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "transformer_lens", "jaxtyping", "einops"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Missing())
"""


def run(code: str, *args: str) -> str:
    """Output of ``code`` in a fresh interpreter; warnings are errors there too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def saved_scores(folder: Path) -> Path:
    """A small result on disk: three trials, two layers, four heads, one head undefined."""
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 4) / 10
    values[:, 1, 2] = np.nan
    scores = mh.HeadScores(
        method="locos",
        values=values,
        kept=np.array([True, True, True]),
        weights=np.array([1.0, 2.0, 1.0]),
        trial_ids=("a", "b", "c"),
        unit="logits",
    )
    return scores.save(folder / "scores.parquet")


def test_import_is_light() -> None:
    heavy = "torch transformers transformer_lens pandas numpy plotly"
    out = run(f"import mechheads, sys; print([m for m in {heavy.split()!r} if m in sys.modules])")
    assert out == "[]"


def test_floor_0_names_do_not_import_torch() -> None:
    out = run(
        """
        import sys
        import mechheads as mh
        mh.Head, mh.HeadSet, mh.Span, mh.Trial, mh.TrialSet, mh.HeadScores, mh.SweepResult, mh.MechheadsError
        mh.plots.head_heatmap, mh.stats
        print("torch" in sys.modules)
        """
    )
    assert out == "False"


def test_saved_scores_load_and_draw_without_torch(tmp_path: Path) -> None:
    out = run(
        BLOCK
        + textwrap.dedent(
            """
            import mechheads as mh
            scores = mh.HeadScores.load(sys.argv[1])
            figure = mh.plots.head_heatmap(scores)
            print(scores.values.shape, scores.top(1)[0], type(figure).__name__, len(figure.data) > 0)
            try:
                import torch
            except ModuleNotFoundError:
                print("no torch")
            """
        ),
        str(saved_scores(tmp_path)),
    )
    assert out.splitlines() == ["(3, 2, 4) L1H3 Figure True", "no torch"]


@pytest.mark.parametrize("name", sorted(set(mh.__all__)))
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(mh, name) is getattr(mh, name)
    assert name in dir(mh)


def test_lazy_names_are_those_type_checkers_see() -> None:
    source = Path(mh.__file__).read_text(encoding="utf-8")
    (block,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module is not None
        home = node.module.removeprefix("mechheads").lstrip(".")
        seen.update({alias.name: home for alias in node.names})
    assert seen == {**mh._HOME, **dict.fromkeys(mh._SUBMODULES, "")}
    assert set(mh.__all__) == {*seen, "__version__"}


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'mechheads' has no attribute 'locos'"):
        mh.locos  # noqa: B018
    assert not hasattr(mh, "_ipython_display_")


def test_types_are_checked_while_tests_run() -> None:
    from mechheads.smollm2 import get_smollm2

    with pytest.raises(jaxtyping.TypeCheckError):
        get_smollm2(force="yes")  # type: ignore[arg-type]


def test_version_is_that_of_the_distribution() -> None:
    assert mh.__version__ == importlib.metadata.version("mechheads")
