"""A model without some of its heads, as a Hugging Face folder that other tools load.

A head that is gone writes nothing: the folder's logits are those of the model with these heads' ``z`` set to zero.
What a configuration can say is left out of the file, so that it is smaller; the rest is masked, which means that the
heads' rows of ``W_O`` are zero and the file is as large as before. Which is which is recorded in the folder.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mechheads.errors import InvalidInput, ModelRefused, OutputNotWritable, ResultFileError, UnknownName
from mechheads.heads import HeadSet
from mechheads.interventions import apply, zero_ablation
from mechheads.model import Model
from mechheads.provenance import json_ready, package_versions
from mechheads.pruned_layout import Checkpoint, Plan, masking_plan, physical_plans

METHODS = ("auto", "physical", "masked")
RECORD = "mechheads_pruning.json"
_FORMAT = 1
_PROBE_LENGTH = 24
# Of logits, which pass through the whole depth; as loose as half precision's rounding makes them.
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_EXACT = 1e-4


@dataclass(frozen=True)
class PrunedModel:
    """What ``save_pruned`` wrote, and what it left out; also in the folder, as ``mechheads_pruning.json``.

    Parameters are numbers in weight tensors, those shared by two places (tied embeddings) counted once; bytes are
    theirs in the type they are stored in. Attention parameters are those of all attention modules: projections,
    biases, sinks and the norms on queries and keys.

    Attributes:
        folder: Where the model is.
        requested: Heads that were to go, in the order given.
        removed: Those that are not in the file any more.
        masked: Those that are there but write nothing: their rows of ``W_O`` are zero.
        kept: For each layer of the new model, which head of the old model each of its heads is.
        method: ``"auto"``, ``"physical"`` or ``"masked"``, as asked for.
        reason: Why heads were masked, in words; empty where none was.
        parameters_before: Of the model.
        parameters_after: Of the folder.
        attention_before: Attention parameters of the model.
        attention_after: Attention parameters of the folder.
        requested_parameters: What the requested heads own: their slices of the query and output projections, biases
            and sinks, and those of keys and values where every query head of a group was requested.
        bytes_before: Size of the model's weights, bytes.
        bytes_after: Size of the folder's weights, bytes.
        logit_error: Largest difference between the folder's logits and the zero-ablated model's on a short prompt,
            over the largest logit; None where it was not measured.
    """

    folder: Path
    requested: HeadSet
    removed: HeadSet
    masked: HeadSet
    kept: tuple[tuple[int, ...], ...]
    method: str
    reason: str
    parameters_before: int
    parameters_after: int
    attention_before: int
    attention_after: int
    requested_parameters: int
    bytes_before: int
    bytes_after: int
    logit_error: float | None = None

    @property
    def requested_fraction(self) -> float:
        """Share of the attention parameters that the requested heads own, 0 to 1."""
        return self.requested_parameters / self.attention_before

    @property
    def achieved_fraction(self) -> float:
        """Share of the attention parameters that is gone from the file, 0 to 1; masking removes none."""
        return 1 - self.attention_after / self.attention_before

    @property
    def requested_fraction_of_all(self) -> float:
        """Share of all parameters that the requested heads own, 0 to 1."""
        return self.requested_parameters / self.parameters_before

    @property
    def achieved_fraction_of_all(self) -> float:
        """Share of all parameters that is gone from the file, 0 to 1."""
        return 1 - self.parameters_after / self.parameters_before

    def summary(self) -> str:
        """What went, what was masked and why, in a few sentences."""
        parts = [f"{len(self.removed)} of {len(self.requested)} heads removed, {len(self.masked)} masked."]
        parts.append(
            f"Attention parameters: {self.requested_fraction:.1%} requested, {self.achieved_fraction:.1%} removed; of "
            f"all parameters: {self.requested_fraction_of_all:.1%} requested, {self.achieved_fraction_of_all:.1%} "
            f"removed ({self.bytes_before:,} bytes before, {self.bytes_after:,} after)."
        )
        return " ".join([*parts, *([f"Masked because {self.reason}."] if self.reason else [])])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, fractions included, the folder left out."""
        out: dict[str, Any] = {k: v for k, v in vars(self).items() if k != "folder"}
        out |= {name: out[name].labels for name in ("requested", "removed", "masked")}
        fractions = ("requested_fraction", "achieved_fraction", "requested_fraction_of_all", "achieved_fraction_of_all")
        return json_ready({**out, **{name: getattr(self, name) for name in fractions}}, where="pruning record")

    @classmethod
    def load(cls, folder: str | Path) -> PrunedModel:
        """Read the record of a folder that ``save_pruned`` wrote.

        Raises:
            ResultFileError: If there is none, or it is damaged or written by a newer mechheads.
        """
        path = Path(folder) / RECORD
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] > _FORMAT:
                raise ResultFileError(f"{path} was written by a newer mechheads (format {raw['format']}): upgrade.")
            found = {name: raw[name] for name in (f.name for f in fields(cls)) if name != "folder"}
            found |= {name: HeadSet.parse(found[name]) for name in ("requested", "removed", "masked")}
            return cls(folder=Path(folder), **{**found, "kept": tuple(map(tuple, found["kept"]))})
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ResultFileError):
                raise
            raise ResultFileError(
                f"{path} is no record of a pruned model that can be read ({error!r}); give a folder that save_pruned "
                "wrote."
            ) from error


