"""Models: loading, one interface over TransformerLens' two kinds, and the checks at the door.

This is the only module that imports ``transformer_lens``.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import Backend, HookFn, Norm, Row
from mechheads.errors import InvalidInput, MechheadsError, ModelRefused, UnknownName
from mechheads.kernels_weights import VocabularyProducts
from mechheads.provenance import content_hash
from mechheads.trials import Encoding

if TYPE_CHECKING:
    from mechheads.verify import Verification

# Trained by mechheads.nano.train and shipped in the package.
_SHIPPED = ("nano", "nano-logic")
_OWN_MODELS = (*_SHIPPED, "smollm2")


@dataclass(frozen=True)
class ModelSpec:
    """What a model is, as results record it.

    Attributes:
        name: Name, hub id or folder it was loaded by.
        architecture: Hugging Face class name.
        backend: ``TransformerBridge`` or ``HookedTransformer``.
        n_layers: Transformer blocks.
        n_heads: Query heads a layer.
        n_key_value_heads: Key/value heads a layer (fewer than n_heads under grouped-query attention).
        d_head: Width of a head.
        d_model: Width of the residual stream.
        d_vocab: Rows of the unembedding.
        n_ctx: Longest context, tokens.
        dtype: Of the weights; scoring arithmetic is float32.
        weights: ``raw`` (as Hugging Face's), ``folded`` or ``processed`` (TransformerLens changed them), with
            ``+centred`` where the unembedding sums to zero over the vocabulary.
        revision: Hub revision, or None.
    """

    name: str
    architecture: str
    backend: str
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int
    d_vocab: int
    n_ctx: int
    dtype: str
    weights: str
    revision: str | None = None


class Model:
    """A language model whose heads can be taken apart.

    Made by ``mh.load``; every number that leaves it is checked once by ``verify``.

    Attributes:
        spec: What it is.
        backend: The TransformerLens object behind it, through the back-end interface.
        verification: What ``verify`` measured last, or None.
        ablations: What the interventions now in force do: kind, site, heads, reference.
        rows: What the rows of the batch now run are, or None; see ``running``.
        row_listeners: Called with the rows before they are run.
        site_effects: Whether hooks at an attention site change what the model runs on, where that was tried.
        lock: Held while hooks are in force and while the model decodes, so that threads take turns.
        vocabulary_products: ``W_U W_E`` and the like, kept while the weights stay as they are.
    """

    def __init__(self, backend: Backend, *, name: str, revision: str | None = None):
        self.backend = backend
        shape = backend.shape
        self.spec = ModelSpec(
            name=name,
            architecture=backend.architecture,
            backend=backend.kind,
            dtype=str(backend.dtype).removeprefix("torch."),
            weights=_weights_label(backend),
            revision=revision,
            **asdict(shape),
        )
        self.verification: Verification | None = None
        self.ablations: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        self.rows: list[Row] | None = None
        self.row_listeners: list[Callable[[list[Row]], None]] = []
        self.site_effects: dict[str, bool] = {}
        self.vocabulary_products = VocabularyProducts()
        self._newline: dict[int, bool] = {}

    def __repr__(self) -> str:
        s = self.spec
        return (
            f"Model({s.name!r}, {s.architecture} via {s.backend}: {s.n_layers} layers x {s.n_heads} heads, "
            f"{s.n_key_value_heads} key/value heads, {s.dtype}, {s.weights} weights)"
        )

    # -- text ------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; an error if the model was made without one."""
        if self.backend.tokenizer is None:
            raise InvalidInput(
                f"{self.spec.name!r} has no tokenizer, so text cannot be read; build trials from tokens "
                "(mh.Trial(tokens=...)) or pass tokenizer=... to mh.load."
            )
        return self.backend.tokenizer

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        """Tokenise a text with the tokenizer's own special tokens (a BOS only where it adds one).

        Args:
            text: The prompt, or the user's message if ``chat``.
            chat: Put the text through the chat template, ready for the assistant's answer.

        Raises:
            InvalidInput: If the text is empty, or ``chat`` is asked of a model without a template.
        """
        if not text:
            raise InvalidInput("the prompt is empty; give at least one character.")
        if chat:
            if not self.has_chat_template:
                raise InvalidInput(f"{self.spec.name!r} has no chat template; use chat=False.")
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        if not getattr(self.tokenizer, "is_fast", False):
            raise InvalidInput(
                f"the tokenizer of {self.spec.name!r} gives no character offsets, so spans cannot be found; "
                "build trials from tokens and spans."
            )
        out = self.tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
        return Encoding(text, tuple(out["input_ids"]), tuple(map(tuple, out["offset_mapping"])))

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts can go through a chat template."""
        return bool(getattr(self.backend.tokenizer, "chat_template", None))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of some tokens, special tokens included."""
        return self.tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token by itself."""
        return [self.decode([t]) for t in tokens]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a generation."""
        return self.backend.stop_tokens()

    def is_newline(self, token: int) -> bool:
        """Whether the text of a token contains a line break; never without a tokenizer, which alone knows."""
        if self.backend.tokenizer is None:
            return False
        if token not in self._newline:
            self._newline[token] = "\n" in self.decode([token])
        return self._newline[token]

    # -- weights ---------------------------------------------------------------------------------

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """Output projection of each head of a layer; a view of the live weights."""
        self.check_layer(layer)
        return self.backend.W_O(layer)

    def b_O(self, layer: int) -> Float[Tensor, " d_model"]:
        """Output bias of a layer; zeros where the architecture has none."""
        self.check_layer(layer)
        bias = self.backend.b_O(layer)
        return bias if bias is not None else self.backend.W_O(layer).new_zeros(self.spec.d_model)

    def W_Q(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        """Query projection of each head of a layer, before QK-norm and rotation: ``q = x @ W_Q + b_Q``.

        x is the stream after ``input_norm``.

        Raises:
            InvalidInput: If there is no such layer.
            ModelRefused: If the architecture keeps no such matrix for each head.
        """
        return self._qkv(layer, "W_Q", self.spec.n_heads)

    def W_K(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        """Key projection of each key/value head of a layer, not repeated under grouped queries; see ``W_Q``."""
        return self._qkv(layer, "W_K", self.spec.n_key_value_heads)

    def W_V(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        """Value projection of each key/value head of a layer, not repeated under grouped queries; see ``W_Q``."""
        return self._qkv(layer, "W_V", self.spec.n_key_value_heads)

    def b_Q(self, layer: int) -> Float[Tensor, "head d_head"]:
        """Query bias of each head; zeros where the architecture has none."""
        return self._qkv(layer, "b_Q", self.spec.n_heads)

    def b_K(self, layer: int) -> Float[Tensor, "kv_head d_head"]:
        """Key bias of each key/value head; zeros where the architecture has none."""
        return self._qkv(layer, "b_K", self.spec.n_key_value_heads)

    def b_V(self, layer: int) -> Float[Tensor, "kv_head d_head"]:
        """Value bias of each key/value head; zeros where the architecture has none."""
        return self._qkv(layer, "b_V", self.spec.n_key_value_heads)

    def _qkv(self, layer: int, name: str, heads: int) -> Tensor:
        """An input projection or its bias, its shape checked."""
        self.check_layer(layer)
        found = self.backend.qkv(layer)[name]
        matrix = name.startswith("W")
        if found is None and not matrix:
            return self.backend.W_O(layer).new_zeros(heads, self.spec.d_head)
        wanted = (heads, self.spec.d_model, self.spec.d_head) if matrix else (heads, self.spec.d_head)
        if found is None or tuple(found.shape) != wanted:
            raise ModelRefused(
                f"{self.spec.architecture}: {name} of layer {layer} is "
                f"{'absent' if found is None else list(found.shape)}, not {list(wanted)} (one matrix a head); scores "
                "from weights alone cannot take it apart. Use methods that read activations."
            )
        return found

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding: what each token writes into the residual stream, Gemma's scale included, positions left out."""
        return self.backend.embedding()

    def input_norm(self, layer: int) -> Norm | None:
        """The norm whose output attention reads; None where attention reads the stream itself (OLMo-2/3).

        Raises:
            InvalidInput: If there is no such layer.
            ModelRefused: If the architecture does not say.
        """
        self.check_layer(layer)
        return self.backend.input_norm(layer)

    def post_norm(self, layer: int) -> Norm | None:
        """The norm between a layer's attention output and the residual stream, or None where there is none."""
        self.check_layer(layer)
        found = self.backend.post_norm(layer)
        return None if found is None else found[0]

    def qk_norm(self, layer: int) -> tuple[Norm, Norm] | None:
        """The norms on a layer's queries and keys (Qwen3, Gemma-3, OLMo-2/3), or None where there are none.

        Their weights are ``[head d_head]`` and ``[kv_head d_head]`` (the same for all heads, except in OLMo).
        """
        self.check_layer(layer)
        found = self.backend.qk_norm(layer)
        if found is None:
            return None
        q, k = (
            replace(
                norm, weight=None if norm.weight is None else norm.weight.reshape(-1, self.spec.d_head).expand(n, -1)
            )
            for norm, n in zip(found, (self.spec.n_heads, self.spec.n_key_value_heads), strict=True)
        )
        return q, k

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding matrix."""
        return self.backend.unembedding()[0]

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """Unembedding bias; zeros where the architecture has none."""
        W_U, b_U = self.backend.unembedding()
        return b_U if b_U is not None else W_U.new_zeros(W_U.shape[1])

    @property
    def final_norm(self) -> Norm:
        """The norm before the unembedding, with its effective weight."""
        return self.backend.final_norm()

    def weight_hash(self) -> str:
        """SHA-256 over every weight (name, shape, bytes), hex, 16 characters. Changes with any edit."""
        digest = hashlib.sha256()
        for name, tensor in self.backend.parameters():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            flat = tensor.detach().contiguous().cpu().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """The spec, with hashes of the weights, the settings and the tokenizer as they are now; JSON-ready."""
        return {
            **asdict(self.spec),
            "weights": _weights_label(self.backend),
            "weight_hash": self.weight_hash(),
            "settings_hash": content_hash(self.backend.settings()),
            "tokenizer_hash": self._tokenizer_hash(),
        }

    def _tokenizer_hash(self) -> str | None:
        """Hash over what turns text into tokens and ends an answer."""
        tokenizer = self.backend.tokenizer
        if tokenizer is None:
            return None
        inner = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = inner.to_str() if inner is not None else repr(tokenizer)
        return content_hash([vocabulary, getattr(tokenizer, "chat_template", None), sorted(self.stop_tokens)])

    def check_layer(self, layer: int) -> None:
        """Raise InvalidInput if there is no such layer."""
        if not 0 <= layer < self.spec.n_layers:
            raise InvalidInput(f"layer {layer} does not exist: the model has layers 0 to {self.spec.n_layers - 1}.")

    def check_tokens(self, tokens: Sequence[int], *, what: str = "the prompt") -> None:
        """Raise InvalidInput if a prompt is empty, longer than the context, or holds tokens of another model.

        Args:
            tokens: The prompt.
            what: Its name in the message.
        """
        if not len(tokens):
            raise InvalidInput(f"{what} has no tokens.")
        if len(tokens) > self.spec.n_ctx:
            raise InvalidInput(
                f"{what} has {len(tokens)} tokens, but {self.spec.name!r} takes at most {self.spec.n_ctx}; make the "
                "context shorter."
            )
        if max(tokens) >= self.spec.d_vocab or min(tokens) < 0:
            raise InvalidInput(
                f"{what} holds token ids outside 0 to {self.spec.d_vocab - 1}; it was made with another model's "
                "tokenizer."
            )

    # -- running ---------------------------------------------------------------------------------

    @contextmanager
    def hooks(self, pairs: Sequence[tuple[str, HookFn]]) -> Iterator[None]:
        """Hooks by TransformerLens name, removed on exit also after an exception."""
        with self.backend.hooks(pairs):
            yield

    @contextmanager
    def running(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Say which prompts the rows of the coming runs are, for interventions that differ by prompt or by row.

        The list is the decoder's own: rows that end are taken out of it, tokens said are added to them.
        """
        before, self.rows = self.rows, None
        try:
            for listener in self.row_listeners:
                listener(rows)
            self.rows = rows
            yield rows
        finally:
            self.rows = before

    def logits(self, tokens: Sequence[int]) -> Float[Tensor, "pos vocab"]:
        """Logits at every position of one prompt, without cache, on the hooked model."""
        batch = torch.tensor([list(tokens)], device=self.backend.device)
        with self.running([Row(tuple(tokens))]):
            return self.backend.run(batch, torch.ones_like(batch), None, last_only=False)[0]

    def verify(self, *, tolerance: float = 1e-5) -> Verification:
        """Measure the identities that scores rest on; see ``mechheads.verify``.

        Raises:
            ModelRefused: If one fails, naming it and the size of the error.
        """
        from mechheads.verify import verify

        self.verification = verify(self, tolerance=tolerance)
        return self.verification


def _weights_label(backend: Backend) -> str:
    """``raw``, ``folded`` or ``processed``, with ``+centred`` where it applies."""
    return backend.weights + ("+centred" if _is_centred(backend) else "")


def _is_centred(backend: Backend) -> bool:
    """Whether W_U sums to zero over the vocabulary, as TransformerLens' processing leaves it."""
    W_U = backend.unembedding()[0].detach().float()
    return bool(W_U.mean(-1).abs().max() < 1e-6 * W_U.abs().max())


def load(
    model: Any,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    device_map: Any = None,
    n_devices: int | None = None,
    verify: bool = True,
) -> Model:
    """Load a model and check it.

    Args:
        model: ``"nano"``, ``"nano-logic"``, ``"smollm2"``, a hub id, a local folder, or a ready ``TransformerBridge``
            or ``HookedTransformer`` (its weights are taken as they are).
        tokenizer: Tokenizer to use instead of the model's own.
        revision: Hub revision (branch, tag or commit).
        dtype: Weight type; as stored if None.
        device: Where to put the model; TransformerLens' choice if None.
        device_map: Placement for models larger than one accelerator, as in ``transformers``.
        n_devices: Or simply the number of accelerators to spread over.
        verify: Check the identities on a short prompt.

    Returns:
        The model; raw weights, so logits equal Hugging Face's.

    Raises:
        UnknownName: If no such model is known.
        ModelRefused: If an identity fails; the message names it and the size of the error.
    """
    kind = type(model).__name__
    if isinstance(model, Model) and tokenizer is not None:
        raise InvalidInput("this Model has its tokenizer already; pass tokenizer=... when loading it by name.")
    by_name = {"revision": revision, "dtype": dtype, "device": device, "device_map": device_map, "n_devices": n_devices}
    if not isinstance(model, (str, Path)) and (given := [k for k, v in by_name.items() if v is not None]):
        raise InvalidInput(f"{given[0]} cannot be applied to a {kind} that is loaded already; load it by name instead.")
    if isinstance(model, Model):
        return model
    if isinstance(model, (str, Path)):
        loaded = _load_by_name(
            str(model),
            tokenizer=tokenizer,
            revision=revision,
            dtype=dtype,
            device=device,
            device_map=device_map,
            n_devices=n_devices,
        )
    elif kind == "TransformerBridge":
        loaded = _from_bridge(model, tokenizer, fresh=False)
    elif kind == "HookedTransformer":
        loaded = _from_hooked(model, tokenizer)
    else:
        raise InvalidInput(
            f"cannot load a model from a {kind}; pass 'nano', 'smollm2', a hub id, a folder, a TransformerBridge or a "
            "HookedTransformer (wrap a Hugging Face model with TransformerBridge.boot_transformers(hf_model=...))."
        )
    if verify:
        loaded.verify()
    return loaded


def _from_bridge(bridge: Any, tokenizer: Any, *, fresh: bool, name: str = "", revision: str | None = None) -> Model:
    """Wrap a booted bridge; ``fresh`` if no user can have hooked it yet."""
    from mechheads.backends.bridge import BridgeBackend

    backend = BridgeBackend(bridge, tokenizer or _native_tokenizer(bridge.tokenizer), fresh=fresh)
    return Model(backend, name=name or str(bridge.cfg.model_name), revision=revision)


def _from_hooked(model: Any, tokenizer: Any) -> Model:
    """Wrap a HookedTransformer of TransformerLens 3.9."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    from mechheads.backends.hooked import HookedBackend

    backend = HookedBackend(model, TransformerLensKeyValueCache, tokenizer or _native_tokenizer(model.tokenizer))
    return Model(backend, name=str(model.cfg.model_name or "HookedTransformer"))


def _native_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer as it was published; TransformerLens sets its own up to prepend a BOS that the model may not use.

    Taken from the folder or the local cache it came from. Where it is not there any more, TransformerLens' stays.
    """
    from transformers import AutoTokenizer

    source = getattr(tokenizer, "name_or_path", "")
    if tokenizer is None or not source:
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError):
        warnings.warn(
            f"the published tokenizer of {source!r} is not on this machine, so TransformerLens' own stays, which may "
            "prepend a BOS that mh.load by name does not; pass tokenizer=... to choose.",
            stacklevel=4,
        )
        return tokenizer


def _load_by_name(name: str, *, tokenizer: Any, revision: str | None, dtype: Any, device: str | None,
                  device_map: Any, n_devices: int | None) -> Model:  # fmt: skip
    """Resolve a name to files and boot a bridge over them."""
    source = _resolve(name)
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"revision": revision} if revision is not None else {}
    dtype = _dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(source, **where)
        dtype = dtype or getattr(config, "dtype", None) or torch.float32
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(source, **where)
        hf = None
        if Path(source).is_dir() and device_map is None and n_devices is None:
            with _no_loading_bar():
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    source, dtype=dtype, attn_implementation="eager", output_loading_info=True
                )
            hf, report = loaded
            _refuse_incomplete(name, report)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, MechheadsError):
            raise
        raise InvalidInput(
            f"cannot load the model {name!r}: {_first_line(error)} Give 'nano', 'smollm2', a hub id that this machine "
            "can reach or has in its cache, or a folder with config.json, weights and tokenizer."
        ) from error
    bridge = _boot(source, hf=hf, tokenizer=tokenizer, dtype=dtype, device=device, device_map=device_map,
                   n_devices=n_devices, revision=revision)  # fmt: skip
    return _from_bridge(bridge, tokenizer, fresh=True, name=name, revision=revision)


