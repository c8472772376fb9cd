"""Tuned lenses in files: two layouts, three formats, and no code run from any of them.

A *layout* says what a matrix means. ``residual``: it is A of ``h -> h + h A^T + b``, as the tuned-lens package writes
it (keys ``{i}.weight`` and ``{i}.bias``, with or without a prefix such as ``layer_translators.``). ``full``: it is all
of ``h -> h M^T + b``, so that ``A = M - I`` (a matrix a layer, a small dictionary a layer, or one stack of them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.lens import TunedLens
from mechheads.lens_read import HEADER, LensFile, read_lens_file, stacked
from mechheads.provenance import canonical_json
from mechheads.result_files import write_atomically

LAYOUTS = ("residual", "full")
READS = ("entering", "leaving")
# Mean of the diagonal below which a matrix is taken for a correction, and above which for a whole map.
_CORRECTION, _WHOLE = 0.25, 0.75


def load_lens(
    path: str | Path,
    *,
    layout: str | None = None,
    reads: str | None = None,
    d_model: int | None = None,
    n_layers: int | None = None,
) -> TunedLens:
    """Read a tuned lens. Tensors alone are read; a file that would run code is refused.

    Args:
        path: A ``.safetensors``, ``.npz`` or ``.pt`` file, or a folder as the tuned-lens package writes it
            (``params.pt`` with ``config.json``).
        layout: ``"residual"`` or ``"full"``. If not given it is taken from what the file says of itself, or else from
            its keys where the numbers agree with them; a file that leaves doubt is refused.
        reads: ``"entering"`` (unless the file says otherwise): translator i reads the stream that enters block i.
            ``"leaving"``: the one that leaves block i, which is the stream that enters block i + 1; then the embedding
            has none, and one for the last block is accepted only if it is the identity.
        d_model: Width expected.
        n_layers: Depth expected, in blocks of the model.

    Raises:
        ResultFileError: If the file is missing, damaged, holds other things than tensors, lacks layers, has matrices
            that are not square or not finite, is for another width or depth, or its layout is in doubt or implausible.
        UnknownName: For another ``layout`` or ``reads``.
    """
    for kind, value, known in (("lens layout", layout, LAYOUTS), ("reading of a lens", reads, READS)):
        if value is not None and value not in known:
            raise UnknownName(kind, value, known)
    found = read_lens_file(Path(path))
    weights, biases, first_key = stacked(found)
    if d_model is not None and weights.shape[-1] != d_model:
        raise ResultFileError(
            f"{path} holds translators of d_model {weights.shape[-1]}, but the model has {d_model}; it belongs to "
            "another model."
        )
    chosen = _agreed(found, "layout", layout) or _guess(found, weights)
    _plausible(found, chosen, weights)
    if chosen == "full":
        weights = weights - torch.eye(weights.shape[-1])
    reads = _agreed(found, "reads", reads) or "entering"
    weights, biases, first = _placed(found, weights, biases, first_key, reads, n_layers)
    meta = {**found.says.get("meta", {}), "file": {"name": Path(path).name, "layout": chosen, "reads": reads}}
    try:
        lens = TunedLens(
            weights, biases, first + len(weights), first, str(found.says.get("name") or Path(path).stem), meta
        )
    except InvalidInput as error:
        raise ResultFileError(f"{path}: {error}") from error
    said = found.says.get("hash")
    if said is not None and chosen == "residual" and said != lens.hash:
        raise ResultFileError(f"{path} says its hash is {said}, but its numbers have {lens.hash}; it is damaged.")
    return lens


# -- what the numbers mean -----------------------------------------------------------------------


def _agreed(found: LensFile, what: str, given: str | None) -> str | None:
    """What the caller and the file say of ``layout`` or ``reads``; an error if they disagree."""
    said = found.says.get(what)
    if given is not None and said is not None and given != said:
        raise ResultFileError(
            f"{found.path} says {what} {said!r}, but {what}={given!r} was asked for; leave it out to follow the file."
        )
    return given or said


def _diagonal(weights: Tensor) -> float:
    """Median over layers of the mean of the diagonal: about 1 for whole maps, about 0 for corrections."""
    return float(weights.diagonal(dim1=-2, dim2=-1).mean(-1).median())


def _guess(found: LensFile, weights: Tensor) -> str:
    """The layout, where keys and numbers point the same way."""
    mean = _diagonal(weights)
    if (found.looks == "full" and mean > _WHOLE) or (found.looks == "residual" and mean < _CORRECTION):
        return found.looks
    raise ResultFileError(
        f"{found.path} does not say what its matrices mean: its keys look like the {found.looks!r} layout, and their "
        f"diagonals are {mean:.2f} on average (about 1 in 'full', about 0 in 'residual'). Give layout='residual' if "
        "h + h A^T + b is meant, or layout='full' if h M^T + b is."
    )


def _plausible(found: LensFile, layout: str, weights: Tensor) -> None:
    """Refuse a layout that the numbers contradict, unless the file itself says so."""
    if found.says.get("layout") == layout:
        return
    mean = _diagonal(weights)
    if layout == "full" and mean < _CORRECTION:
        raise ResultFileError(
            f"{found.path} read as 'full' would throw most of the residual stream away: the diagonals of its matrices "
            f"are {mean:.2f} on average, where a map near the identity has 1. It looks like layout='residual'. If it "
            "is right as it is, build the lens with TunedLens.from_full."
        )
    if layout == "residual" and mean > _WHOLE:
        raise ResultFileError(
            f"{found.path} read as 'residual' would add the residual stream to itself: the diagonals of its matrices "
            f"are {mean:.2f} on average, where a correction has about 0. It looks like layout='full'. If it is right "
            "as it is, build the lens with TunedLens."
        )


def _placed(
    found: LensFile, weights: Tensor, biases: Tensor, first: int, reads: str, n_layers: int | None
) -> tuple[Tensor, Tensor, int]:
    """Translators of the streams ``first`` to the last block's, in the numbering of ``TunedLens``."""
    said = found.says.get("n_layers")
    if n_layers is not None and said is not None and int(said) != n_layers:
        raise ResultFileError(
            f"{found.path} is for {said} layers, but the model has {n_layers}; it belongs to another model."
        )
    n_layers = n_layers if n_layers is not None else None if said is None else int(said)
    have = first + len(weights)
    if reads == "entering":
        if n_layers is not None and have != n_layers:
            raise ResultFileError(
                f"{found.path} holds translators up to layer {have - 1}, but the model's layers are 0 to "
                f"{n_layers - 1}. It belongs to another model, or some are missing."
            )
        return weights, biases, first
    last_is_identity = not weights[-1].any() and not biases[-1].any()
    if n_layers is None and not last_is_identity:
        raise ResultFileError(
            f"{found.path}: with reads='leaving' it does not show whether the last of its {have} translators belongs "
            "to the last block; give n_layers."
        )
    n_layers = have if n_layers is None else n_layers
    if have == n_layers and last_is_identity:
        weights, biases = weights[:-1], biases[:-1]
    elif have != n_layers - 1:
        raise ResultFileError(
            f"{found.path} holds {have} translators for streams that leave a block, but a model of {n_layers} layers "
            f"needs {n_layers - 1}: the last block's output is read as it is, so its translator must be the identity "
            "or left out."
        )
    if not len(weights):
        raise ResultFileError(f"{found.path} holds no translator but the last block's, which is the identity.")
    return weights, biases, first + 1