def save_pruned(
    model: Model, heads: Any, folder: str | Path, *, method: str = "auto", overwrite: bool = False, verify: bool = True
) -> PrunedModel:
    """Write the model without some heads as a Hugging Face folder; the model itself stays as it is.

    The folder (configuration, safetensors, tokenizer, generation settings) loads with
    ``transformers.AutoModelForCausalLM.from_pretrained`` and with ``mh.load``, without any code of ours. Its logits are
    those under ``zero_ablation().on(heads)``: a pruned head adds nothing, output biases stay.

    Heads are left out physically where the configuration can say so. It has one number of query heads and one of
    key/value heads for all layers, and a width of heads (``head_dim``) of its own: then as many whole key/value groups
    as go in **every** layer can be left out, and, of the groups that stay, as many query heads as go in **each**. The
    other heads are masked: their rows of ``W_O`` are zero. Heads that stay keep their order and get new numbers
    (``PrunedModel.kept``). Masked throughout: architectures whose configuration derives a head's width from
    their number (GPT-2, OPT, GPT-NeoX), and those that normalise the queries of all heads together (OLMo-2/3).

    Args:
        model: A model loaded by name or from a ``TransformerBridge``, with raw weights and nothing hooked onto it.
        heads: A HeadSet, or anything one parses from.
        folder: Where to write; made if it is not there. It appears whole or not at all.
        method: ``"auto"``; ``"masked"`` to mask all of them, so that heads keep their numbers; ``"physical"`` to refuse
            unless all of them can be left out.
        overwrite: Replace a folder that ``save_pruned`` wrote.
        verify: Load the folder again and compare its logits with the ablated model's, on a short prompt. Takes the
            memory of a second model for a moment.

    Raises:
        InvalidInput: If there are no heads, one does not exist, or they are all there are; if the folder is not
            empty; if hooks or interventions are in force, the weights are not raw, or ``method="physical"``
            cannot be had.
        UnknownName: For another method.
        ModelRefused: If the architecture keeps its heads in a way that is not known, or the folder's logits are
            not the ablated model's.
        OutputNotWritable: If the folder cannot be written.
    """
    if method not in METHODS:
        raise UnknownName("method", method, METHODS)
    requested = HeadSet.parse(heads).check(model.spec.n_layers, model.spec.n_heads)
    target = Path(folder).absolute()
    _refuse_heads(model, requested)
    _refuse_model(model)
    _refuse_folder(model, target, overwrite)
    source = Checkpoint(model)
    why_not: list[str] = ["masking was asked for"] if method == "masked" else []
    with _scratch(target) as scratch:
        for i, plan in enumerate(_plans(source, requested, method, why_not)):
            if method == "physical" and plan.masked:
                raise InvalidInput(
                    f"not all of these heads can go physically: {'; '.join(why_not)}. method='auto' masks the others, "
                    "method='masked' all of them."
                )
            staged = scratch / f"model-{i}"
            weights = _write(source, plan, staged)
            error = _reload_error(model, staged, requested) if verify else None
            if error is None or error <= _TOLERANCE.get(model.backend.dtype, _EXACT):
                record = _record(source, plan, weights, requested, method, "; ".join(why_not))
                return _finish(model, replace(record, folder=target, logit_error=error), staged)
            why_not.append(f"with {len(plan.kept[0])} heads a layer the reloaded model's logits are off by {error:.1e}")
            shutil.rmtree(staged)
    raise ModelRefused(
        f"{model.spec.name!r} ({model.spec.architecture}): {'; '.join(why_not)}. Something of this model is neither in "
        "its weights nor in its configuration; nothing was written."
    )