def _refuse_incomplete(name: str, report: Mapping[str, Any]) -> None:
    """Refuse weights that Hugging Face filled up with random numbers."""
    for what in ("missing_keys", "mismatched_keys"):
        bad = sorted(map(str, report.get(what) or ()))
        if bad:
            raise ModelRefused(
                f"the checkpoint of {name!r} has {len(bad)} {what.replace('_', ' ')} (first: {bad[0]!r}); those "
                "weights would be random numbers. Use a complete checkpoint that fits its config.json."
            )


def _boot(source: str, *, hf: Any, tokenizer: Any, **options: Any) -> Any:
    """Boot a TransformerBridge; TransformerLens may alter the tokenizer it is given, so it gets a copy."""
    import copy

    from transformer_lens.model_bridge import TransformerBridge

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hf is not None:
            hf = hf.to(options["device"]) if options["device"] else hf
            options = {"dtype": options["dtype"]}
        given = {k: v for k, v in options.items() if v is not None}
        lent = copy.deepcopy(tokenizer)
        if "name_or_path" not in getattr(lent, "init_kwargs", {"name_or_path": source}):
            lent.bos_token = None  # TransformerLens reloads one with a BOS by its name; a hand-made one has none
        bridge = TransformerBridge.boot_transformers(source, hf_model=hf, tokenizer=lent, **given)
    bridge.eval()
    return bridge