# -- writing -------------------------------------------------------------------------------------


def save_lens(lens: TunedLens, path: str | Path, *, layout: str = "residual") -> Path:
    """Write a lens, in one piece; ``load_lens`` reads it back.

    ``.safetensors`` and ``.npz`` hold name, layout and ``meta`` as well. A ``.pt`` file is a plain dictionary of
    tensors: ``{i}.weight`` and ``{i}.bias`` as the tuned-lens package reads them, or for the full layout
    ``{i: {"weight", "bias"}}``.

    Args:
        lens: The lens.
        path: The file; its extension chooses the format.
        layout: ``"residual"`` (A) or ``"full"`` (``M = I + A``).

    Returns:
        The path.

    Raises:
        InvalidInput: For another extension, or a ``.pt`` file of a lens that does not begin at stream 0.
        UnknownName: For another layout.
        OutputNotWritable: If the folder cannot be written.
    """
    path = check_lens_path(path)
    if layout not in LAYOUTS:
        raise UnknownName("lens layout", layout, LAYOUTS)
    if path.suffix == ".pt" and lens.first:
        raise InvalidInput(
            f"the lens begins at stream {lens.first}, which a .pt file cannot say; write .safetensors or .npz."
        )
    weights = lens.weights if layout == "residual" else lens.weights + torch.eye(lens.d_model).to(lens.weights)
    key = "{}" if layout == "residual" else "layer_{}"
    tensors: dict[str, Tensor] = {}
    for i, (weight, bias) in enumerate(zip(weights.cpu(), lens.biases.cpu(), strict=True), start=lens.first):
        tensors[key.format(i) + ".weight"], tensors[key.format(i) + ".bias"] = weight.clone(), bias.clone()
    header = canonical_json({"format": 1, "layout": layout, "reads": "entering", **lens.describe()})
    return write_atomically(path, lambda target: _write(target, path.suffix, tensors, header, layout))


def check_lens_path(path: str | Path) -> Path:
    """The path, if a lens can be written to a file of that name.

    Raises:
        InvalidInput: For another extension.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz", ".pt"):
        raise InvalidInput(
            f"a lens cannot be written to {path.name!r}; choose .safetensors, .npz or .pt (which keeps no provenance)."
        )
    return path


def _write(target: Path, suffix: str, tensors: dict[str, Tensor], header: str, layout: str) -> None:
    """Fill a file in the format of its extension."""
    if suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(tensors, str(target), metadata={HEADER: header})
    elif suffix == ".npz":
        with target.open("wb") as file:  # np.savez would add its extension to a name
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
            arrays[HEADER] = np.array(header)
            np.savez(file, **arrays)
    elif layout == "residual":
        torch.save(tensors, target)
    else:
        whole: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            layer, what = name.removeprefix("layer_").split(".")
            whole.setdefault(int(layer), {})[what] = tensor
        torch.save(whole, target)
