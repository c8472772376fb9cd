"""Every intervention on every architecture, against plain hooks on the Hugging Face model (``plain_interventions``)."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from plain_interventions import Edit, Plain
from torch import Tensor

import mechheads as mh
from mechheads.backends.base import Row
from mechheads.decode import pad
from mechheads.generate import generate
from mechheads.interventions import (
    Intervention,
    apply,
    attention_bias,
    mean_positional_ablation,
    patch,
    prune,
    resample_ablation,
)
from mechheads.interventions.acting import Act, Acting
from mechheads.interventions.applying import check_fired, in_force

each_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)

# One shorter than the sliding windows, two longer; references shorter and longer than the prompts.
PROMPTS = [tiny.prompt(n, seed=40 + n) for n in (7, 13, 21)]
REFERENCE = [tiny.prompt(n, seed=70 + n) for n in (5, 17, 11)]
PARTNERS = {tuple(p): tuple(tiny.prompt(len(p), seed=90 + len(p))) for p in PROMPTS}
TRIALS = mh.TrialSet((mh.Trial(id=f"r{i}", tokens=p) for i, p in enumerate(REFERENCE)), name="reference")
HEADS = ((0, 1), (1, 0), (1, 3), (2, 2))
POSITIONS: tuple[Any, ...] = ("all", "prompt", "answer", (0, -1), (2, -3, 5))
SOME_TOKENS = frozenset(range(3, 50))  # about half of what is asked and said
N_NEW = 3


@dataclass(frozen=True)
class Both:
    """An intervention, and the same thing spelled out."""

    ours: Intervention
    plain: Edit


def both(kind: str, site: str, heads: Any = HEADS, positions: Any = "all", **more: Any) -> Both:
    where: dict[str, Any] = {"site": site, "positions": positions}
    if kind == "zero":
        ours = mh.zero_ablation(site=site, positions=positions)
    elif kind == "patch":
        more = {"partners": PARTNERS}
        ours = patch(PARTNERS, **where)
    elif kind == "bias":
        ours = attention_bias(
            more["strength"], tokens=sorted(more.get("tokens", ())) or None, keys=more.get("keys"), positions=positions
        )
    elif kind == "prune":
        ours, site = prune(), "z"
    else:
        seed = {"seed": more["seed"]} if kind == "resample" else {}
        make = {"mean": mh.mean_ablation, "mean_positional": mean_positional_ablation, "resample": resample_ablation}
        ours = make[kind](reference=TRIALS, **seed, **where)
        more = {**more, "prompts": tuple(map(tuple, REFERENCE))}
    return Both(ours.on(list(heads)), Edit(kind, site, heads, positions, **more))


def kinds(turn: int) -> list[Both]:
    """Every kind at every site, each at other positions; from architecture to architecture they go round."""
    at = [POSITIONS[(turn + i) % len(POSITIONS)] for i in range(20)]
    taking = [("mean", {}), ("mean_positional", {}), ("resample", {"seed": turn}), ("patch", {})]
    out = [both("zero", site, positions=at[i]) for i, site in enumerate(("z", "q", "pattern", "attn_scores"))]
    out += [
        both(kind, site, positions=at[4 + 2 * i + j], **more)
        for i, (kind, more) in enumerate(taking)
        for j, site in enumerate(("z", "q"))
    ]
    out.append(both("bias", "attn_scores", positions=at[12], strength=1.5, tokens=SOME_TOKENS))
    out.append(both("bias", "attn_scores", positions=at[13], strength=-3.0, keys=(1, -2)))
    return [*out, both("prune", "weights")]


def compositions() -> list[list[Both]]:
    """Several at once: on different heads, on the same ones, and in both orders."""
    zero = both("zero", "z", HEADS[:2], "prompt")
    mean = both("mean", "z", HEADS[1:], (2, -1))
    even = both("zero", "attn_scores", HEADS[:3], "all")
    bias = both("bias", "attn_scores", HEADS[1:], strength=2.0, tokens=SOME_TOKENS)
    blind = both("zero", "q", HEADS[1:])
    dark = both("zero", "pattern", HEADS[2:], "answer")
    lent = both("resample", "z", ((0, 0), (2, 3)), seed=5)
    asks = both("patch", "q", ((0, 0), (1, 3)))
    return [
        [zero, both("mean_positional", "q", HEADS[2:])],
        [zero, mean],
        [mean, zero],
        [even, bias],
        [bias, even],
        [blind, bias],
        [bias, asks],
        [dark, even, bias],
        [mean, dark],
        [lent, both("prune", "weights", ((0, 2), (2, 3))), asks],
    ]


@functools.cache
def plain(name: str) -> Plain:
    """Loaded once; edits leave it as it is."""
    return Plain(name)


@contextlib.contextmanager
def shared_norm_warns(name: str, interventions: Sequence[Intervention]) -> Iterator[None]:
    """OLMo-2/3 normalise the queries of all heads together, and say so."""
    if name.startswith("olmo") and any(i.site == "q" for i in interventions):
        with pytest.warns(UserWarning, match="all heads together"):
            yield
    else:
        yield


def moved(got: np.ndarray, want: np.ndarray) -> bool:
    return tiny.relative(got, want) > 1e-3


def check(
    name: str, several: Sequence[Both], *, turn: int = 0, n_new: int = N_NEW, model: mh.Model | None = None
) -> list[np.ndarray]:
    """Logits without a cache, and answers batched and alone, as the plain model gives them."""
    model, reference = model or tiny.shared(name), plain(name)
    edits, ours = [b.plain for b in several], [b.ours for b in several]
    right = turn % 2 == 1 and not any(tiny.windows(name))
    wanted = [reference.logits(p, edits) for p in PROMPTS]
    answers = [reference.greedy(p, edits, n_new) for p in PROMPTS] if n_new else []
    with shared_norm_warns(name, ours), apply(model, *ours):
        for p, want in zip(PROMPTS, wanted, strict=True):
            error = tiny.relative(tiny.array(model.logits(p)), want)
            assert error < 1e-5, (ours, len(p), error)
        if n_new:
            options: dict[str, Any] = {"max_new_tokens": n_new, "padding": "right" if right else "left"}
            batched = generate(model, PROMPTS, batch_size=3, **options)
            single = generate(model, PROMPTS[1:2], batch_size=1, max_new_tokens=n_new)
            for got, answer in zip([*batched, *single], [*answers, answers[1]], strict=True):
                same_answer(got.tokens, got.logprobs, answer)
    return wanted


def same_answer(tokens: Sequence[int], logprobs: Sequence[float], want: tuple[list, list, list]) -> None:
    """Equal up to where two tokens are as good as equally likely."""
    said, wanted, margins = want
    sure = next((i for i, margin in enumerate(margins) if margin < 1e-4), len(margins))
    assert sure >= 1
    assert list(tokens[:sure]) == said[:sure]
    if sure == len(margins):
        assert len(tokens) == len(said)
    np.testing.assert_allclose(logprobs[:sure], wanted[:sure], atol=1e-4)


@each_architecture
def test_every_kind_at_every_site_equals_plain_hooks(name: str) -> None:
    turn = tiny.ARCHITECTURES.index(name)
    clean = [plain(name).logits(p) for p in PROMPTS]
    for i, one in enumerate(kinds(turn)):
        wanted = check(name, [one], turn=turn + i)
        assert any(moved(a, b) for a, b in zip(wanted, clean, strict=True)), one.ours


@each_architecture
def test_compositions_equal_plain_hooks(name: str) -> None:
    seen = []
    for i, several in enumerate(compositions()):
        seen.append(check(name, several, turn=i, n_new=2 if i in (5, 9) else 0)[2])
    assert moved(seen[1], seen[2])  # the order matters


@each_architecture
def test_every_row_of_a_batch_can_have_its_own(name: str) -> None:
    """Different interventions and head sets in the rows of one padded batch, decoded under a cache."""
    model, reference = tiny.shared(name), plain(name)
    a, b = ((0, 1), (1, 0)), ((1, 3), (2, 2))
    biased = functools.partial(both, "bias", "attn_scores", strength=2.0, tokens=SOME_TOKENS)
    programs = {
        1: [both("zero", "z", a)],
        2: [both("zero", "z", b), both("mean", "q", a, "answer")],
        3: [both("mean", "q", b, "answer")],
        4: [both("resample", "z", a, "prompt", seed=3), biased(b)],
        5: [both("patch", "q", b)],
        6: [both("mean_positional", "z", b), both("zero", "pattern", a)],
        7: [biased(a)],
    }
    plan = [(0, 0), (2, 1), (1, 2), (0, 3), (2, 4), (1, 5), (2, 6), (0, 7), (1, 1), (1, 0), (0, 4)]
    alike: dict[Any, tuple[Intervention, dict[int, mh.HeadSet]]] = {}
    for which, several in programs.items():
        for one in several:
            key = (one.plain.kind, one.plain.site, one.plain.positions)
            _, sets = alike.setdefault(key, (one.ours, {}))
            sets[which] = one.ours.heads or mh.HeadSet()
    acting = Acting(model, [Act(i.prepare(model), sets) for i, sets in alike.values()])
    rows = [Row(tuple(PROMPTS[p]), which=which) for p, which in plan]
    with in_force(model, acting, []), model.running(rows):
        said, logits = decode(model, rows, N_NEW)
    check_fired(acting)
    for i, (p, which) in enumerate(plan):
        edits = [one.plain for one in programs.get(which, [])]
        prompt = PROMPTS[p]
        want = reference.logits([*prompt, *said[i][:-1]], edits, len(prompt))[len(prompt) - 1 :]
        assert tiny.relative(logits[i], want) < 1e-5, (plan[i], tiny.relative(logits[i], want))
    assert not model.backend.hooked() and model.rows is None


@torch.no_grad()
def decode(model: mh.Model, rows: list[Row], n: int) -> tuple[list[list[int]], np.ndarray]:
    """Greedy steps of a batch padded on the left, and the logits ``[row step vocab]`` of each."""
    backend = model.backend
    pending, mask = pad([row.prompt for row in rows], "left", backend.device)
    cache, steps = backend.new_cache(len(rows)), []
    for step in range(n):
        logits = backend.run(pending, mask, cache, last_only=True)[:, -1]
        steps.append(logits)
        pending = logits.argmax(-1)[:, None]
        for row, token in zip(rows, pending[:, 0].tolist(), strict=True):
            row.said.append(token)
        mask = torch.cat([mask, torch.ones_like(pending)], dim=1)
        assert step < n
    return [row.said for row in rows], tiny.array(torch.stack(steps, dim=1))


# -- identities -------------------------------------------------------------------------------------


def under(model: mh.Model, tokens: Sequence[int], *interventions: Intervention) -> Tensor:
    """Logits under interventions; a shared norm's warning is another test's matter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*all heads together")
        with apply(model, *interventions):
            return model.logits(tokens)


