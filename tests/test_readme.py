"""The README says what the commands print, and its code is code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import mechheads as mh

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_numbers_are_those_of_the_recorded_demo() -> None:
    numbers = script("readme_numbers")
    summary = json.loads(numbers.SUMMARY.read_text(encoding="utf-8"))
    block = README.split(numbers.START)[1].split(numbers.END)[0]
    assert block.strip() == numbers.markdown(summary).strip()
    assert not re.search(r"\b0\.\d\d \[", README.replace(block, "")), "a number outside the measured block"


def test_the_comparison_is_the_recorded_one() -> None:
    numbers = script("readme_numbers")
    summary = json.loads(numbers.COMPARE.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    block = page.split(numbers.COMPARE_START)[1].split(numbers.COMPARE_END)[0]
    assert block.strip() == numbers.compare_markdown(summary).strip()
    assert not re.search(r"\b0\.\d\d \[", page.replace(block, "")), "a number outside the measured block"


def test_python_blocks_parse_and_name_things_that_exist() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mh":
                assert hasattr(mh, node.attr), node.attr


def test_pictures_and_pages_it_links_to_are_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:docs|notebooks)/[^`]+)`", README):
        assert (ROOT / path).exists(), path
