"""Shared by all tests: shapes and types checked while they run, no model hub, the real model on request."""

from __future__ import annotations

import os
import signal
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import config, install_import_hook

# Nothing here may need a network: a test that asks the hub for something fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"

# Started in the background, a shell lets a process ignore Ctrl-C, and what it starts as well; tests of Ctrl-C need it.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before the first import of the package, or the modules already imported stay unchecked.
install_import_hook("mechheads", "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of the second environment in the first one."""
    try:
        if version("transformer-lens").startswith("3."):
            return
    except PackageNotFoundError:
        pass  # an environment for results and figures alone: those tests cannot run there either
    skip = pytest.mark.skip(reason="needs TransformerLens 3.9: run `make test`")
    for item in items:
        if "tl3" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def as_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No type checks while a test runs: values of the wrong type meet the package's own errors, as at home."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of the converted SmolLM2; a missing one fails the test rather than skip it silently."""
    from mechheads.smollm2 import GET_COMMAND, smollm2_path

    folder = smollm2_path()
    if folder is None:
        pytest.fail(f"SmolLM2 is not converted yet: run `{GET_COMMAND}`, or leave out with -m 'not smollm2'.")
    return folder


@pytest.fixture(scope="session")
def smollm2_model(smollm2_folder: Path) -> Any:
    """SmolLM2, loaded once for all tests."""
    import mechheads as mh

    return mh.load("smollm2")


@pytest.fixture(scope="session")
def llama() -> Any:
    """Tiny Llama with grouped queries (3 layers, 4 heads, 2 key/value heads), shared: leave it as it is."""
    import tiny

    return tiny.shared("llama")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that a test registers are gone after it."""
    from mechheads.methods import method_names, registry

    method_names()  # the shipped ones are there before the copy is made
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