def seen_under(model: mh.Model, tokens: Sequence[int], site: str, *interventions: Intervention) -> list[Tensor]:
    """What each layer had at a site."""
    kept: dict[int, Tensor] = {}

    def keeper(layer: int) -> Any:
        return lambda t: kept.__setitem__(layer, t[0].clone())

    with apply(model, *interventions):
        pairs = [(f"blocks.{n}.attn.hook_{site}", keeper(n)) for n in range(tiny.LAYERS)]
        with model.hooks(pairs):
            model.logits(tokens)
    return [kept[layer] for layer in range(tiny.LAYERS)]


@each_architecture
def test_identities(name: str) -> None:
    model, tokens = tiny.shared(name), PROMPTS[2]
    clean = model.logits(tokens)
    a_layer = [(1, h) for h in range(tiny.HEADS)]
    every = [(layer, h) for layer in range(tiny.LAYERS) for h in range(tiny.HEADS)]
    own = {tuple(tokens): tokens}
    for site in ("z", "q"):
        assert torch.equal(under(model, tokens, patch(own, site=site).on(every)), clean)
        short = [mh.Trial(id="one", tokens=[11])]
        mean = mh.mean_ablation(site=site, reference=short).on(every)
        assert tiny.relative(tiny.array(under(model, [11], mean)), tiny.array(model.logits([11]))) < 1e-6
    zeroed = under(model, tokens, mh.zero_ablation().on(HEADS))
    pruned = under(model, tokens, prune().on(HEADS))
    assert tiny.relative(tiny.array(pruned), tiny.array(zeroed)) < 1e-6
    dark = under(model, tokens, mh.zero_ablation(site="pattern").on(HEADS))
    assert torch.equal(dark, zeroed)
    # A zero query and zero scores; a whole layer, for where one norm spans its heads.
    even = under(model, tokens, mh.zero_ablation(site="attn_scores").on(a_layer))
    blind = under(model, tokens, mh.zero_ablation(site="q").on(a_layer))
    assert tiny.relative(tiny.array(blind), tiny.array(even)) < 1e-6
    nothing = under(model, tokens, attention_bias(0.0, keys=[0, 3]).on(every))
    alike = under(model, tokens, attention_bias(3.0, keys=range(len(tokens))).on(every))
    gone = under(model, tokens, attention_bias(-1e4, keys=range(len(tokens))).on(every))
    assert tiny.relative(tiny.array(nothing), tiny.array(clean)) < 1e-6
    for got in (alike, gone):  # a sink is not biased, so it is left with less or with all
        error = tiny.relative(tiny.array(got), tiny.array(clean))
        assert error > 1e-2 if name == "gptoss" else error < 1e-5


