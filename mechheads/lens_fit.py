"""Fitting a tuned lens to a model on text (Belrose et al. 2023, arXiv 2303.08112)."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.datasets.haystack import Haystack
from mechheads.errors import InvalidInput, UnknownName
from mechheads.lens import TunedLens
from mechheads.lens_readout import Readout, Report, mean_kl, streams_of, windows_of
from mechheads.model import Model

if TYPE_CHECKING:
    import pandas as pd

INITS = ("least_squares", "identity")
_PASSAGE = 6000


@dataclass(frozen=True)
class _Options:
    """How to fit; see ``fit_lens``."""

    steps: int
    tokens: int
    lr: float
    batch: int
    seed: int
    holdout: int
    init: str
    context: int
    ridge: float
    vocabulary: int

    def check(self) -> None:
        """Refuse values that make no sense."""
        if self.init not in INITS:
            raise UnknownName("start of a lens", self.init, INITS)
        for name, least in (("steps", 0), ("tokens", 1), ("batch", 1), ("seed", 0), ("holdout", 1), ("vocabulary", 2)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected a whole number of at least {least}.")
        for name in ("lr", "ridge"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInput(f"{name} is {getattr(self, name)}; expected a positive number.")


@dataclass(frozen=True, eq=False)
class LensFit:
    """A fitted lens and how well it reads text it was not fitted on.

    Attributes:
        lens: The lens.
        kl_logit_lens: For each stream the mean ``KL(model || logit lens)`` on held-out text, nats a token.
        kl_tuned_lens: The same through the lens.
        kept: For each stream what proved best on validation text: ``trained``, ``least_squares`` or ``identity``.
        n_train: Positions fitted on.
        n_holdout: Positions the KL is over.
    """

    lens: TunedLens
    kl_logit_lens: tuple[float, ...]
    kl_tuned_lens: tuple[float, ...]
    kept: tuple[str, ...]
    n_train: int
    n_holdout: int

    @property
    def worse(self) -> tuple[int, ...]:
        """Streams that the lens reads worse than the logit lens does, on held-out text."""
        pairs = zip(self.kl_tuned_lens, self.kl_logit_lens, strict=True)
        return tuple(i for i, (tuned, logit) in enumerate(pairs) if tuned > logit)

    def to_frame(self) -> pd.DataFrame:
        """A row a stream: ``stream kl_logit_lens kl_tuned_lens kept worse`` (nats a token)."""
        return kl_frame(self.lens.meta)


def kl_frame(meta: Any) -> pd.DataFrame:
    """The KL table that ``fit_lens`` leaves in a lens' ``meta``.

    Raises:
        InvalidInput: If there is none: the lens was fitted elsewhere.
    """
    import pandas as pd

    table = meta.get("kl")
    if table is None:
        raise InvalidInput("this lens does not record how well it reads held-out text; mechheads did not fit it.")
    frame = pd.DataFrame({"stream": range(len(table["kept"])), **table})
    frame["worse"] = frame["kl_tuned_lens"] > frame["kl_logit_lens"]
    return frame


def fit_lens(
    model: Model,
    texts: Sequence[str] | None = None,
    *,
    steps: int = 250,
    tokens: int = 8192,
    lr: float = 3e-4,
    batch: int = 64,
    seed: int = 0,
    holdout: int = 256,
    init: str = "least_squares",
    context: int = 128,
    ridge: float = 1.0,
    vocabulary: int = 4096,
    progress: Report | None = None,
) -> LensFit:
    """Fit a translator to each residual stream, so that what it reads is what the model will say.

    Minimises ``KL(softmax(final logits) || softmax(logits of T(h)))`` over positions of the text, in nats, with the
    final norm and the unembedding frozen. Windows of the text are run once; their streams are kept in memory,
    ``tokens * (n_layers + 1) * d_model`` float32 numbers. The start is the ridge regression of the final stream on each
    stream; then Adam, on whitened streams so that one learning rate does for all. The KL of a step is over
    ``vocabulary`` tokens: the likeliest ones and a random sample that stands for the rest; every KL that is reported is
    over all. Whole windows are set aside: some to choose, for each stream, among trained, start and identity; others,
    seen by neither, for the KL that is reported.

    The same seed, text and thread count give the same lens.

    Args:
        model: The model, with nothing taken out of it.
        texts: Texts; the prose that comes with mechheads if None (a few thousand tokens: little for a wide model).
        steps: Steps of Adam; 0 leaves the start.
        tokens: Positions to fit on, at most.
        lr: Learning rate at the start; it falls linearly to zero.
        batch: Positions a step.
        seed: Of the choice of windows and of every step's sample.
        holdout: Held-out positions to report on; as many again choose the best of each stream.
        init: ``"least_squares"`` or ``"identity"``.
        context: Tokens of a window.
        ridge: Strength of the pull toward the identity in the regression, in units of the median variance of the stream
            over its directions, spread over the positions.
        vocabulary: Tokens in the KL of a step.
        progress: Called with what is being done, how much of it is done, and how much there is.

    Warns:
        UserWarning: If some stream is read worse than by the logit lens on held-out text.

    Raises:
        InvalidInput: For options that make no sense, too little text, or a model under hooks.
        ModelRefused: If the final norm and unembedding by themselves do not give the model's logits.
    """
    options = _Options(steps, tokens, lr, batch, seed, holdout, init, context, ridge, vocabulary)
    options.check()
    if model.ablations or model.backend.hooked():
        raise InvalidInput(
            "something is hooked onto the model; a lens is fitted to the model as it is. Remove it first."
        )
    texts = haystack_texts(None) if texts is None else list(texts)
    readout = Readout.of(model)
    parts = _split(windows_of(model, texts, context=context), options)
    train, choose, held = (streams_of(model, part, batch=max(1, 1024 // context), report=progress) for part in parts)
    weights, biases, kept = _best(readout, train, choose, options, progress)
    before = mean_kl(readout, held[-1], lambda i, r: held[i, r], len(weights), report=progress, what="logit lens")
    after = mean_kl(
        readout, held[-1], lambda i, r: _apply(held[i, r], weights[i], biases[i]), len(weights),
        report=progress, what="tuned lens",
    )  # fmt: skip
    meta = {
        "model": model.describe(),
        "options": asdict(options),
        "text": hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16],
        "n_train": train.shape[1],
        "n_holdout": held.shape[1],
        "kl": {"kl_logit_lens": before.tolist(), "kl_tuned_lens": after.tolist(), "kept": list(kept)},
    }
    lens = TunedLens(weights, biases, len(weights), name=f"tuned lens of {model.spec.name}", meta=meta)
    fit = LensFit(lens, tuple(before.tolist()), tuple(after.tolist()), kept, int(train.shape[1]), int(held.shape[1]))
    if fit.worse:
        warnings.warn(
            f"on held-out text the lens reads the streams {list(fit.worse)} worse than the logit lens does; more text "
            "(tokens=...) is what helps most.",
            stacklevel=2,
        )
    return fit


def haystack_texts(path: Any) -> list[str]:
    """Passages of a text file, of the ``.txt`` files of a folder, or of the shipped prose (None).

    Raises:
        InvalidInput: If there is no text at the path.
    """
    passages: list[list[str]] = [[]]
    size = 0
    for sentence in Haystack.load(path).sentences:
        if size > _PASSAGE:
            passages.append([])
            size = 0
        passages[-1].append(sentence)
        size += len(sentence) + 1
    return [" ".join(p) for p in passages]


def _split(windows: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor]:
    """Windows to train on, to choose with, and to report on: disjoint, drawn at random."""
    each = -(-options.holdout // (windows.shape[1] - 1))
    wanted = -(-options.tokens // (windows.shape[1] - 1))
    if len(windows) < 2 * each + 1:
        raise InvalidInput(
            f"the text makes {len(windows)} windows of {windows.shape[1]} tokens, but holding out {options.holdout} "
            f"positions to report on and as many to choose with takes {2 * each}, and 1 is needed to fit on; give more "
            "text or a smaller holdout."
        )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(options.seed))
    held, choose, train = order[:each], order[each : 2 * each], order[2 * each : 2 * each + wanted]
    return windows[train], windows[choose], windows[held]


def _apply(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``h + h A^T + b``."""
    return hidden + torch.addmm(bias, hidden, weight.T)