def _plans(source: Checkpoint, requested: HeadSet, method: str, why_not: list[str]) -> Iterator[Plan]:
    """What can be done, best first."""
    if method != "masked":
        yield from physical_plans(source, requested, why_not)
    yield masking_plan(source, requested)


# -- what is refused ---------------------------------------------------------------------------------


def _refuse_heads(model: Model, requested: HeadSet) -> None:
    """Some heads must go and some must stay."""
    everything = model.spec.n_layers * model.spec.n_heads
    if not len(requested):
        raise InvalidInput("there are no heads to prune; name some, such as 'L1H2, L3H4'.")
    if len(requested) == everything:
        raise InvalidInput(
            f"these are all {everything} heads of the model, and a model needs some; leave at least one."
        )


def _refuse_model(model: Model) -> None:
    """Only what the weights and the configuration alone say can be written."""
    backend: Any = model.backend
    if backend.kind != "TransformerBridge":
        raise InvalidInput(
            f"{model.spec.name!r} is a {backend.kind}, whose weights are in TransformerLens' own layout and no longer "
            "under the names that a Hugging Face folder needs; load the model by name with mh.load."
        )
    if backend.weights != "raw":
        raise InvalidInput(
            f"the weights of {model.spec.name!r} are {backend.weights}: TransformerLens folded norms into them, which "
            "no Hugging Face configuration can say; load the model by name with mh.load, which leaves them raw."
        )
    if model.ablations or backend.hooked():
        raise InvalidInput(
            "there are hooks or interventions on the model, and a folder cannot hold them; leave the `with apply(...)` "
            "block or remove the hooks, then save."
        )
    hf = backend.bridge.original_model
    if getattr(hf, "is_quantized", False) or getattr(hf.config, "quantization_config", None) is not None:
        raise InvalidInput(
            f"{model.spec.name!r} is quantised, so its heads are no plain slices of weights; load it de-quantised."
        )


def _refuse_folder(model: Model, target: Path, overwrite: bool) -> None:
    """Nothing that is not ours is ever replaced."""
    if target.exists() and not target.is_dir():
        raise InvalidInput(f"{target} is a file; give a folder.")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise InvalidInput(
            f"the folder {target} is not empty; give another one, or overwrite=True to replace a pruned model in it."
        )
    if not (target / RECORD).is_file():
        raise InvalidInput(
            f"the folder {target} has no {RECORD}, so save_pruned did not write it, and it is not replaced; give "
            "another folder, or remove it yourself."
        )
    if Path(model.spec.name).absolute() == target:
        raise InvalidInput(f"{target} is the folder this model was loaded from; give another one.")


# -- writing and reading again -----------------------------------------------------------------------


@contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside the target to write in; gone afterwards."""
    from safetensors import SafetensorError

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            yield Path(scratch)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OutputNotWritable):
            raise
        why = getattr(error, "strerror", None) or error
        raise OutputNotWritable(
            f"cannot write the model into {target}: {why}. Choose a folder you may write to, with room in it."
        ) from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' bars over weights that are read or written."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _write(source: Checkpoint, plan: Plan, staged: Path) -> dict[str, Tensor]:
    """Write weights, configuration, generation settings and tokenizer; returns the weights."""
    weights = source.weights | source.sliced(plan)
    width = source.model.spec.d_head
    for layer, heads in plan.masked.by_layer().items():
        out = source.layouts[layer].out
        rows = weights[f"{source.attention[layer]}.{out}"]  # a copy, as all of sliced
        at = torch.tensor([plan.kept[layer].index(head) * width + i for head in heads for i in range(width)])
        rows.index_fill_(source.layouts[layer].owners[out][0], at.to(rows.device), 0)
    filled = plan.empty
    filled.load_state_dict(weights, strict=True, assign=True)
    filled.tie_weights()
    if getattr(source.hf, "generation_config", None) is not None:
        filled.generation_config = copy.deepcopy(source.hf.generation_config)
    filled.config._name_or_path = ""
    staged.mkdir()
    try:
        with _no_bars():
            filled.save_pretrained(str(staged))
    except ValueError as error:  # such as generation settings that contradict each other
        raise InvalidInput(f"transformers does not write {source.model.spec.name!r}: {error}") from error
    if source.model.backend.tokenizer is not None:
        source.model.backend.tokenizer.save_pretrained(str(staged))
    return weights


def _record(
    source: Checkpoint, plan: Plan, weights: Mapping[str, Tensor], requested: HeadSet, method: str, reason: str
) -> PrunedModel:
    """What was done, in numbers."""
    before, after = _sizes(source.weights, source.attention), _sizes(weights, source.attention)
    return PrunedModel(
        folder=Path(),
        requested=requested,
        removed=requested - plan.masked,
        masked=plan.masked,
        kept=plan.kept,
        method=method,
        reason=reason if plan.masked else "",
        parameters_before=before[0],
        parameters_after=after[0],
        attention_before=before[1],
        attention_after=after[1],
        requested_parameters=source.owned(requested),
        bytes_before=before[2],
        bytes_after=after[2],
    )


def _sizes(weights: Mapping[str, Tensor], attention: Sequence[str]) -> tuple[int, int, int]:
    """Parameters, attention parameters and bytes, each storage once."""
    once = {tensor.data_ptr(): (name, tensor) for name, tensor in weights.items()}.values()
    inside = tuple(f"{path}." for path in attention)
    return (
        sum(t.numel() for _, t in once),
        sum(t.numel() for name, t in once if name.startswith(inside)),
        sum(t.numel() * t.element_size() for _, t in once),
    )


@torch.no_grad()
def _reload_error(model: Model, folder: Path, heads: HeadSet) -> float:
    """Largest difference of the folder's logits from the ablated model's, over the largest logit.

    Raises:
        ModelRefused: If keys of the checkpoint are missing, of another shape or unexpected.
    """
    from transformers import AutoModelForCausalLM

    backend: Any = model.backend
    spread = getattr(backend.bridge.original_model, "hf_device_map", None)
    place = {} if spread is None else {"device_map": spread}
    with _no_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True, **place
        )
    again, report = loaded
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(what):
            raise ModelRefused(
                f"the pruned {model.spec.name!r} does not load: {len(report[what])} {what.replace('_', ' ')} (first: "
                f"{sorted(map(str, report[what]))[0]}); nothing was written."
            )
    generator = torch.Generator().manual_seed(0)
    length = min(_PROBE_LENGTH, model.spec.n_ctx)
    tokens = torch.randint(model.spec.d_vocab, (1, length), generator=generator).to(backend.device)
    again = (again if spread is not None else again.to(backend.device)).eval()
    got = again(input_ids=tokens, use_cache=False).logits[0].float()
    with apply(model, zero_ablation().on(heads)):
        want = model.logits(tokens[0].tolist()).float()
    return float((got.to(want.device) - want).abs().max() / want.abs().max())


def _finish(model: Model, record: PrunedModel, staged: Path) -> PrunedModel:
    """Write the record and the model card, and put the folder where it belongs."""
    raw = {
        "format": _FORMAT, "kind": "pruned_model", "model": model.describe(), "versions": package_versions(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"), **record.to_dict(),
    }  # fmt: skip
    (staged / RECORD).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    (staged / "README.md").write_text(_card(model, record), encoding="utf-8")
    replaced = staged.parent / "replaced"
    if record.folder.exists():
        record.folder.rename(replaced)
    try:
        staged.rename(record.folder)
    except OSError:
        if replaced.exists():
            replaced.rename(record.folder)
        raise
    return record


def _card(model: Model, record: PrunedModel) -> str:
    """The folder's README."""
    name = Path(model.spec.name).name if Path(model.spec.name).is_dir() else model.spec.name
    lines = [
        f"# {name} without {len(record.requested)} attention heads",
        "",
        f"Pruned with mechheads. {record.summary()}",
        "",
        f"* requested: {', '.join(record.requested.labels)}",
        f"* removed: {', '.join(record.removed.labels) or 'none'}",
        f"* masked (their rows of the output projection are zero): {', '.join(record.masked.labels) or 'none'}",
    ]
    if record.removed:
        lines += [
            "",
            f"Heads have new numbers. `{RECORD}` lists under `kept`, for each layer, which head of {name} each one is.",
        ]
    return "\n".join([*lines, ""])


__all__ = ["PrunedModel", "save_pruned"]