@each_architecture
def test_a_whole_model_patched_at_z_writes_what_the_partner_wrote(name: str) -> None:
    model, tokens = tiny.shared(name), PROMPTS[1]
    every = [(layer, h) for layer in range(tiny.LAYERS) for h in range(tiny.HEADS)]
    partner = PARTNERS[tuple(tokens)]
    got = seen_under(model, tokens, "z", patch(PARTNERS).on(every))
    want = seen_under(model, partner, "z")
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@each_architecture
@pytest.mark.parametrize("strength", [1.25, -1e4])
def test_a_bias_multiplies_attention_and_normalises_again(name: str, strength: float) -> None:
    model, tokens, keys = tiny.shared(name), PROMPTS[2], [2, 17]
    heads = [(0, h) for h in range(3)]  # layer 0, where what enters is the same
    before = seen_under(model, tokens, "pattern")[0].double()
    after = seen_under(model, tokens, "pattern", attention_bias(strength, keys=keys, positions=[5, -1]).on(heads))[0]
    factor = torch.ones(len(tokens), dtype=torch.float64)
    factor[keys] = float(np.exp(strength))
    new = before * factor
    sink = 1 - before.sum(-1, keepdim=True) if name == "gptoss" else 0.0
    want = before.clone()
    biased = new / (new.sum(-1, keepdim=True) + sink)
    for query in (5, len(tokens) - 1):
        want[:3, query] = biased[:3, query]
    torch.testing.assert_close(after.double(), want, atol=1e-6, rtol=1e-5)
    if strength < 0:
        assert after[:3, -1, 17].abs().max() == 0 and before[:3, -1, 17].min() > 0


@each_architecture
def test_a_zero_query_attends_evenly_over_what_it_may_see(name: str) -> None:
    model, tokens = tiny.shared(name), PROMPTS[2]
    intervention = mh.zero_ablation(site="attn_scores" if name.startswith("olmo") else "q").on([(0, 1), (1, 2)])
    pattern = seen_under(model, tokens, "pattern", intervention)
    for layer, head in ((0, 1), (1, 2)):
        window = tiny.windows(name)[layer] or len(tokens)
        sinks = plain(name).reference.attentions[layer].sinks if name == "gptoss" else None
        for query in range(len(tokens)):
            first = max(0, query - window + 1)
            share = 1 / (query - first + 1 + (0 if sinks is None else float(sinks[head].detach().exp())))
            want = torch.zeros(len(tokens))
            want[first : query + 1] = share
            torch.testing.assert_close(pattern[layer][head, query], want, atol=1e-6, rtol=1e-5)
