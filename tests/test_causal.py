"""Causal scores against one head at a time on a plain Hugging Face model, and gradients against differences."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

import mechheads as mh
from mechheads.errors import HookNeverFired, InvalidInput, UnknownName
from mechheads.interventions import apply
from mechheads.methods.causal import attribution_patching, cri, radau
from mechheads.methods.registry import get_method
from mechheads.model import Model
from mechheads.patching import METRICS, Pair, PatchRuns, Readout, filler_token, make_pair

FILLER = 7
HEADS = [(layer, head) for layer in range(tiny.LAYERS) for head in range(tiny.HEADS)]

each_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)


# -- the slow way: plain transformers, one head, whole prompts, no cache --------------------------------


class Slow:
    """One trial on a plain Hugging Face model; ``z`` is what goes into the output projection."""

    def __init__(self, reference: tiny.Reference, case: tiny.Case):
        self.reference, self.case = reference, case
        prompt, needle = list(case.trial.tokens), case.trial.positions("needle")
        before, self.answer = case.said[: case.steps[0]], [case.said[s] for s in case.steps]
        without = [FILLER if i in needle else token for i, token in enumerate(prompt)]
        self.clean, self.corrupt = ([*p, *before, *self.answer] for p in (prompt, without))
        self.first = len(prompt) + len(before) - 1
        self.z_clean, self.z_corrupt = self.z(self.clean), self.z(self.corrupt)
        row = self.logits(self.corrupt)[self.first].copy()
        row[self.answer[0]] = -np.inf
        self.other = int(row.argmax())

    def z(self, tokens: list[int]) -> list[Tensor]:
        """``[pos head * d_head]`` for each layer."""
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., Any]:
            return lambda module, args: found.__setitem__(layer, args[0][0].clone())

        with self.before({layer: keep(layer) for layer in range(len(self.reference.outs))}):
            self.logits(tokens)
        return [found[layer] for layer in sorted(found)]

    @contextmanager
    def before(self, hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
        handles = [self.reference.outs[layer].register_forward_pre_hook(hook) for layer, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, tokens: list[int]) -> np.ndarray:
        return self.reference.logits(tokens)

    def metrics(self, logits: np.ndarray) -> dict[str, float]:
        """Both metrics, by hand."""
        first = logits[self.first]
        total = 0.0
        for i, token in enumerate(self.answer):
            row = logits[self.first + i]
            total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        return {"logit_diff": first[self.answer[0]] - first[self.other], "logprob": total / len(self.answer)}

    def moved(self, layer: int, heads: list[int], fraction: float = 1.0) -> dict[str, float]:
        """Metrics with some heads' ``z`` moved a fraction of the way to clean, in the corrupted run."""

        def hook(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            z = args[0].clone()
            for head in heads:
                at = slice(head * tiny.D_HEAD, (head + 1) * tiny.D_HEAD)
                z[0, :, at] += fraction * (self.z_clean[layer] - self.z_corrupt[layer])[:, at]
            return (z, *args[1:])

        with self.before({layer: hook}):
            return self.metrics(self.logits(self.corrupt))

    def cri(self) -> dict[str, np.ndarray]:
        """Both metrics' changes, ``[layer head]``."""
        base = self.metrics(self.logits(self.corrupt))
        out = {name: np.zeros((len(self.z_clean), tiny.HEADS)) for name in base}
        for layer in range(len(self.z_clean)):
            for head in range(tiny.HEADS):
                for name, value in self.moved(layer, [head]).items():
                    out[name][layer, head] = value - base[name]
        return out


@functools.cache
def slow(name: str) -> tuple[Slow, ...]:
    """Trials with one needle and with two, in and out of windows, with an answer of 1 to 3 tokens."""
    plain = tiny.plain(name)  # in double precision, but for gpt-oss, whose experts take none
    reference = tiny.Reference(name, plain if name == "gptoss" else plain.double())
    return tuple(Slow(reference, case) for case in tiny.cases(name))


def close(got: Any, want: np.ndarray, bound: float = 1e-4) -> None:
    """Within a bound of the largest magnitude, which is not zero."""
    assert np.abs(want).max() > 1e-3
    assert tiny.relative(np.asarray(got), want) < bound


# -- cri -------------------------------------------------------------------------------------------------


@each_architecture
def test_cri_is_one_head_at_a_time_on_the_whole_prompt(name: str) -> None:
    model = tiny.shared(name)
    for each in slow(name):
        want = each.cri()
        got = cri(model, each.case.trial, filler=FILLER, max_new_tokens=5)
        close(got["score"], want["logit_diff"])
        close(got["logprob"], want["logprob"])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_rows_at_once_change_nothing(llama: Model, rows: int) -> None:
    each = slow("llama")[1]
    got = cri(llama, each.case.trial, filler=FILLER, patch_batch=rows, max_new_tokens=5)
    close(got["score"], each.cri()["logit_diff"])


def test_logprob_as_the_score_keeps_the_difference_as_a_part(llama: Model) -> None:
    trial = slow("llama")[0].case.trial
    one = cri(llama, trial, filler=FILLER, max_new_tokens=5)
    two = cri(llama, trial, filler=FILLER, metric="logprob", max_new_tokens=5)
    assert set(one) == {"score", "logprob"} and set(two) == {"score", "logit_diff"}
    assert torch.equal(one["score"], two["logit_diff"]) and torch.equal(one["logprob"], two["score"])


def test_restoring_every_head_of_every_layer_restores_the_clean_logits(llama: Model) -> None:
    pair = make_pair(llama, slow("llama")[0].case.trial, filler=FILLER, max_new_tokens=5)
    assert pair is not None
    runs = PatchRuns(llama, pair)
    _, clean = runs.record(pair.clean)
    edits = {i: lambda t, at, i=i: runs.z_clean[i, at][None] for i in range(tiny.LAYERS)}
    restored = runs.run(pair.corrupt, edits)
    # The needle's own embeddings stay corrupted, but nothing of them reaches the answer's rows except through heads.
    assert torch.allclose(restored, clean, atol=1e-5)


def test_what_both_prompts_share_is_run_once(llama: Model) -> None:
    """They part at the first token of the needle that is not the filler already."""
    trial = slow("llama")[0].case.trial
    start = trial.positions("needle")[0]
    tokens = list(trial.tokens)
    tokens[start] = FILLER
    pair = make_pair(llama, replace(trial, tokens=tokens, answer=None), filler=FILLER, max_new_tokens=5)
    assert pair is not None and pair.start == start + 1
    assert PatchRuns(llama, pair).first == start + 1


def test_gold_is_what_the_model_says_there_and_what_it_says_before_is_forced(llama: Model) -> None:
    case = slow("llama")[0].case
    assert case.steps == [1, 2]
    pair = make_pair(llama, case.trial, filler=FILLER, max_new_tokens=5)
    assert pair is not None
    assert pair.answer == tuple(case.said[1:3])
    assert pair.clean == (*case.trial.tokens, case.said[0]) and pair.corrupt[-1] == case.said[0]
    everything = make_pair(llama, replace(case.trial, answer=None), filler=FILLER, max_new_tokens=5)
    assert everything is not None and everything.answer == tuple(case.said)


def test_the_counterfactual_is_the_likeliest_other_token() -> None:
    logits = torch.tensor([[[0.0, 3.0, 2.0, 1.0]]])
    pair = Pair(clean=(1, 2), corrupt=(1, 3), answer=(1,), start=1)
    assert Readout.of(pair, logits).counterfactual == 2
    assert Readout.of(replace(pair, answer=(0,)), logits).counterfactual == 1


@pytest.mark.parametrize("method", [cri, attribution_patching])
def test_undefined_where_the_answer_was_not_said(llama: Model, method: Any) -> None:
    trial = replace(slow("llama")[0].case.trial, answer="w3 w3 w3 w3")
    got = method(llama, trial, filler=FILLER, max_new_tokens=5)
    maps = got.values() if isinstance(got, dict) else [got]
    for values in maps:
        assert values.shape == (tiny.LAYERS, tiny.HEADS) and values.isnan().all()


# -- attribution patching ----------------------------------------------------------------------------------


def worth(each: Slow) -> dict[str, np.ndarray]:
    """Derivatives of both metrics along each head's move from corrupted to clean, by central differences."""
    out = {metric: np.zeros((len(each.z_clean), tiny.HEADS)) for metric in METRICS}
    step = 2e-3 if each.z_clean[0].dtype == torch.float32 else 2e-4  # short: OPT has kinks, gpt-oss jumps
    for layer, head in HEADS:
        up, down = (each.moved(layer, [head], sign * step) for sign in (1, -1))
        for metric in METRICS:
            out[metric][layer, head] = (up[metric] - down[metric]) / (2 * step)
    return out


@each_architecture
def test_attribution_is_the_derivative_along_the_patch(name: str) -> None:
    model = tiny.shared(name)
    for each in slow(name)[:2]:
        for metric, want in worth(each).items():
            got = attribution_patching(model, each.case.trial, filler=FILLER, metric=metric, max_new_tokens=5)
            close(got, want, 1e-2)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2"])
def test_integrated_scores_of_a_layer_add_up_to_patching_all_of_it(name: str, metric: str) -> None:
    model, each = tiny.shared(name), slow(name)[1]
    base = each.metrics(each.logits(each.corrupt))[metric]
    want = np.array([each.moved(i, list(range(tiny.HEADS)))[metric] - base for i in range(tiny.LAYERS)])
    errors = []
    for steps in (1, 4, 24):
        got = attribution_patching(
            model, each.case.trial, filler=FILLER, metric=metric, steps=steps, max_new_tokens=5
        )  # fmt: skip
        errors.append(tiny.relative(got.sum(1).numpy(), want))
    assert errors[2] < 1e-3 and errors[2] < errors[1] < errors[0]


def test_one_step_is_the_plain_form(llama: Model) -> None:
    """The fixed node of the quadrature is the corrupted run."""
    from mechheads.methods.causal import _integrated, _plain

    pair = make_pair(llama, slow("llama")[1].case.trial, filler=FILLER, max_new_tokens=5)
    assert pair is not None
    runs = PatchRuns(llama, pair)
    with torch.enable_grad():
        assert tiny.relative(_integrated(runs, "logprob", 1).numpy(), _plain(runs, "logprob").numpy()) < 1e-4


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_radau_is_exact_for_polynomials_and_has_zero_as_a_node(n: int) -> None:
    nodes, weights = radau(n)
    assert nodes[0] == 0 and (np.diff(nodes) > 0).all() and nodes[-1] < 1 and (weights > 0).all()
    for degree in range(2 * n - 1):
        assert abs((weights * nodes**degree).sum() - 1 / (degree + 1)) < 1e-12
    assert abs((weights * nodes ** (2 * n - 1)).sum() - 1 / (2 * n)) > 1e-9


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One layer, no MLP, norms that divide by a constant: logits are linear in ``z``."""
    hf = tiny.build("llama", num_hidden_layers=1, rms_norm_eps=1e8)
    with torch.no_grad():
        hf.model.layers[0].mlp.down_proj.weight.zero_()
        for norm in (hf.model.layers[0].input_layernorm, hf.model.norm):
            norm.weight.mul_(1e4)
    return mh.load(tiny.save(hf, tmp_path_factory.mktemp("linear")))


def test_on_a_linear_model_both_are_the_same(linear: Model) -> None:
    tokens = tiny.prompt(20, seed=4)
    trial = mh.Trial(id="t", tokens=tokens, spans={"needle": (4, 9)})
    options: dict[str, Any] = {"filler": FILLER, "max_new_tokens": 3}
    want = cri(linear, trial, **options)["score"].numpy()
    for steps in (1, 3):
        close(attribution_patching(linear, trial, steps=steps, **options), want)


# -- HookedTransformer -------------------------------------------------------------------------------------


@pytest.mark.tl3
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["olmo2_mha" if name == "olmo2" else name for name in tiny.ARCHITECTURES])
def test_hooked_transformer_gives_the_same(name: str) -> None:
    from test_hooked import hooked

    model = hooked(name)
    for each in slow(name)[:2]:
        got = cri(model, each.case.trial, filler=FILLER, max_new_tokens=5)
        want = each.cri()
        close(got["score"], want["logit_diff"])
        close(got["logprob"], want["logprob"])
        for steps in (1, 2):
            mine, bridged = (
                attribution_patching(m, each.case.trial, filler=FILLER, steps=steps, max_new_tokens=5)
                for m in (model, tiny.shared(name))
            )
            close(mine, bridged.numpy(), 1e-3)
    assert all(p.requires_grad for p in model.backend.model.parameters())  # type: ignore[attr-defined]


# -- what is on the model already, and what is left on it --------------------------------------------------


@pytest.mark.parametrize("site", ["z", "q"])
@pytest.mark.parametrize("method", [cri, attribution_patching])
def test_interventions_in_force_act_in_every_run(site: str, method: Any) -> None:
    """The ablated model is scored: brute force on a plain model that has been changed in its weights instead."""
    changed = tiny.plain("llama").double()
    attention = changed.model.layers[1].self_attn
    with torch.no_grad():
        if site == "z":
            attention.o_proj.weight[:, 2 * tiny.D_HEAD : 3 * tiny.D_HEAD] = 0
        else:
            attention.q_proj.weight[2 * tiny.D_HEAD : 3 * tiny.D_HEAD] = 0
    reference = tiny.Reference("llama", changed)
    tokens, said, logprobs = tiny.talkative(reference, 22, 4, seed=50)
    trial = mh.Trial(id="t", tokens=tokens, spans={"needle": [(3, 6), (12, 14)]}, answer=f"w{said[0]} w{said[1]}")
    each = Slow(reference, tiny.Case(trial, said, logprobs, [0, 1]))
    model = tiny.shared("llama")
    with apply(model, mh.zero_ablation(site=site).on("L1H2")):
        got = method(model, trial, filler=FILLER, max_new_tokens=4)
    got = got["score"] if isinstance(got, dict) else got
    if site == "z":
        assert got[1, 2].abs() < 1e-5  # nothing it writes differs between the runs
    if method is cri:
        close(got, each.cri()["logit_diff"])
    else:
        close(got, worth(each)["logit_diff"], 1e-2)


def test_a_hook_that_counts_positions_sees_whole_prompts(llama: Model) -> None:
    trial = slow("llama")[0].case.trial
    lengths = []
    with llama.hooks([("blocks.0.attn.hook_q", lambda t: lengths.append(t.shape[1]))]):
        hooked = cri(llama, trial, filler=FILLER, max_new_tokens=5)["score"]
    assert set(lengths) - {1} == {len(trial.tokens), len(trial.tokens) + 1}
    assert torch.allclose(hooked, cri(llama, trial, filler=FILLER, max_new_tokens=5)["score"], atol=1e-5)


def state(model: Model) -> dict[str, Any]:
    """Everything a run could leave behind."""
    bridge = model.backend.bridge  # type: ignore[attr-defined]
    return {
        "weights": model.weight_hash(),
        "grads": [(n, p.requires_grad, p.grad is None) for n, p in bridge.original_model.named_parameters()],
        "hooked": model.backend.hooked(),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bridge.modules()),
        "fast": model.backend.fast_prefill(),
        "logits": model.logits(tiny.prompt(12, seed=1)).tolist(),
    }


@pytest.mark.parametrize("options", [{}, {"steps": 2}])
def test_nothing_is_left_on_the_model(options: dict[str, int]) -> None:
    model = tiny.fresh("llama")
    parameters = list(model.backend.bridge.original_model.parameters())  # type: ignore[attr-defined]
    parameters[2].requires_grad_(False)
    before = state(model)
    trial = slow("llama")[0].case.trial
    cri(model, trial, filler=FILLER, max_new_tokens=5)
    with torch.no_grad():
        quiet = attribution_patching(model, trial, filler=FILLER, max_new_tokens=5, **options)
    assert state(model) == before
    assert not quiet.requires_grad and quiet.abs().max() > 0


def test_an_error_in_the_middle_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("llama")
    before, trial = state(model), slow("llama")[0].case.trial

    def broken(t: Tensor) -> None:
        if t.requires_grad:
            raise RuntimeError("broken in the middle")

    with model.hooks([("blocks.2.attn.hook_q", broken)]), pytest.raises(RuntimeError, match="broken in the middle"):
        attribution_patching(model, trial, filler=FILLER, max_new_tokens=5)
    assert state(model) == before


def test_a_fork_leaves_its_source_alone(llama: Model) -> None:
    tokens = torch.tensor([tiny.prompt(9, seed=3)])
    cache = llama.backend.prefill(tokens, torch.ones_like(tokens))
    kept = [tuple(x.clone() for x in llama.backend.cached_kv(cache, i)) for i in range(tiny.LAYERS)]
    fork = llama.backend.fork(cache, 3, above=0)
    assert [llama.backend.cached_kv(fork, i)[0].shape[0] for i in range(tiny.LAYERS)] == [1, 3, 3]
    more = llama.backend.fork(cache)
    llama.backend.run(tokens, torch.ones(1, 18, dtype=torch.long), more, last_only=True)
    llama.backend.cached_kv(fork, 2)[0].zero_()
    for i, (k, v) in enumerate(kept):
        now = llama.backend.cached_kv(cache, i)
        assert torch.equal(now[0], k) and torch.equal(now[1], v)


@pytest.mark.parametrize("name", ["cri", "attribution_patching"])
def test_what_the_registry_knows(name: str) -> None:
    known = get_method(name)
    assert known.kind == "causal" and known.spans == ("needle",) and known.unit == "logits" and known.builtin
    assert json.loads(json.dumps(known.options)) == known.options
    assert known.options["metric"] == "logit_diff" and known.options["filler"] == "."


@pytest.mark.parametrize("method", [cri, attribution_patching])
def test_half_precision_gives_about_the_same(method: Any) -> None:
    """Same answer forced (everything said), so that only rounding differs."""
    each = slow("llama")[3]
    half = mh.load(tiny.folder("llama"), dtype="bfloat16")
    trial = replace(each.case.trial, answer=f"w{each.case.said[0]}")
    got, want = (method(m, trial, filler=FILLER, max_new_tokens=5) for m in (half, tiny.shared("llama")))
    got, want = (x["score"] if isinstance(x, dict) else x for x in (got, want))
    assert got.dtype == torch.float32
    close(got, want.numpy(), 0.1)


# -- errors ------------------------------------------------------------------------------------------------


def test_fillers(llama: Model) -> None:
    assert filler_token(llama, "w5") == 5 and filler_token(llama, 5) == 5
    with pytest.raises(InvalidInput, match=r"the filler 'w5 w6' is 2 tokens for the tokenizer of .* \(filler=5\)"):
        filler_token(llama, "w5 w6")
    with pytest.raises(InvalidInput, match=r"the filler '\.' is unknown to the tokenizer"):
        filler_token(llama, ".")
    with pytest.raises(InvalidInput, match="the filler '' is 0 tokens for"):
        filler_token(llama, "")
    with pytest.raises(InvalidInput, match="the filler 97 is no token id of this model: 0 to 96"):
        filler_token(llama, 97)


def test_what_cannot_be_scored_is_refused(llama: Model) -> None:
    trial = slow("llama")[0].case.trial
    with pytest.raises(UnknownName, match=r"unknown metric 'logits'\. Did you mean 'logit_diff'"):
        cri(llama, trial, filler=FILLER, metric="logits")
    with pytest.raises(UnknownName, match="unknown metric 'kl'"):
        attribution_patching(llama, trial, filler=FILLER, metric="kl")
    with pytest.raises(UnknownName, match="unknown span of trial 'bare' 'needle'"):
        cri(llama, mh.Trial(id="bare", tokens=trial.tokens, answer="w4"), filler=FILLER)
    dull = mh.Trial(id="dull", tokens=[4, FILLER, FILLER, 5], spans={"needle": (1, 3)})
    with pytest.raises(InvalidInput, match="trial 'dull': the needle is nothing but the filler 7"):
        cri(llama, dull, filler=FILLER)


@pytest.mark.parametrize(("method", "name", "value", "wanted"), [
    *((attribution_patching, "steps", value, "it must be a whole number >= 1") for value in ("a", 1.5, True, 0, None)),
    *((cri, "patch_batch", value, "it must be a whole number >= 1") for value in ("a", 1.5, True, 0)),
    *((cri, "filler", value, "it must be text that is exactly one token .* or a token id")
      for value in (True, 1.5, None, [5], b"w5")),
    (attribution_patching, "filler", False, "it must be text"),
    *((cri, "max_new_tokens", value, "it must be a whole number >= 1") for value in ("5", 2.5, True, 0)),
    (cri, "stop_at_newline", "no", "it must be True or False"),
    (cri, "metric", ["logprob"], "unknown metric"),
])  # fmt: skip
def test_an_option_of_another_type_is_named(
    llama: Model, method: Any, name: str, value: Any, wanted: str, as_users_run: None
) -> None:
    said = "" if name == "metric" else rf"^{name}( \(.*\))? is {re.escape(repr(value))}.*"
    with pytest.raises(InvalidInput, match=f"{said}{wanted}"):
        method(llama, slow("llama")[0].case.trial, **{"filler": FILLER, "max_new_tokens": 5, name: value})


def test_whole_numbers_of_numpy_are_taken(llama: Model, as_users_run: None) -> None:
    trial = slow("llama")[0].case.trial
    five, two = np.int64(5), np.int64(2)
    want = cri(llama, trial, filler=FILLER, max_new_tokens=5)["score"]
    got = cri(llama, trial, filler=np.int64(FILLER), max_new_tokens=five, patch_batch=two)  # type: ignore[arg-type]
    assert torch.allclose(got["score"], want, atol=1e-5)


@pytest.mark.parametrize("method", [cri, attribution_patching])
@pytest.mark.parametrize("metric", METRICS)
def test_logits_that_are_no_numbers_are_refused(llama: Model, method: Any, metric: str) -> None:
    """NaN stands for an answer that was not said, and for nothing else."""
    trial = replace(slow("llama")[0].case.trial, answer=None)

    def broken(t: Tensor) -> Tensor:
        return torch.full_like(t, torch.nan)

    with (
        llama.hooks([("blocks.1.attn.hook_z", broken)]),
        pytest.raises(InvalidInput, match=r"trial '.*': the \w+ score of L0H0 is nan .*; load the model in float32"),
    ):
        method(llama, trial, filler=FILLER, metric=metric, max_new_tokens=2)


def test_a_layer_that_does_not_pass_its_z_is_an_error(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair(llama, slow("llama")[0].case.trial, filler=FILLER, max_new_tokens=5)
    assert pair is not None
    with monkeypatch.context() as patch:
        patch.setattr(llama.backend, "run", lambda tokens, *args, **kwargs: torch.zeros(1, 1, tiny.VOCAB))
        with pytest.raises(HookNeverFired, match=r"'blocks\.0\.attn\.hook_z' never fired, so nothing was patched"):
            PatchRuns(llama, pair)