@contextmanager
def _no_loading_bar() -> Iterator[None]:
    """Without transformers' bar over local weights, which takes a second; downloads keep theirs."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _resolve(name: str) -> str:
    """Folder or hub id of a model name.

    Raises:
        UnknownName: For a bare name that nothing answers to.
        InvalidInput: For a model of ours whose weights are not here yet.
    """
    if name == "smollm2":
        from mechheads.smollm2 import smollm2_path

        path = smollm2_path()
        if path is None:
            raise InvalidInput("the weights of 'smollm2' are not here yet; run: mechheads get smollm2")
        return str(path)
    if name in _SHIPPED:
        return str(Path(__file__).parent / "nano" / "weights" / name)
    if Path(name).is_dir():
        return name
    if "/" in name and not name.startswith((".", "/", "~")):
        return name
    known = _bare_names()
    if name in known:
        return name
    raise UnknownName(
        "model", name, _OWN_MODELS if name.startswith((".", "/", "~")) else {*_OWN_MODELS, *_near(name, known)},
        hint="Or give a hub id such as 'Qwen/Qwen3-8B', or an existing folder.",
    )  # fmt: skip


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Known bare names close to a mistyped one."""
    import difflib

    return difflib.get_close_matches(name, known, n=5, cutoff=0.6)


def _bare_names() -> list[str]:
    """Hub ids without an owner that TransformerLens knows, such as ``gpt2``."""
    from transformer_lens import supported_models

    names = getattr(supported_models, "OFFICIAL_MODEL_NAMES", [])
    return [n for n in names if "/" not in n]


def _dtype(value: Any) -> torch.dtype | None:
    """A torch dtype from its name."""
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UnknownName("dtype", value, ("float32", "bfloat16", "float16"))
    return found


def _first_line(error: BaseException) -> str:
    """First sentence of an error, for messages that wrap it."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if text.endswith(".") else text + "."


__all__ = ["Model", "ModelRefused", "ModelSpec", "load"]