# -- the start -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Start:
    """Where training begins, and the coordinates it moves in: ``T(h) = h + h A^T + b + ((h - mean) P^T U^T + c) size``.

    Attributes:
        weights: ``[stream d_model d_model]`` A.
        biases: ``[stream d_model]`` b.
        means: ``[stream d_model]`` mean of each stream.
        whiten: ``[stream d_model d_model]`` P, under which the stream has about unit covariance.
        size: Root mean square of the final stream, so that U and c are of order one.
    """

    weights: Float[Tensor, "stream d_model d_model"]
    biases: Float[Tensor, "stream d_model"]
    means: Float[Tensor, "stream d_model"]
    whiten: Float[Tensor, "stream d_model d_model"]
    size: float

    def to(self, device: torch.device) -> _Start:
        """The same on a device."""
        return _Start(
            self.weights.to(device), self.biases.to(device), self.means.to(device), self.whiten.to(device), self.size
        )

    def moved(self, u: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Translators after U and c have been trained."""
        step = self.size * u @ self.whiten
        return self.weights + step, self.biases + self.size * c - torch.einsum("sij,sj->si", step, self.means)


def _start(streams: Tensor, options: _Options, progress: Report | None) -> _Start:
    """Ridge regression of the final stream on each stream, pulled toward the identity, and the whitening."""
    final = streams[-1].double()
    # A position counts by its share: some have a stream a hundred times as large, which the final norm takes out.
    share = 1 / final.square().mean(-1).clamp(min=1e-12)
    share = share / share.sum()
    n, d = len(share), final.shape[-1]
    weights, biases, means, whiten = (torch.zeros(len(streams) - 1, *s) for s in ((d, d), (d,), (d,), (d, d)))
    for i, stream in enumerate(streams[:-1]):
        h = stream.double()
        mean = share @ h
        centred = h - mean
        values, vectors = torch.linalg.eigh(centred.T @ (centred * share[:, None]))
        level = values.clamp(min=0).median().clamp(min=1e-12) * d / n * options.ridge
        means[i], whiten[i] = mean, (vectors * (values.clamp(min=0) + level).rsqrt()) @ vectors.T
        if options.init == "least_squares":
            gap = final - h
            cross = centred.T @ ((gap - share @ gap) * share[:, None])
            solved = (vectors / (values.clamp(min=0) + level)) @ (vectors.T @ cross)
            weights[i], biases[i] = solved.T, share @ gap - mean @ solved
        if progress is not None:
            progress("regression", i + 1, len(streams) - 1)
    size = float(final.square().mean(-1).sqrt().median())
    return _Start(weights, biases, means, whiten, size)


# -- training ------------------------------------------------------------------------------------


def _best(
    readout: Readout, train: Tensor, choose: Tensor, options: _Options, progress: Report | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Translators: for each stream the best on ``choose`` of trained, start and identity."""
    start = _start(train, options, progress)
    found = {"identity": (torch.zeros_like(start.weights), torch.zeros_like(start.biases))}
    if options.init == "least_squares":
        found["least_squares"] = (start.weights, start.biases)
    if options.steps:
        found["trained"] = _train(readout, train, start, options, progress)
    kl = torch.stack(
        [
            mean_kl(
                readout, choose[-1], lambda i, r, w=w, b=b: _apply(choose[i, r], w[i], b[i]), len(w),
                report=progress, what="choosing",
            )
            for w, b in found.values()
        ]
    )  # fmt: skip
    names = list(found)
    # Something that overflowed must not win by comparing false with everything.
    best = kl.nan_to_num(float("inf")).argmin(0).tolist()
    pairs = [found[names[which]] for which in best]
    weights = torch.stack([w[i] for i, (w, _) in enumerate(pairs)])
    biases = torch.stack([b[i] for i, (_, b) in enumerate(pairs)])
    return weights, biases, tuple(names[which] for which in best)


def _train(
    readout: Readout, streams: Tensor, start: _Start, options: _Options, progress: Report | None
) -> tuple[Tensor, Tensor]:
    """Translators after ``options.steps`` steps of Adam on the KL, from the start; on the readout's device."""
    device = readout.rows.device
    start = start.to(device)
    generator = torch.Generator().manual_seed(options.seed)
    u = torch.zeros_like(start.weights, requires_grad=True)
    c = torch.zeros_like(start.biases, requires_grad=True)
    optimizer = torch.optim.Adam([u, c], lr=options.lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    n = streams.shape[1]
    for step in range(options.steps):
        rows = torch.randint(n, (min(options.batch, n),), generator=generator)
        target = _target(readout, streams[-1][rows], options.vocabulary, generator)
        optimizer.zero_grad()
        for i in range(len(u)):
            h = streams[i][rows].to(device)
            fixed = _apply(h, start.weights[i], start.biases[i])
            white = (h - start.means[i]) @ start.whiten[i].T
            moved = fixed + start.size * torch.addmm(c[i], white, u[i].T)
            target.kl(moved).backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress("training", step + 1, options.steps)
    with torch.no_grad():
        weights, biases = start.moved(u, c)
    return weights.cpu(), biases.cpu()


@dataclass(frozen=True, eq=False)
class _Target:
    """What the model says at some positions, over all tokens or a sample of them.

    Attributes:
        readout: Of these tokens.
        log_weight: ``[token]`` log of how many tokens each one stands for.
        p: ``[row token]`` the model's probability of each, times that number.
        entropy: ``[row]`` of the model's whole distribution, nats.
    """

    readout: Readout
    log_weight: Tensor | float
    p: Tensor
    entropy: Tensor

    def kl(self, hidden: Tensor) -> Tensor:
        """Mean ``KL(model || lens)``, nats."""
        logits = self.readout.logits(hidden)
        return ((logits + self.log_weight).logsumexp(-1) - (self.p * logits).sum(-1) - self.entropy).mean()


@torch.no_grad()
def _target(readout: Readout, final: Tensor, size: int, generator: torch.Generator) -> _Target:
    """The model's word at some positions: the likeliest tokens of every row, and a sample for the rest.

    At most half of the tokens are chosen for their probability, so that the rest is always sampled.
    """
    device = readout.rows.device
    log_p = readout.logits(final.to(device)).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    vocab = p.shape[-1]
    if size >= vocab:
        return _Target(readout, 0.0, p, entropy)
    likeliest = p.sum(0).topk(size // 2).indices
    left = torch.ones(vocab, dtype=torch.bool, device=device)
    left[likeliest] = False
    rest = left.nonzero().flatten()
    drawn = rest[torch.randperm(len(rest), generator=generator)[: size - len(likeliest)].to(device)]
    chosen = torch.cat([likeliest, drawn])
    stands_for = torch.ones(size, device=device)
    stands_for[len(likeliest) :] = len(rest) / len(drawn)
    return _Target(readout.of_tokens(chosen), stands_for.log(), p[:, chosen] * stands_for, entropy)
