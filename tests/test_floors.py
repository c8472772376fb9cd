"""Imports only go down: the floors of docs/architecture.md, checked in the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mechheads"
TOP = 5

# What a floor may import from outside, besides the standard library; higher floors may import anything.
FLOOR_0 = {
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "plotly",
    "rouge_score",
    "yaml",
    "pydantic",
    "pydantic_core",
    "filelock",
}
OUTSIDE = {0: FLOOR_0, 1: FLOOR_0 | {"torch", "einops", "jaxtyping"}}
# Packages that one module alone may import.
SOLE_IMPORTER = {"transformer_lens": "model"}


def documented_floors() -> dict[str, int]:
    """Module or subpackage name -> floor, from the table of the document."""
    floors: dict[str, int] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (\d) \| (.+?) \|", line)
        if row is None:
            continue
        names = re.sub(r"\(.*?\)", "", row[2])  # remarks in brackets name no module of ours
        floors.update({name.rstrip("/"): int(row[1]) for name in re.findall(r"`([^`]+)`", names)})
    return floors


FLOORS = documented_floors()
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"  # holds no code but the lazy lookup of names
}


def floor_of(module: str) -> int:
    """Floor of a module inside the package, such as ``plots.heatmap``."""
    name = module.split(".")[0]
    assert name in FLOORS, f"mechheads.{name} stands on no floor of the table in docs/architecture.md: add it."
    return FLOORS[name]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Dotted names that ``source`` imports when it runs, inside functions too, relative ones resolved."""
    todo: list[ast.AST] = [ast.parse(source)]
    here = ["mechheads", *module.split(".")] if is_package else ["mechheads", *module.split(".")[:-1]]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # "from mechheads import stats" may name a module: the longest name that is one counts.
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.If) and is_type_checking(node):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line for each import of ``source`` that its floor forbids."""
    floor = floor_of(module)
    found = []
    for name in imports(source, module, is_package=is_package):
        parts = name.split(".")
        if parts[0] == "mechheads":
            inner = parts[1] if len(parts) > 1 else ""
            is_module = inner in FLOORS or (PACKAGE / inner).is_dir() or (PACKAGE / f"{inner}.py").exists()
            if is_module and inner and floor_of(inner) > floor:
                found.append(f"{module} (floor {floor}) imports {name} (floor {floor_of(inner)})")
            elif (not is_module or not inner) and inner != "__version__":
                found.append(f"{module} imports {name}: import from the module that defines it")
        elif SOLE_IMPORTER.get(parts[0], module) != module:
            found.append(f"{module} imports {parts[0]}; only {SOLE_IMPORTER[parts[0]]} may")
        elif floor in OUTSIDE and parts[0] not in OUTSIDE[floor] | sys.stdlib_module_names:
            found.append(f"{module} (floor {floor}) imports {parts[0]}")
    return found


def test_the_document_has_all_floors() -> None:
    assert set(FLOORS.values()) == set(range(TOP + 1))
    assert FLOORS["heads"] == 0 and FLOORS["kernels"] == 1 and FLOORS["model"] == 2 and FLOORS["cli"] == TOP


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    path = MODULES[module]
    package = path.name == "__init__.py"
    name = module.removesuffix(".__init__")
    assert violations(path.read_text(encoding="utf-8"), name, is_package=package) == []


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("scores", "import torch", "scores (floor 0) imports torch"),
        ("scores", "def f():\n    from torch import nn", "scores (floor 0) imports torch"),
        ("scores", "from mechheads.model import load", "(floor 2)"),
        ("scores", "from mechheads import model", "(floor 2)"),
        ("scores", "from . import model", "(floor 2)"),
        ("plots.heatmap", "from ..capture import LayerActs", "(floor 2)"),
        ("kernels", "import transformers", "kernels (floor 1) imports transformers"),
        ("capture", "import transformer_lens.hook_points", "only model may"),
        ("analysis", "import mechheads", "import from the module that defines it"),
        ("heads", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch", "heads (floor 0) imports torch"),
    ],
)
def test_the_check_sees(module: str, source: str, problem: str) -> None:
    (found,) = violations(source, module)
    assert problem in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scores", "from mechheads.heads import Head\nimport numpy as np\nimport json"),
        ("heads", "if TYPE_CHECKING:\n    import torch"),
        ("model", "import transformer_lens"),
        ("plots.heatmap", "from ..scores import HeadScores\nfrom .style import COLOURS"),
        ("analysis", "from mechheads import __version__\nimport torch"),
    ],
)
def test_the_check_allows(module: str, source: str) -> None:
    assert violations(source, module) == []
