"""Opening the files that tuned lenses come in: tensors by layer, and no code run from any of them."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechheads.errors import ResultFileError

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
FORMATS = (".safetensors", ".npz", *_TORCH)
HEADER = "mechheads_lens"
_KEY = re.compile(r"(?P<prefix>.*?)(?P<layer>\d+)(?:\.(?P<field>weight|bias))?")
# A saved module brings its frozen copy of the model's own norm and unembedding along; they are not translators.
_FROZEN = ("unembed.", "unembedding.", "final_norm.", "layer_norm.")


@dataclass(frozen=True)
class LensFile:
    """Translators as a file holds them.

    Attributes:
        path: The file.
        layers: ``{layer: {"weight": [d_model d_model], "bias": [d_model]}}``.
        looks: The layout that such keys usually go with.
        says: What the file, or the configuration beside it, says of itself.
    """

    path: Path
    layers: dict[int, dict[str, Tensor]]
    looks: str
    says: dict[str, Any]


def read_lens_file(path: Path) -> LensFile:
    """The layers of a file or folder."""
    config: dict[str, Any] = {}
    if path.is_dir():
        config, path = _folder(path)
    if not path.is_file():
        raise ResultFileError(f"{path} does not exist; give a lens file ({', '.join(FORMATS)}) or its folder.")
    if path.suffix not in FORMATS:
        raise ResultFileError(f"{path} has the extension {path.suffix!r}; expected one of {', '.join(FORMATS)}.")
    if path.suffix == ".safetensors":
        raw, says = _read_safetensors(path)
    elif path.suffix == ".npz":
        raw, says = _read_npz(path)
    else:
        raw, says = _read_torch(path), {}
    return _by_layer(path, raw, {**config, **says})


def _folder(path: Path) -> tuple[dict[str, Any], Path]:
    """What a tuned-lens folder's ``config.json`` says, and the file of its parameters."""
    file, config = path / "params.pt", path / "config.json"
    if not file.is_file() or not config.is_file():
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:6]) or "nothing"
        raise ResultFileError(
            f"{path} is no lens folder: expected params.pt and config.json in it, found {inside}. A single file is "
            "given by its own name."
        )
    try:
        raw = json.loads(config.read_text(encoding="utf-8"))
        says = {"d_model": int(raw["d_model"]), "n_layers": int(raw["num_hidden_layers"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultFileError(
            f"{config} is not a lens' configuration ({error!r}); expected d_model and num_hidden_layers in it."
        ) from error
    kind = raw.get("lens_type", "linear_tuned_lens")
    if kind != "linear_tuned_lens":
        raise ResultFileError(f"{config} describes a {kind!r}; only 'linear_tuned_lens' is an affine map a stream.")
    base = raw.get("base_model_name_or_path")
    return {**says, "layout": "residual", "name": base, "meta": {"published_for": str(base)}}, file


def _read_torch(path: Path) -> Any:
    """What a PyTorch file holds, by the reader that builds tensors and containers only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ResultFileError(
            f"{path} is refused: it holds something else than tensors in plain dictionaries, or is no PyTorch file; "
            "opening such a file could run code from it. Save the tensors alone, best as .safetensors. "
            f"({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise ResultFileError(f"{path} is truncated or damaged ({_first_line(error)}); get it again.") from error


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            raw = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dictionary)
            header = (file.metadata() or {}).get(HEADER)
    except (SafetensorError, OSError) as error:
        raise ResultFileError(f"{path} is truncated or damaged ({_first_line(error)}); get it again.") from error
    return raw, _header(path, header)


def _read_npz(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and header of a NumPy archive; arrays of Python objects are not opened."""
    try:
        # Opened here, because np.load leaves a damaged file open.
        with path.open("rb") as handle:
            file = np.load(handle, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise ResultFileError(f"{path} holds a single array, not an archive of arrays; write it with np.savez.")
            arrays = {key: file[key] for key in file.files}
    except ResultFileError:
        raise
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if "allow_pickle" in str(error):
            raise ResultFileError(
                f"{path} is refused: it holds pickled Python objects, and opening them could run code from the file. "
                "Save plain arrays, one a layer."
            ) from error
        raise ResultFileError(f"{path} is truncated or damaged ({_first_line(error)}); get it again.") from error
    header = arrays.pop(HEADER, None)
    for key, array in arrays.items():
        if array.dtype.kind not in "fiu":
            raise ResultFileError(f"{path}: {key!r} holds {array.dtype}, not numbers.")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}, _header(path, header)


def _header(path: Path, text: Any) -> dict[str, Any]:
    """What ``save_lens`` wrote about the lens; empty for other people's files."""
    if text is None:
        return {}
    try:
        says = json.loads(str(text))
        if int(says["format"]) > 1:
            raise ResultFileError(f"{path} was written by a newer mechheads (lens format {says['format']}): upgrade.")
    except (ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"{path} has a mechheads header that cannot be read: {error!r}.") from error
    return says


def _first_line(error: Exception) -> str:
    """The first line of an error that is not ours."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


# -- keys to layers ------------------------------------------------------------------------------


def _by_layer(path: Path, raw: Any, says: dict[str, Any]) -> LensFile:
    """Sort what was read by layer; ``looks`` is the layout that such keys usually go with."""
    raw = _unwrapped(raw)
    stack = _stack_in(path, raw)
    if stack is not None:
        return LensFile(path, stack, "full", says)
    if not isinstance(raw, Mapping) or not raw:
        raise ResultFileError(f"{path} holds {_kind(raw)}; expected translators keyed by layer, or a stack of them.")
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {str(key): value}
    layers: dict[int, dict[str, Tensor]] = {}
    prefixes: set[str] = set()
    for key, value in flat.items():
        if key.startswith(_FROZEN):
            continue
        match = _KEY.fullmatch(key)
        if match is None or not isinstance(value, Tensor):
            raise ResultFileError(
                f"{path}: the entry {key!r} ({_kind(value)}) is no translator; expected keys such as '3.weight' and "
                "'3.bias', or a matrix a layer."
            )
        prefixes.add(match["prefix"])
        if len(prefixes) > 1:
            a, b = sorted(prefixes)
            raise ResultFileError(
                f"{path} holds several families of layers ({a + '0'!r}, {b + '0'!r}, ...); keep the translators alone."
            )
        entry = layers.setdefault(int(match["layer"]), {})
        what = match["field"] or "weight"
        if what in entry:
            raise ResultFileError(f"{path} names the {what} of layer {match['layer']} twice ({key!r}).")
        entry[what] = value
    # A dictionary in a dictionary, or a bare matrix, is how whole maps are kept; flat dotted keys are a module's.
    dotted = all(isinstance(value, Tensor) for value in raw.values()) and any("." in str(key) for key in raw)
    return LensFile(path, layers, "residual" if dotted else "full", says)


def _unwrapped(raw: Any) -> Any:
    """Take off wrappers such as ``{"state_dict": {...}}``."""
    while isinstance(raw, Mapping) and len(raw) == 1:
        ((key, value),) = raw.items()
        if not isinstance(value, Mapping) or re.search(r"\d", str(key)):
            break
        raw = value
    return raw


def _stack_in(path: Path, raw: Any) -> dict[int, dict[str, Tensor]] | None:
    """The layers of one stack ``[layer d d]``, with a stack of biases ``[layer d]`` beside it or not."""
    if isinstance(raw, Tensor):
        raw = {"weight": raw}
    if not isinstance(raw, Mapping):
        return None
    stacks = {k: v for k, v in raw.items() if isinstance(v, Tensor) and v.ndim == 3}
    if not stacks:
        return None
    rest = {k: v for k, v in raw.items() if k not in stacks}
    if len(stacks) > 1 or len(rest) > 1 or not all(isinstance(v, Tensor) and v.ndim == 2 for v in rest.values()):
        raise ResultFileError(
            f"{path} holds {len(stacks)} stacks of matrices and {len(rest)} other entries "
            f"({', '.join(map(str, raw))}); expected one stack [layer d d], and at most one of biases [layer d]."
        )
    (stack,) = stacks.values()
    out = {i: {"weight": matrix} for i, matrix in enumerate(stack)}
    for bias in rest.values():
        if len(bias) != len(stack):
            raise ResultFileError(f"{path} holds {len(stack)} matrices and {len(bias)} biases; one for each is needed.")
        for i, vector in enumerate(bias):
            out[i]["bias"] = vector
    return out


def _kind(value: Any) -> str:
    """What a thing is, for a message."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def stacked(found: LensFile) -> tuple[Tensor, Tensor, int]:
    """Weights ``[layer d d]``, biases ``[layer d]`` (zeros where none has one) and the first layer's number."""
    path, layers = found.path, found.layers
    if not layers:
        raise ResultFileError(f"{path} holds no translators.")
    first = int(found.says.get("first", 0))
    numbers = range(first, max(layers) + 1)
    missing = [i for i in numbers if "weight" not in layers.get(i, {})]
    if missing or min(layers) < first:
        raise ResultFileError(
            f"{path} lacks the translators of the layers {missing[:12]}"
            f"{' ...' if len(missing) > 12 else ''}; it reaches from {min(layers)} to {max(layers)}, and all "
            "are needed."
        )
    bare = [i for i in numbers if "bias" not in layers[i]]
    if bare and len(bare) < len(layers):
        raise ResultFileError(f"{path} has no bias for the layers {bare[:12]}, though others have one; it is damaged.")
    d = layers[first]["weight"].shape[-1] if layers[first]["weight"].ndim else 0
    for i in numbers:
        weight, bias = layers[i]["weight"], layers[i].get("bias")
        if tuple(weight.shape) != (d, d) or not d:
            raise ResultFileError(
                f"{path}: the translator of layer {i} has the shape {list(weight.shape)}; expected a square matrix"
                f"{f' [{d}, {d}], like the first' if i > first else ''}."
            )
        if bias is not None and tuple(bias.shape) != (d,):
            raise ResultFileError(f"{path}: the bias of layer {i} has the shape {list(bias.shape)}; expected [{d}].")
        for what, tensor in layers[i].items():
            if not torch.isfinite(tensor.float()).all():
                raise ResultFileError(f"{path}: the {what} of layer {i} holds NaN or infinity; the file is not usable.")
    said = found.says.get("d_model")
    if said is not None and int(said) != d:
        raise ResultFileError(f"{path} holds matrices of {d}, but what comes with it says d_model {said}.")
    weights = torch.stack([layers[i]["weight"].float() for i in numbers])
    biases = weights.new_zeros(weights.shape[:2]) if bare else torch.stack([layers[i]["bias"].float() for i in numbers])
    return weights, biases, first
