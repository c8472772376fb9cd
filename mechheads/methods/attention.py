"""Scores that look at attention alone, the detectors LOCOS is measured against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechheads.capture import LayerActs, answer_tokens
from mechheads.errors import InvalidInput, UnknownName
from mechheads.kernels import contrast
from mechheads.methods.registry import method
from mechheads.model import Model
from mechheads.stats import check_count
from mechheads.text import char_offsets, find_answer_tokens
from mechheads.trials import Trial

COUNTINGS = ("distinct", "step")
WU_SPANS = ("needle", "answer")
FORMS = ("mass", "topk")
QUERIES = ("question", "to_end")


@method("attention_spatial", needs=("pattern",), unit="probability", spans=("needle",), paper="arXiv 2607.01002")
def attention_spatial(acts: LayerActs, trial: Trial) -> dict[str, Float[Tensor, " head"]]:
    """LOCOS with ``alpha`` in place of ``phi``: needle attention less its share of the rest.

    ``plus = sum_{j in needle} alpha[t, j]``; ``minus = n / (N - n) * sum_{j not in needle} alpha[t, j]``; mean over
    answer steps (arXiv 2607.01002, the control without OV). Between -n/(N-n) and 1; 0 for uniform attention.

    Args:
        acts: One layer at the answer's steps.
        trial: The trial; needs a ``needle`` span.

    Returns:
        ``score``, ``plus`` (needle mass) and ``minus``, as probabilities.

    Raises:
        UnknownName: If the trial has no needle.
    """
    plus, minus = contrast(acts.need("pattern"), acts.mask("needle"), acts.visible)
    return {"score": (plus - minus).mean(-1), "plus": plus.mean(-1), "minus": minus.mean(-1)}


# -- Wu et al.: what is copied ------------------------------------------------------------------


@method("wu", needs=("pattern",), unit="share of needle tokens", spans=("needle",), rows="generated",
        paper="arXiv 2404.15574")  # fmt: skip
def wu(acts: LayerActs, trial: Trial, *, counting: str = "distinct", span: str = "needle") -> Float[Tensor, " head"]:
    """Retrieval score of Wu et al. (arXiv 2404.15574): how much of the needle a head copies and pastes.

    A head copies at step t if the key it attends to most, ``j = argmax_j alpha[t, j]``, lies in the needle and token j
    is the one generated at t. With g the needle tokens copied over all generated steps, the score is
    ``|g| / |needle|``, between 0 and 1. It can only see literal retrieval: a head that reads "Eiffel Tower" to
    write "Yuki" scores 0. Attention to a sink outside the keys is left out of the arg-max.

    Args:
        acts: One layer at every generated step.
        trial: The trial; needs a ``needle`` span.
        counting: ``"distinct"``: different token types, copied over present (the paper's sets). ``"step"``: one count
            for every copying step over the needle's length (published code; a token copied twice counts twice).
        span: ``"needle"``, or ``"answer"``: only the answer's tokens inside the needle count, as copied and as total.
            NaN where the answer does not stand there.

    Returns:
        Share of the span's tokens, 0 to 1 (may pass 1 with ``counting="step"``).

    Raises:
        UnknownName: For another counting or span, or if the trial has no needle.
    """
    if counting not in COUNTINGS:
        raise UnknownName("counting", counting, COUNTINGS)
    if span not in WU_SPANS:
        raise UnknownName("span of the retrieval score", span, WU_SPANS)
    pattern = acts.need("pattern")
    counted = acts.mask("needle") if span == "needle" else _answer_in_needle(acts)
    if not counted.any():
        return pattern.new_full((pattern.shape[0],), torch.nan)
    best = pattern.argmax(-1)  # [head step]
    copies = counted[best] & (acts.tokens[best] == acts.targets)
    if counting == "step":
        return copies.sum(-1).float() / counted.sum()
    kinds = acts.tokens[counted].unique()
    copied = (acts.tokens[best][..., None] == kinds) & copies[..., None]
    return copied.any(1).sum(-1).float() / len(kinds)


def _answer_in_needle(acts: LayerActs) -> Bool[Tensor, " key"]:
    """Keys of the gold answer where it first stands in a needle span; all False if it does not, or is not given."""
    out = torch.zeros_like(acts.mask("needle"))
    trial = acts.trial
    if trial.answer is None:
        return out
    for span in trial.spans["needle"]:
        tokens = list(trial.tokens[span.start : span.stop])
        text, offsets = char_offsets(acts.model.decode, tokens)
        found = find_answer_tokens(
            [text], tokens, [answer_tokens(acts.model, trial.answer)], trial.answer, offsets=offsets
        )
        if found:
            out[[span.start + i for i in found]] = True
            return out
    return out


# -- contrast in time ---------------------------------------------------------------------------


def _normalise(
    parts: dict[str, np.ndarray], trial: Trial, options: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], str | None]:
    """``R / sum R`` over all heads; a trial in which no head stands out is dropped."""
    if trial.answer is None:
        return parts, "the trial has no answer to contrast with"
    contrast_map = parts["contrast"]
    if np.isnan(contrast_map).all():
        return parts, "every generated step is an answer step, so there is nothing to contrast with"
    n = len(trial.positions("needle"))
    bar = 2 * n / len(trial.tokens)
    if options["filtered"] and np.nanmax(contrast_map) < bar:
        return parts, f"no head's contrast reaches 2 n / context length = {bar:.3g}"
    total = np.nansum(contrast_map)
    if options["normalised"] and not total:
        return parts, "no head attends to the needle more at the answer than elsewhere"
    return {**parts, "score": contrast_map / total if options["normalised"] else contrast_map}, None


@method("contrastive", needs=("pattern",), unit="share of all heads", spans=("needle",), rows="generated",
        finish=_normalise, paper="arXiv 2607.01002 (baseline)")  # fmt: skip
def contrastive(
    acts: LayerActs,
    trial: Trial,
    *,
    form: str = "mass",
    top: int = 10,
    normalised: bool = True,
    filtered: bool = True,
) -> dict[str, Float[Tensor, " head"]]:
    """Contrastive attention: needle attention at answer steps, less that at the other steps.

    With ``a[t]`` a head's needle mass at step t, ``R = max(mean_{t in answer} a[t] - mean_{t not in answer} a[t], 0)``;
    the stop token's step counts among the others. Then ``score = R / sum over heads of R``, and the trial is dropped
    if ``max R < 2 n / context length`` (n needle tokens). A temporal contrast, where LOCOS makes a spatial one.

    Args:
        acts: One layer at every generated step.
        trial: The trial; needs a ``needle`` span and an answer.
        form: ``"mass"``: ``a[t] = sum_{j in needle} alpha[t, j]``. ``"topk"``: the share of the ``top`` most attended
            keys that lie in the needle.
        top: Keys looked at with ``form="topk"``.
        normalised: Divide by the sum over all heads (as published); otherwise the score is R.
        filtered: Drop trials in which no head stands out (as published).

    Returns:
        ``score``; ``contrast`` (R), ``plus`` and ``minus`` (the two means), probabilities 0 to 1. A trial without a
        step beside the answer's is dropped.

    Raises:
        UnknownName: For another form, or if the trial has no needle.
        InvalidInput: For a ``top`` below 1.
    """
    if form not in FORMS:
        raise UnknownName("form of contrastive attention", form, FORMS)
    check_count("top", top)
    pattern, needle = acts.need("pattern"), acts.mask("needle")
    if form == "mass":
        at_step = pattern[..., needle].sum(-1)
    else:
        best = pattern.topk(min(top, pattern.shape[-1]), dim=-1)
        at_step = (needle[best.indices] & (best.values > 0)).sum(-1).float() / top
    assert acts.answer is not None
    plus = at_step[:, acts.answer].mean(-1)
    minus = at_step[:, ~acts.answer].mean(-1)
    return {"score": plus - minus, "contrast": (plus - minus).clamp(min=0), "plus": plus, "minus": minus}


# -- what the prompt's end reads ----------------------------------------------------------------


def _last_rows(trial: Trial, options: Mapping[str, Any]) -> Sequence[int]:
    window, n = check_count("window", options["window"]), len(trial.tokens)
    return range(max(0, n - window), n)


@method("headkv", needs=("pattern",), unit="probability", spans=("needle",), rows=_last_rows,
        paper="arXiv 2410.19258")  # fmt: skip
def headkv(acts: LayerActs, trial: Trial, *, window: int = 8) -> Float[Tensor, " head"]:
    """HeadKV's retrieval score: the most attention that any of the last prompt tokens gives the needle.

    ``max over the last `window` prompt tokens t of sum_{j in needle} alpha[t, j]``, a probability, 0 to 1
    (arXiv 2410.19258). Nothing is generated and no trial is gated: it says where a head looks, not whether that
    helps.

    Args:
        acts: One layer at the last prompt rows.
        trial: The trial; needs a ``needle`` span.
        window: Prompt tokens looked from (fewer in a shorter prompt).

    Raises:
        UnknownName: If the trial has no needle.
        InvalidInput: For a window below 1.
    """
    return acts.need("pattern")[..., acts.mask("needle")].sum(-1).amax(-1)


def _question_rows(trial: Trial, options: Mapping[str, Any]) -> Sequence[int]:
    """Positions whose queries ask: the question's, or everything from it on."""
    if options["query"] not in QUERIES:
        raise UnknownName("query of qrhead", options["query"], QUERIES)
    rows = trial.positions("question")
    if max(trial.positions("needle")) >= min(rows):
        raise InvalidInput(
            f"in trial {trial.id!r} the question does not come after the needle, so its tokens cannot read it; "
            "qrhead needs prompts that end with the question."
        )
    late = [s for s in trial.spans.get("documents", ()) if s.stop > min(rows)]
    if late:
        raise InvalidInput(
            f"in trial {trial.id!r} the document at [{late[0].start}, {late[0].stop}) does not end before the "
            "question, "
            "whose tokens cannot read it; qrhead needs all documents before the question."
        )
    return list(rows) if options["query"] == "question" else range(min(rows), len(trial.tokens))


def _null_trial(model: Model, trial: Trial, options: Mapping[str, Any]) -> Trial | None:
    """The same context with the null query in the question's place, as far as its rows are read."""
    if not options["calibrated"]:
        return None
    if len(trial.spans["question"]) != 1:
        raise InvalidInput(f"trial {trial.id!r} has {len(trial.spans['question'])} question spans; qrhead needs one.")
    span = trial.spans["question"][0]
    null = _null_tokens(model, trial.tokens[span.start], options["null_query"])
    # What follows the question cannot be seen from it, so it is run only where its own rows count.
    rest = trial.tokens[span.stop :] if options["query"] == "to_end" else ()
    tokens = (*trial.tokens[: span.start], *null, *rest)
    before = {k: v for k, v in trial.spans.items() if k != "question" and max(s.stop for s in v) <= span.start}
    return replace(trial, tokens=tokens, spans={**before, "question": (span.start, span.start + len(null))})


def _null_tokens(model: Model, first: int, query: Any) -> list[int]:
    """Token ids of the null query, with a leading space where the question has one; given ids are taken as they are."""
    if isinstance(query, str):
        spaced = model.decode([first]).startswith(" ")
        tokens = answer_tokens(model, (" " if spaced else "") + query)
    elif isinstance(query, (list, tuple)) and all(isinstance(t, int) and not isinstance(t, bool) for t in query):
        tokens = list(query)
    else:
        raise InvalidInput(f"null_query is {query!r}; give text, such as the published 'N/A', or a list of token ids.")
    if not tokens:
        raise InvalidInput(f"null_query {query!r} has no tokens; the published one is 'N/A'.")
    return tokens


@method("qrhead", needs=("pattern",), unit="probability", spans=("needle", "question"), rows=_question_rows,
        null=_null_trial, paper="arXiv 2506.09944")  # fmt: skip
def qrhead(
    acts: LayerActs,
    trial: Trial,
    *,
    query: str = "question",
    calibrated: bool = True,
    null_query: str | Sequence[int] = "N/A",
    drop_outliers: bool = False,
) -> dict[str, Float[Tensor, " head"]]:
    """QRHead's score: how much the question's tokens attend to the gold document, beyond what any question does.

    ``QR(doc) = sum_{j in doc} (mean_{i in question} alpha[i, j] - mean_{i in null question} alpha0[i, j])``, the second
    term from the same context under the null query; the score is the sum over the gold spans (``needle``)
    (arXiv 2506.09944). A difference of probabilities, -1 to 1; positive: this question, not any question, draws the
    head to the gold. Nothing is generated and no trial is gated.

    Args:
        acts: One layer at the question's rows, with the null variant.
        trial: The trial; needs ``needle`` (the gold spans) and ``question`` after it. With a span ``documents`` (a
            list, one for each document), the part ``first`` says whether a gold document scores highest.
        query: ``"question"``: the question's own tokens. ``"to_end"``: all tokens from it to the prompt's end (what the
            published code averages over, with the chat template's closing tokens).
        calibrated: Subtract the null query's attention (as published).
        null_query: The null query, as text or token ids.
        drop_outliers: Leave out, in each document, keys whose calibrated attention is below the document's mean less
            two standard deviations (published code only).

    Returns:
        ``score``; ``raw``, the first term alone; and ``first`` (0 or 1) where the trial has documents.

    Raises:
        UnknownName: For another query, or a missing span.
        InvalidInput: If the question does not come after the needle.
    """
    raw = acts.need("pattern").mean(1)
    reads = raw
    if calibrated:
        assert acts.null is not None
        n = min(raw.shape[-1], len(acts.null.tokens))
        reads = raw[:, :n] - acts.null.need("pattern").mean(1)[:, :n]
    gold = [list(s) for s in trial.spans["needle"]]
    out = {
        "score": sum_of(reads, gold, drop_outliers=drop_outliers),
        "raw": sum_of(raw, gold, drop_outliers=False),
    }
    if "documents" in trial.spans:
        documents = [list(s) for s in trial.spans["documents"]]
        each = torch.stack([sum_of(reads, [d], drop_outliers=drop_outliers) for d in documents], dim=-1)
        wanted = set(trial.positions("needle"))
        is_gold = torch.tensor([bool(wanted & set(d)) for d in documents], device=each.device)
        out["first"] = is_gold[each.argmax(-1)].float()
    return out


def sum_of(
    reads: Float[Tensor, "head key"], spans: Sequence[Sequence[int]], *, drop_outliers: bool
) -> Float[Tensor, " head"]:
    """Sum over the keys of some spans, without each span's low outliers if asked."""
    total = reads.new_zeros(reads.shape[0])
    for span in spans:
        keys = reads[:, list(span)]
        if drop_outliers and len(span) > 1:
            keys = torch.where(keys > keys.mean(-1, keepdim=True) - 2 * keys.std(-1, keepdim=True), keys, 0.0)
        total = total + keys.sum(-1)
    return total
