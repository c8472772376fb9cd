"""The pruning check: against weights that are really zero, its random heads, and the light road to verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
from helpers import counted
from hypothesis import given
from hypothesis import strategies as st

import mechheads as mh
from mechheads import pruning
from mechheads.candidates import (
    candidate_logprobs,
    capture_candidates,
    read_question,
    tokens_run,
    without_queries,
)
from mechheads.errors import InvalidInput, UnknownName
from mechheads.pruning import choice_metrics, head_counts, run_pruning

CANDIDATES = ((5,), (9,), (7, 31), (44, 8, 20))


def question(i: int, length: int, *, n: int = 2, **fields: Any) -> mh.Trial:
    texts = tuple(" " + " ".join(f"w{t}" for t in c) for c in CANDIDATES[:n])
    return mh.Trial(
        id=f"q{i}", tokens=tiny.prompt(length, seed=50 + i), spans={"statement": (3, 6)}, candidates=texts, label=i % n,
        **fields,
    )  # fmt: skip


def in_prompt(i: int, length: int, *texts: str) -> mh.Trial:
    spans = {"statement": (1, 4), "candidates": [(5 + 2 * j, 6 + 2 * j) for j in range(len(texts))]}
    return mh.Trial(id=f"p{i}", tokens=tiny.prompt(length, seed=80 + i), spans=spans, candidates=texts, label=0)


MIXED = [question(0, 17), question(1, 23, n=4), question(2, 9, n=3), question(3, 12), in_prompt(0, 15, " w5", " w9"),
         in_prompt(1, 13, " w7 w31", " w9")]  # fmt: skip
BEST = mh.HeadSet(["L1H2", "L0H1", "L2H3", "L0H2", "L1H0", "L2H0"])


def slow_logprobs(ref: tiny.Reference, trial: mh.Trial, tokens: Sequence[Sequence[int]]) -> list[float]:
    """Each candidate run after the prompt by itself, without a cache, its log-probabilities added up."""
    out = []
    for extra in tokens:
        rows = ref.logits([*trial.tokens, *extra])
        total = 0.0
        for j, token in enumerate(extra):
            row = rows[len(trial.tokens) - 1 + j]
            total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        out.append(float(total))
    return out


# -- the light road ------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gptoss"])
def test_log_probabilities_alone_are_those_beside_the_queries(name: str, padding: str) -> None:
    if padding == "right" and tiny.windows(name) != (None,) * 3:
        pytest.skip("a sliding window counts padding as distance; greedy decoding refuses it too")
    model, ref = tiny.shared(name), tiny.Reference(name)
    light = candidate_logprobs(model, MIXED, batch_size=4, padding=padding)
    for trial, got in zip(MIXED, light, strict=True):
        whole = capture_candidates(model, [trial])[0]
        np.testing.assert_allclose(got, whole.logprobs, rtol=0, atol=1e-4)
        np.testing.assert_allclose(got, slow_logprobs(ref, trial, whole.tokens), rtol=0, atol=1e-4)


def test_one_token_candidates_need_no_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens said to be run are those that the back end is given, with and without queries."""
    model = tiny.fresh("llama")
    run, prefill = model.backend.run, model.backend.prefill
    given: list[int] = []

    def count_run(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(tokens.numel())
        return run(tokens, *args, **kwargs)

    def count_prefill(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(tokens.numel())
        return prefill(tokens, *args, **kwargs)

    monkeypatch.setattr(model.backend, "run", count_run)
    monkeypatch.setattr(model.backend, "prefill", count_prefill)
    for trial in MIXED:
        asked = read_question(model, trial)
        for read, run_it in ((without_queries(asked), candidate_logprobs), (asked, capture_candidates)):
            given.clear()
            run_it(model, [trial])
            if trial.id == "p1" and read is asked:
                continue  # the prefix run there depends on how the rows are grouped
            assert sum(given) == tokens_run(read), trial.id
    assert tokens_run(without_queries(read_question(model, MIXED[0]))) == len(MIXED[0].tokens)


def test_the_light_road_refuses_what_cannot_be_run() -> None:
    with pytest.raises(UnknownName, match="padding side"):
        candidate_logprobs(tiny.shared("llama"), MIXED, padding="centre")
    with pytest.raises(InvalidInput, match="batch_size is 0"):
        candidate_logprobs(tiny.shared("llama"), MIXED, batch_size=0)
    with pytest.raises(UnknownName, match="statement"):
        candidate_logprobs(tiny.shared("llama"), [mh.Trial(id="t", tokens=[5, 6, 7], candidates=("a", "b"), label=0)])
    assert candidate_logprobs(tiny.shared("llama"), []) == []


# -- metrics -------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-4, 0), min_size=2, max_size=5), min_size=1, max_size=6), st.integers(0, 99))
def test_metrics_equal_a_loop(logprobs: list[list[int]], at: int) -> None:
    labels = [at % len(one) for one in logprobs]
    got = choice_metrics([[float(x) for x in one] for one in logprobs], labels)
    for (credit, share), one, label in zip(got, logprobs, labels, strict=True):
        best = [i for i, x in enumerate(one) if x == max(one)]
        assert credit == (1 / len(best) if label in best else 0)
        assert share == pytest.approx(np.exp(one[label]) / sum(np.exp(x) for x in one))


# -- pruning -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "opt", "neox", "llama", "llama_mqa", "qwen2", "qwen3", "gemma2", "gptoss"])
def test_pruning_is_zeroing_the_heads_rows_of_the_output_projection(name: str) -> None:
    """Against a Hugging Face model whose weights are really zero there, its biases left alone."""
    model = tiny.shared(name)
    found = run_pruning(model, BEST, mh.TrialSet(MIXED, name="mixed"), k=(2, 3), draws=2, batch_size=3)
    assert (found.rankings, found.ks, found.tasks) == (["best", "random"], [0, 2, 3], ["mixed"])
    assert found.metrics == ["choice_accuracy", "label_probability"]
    plain = tiny.Reference(name)
    tokens = {t.id: read_question(model, t).tokens for t in MIXED}
    whole = {t.id: choice_metrics([slow_logprobs(plain, t, tokens[t.id])], [t.label or 0])[0][1] for t in MIXED}
    moved = 0.0
    for key, cell in found.frame.groupby(["ranking", "draw", "k", "heads"]):
        ref = tiny.Reference(name)
        for head in mh.HeadSet.parse(str(cell["heads"].iloc[0])):
            ref.zero_head(head.layer, head.head)
        for trial in MIXED:
            credit, share = choice_metrics([slow_logprobs(ref, trial, tokens[trial.id])], [trial.label or 0])[0]
            mine = cell[cell["trial_id"] == trial.id].set_index("metric")["value"]
            assert mine["choice_accuracy"] == credit, key
            assert mine["label_probability"] == pytest.approx(share, abs=1e-4)
            moved = max(moved, abs(share - whole[trial.id]))
    assert moved > 0.01


@given(seed=st.integers(0, 2**31), draws=st.integers(1, 4))
def test_random_sets_never_hold_one_of_the_best(seed: int, draws: int) -> None:
    cells = pruning.plan_cells({"best": BEST}, [2, 5], (3, 4), pruning.RandomHeads(draws=draws, seed=seed))
    drawn = [c for c in cells if c.ranking == "random"]
    assert [(c.k, c.draw) for c in drawn] == [(k, d) for k in (2, 5) for d in range(draws)]
    for cell in drawn:
        assert len(set(cell.heads)) == cell.k and not set(cell.heads) & set(BEST[:5])


def test_the_seed_decides_the_random_sets(llama: mh.Model) -> None:
    def drawn(seed: int) -> list[str]:
        frame = run_pruning(llama, BEST, MIXED[:1], k=3, draws=3, seed=seed).frame
        sets = list(dict.fromkeys(frame.loc[frame["ranking"] == "random", "heads"]))
        for one in sets:
            assert not set(mh.HeadSet.parse(one)) & set(BEST[:3])
        return sets

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(drawn(0)) > 1


def test_curves_and_comparisons_come_of_it(llama: mh.Model, tmp_path: Any) -> None:
    found = run_pruning(llama, BEST, MIXED, k=(0.1, 0.25), draws=3)
    assert found.ks == [0, 1, 3] and found.meta["options"]["k_asked"] == [0.1, 0.25]
    curve = found.curve("label_probability")
    assert curve["n_draws"].tolist() == [1, 1, 1, 1, 3, 3]
    one = found.compare("best", "random", 3, "label_probability")
    best, drawn = (found.cell(r, 3, "trials", "label_probability") for r in ("best", "random"))
    assert one.difference.estimate == pytest.approx(best["value"].mean() - drawn["value"].mean())
    again = mh.SweepResult.load(found.save(tmp_path / "pruned"))
    assert again.frame.equals(found.frame) and again.meta["method"] == "pruning"
    assert mh.plots.ablation_curves(found, metric="choice_accuracy").data


def test_another_intervention_may_stand_in(llama: mh.Model) -> None:
    mean = mh.mean_ablation(reference=MIXED[:2])
    with pytest.warns(UserWarning, match="the mean is taken over 2 of the 6 trials it is tested on"):
        found = run_pruning(llama, BEST, MIXED, k=2, draws=1, intervention=mean)
    plain = run_pruning(llama, BEST, MIXED, k=2, draws=1)
    values = [f.cell("best", 2, "trials", "label_probability")["value"] for f in (found, plain)]
    assert np.abs(values[0] - values[1]).max() > 1e-3
    assert found.meta["options"]["intervention"]["kind"] == "mean"


def test_calibration_trials_are_pointed_out(llama: mh.Model) -> None:
    trials = [question(0, 12, split="calibration"), question(1, 13, split="test")]
    with pytest.warns(UserWarning, match="1 of the 2 trials belong to the calibration split") as caught:
        found = run_pruning(llama, BEST, trials, k=1, draws=1)
    assert found.meta["caveats"] == [str(caught[0].message)]


def test_each_head_set_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("llama")
    with counted(model, monkeypatch) as calls:
        run_pruning(model, BEST, MIXED[:1], k=6, draws=5, seed=3)  # six heads are left: every draw is the same set
    assert calls["prefill"] == 3


def test_interrupted_checks_keep_their_cells(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def tired(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == stop:
            raise KeyboardInterrupt
        return candidate_logprobs(*args, **kwargs)

    monkeypatch.setattr(pruning, "candidate_logprobs", tired)
    stop = 3
    with pytest.warns(UserWarning, match="interrupted: the head sets that are done are kept"):
        found = run_pruning(llama, BEST, MIXED, k=2, draws=4)
    assert found.meta["complete"] is False and found.rankings == ["best"]
    calls.clear()
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        run_pruning(llama, BEST, MIXED, k=2, draws=4)


def test_numbers_of_heads() -> None:
    assert head_counts((10, 20), 270) == [10, 20]
    assert head_counts((0.1, 0.2), 270) == [27, 54]
    assert head_counts(0.01, 12) == [1]
    assert head_counts((0.5, 3, 6), 12) == [3, 6]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too many": ({"k": (2, 7)}, r"k = 7: the model has 12 heads, so besides the best 7 only 5 are left to draw 7 "
                 r"random ones from; use k of at most 6, or fractions such as 0\.1\."),
    "more than given": ({"heads": "L0H1", "k": 2}, "k = 2, but only 1 heads are given; give at least 2, best first"),
    "zero": ({"k": 0}, r"k holds 0; give numbers of heads from 1, such as \(10, 20\), or fractions"),
    "a whole float": ({"k": 10.0}, "k holds 10.0; give numbers of heads from 1"),
    "true": ({"k": True}, "k holds True"),
    "none": ({"k": ()}, "k is empty; give numbers of heads"),
    "no draws": ({"k": 1, "draws": 0}, "draws is 0; a random control needs at least 1"),
    "no such head": ({"heads": "L7H0", "k": 1}, "L7H0 does not exist"),
    "heads named": ({"k": 1, "intervention": mh.zero_ablation().on("L0H0")}, "takes an intervention without heads"),
    "no trials": ({"k": 1, "trials": []}, "there are no trials to test the pruned model on"),
    "no batch": ({"k": 1, "batch_size": 0}, "batch_size is 0"),
    "no label": ({"k": 1, "trials": [mh.Trial(id="t", tokens=[5, 6, 7], spans={"statement": (0, 1)},
                                              candidates=(" w5", " w9"))]}, "the label None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_numbers(case: str, llama: mh.Model) -> None:
    change, message = BAD[case]
    given: dict[str, Any] = {"heads": BEST, "trials": MIXED, **change}
    with pytest.raises(InvalidInput, match=message):
        run_pruning(llama, given.pop("heads"), given.pop("trials"), **given)
