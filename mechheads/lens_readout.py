"""What a lens is fitted on: residual streams of a text, and the frozen reading of a stream as logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechheads.errors import InvalidInput, ModelRefused
from mechheads.model import Model

Report = Callable[[str, int, int], None]
_CHUNK = 64


@dataclass(frozen=True, eq=False)
class Readout:
    """The final norm and the unembedding of a model, frozen, in float32: a stream in, logits out.

    Attributes:
        rows: ``[vocab d_model]`` rows of the unembedding.
        bias: ``[vocab]`` its bias.
        norm_weight: ``[d_model]`` weight of the norm.
        norm_bias: ``[d_model]`` bias of the norm.
        centers: Whether the norm subtracts the mean (LayerNorm).
        eps: What the norm adds to the mean square.
        softcap: Cap of the logits, or None.
    """

    rows: Float[Tensor, "vocab d_model"]
    bias: Float[Tensor, " vocab"]
    norm_weight: Float[Tensor, " d_model"]
    norm_bias: Float[Tensor, " d_model"]
    centers: bool
    eps: float
    softcap: float | None

    @classmethod
    def of(cls, model: Model) -> Readout:
        """Take a model's readout, and check it against the model's own logits.

        Raises:
            ModelRefused: If it does not reproduce them.
        """
        norm, rows = model.final_norm, model.W_U.detach().T.float()
        ones, zeros = rows.new_ones(rows.shape[1]), rows.new_zeros(rows.shape[1])
        out = cls(
            rows=rows,
            bias=model.b_U.detach().float(),
            norm_weight=ones if norm.weight is None else norm.weight.detach().float(),
            norm_bias=zeros if norm.bias is None else norm.bias.detach().float(),
            centers=norm.centers,
            eps=_norm_eps(model),
            softcap=model.backend.logit_softcap,
        )
        out._check(model)
        return out

    def normed(self, hidden: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_model"]:
        """The final norm, its scale taken from this stream itself."""
        if self.centers:
            hidden = hidden - hidden.mean(-1, keepdim=True)
        scale = (hidden.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return hidden * scale * self.norm_weight + self.norm_bias

    def logits(self, hidden: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        """Logits of every token this readout has."""
        logits = torch.addmm(self.bias, self.normed(hidden), self.rows.T)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def of_tokens(self, tokens: Int[Tensor, " token"]) -> Readout:
        """The readout of some tokens alone, in the order given."""
        return replace(self, rows=self.rows[tokens], bias=self.bias[tokens])

    def _check(self, model: Model) -> None:
        """Compare with the model's logits on a short prompt, half of it with a stream so small that eps matters."""
        stream, logits = _probe(model)
        error = float((self.logits(stream) - logits).abs().max() / logits.abs().max().clamp(min=1e-12))
        # The bars of model.verify(): what float32, or the rounding of half precision, makes of logits.
        allowed = {torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(model.backend.dtype, 1e-4)
        if not error <= allowed:
            raise ModelRefused(
                f"the final norm and unembedding of {model.spec.name!r}, read by themselves, reproduce its logits only "
                f"to {error:.1e} (allowed {allowed:.0e}); a lens through them would be fitted to another model."
            )


def _final_hook(model: Model) -> str:
    """The hook of the stream that leaves the last block."""
    return f"blocks.{model.spec.n_layers - 1}.hook_resid_post"


def _one_prompt(model: Model) -> Int[Tensor, "one pos"]:
    """A few arbitrary tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.d_vocab, (1, 8), generator=generator).to(model.backend.device)


def _norm_eps(model: Model) -> float:
    """What the final norm adds to the mean square: its scale, squared, on a stream of zeros.

    Measured, because every architecture keeps it under another name.
    """
    seen: list[Tensor] = []
    pairs = [(_final_hook(model), torch.zeros_like), ("ln_final.hook_scale", lambda t: seen.append(t.detach()))]
    tokens = _one_prompt(model)
    with model.lock, model.hooks(pairs):
        model.backend.run(tokens, torch.ones_like(tokens), None, last_only=True)
    return float(seen[-1].double().square().mean())


def _probe(model: Model) -> tuple[Float[Tensor, "pos d_model"], Float[Tensor, "pos vocab"]]:
    """A stream that leaves the last block, its second half made small, and the model's logits of it."""
    seen: list[Tensor] = []

    def shrink(t: Tensor) -> Tensor:
        t = t.clone()
        half = t.shape[1] // 2
        t[:, half:] *= 1e-3 / t[:, half:].abs().amax(-1, keepdim=True).clamp(min=1e-6)
        seen.append(t)
        return t

    tokens = _one_prompt(model)
    with model.lock, model.hooks([(_final_hook(model), shrink)]):
        logits = model.backend.run(tokens, torch.ones_like(tokens), None, last_only=False)[0]
    return seen[-1][0].float(), logits.float()


def windows_of(model: Model, texts: Sequence[str], *, context: int) -> Int[Tensor, "window pos"]:
    """Texts as windows of ``context`` tokens; what is left over at the end of a text is dropped.

    Where the tokenizer begins a text with its BOS, every window begins with it.

    Raises:
        InvalidInput: If the context is too short or too long, or no text fills a window.
    """
    if not 2 <= context <= model.spec.n_ctx:
        raise InvalidInput(f"context is {context}; expected 2 to {model.spec.n_ctx} tokens for {model.spec.name!r}.")
    bos = getattr(model.tokenizer, "bos_token_id", None)
    rows: list[list[int]] = []
    for text in texts:
        tokens = list(model.encode(text).tokens) if text.strip() else []
        begins = bool(tokens) and bos is not None and tokens[0] == bos
        head, body = (tokens[:1], tokens[1:]) if begins else ([], tokens)
        step = context - len(head)
        rows += [head + body[i : i + step] for i in range(0, len(body) - step + 1, step)]
    if not rows:
        raise InvalidInput(
            f"none of the {len(texts)} texts has {context} tokens; give longer texts or a smaller context."
        )
    return torch.tensor(rows)


@torch.no_grad()
def streams_of(
    model: Model, windows: Int[Tensor, "window pos"], *, batch: int, report: Report | None = None
) -> Float[Tensor, "stream row d_model"]:
    """Residual streams 0 to n_layers of every position but the first of each window, in float32 on the CPU.

    The first position is left out: it is where attention rests when it has nothing to do, and its stream is unlike
    all others.
    """
    n_layers, (n, length) = model.spec.n_layers, windows.shape
    out = torch.empty(n_layers + 1, n, length - 1, model.spec.d_model)

    def keeper(stream: int, at: slice) -> Callable[[Tensor], None]:
        def hook(t: Tensor) -> None:
            out[stream, at] = t.detach()[:, 1:].float().cpu()

        return hook

    for start in range(0, n, batch):
        at = slice(start, min(start + batch, n))
        pairs = [("blocks.0.hook_resid_pre", keeper(0, at))]
        pairs += [(f"blocks.{i}.hook_resid_post", keeper(i + 1, at)) for i in range(n_layers)]
        tokens = windows[at].to(model.backend.device)
        with model.lock, model.hooks(pairs):
            model.backend.run(tokens, torch.ones_like(tokens), None, last_only=True)
        if report is not None:
            report("reading text", at.stop, n)
    if not torch.isfinite(out).all():
        raise ModelRefused(f"residual streams of {model.spec.name!r} hold NaN or infinity; load it in float32.")
    return out.flatten(1, 2)


@torch.no_grad()
def mean_kl(
    readout: Readout,
    final: Float[Tensor, "row d_model"],
    read: Callable[[int, slice], Float[Tensor, "part d_model"]],
    n_streams: int,
    *,
    report: Report | None = None,
    what: str = "measuring",
) -> Float[Tensor, " stream"]:
    """Mean over positions of ``KL(model || lens)`` in nats, of each stream; exact over the vocabulary.

    Args:
        readout: The frozen readout.
        final: ``[row d_model]`` streams that leave the last block.
        read: Gives the translated stream of some rows.
        n_streams: How many streams.
        report: Called with what is done, how far, and of how much.
        what: Name of the work, for ``report``.
    """
    device, total = readout.rows.device, torch.zeros(n_streams, dtype=torch.float64)
    for start in range(0, len(final), _CHUNK):
        rows = slice(start, min(start + _CHUNK, len(final)))
        log_p = readout.logits(final[rows].to(device)).log_softmax(-1)
        p = log_p.exp()
        entropy = (p * log_p).sum(-1)
        for stream in range(n_streams):
            logits = readout.logits(read(stream, rows).to(device))
            expected = torch.linalg.vecdot(p, logits)
            total[stream] += (entropy - expected + logits.logsumexp(-1)).sum().item()
        if report is not None:
            report(what, rows.stop, len(final))
    return total / len(final)
