"""Premise ablation: against a slow loop on a plain Hugging Face model, and a stub whose answers are known by hand."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import mechheads as mh
from mechheads import premises
from mechheads.candidate_scores import CandidateScores
from mechheads.datasets import prontoqa
from mechheads.datasets.logic_worlds import word_pools
from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.premise_prompts import neutral_sentences, premise_attention, premise_spans
from mechheads.premise_result import ARMS, CUMULATIVE, SINGLY, PremiseAblation
from mechheads.premises import qk_verdicts, run_premises
from mechheads.trials import Span, Trial, TrialSet
from mechheads.verdicts.resampling import interval

# -- a tiny Llama that knows the words of the worlds -------------------------------------------------------------


@functools.cache
def worlds_folder() -> Path:
    """A random model over the worlds' words, one token each, punctuation apart."""
    pools = word_pools()
    words = [*pools["people"], *pools["kinds"], *pools["adjectives"], *" ".join(pools["rules"]).split()]
    words += ["Every", "Each", "Any", "Everything", "If", "is", "not", "a", "and", "or", "true", "false", "claim"]
    words += [".", ",", ":", "it"]
    vocab = {w: i for i, w in enumerate(dict.fromkeys(["<pad>", "<eos>", "<unk>", *words]))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", bos_token="<eos>"
    )
    folder = tiny.folder("llama").parent / "llama-worlds"
    tiny.build("llama", vocab_size=len(vocab), seed=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def worlds_model() -> mh.Model:
    return mh.load(worlds_folder())


@functools.cache
def plain_model() -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(
        worlds_folder(), attn_implementation="eager", dtype=torch.float32
    ).eval()


@functools.cache
def world_trials() -> TrialSet:
    rules = ("modus_ponens", "conjunction_introduction")
    return prontoqa(worlds_model(), n=8, depth=(1, 2), distractors=1, rules=rules, template="nano", seed=1)


HEADS = mh.HeadSet(["L1H2", "L2H3", "L1H0"])


@torch.no_grad()
def slow_run(text: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """Log-probabilities of true and false after a text, and each layer's attention, without a cache or a batch."""
    ids = worlds_model().tokenizer(text, add_special_tokens=False)["input_ids"]
    out = plain_model()(torch.tensor([ids]), output_attentions=True)
    logprobs = out.logits[0, -1].double().log_softmax(-1).numpy()
    vocab = worlds_model().tokenizer.get_vocab()
    return logprobs[[vocab["true"], vocab["false"]]], [a[0].double().numpy() for a in out.attentions]


def text_of(trial: Trial, gone: Sequence[int] = (), instead: Sequence[str] = ()) -> str:
    told = [p for i, p in enumerate(trial.meta["premises"]) if i not in gone]
    if instead:
        told = [instead[i] if i in gone else p for i, p in enumerate(trial.meta["premises"])]
    return " ".join([*told, "claim:", trial.meta["statement"]])


def slow_odds(text: str, i: int) -> float:
    logprobs, _ = slow_run(text)
    return float(logprobs[i] - logprobs[1 - i])


def slow_attention(trial: Trial, verdict: int) -> list[float]:
    """Attention of the heads to each premise, its tokens counted by hand."""
    said = (" true", " false")[verdict]
    _, before = slow_run(text_of(trial))
    _, after = slow_run(text_of(trial) + said)
    masses, at = [], 0
    for premise in trial.meta["premises"]:
        n = len(worlds_model().tokenizer(premise, add_special_tokens=False)["input_ids"])
        total = 0.0
        for head in HEADS:
            for patterns in (before, after):
                total += sum(patterns[head.layer][head.head, -1, j] for j in range(at, at + n))
        masses.append(total / (2 * len(HEADS)))
        at += n
    return masses


@functools.cache
def world_result(replace: str = "remove") -> PremiseAblation:
    return run_premises(worlds_model(), world_trials(), heads=HEADS, replace=replace, batch_size=3, seed=4)


@pytest.mark.parametrize("replace", ["remove", "distractor"])
def test_every_row_equals_a_run_of_the_text_by_itself(replace: str) -> None:
    model, trials = worlds_model(), world_trials()
    found = world_result(replace)
    assert found.arms == list(ARMS) and [q["trial_id"] for q in found.questions] == [t.id for t in trials]
    for trial, question in zip(trials, found.questions, strict=True):
        first, _ = slow_run(text_of(trial))
        assert question["verdict"] == int(first.argmax()) and question["proof"] == trial.meta["proof"]
        assert question["number"] == min(3, len(trial.meta["proof"]))
        instead = neutral_sentences(model, trial, seed=4) if replace == "distractor" else ()
        for row in found.rows[found.rows["trial_id"] == trial.id].itertuples():
            text = text_of(trial, row.removed, instead)
            logprobs, _ = slow_run(text)
            right = trial.label or 0
            assert row.verdict == int(logprobs.argmax())
            assert row.log_odds == pytest.approx(slow_odds(text, right), abs=1e-4)
            assert row.verdict_log_odds == pytest.approx(slow_odds(text, question["verdict"]), abs=1e-4)
            assert row.p_label == pytest.approx(1 / (1 + math.exp(-slow_odds(text, right))), abs=1e-5)


def test_each_arm_removes_its_own_premises_as_many_as_the_proof() -> None:
    found = world_result()
    for trial, question in zip(world_trials(), found.questions, strict=True):
        proof, n = set(trial.meta["proof"]), question["number"]
        everything = range(len(trial.meta["premises"]))
        for arm in ARMS:
            rows: Any = found.rows[(found.rows["trial_id"] == trial.id) & (found.rows["arm"] == arm)]
            steps = rows[rows["order"] == CUMULATIVE].sort_values("round")["removed"].tolist()
            assert [len(s) for s in steps] == list(range(1, n + 1))
            assert all(b[:-1] == a for a, b in itertools.pairwise(steps))
            singly = rows[rows["order"] == SINGLY].sort_values("round")["removed"].tolist()
            assert singly == [[i] for i in steps[-1]]
            last = set(steps[-1])
            assert len(last) == n and last <= set(everything)
            if arm == "gold":
                assert last <= proof
            elif arm == "random":
                assert not last & proof
            elif arm == "best heads":
                masses = slow_attention(trial, question["verdict"])
                assert steps[-1] == sorted(everything, key=lambda i: -masses[i])[:n]
            elif arm == "model":
                left = [slow_odds(text_of(trial, [i]), question["verdict"]) for i in everything]
                assert steps[-1] == sorted(everything, key=lambda i: left[i])[:n]


def test_attention_to_premises_equals_a_loop() -> None:
    model, trials = worlds_model(), world_trials()
    verdicts = [0, 1] * (len(trials) // 2)
    spans = [premise_spans(model, t) for t in trials]
    got = premise_attention(model, HEADS, trials, spans, verdicts)
    for trial, verdict, masses in zip(trials, verdicts, got, strict=True):
        np.testing.assert_allclose(masses, slow_attention(trial, verdict), atol=1e-5)
        assert (masses > 0).all() and masses.sum() <= 1


def test_attention_at_candidates_that_stand_in_the_prompt() -> None:
    """The rows are the last token and the chosen candidate's own."""
    spans = {"statement": (6, 9), "candidates": [(10, 11), (12, 14)]}
    trial = Trial(id="t", tokens=tiny.prompt(18, seed=9), spans=spans, candidates=(" w5", " w9"), label=0)
    ran = tiny.Reference("gpt2").run(trial.tokens).attention
    got = premise_attention(tiny.shared("gpt2"), mh.HeadSet("L1H2"), [trial], [[Span(0, 2), Span(2, 6)]], [1])[0]
    want = [sum(ran[1][2, t, j] for t in (13, 17) for j in js) / 2 for js in (range(2), range(2, 6))]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_premises_are_found_also_where_the_statement_reads_the_same() -> None:
    model = worlds_model()
    fields = {
        "id": "same",
        "premises": ["Wren is kind."],
        "statement": "Wren is kind.",
        "candidates": ("true", "false"),
    }
    question = mh.datasets.LogicQuestion(**fields, label=0, proof=[0])
    for text, where in (("{context} claim: {statement}", Span(0, 4)), ("claim: {statement} {context}", Span(6, 10))):
        trial = mh.datasets.build_trials(model, [question], template={"text": text}, calibration=None)[0]
        assert premise_spans(model, trial) == [where]
    other = Trial(**{**trial.to_dict(), "tokens": [*trial.tokens, 5]})
    with pytest.raises(InvalidInput, match="trial 'same' was made with another tokenizer"):
        premise_spans(model, other)


def test_the_seed_decides_the_orders_and_a_trial_alone_has_the_same() -> None:
    model, trials = worlds_model(), world_trials()[:4]

    def removed(some: Any, seed: int) -> Any:
        found = run_premises(model, some, arms=("gold", "random", "random any"), seed=seed)
        return found.rows.set_index(["trial_id", "arm", "order", "round"])["removed"].sort_index()

    whole = removed(trials, 0)
    assert whole.equals(removed(trials, 0)) and not whole.equals(removed(trials, 1))
    alone = removed([trials[3]], 0)
    assert alone.equals(whole.loc[[trials[3].id]])


def test_neutral_sentences_share_no_word_with_the_question_and_keep_its_length() -> None:
    model = worlds_model()
    pools = word_pools()
    own = {w.lower() for sort in ("people", "kinds", "adjectives") for w in pools[sort]}

    def words(text: str) -> set[str]:
        return {w for w in text.lower().replace(".", " ").replace(",", " ").split() if w in own}

    for trial in world_trials():
        said = words(" ".join([*trial.meta["premises"], trial.meta["statement"]]))
        made = neutral_sentences(model, trial, seed=4)
        assert made == neutral_sentences(model, trial, seed=4) != neutral_sentences(model, trial, seed=5)
        for premise, sentence in zip(trial.meta["premises"], made, strict=True):
            assert words(sentence) and not words(sentence) & said
            lengths = [len(model.tokenizer(s)["input_ids"]) for s in (premise, sentence)]
            assert abs(lengths[0] - lengths[1]) <= 1


def test_neutral_sentences_need_a_tokenizer_that_knows_them() -> None:
    trial = Trial(id="t", tokens=[5, 6], meta={"premises": ["w5 w6"], "statement": "w7"})
    with pytest.raises(InvalidInput, match=r"does not know the words of .* a premise of trial 't'"):
        neutral_sentences(tiny.shared("llama"), trial)
    trial = Trial(id="t", tokens=[5, 6], meta={"premises": [" ".join(word_pools()["people"])], "statement": "w7"})
    with pytest.raises(InvalidInput, match="leaves no people unused"):
        neutral_sentences(worlds_model(), trial)


# -- a stub whose answers are known by hand ----------------------------------------------------------------------

KEY, BESIDE = 1, 3  # the proof; the verdict hinges on the first alone
N_PREMISES = 6


def made_up(i: int, **meta: Any) -> Trial:
    """A question of six premises, two to a group, asked of a stub that answers by the key premise alone."""
    known = {
        "premises": [f"p{j}" for j in range(N_PREMISES)], "proof": [KEY, BESIDE], "group": f"g{i // 2}", "own": i,
        "kept": list(range(N_PREMISES)), **meta,
    }  # fmt: skip
    return Trial(
        id=f"q{i:02d}", tokens=[10 + i, *(40 + j for j in range(N_PREMISES)), 60, 61], spans={"statement": (7, 9)},
        candidates=(" w5", " w9"), label=i % 2, meta=known,
    )  # fmt: skip


def fewer(model: Any, trial: Trial, *, premises: Sequence[int], replaced: Any = None) -> Trial:
    n = len(premises)
    tokens = [trial.tokens[0], *(40 + j for j in premises), 60, 61]
    data = trial.to_dict() | {"id": f"{trial.id} {list(premises)}", "tokens": tokens}
    data |= {"spans": {"statement": [[n + 1, n + 3]]}, "meta": {**trial.meta, "kept": list(premises)}}
    return Trial.from_dict(data)


def answer(trial: Trial) -> tuple[float, float]:
    """Right by 2 nats with the key premise, wrong by 1 without; every fourth question knows the answer by heart."""
    by_heart = trial.meta["own"] % 4 == 3
    odds = 2.0 if by_heart or KEY in trial.meta["kept"] else -1.0
    odds = -odds if trial.meta.get("fooled") else odds
    right = -math.log1p(math.exp(-odds))
    return (right, right - odds) if trial.label == 0 else (right - odds, right)


class Stub:
    """In the place of the model's log-probabilities; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Trial] = []
        self.stop_after = math.inf

    def __call__(self, model: Any, trials: Sequence[Trial], **options: Any) -> list[tuple[float, ...]]:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += trials
        return [answer(t) for t in trials]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    made = Stub()
    monkeypatch.setattr(premises, "candidate_logprobs", made)
    yield made


QUESTIONS = [made_up(i) for i in range(12)]
FLIPS = np.array([i % 4 != 3 for i in range(12)], dtype=float)
GROUPS = [f"g{i // 2}" for i in range(12)]


def stubbed(trials: Any = QUESTIONS, **options: Any) -> PremiseAblation:
    return run_premises(tiny.shared("llama"), trials, rebuild=fewer, **options)


def test_flips_and_log_odds_are_those_built_in(stub: Stub) -> None:
    found = stubbed()
    gold, other = found.per_question("gold"), found.per_question("random")
    assert gold["flipped"].tolist() == FLIPS.tolist()
    np.testing.assert_allclose(gold["drop"], 3 * FLIPS)
    np.testing.assert_allclose(gold["change"], -3 * FLIPS)
    assert (other[["flipped", "drop", "change"]].abs() < 1e-9).all(axis=None)
    # One at a time, one of the proof's two premises matters.
    singly = found.per_question("gold", SINGLY)
    np.testing.assert_allclose(singly["flipped"], FLIPS / 2)
    np.testing.assert_allclose(singly["drop"], 1.5 * FLIPS)
    # Leaving out finds the key premise first, wherever there is one.
    rows = found.rows[(found.rows["arm"] == "model") & (found.rows["round"] == 1)]
    assert [r == [KEY] for r in rows[rows["order"] == CUMULATIVE]["removed"]] == [bool(f) for f in FLIPS]
    assert found.per_question("model", CUMULATIVE, 1)["flipped"].tolist() == FLIPS.tolist()
    assert found.rounds == 2 and found.left_out == dict.fromkeys(found.arms, 0)


def test_rates_and_intervals_by_arm(stub: Stub) -> None:
    found = stubbed()
    table = found.by_arm(level=0.9, n_boot=300, seed=7).set_index(["arm", "round"])
    row = table.loc[("gold", "all")]
    want = interval(FLIPS, GROUPS, level=0.9, n_boot=300, seed=7)
    assert (row["flipped"], row["flipped_low"], row["flipped_high"]) == (0.75, want.low, want.high)
    odds = interval(-3 * FLIPS, GROUPS, level=0.9, n_boot=300, seed=7, low=-math.inf, high=math.inf)
    np.testing.assert_allclose(row[["change", "change_low", "change_high"]].tolist(), [-2.25, odds.low, odds.high])
    assert (row["n"], row["n_groups"]) == (12, 6)
    none = table.loc[("random", "all")]
    assert none["flipped"] == none["flipped_low"] == 0 < none["flipped_high"]
    assert none["drop"] == 0 and math.isnan(none["drop_low"])  # all the same: there is no width to give
    early = found.per_question("gold", CUMULATIVE, 1)["flipped"].mean()
    assert table.loc[("gold", 1), "flipped"] == early < 0.75
    halves = found.by_arm(by="label").query("arm == 'gold' and round == 'all'").set_index("value")
    assert halves["flipped"].to_dict() == {"w5": 1.0, "w9": 0.5}
    assert found.by_arm(SINGLY).query("arm == 'gold' and round == 'all'")["flipped"].item() == 0.375


def test_differences_between_arms_with_a_paired_test(stub: Stub) -> None:
    wrong = [made_up(i, fooled=True) for i in (4, 5)]
    trials = [*QUESTIONS[:4], *wrong, *QUESTIONS[6:]]
    found = stubbed(trials)
    table = found.differences(n_boot=400, seed=3)
    row = table[(table["by"] == "overall") & (table["measure"] == "flipped")].iloc[0]
    want = interval(FLIPS, GROUPS, n_boot=400, seed=3, low=-1.0)
    assert (row["mean_a"], row["mean_b"], row["difference"]) == (0.75, 0.0, 0.75)
    assert (row["low"], row["high"], row["n_groups"]) == (want.low, want.high, 6)
    sums = [FLIPS[2 * g] + FLIPS[2 * g + 1] for g in range(6)]
    signs = list(itertools.product((1, -1), repeat=6))
    beyond = sum(abs(sum(s * x for s, x in zip(one, sums, strict=True))) >= sum(sums) for one in signs)
    assert row["p"] == beyond / 64
    by = table[table["measure"] == "change"].set_index(["by", "value"])
    # Where the first verdict is wrong, losing the key premise helps the right answer.
    assert by.loc[("verdict", "wrong"), "difference"] == pytest.approx(3) and by.loc[("verdict", "wrong"), "n"] == 2
    assert by.loc[("verdict", "right"), "difference"] == pytest.approx(-3 * 7 / 10)
    assert set(by.loc["label"].index) == {"w5", "w9"}
    drops = table[(table["by"] == "verdict") & (table["measure"] == "drop")].set_index("value")["difference"]
    assert drops["wrong"] == pytest.approx(3) and drops["right"] == pytest.approx(2.1)


def test_dependence_of_each_question(stub: Stub) -> None:
    found = stubbed()
    table = found.dependence().set_index("trial_id")
    gold: Any = found.rows[(found.rows["arm"] == "gold") & (found.rows["order"] == CUMULATIVE)]
    for trial in QUESTIONS:
        steps = gold[gold["trial_id"] == trial.id].sort_values("round")["removed"].tolist()
        at = next(i for i, s in enumerate(steps, 1) if KEY in s)
        turned = table.loc[trial.id, "turned_at"]
        assert math.isnan(turned) if trial.meta["own"] % 4 == 3 else turned == at
    assert table["flipped"].tolist() == FLIPS.tolist() and table["qk_right"].isna().all()


def test_agreement_with_qk_verdicts(stub: Stub) -> None:
    """A head that is right, and surer, exactly where the verdict rests on the evidence; and one tie."""
    values = np.zeros((12, 2, 3, 4), dtype=np.float32)
    for i, trial in enumerate(QUESTIONS):
        right = trial.label or 0
        values[i, right, 1, 2] = (5.0 + i) if FLIPS[i] else -1.0
    values[0, :, 1, 2] = 0.0
    labels, ids = np.array([t.label for t in QUESTIONS]), [t.id for t in QUESTIONS]
    qk = CandidateScores(values, np.zeros((12, 2)), labels, [t.candidates for t in QUESTIONS], ids)
    found = stubbed(qk=qk, heads="L1H2", arms=("gold", "random"))
    agreed = found.agreement(n_boot=200)
    assert agreed.table == {(True, True): 8, (True, False): 0, (False, True): 0, (False, False): 3}
    assert agreed.n_tied == 1
    assert agreed.right_if_rests is not None and agreed.right_if_not is not None
    assert agreed.right_if_rests.estimate == pytest.approx(8.5 / 9) and agreed.right_if_not.estimate == 0
    rho = pd.Series(found.dependence()["qk_margin"]).corr(pd.Series(3 * FLIPS), method="spearman")
    assert agreed.correlation.estimate == pytest.approx(rho)
    assert agreed.correlation.low < rho < agreed.correlation.high
    assert f"have the rank correlation {found.agreement().correlation}." in found.summary()
    # Sign turned, the same head is wrong there.
    turned = stubbed(qk=qk, heads="L1H2", inverse="L1H2", arms=("gold",)).agreement(n_boot=200)
    assert turned.table[False, True] == 8 and turned.correlation.estimate == pytest.approx(-rho)


def test_qk_verdicts_are_those_of_the_majority() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 3, 2, 2)).astype(np.float32)
    labels = rng.integers(0, 3, 20)
    scores = CandidateScores(values, np.zeros((20, 3)), labels, [("a", "b", "c")] * 20, [str(i) for i in range(20)])
    heads = mh.HeadSet(["L0H1", "L1H0", "L1H1"])
    offset = rng.normal(size=(3, 2, 2))
    right, margins = qk_verdicts(scores, heads, "L1H0", offset)
    every = []
    for head in heads:
        sign = -1 if str(head) == "L1H0" else 1
        mine = sign * (values[:, :, head.layer, head.head] - offset[:, head.layer, head.head])
        every.append(mine)
    for i, label in enumerate(labels):
        votes = [int(one[i].argmax()) for one in every]
        most = [c for c in range(3) if votes.count(c) == max(map(votes.count, votes))]
        assert right[i] == pytest.approx(1 / len(most) if label in most else 0)
    gaps = [[one[i, y] - max(np.delete(one[i], y)) for i, y in enumerate(labels)] for one in every]
    np.testing.assert_allclose(margins, np.mean([np.array(g) / np.std(g) for g in gaps], axis=0), rtol=1e-5)


def test_cost_counts_each_distinct_prompt_once(stub: Stub) -> None:
    found = stubbed(heads="L1H2", arms=("gold", "model", "random"))
    asked = [tuple(t.tokens) for t in stub.asked]
    assert len(set(asked)) == len(asked) == found.cost["ablation"]["passes"]
    assert found.cost["ablation"]["tokens"] == sum(map(len, asked))
    # One pass of the QK-score: the prompt but its last token, and that with either candidate.
    assert found.cost["qk"]["passes"] == 12 and found.cost["qk"]["tokens"] == 12 * (8 + 2 * 2)
    assert found.cost_ratio == found.cost["ablation"]["tokens"] / 144
    # Gold by itself: the prompt, two single removals, and both together.
    assert found.cost["by_arm"]["gold"] == {"passes": 48, "tokens": 12 * (9 + 8 + 8 + 7)}
    assert found.cost["by_arm"]["model"]["passes"] == 12 * (1 + N_PREMISES + 1)
    assert found.seconds_ratio > 0


def test_cost_of_attention_is_counted() -> None:
    found = world_result()
    alone = run_premises(worlds_model(), world_trials(), heads=HEADS, arms="best heads", seed=4)
    lengths = [len(t.tokens) + 1 for t in world_trials()]
    ran = zip(alone.rows["trial_id"], alone.rows["removed"], strict=True)
    distinct = {(trial, tuple(sorted(gone))) for trial, gone in ran}
    assert alone.cost["ablation"]["passes"] == len(lengths) * 2 + len(distinct)
    assert alone.cost["by_arm"]["best heads"] == {k: alone.cost["ablation"][k] for k in ("passes", "tokens")}
    assert found.cost["by_arm"]["best heads"] == alone.cost["by_arm"]["best heads"]


def test_questions_without_a_proof_are_left_out_and_counted(stub: Stub) -> None:
    trials = [*QUESTIONS[:3], made_up(3, proof=None), made_up(4, proof=[])]
    found = stubbed(trials, rounds=4)
    assert found.left_out == {"gold": 2, "model": 0, "random": 2, "random any": 0}
    assert [q["number"] for q in found.questions] == [2, 2, 2, 4, 4]
    assert len(found.dependence()) == 3 and len(found.per_question("random any")) == 5
    assert "2 questions are left out of the arm 'gold'." in found.summary()
    with pytest.raises(InvalidInput, match="none of the 1 questions has a known proof, so the arms gold have nothing"):
        stubbed(trials[3:4], arms="gold")


def test_an_arm_with_too_few_premises_is_compared_where_it_has_enough(stub: Stub) -> None:
    """One premise lies outside this proof, so the random arm stops after one and its question is not in 'all'."""
    trials = [*QUESTIONS[:4], made_up(4, proof=[0, 1, 2, 3, 4])]
    found = stubbed(trials, rounds=3)
    assert len(found.per_question("gold")) == 5 and len(found.per_question("random")) == 4
    assert len(found.per_question("random", CUMULATIVE, 1)) == 5
    assert found.differences()["n"].iloc[0] == 4


def test_rounds_cap_what_is_removed(stub: Stub) -> None:
    found = stubbed(rounds=1, arms=("gold", "random"))
    assert found.rounds == 1 and {len(r) for r in found.rows["removed"]} == {1}


def test_a_tie_is_no_move() -> None:
    assert premises.verdict_of([-1.0, -0.5, -0.5]) == 1
    assert premises.verdict_of([-1.0, -0.5, -0.5], 2) == 2
    assert premises.verdict_of([-1.0, -0.5, -0.5], 0) == 1


def test_replacements_reach_a_rebuild_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[int, str]] = []

    def own(model: Any, trial: Trial, *, premises: Sequence[int], replaced: dict[int, str]) -> Trial:
        seen.append(replaced)
        assert sorted([*premises, *replaced]) == list(range(N_PREMISES))
        return fewer(model, trial, premises=premises)

    monkeypatch.setattr(premises, "candidate_logprobs", Stub())
    monkeypatch.setattr(premises, "neutral_sentences", lambda *a, **k: [f"n{i}" for i in range(N_PREMISES)])
    run_premises(tiny.shared("llama"), QUESTIONS[:2], rebuild=own, arms="gold", replace="distractor")
    assert seen and all(r == {i: f"n{i}" for i in r} for r in seen)


def test_interrupted_runs_keep_whole_questions(stub: Stub) -> None:
    whole = stubbed(arms=("gold", "random"))
    stub.asked.clear()
    stub.stop_after = 30
    with pytest.warns(UserWarning, match="interrupted: 4 of 12 questions are done and kept"):
        found = stubbed(arms=("gold", "random"), batch_size=2)
    assert found.meta["complete"] is False and found.meta["n_trials_asked"] == 12
    assert [q["trial_id"] for q in found.questions] == [t.id for t in QUESTIONS[:4]]
    kept = whole.rows[whole.rows["trial_id"].isin({t.id for t in QUESTIONS[:4]})].reset_index(drop=True)
    assert found.rows.drop(columns="round").equals(kept.drop(columns="round"))
    # What was run of the questions not kept does not count, and the pass it is compared with is that of those kept.
    done = {tuple(t.tokens) for t in stub.asked if t.meta["own"] < 4}
    assert found.cost["ablation"]["passes"] == len(done) and found.cost["qk"]["passes"] == 4
    stub.asked.clear()
    stub.stop_after = 0
    with pytest.raises(KeyboardInterrupt):
        stubbed(arms=("gold", "random"))


def test_errors_keep_what_was_done(stub: Stub) -> None:
    def failing(model: Any, trial: Trial, *, premises: Sequence[int]) -> Trial:
        made = fewer(model, trial, premises=premises)
        return made if trial.meta["own"] < 2 else Trial.from_dict({**made.to_dict(), "candidates": [" w5", " w8"]})

    message = r"trial 'q02' has the candidates .* without premises .* rebuild must keep them"
    with pytest.raises(InvalidInput, match=message) as caught:
        run_premises(tiny.shared("llama"), QUESTIONS, rebuild=failing, arms="gold", batch_size=2)
    assert len(caught.value.partial["premises"].questions) == 2


# -- results -----------------------------------------------------------------------------------------------------


def test_results_are_saved_and_read_back(stub: Stub, tmp_path: Path) -> None:
    found = stubbed(heads="L1H2")
    again = PremiseAblation.load(found.save(tmp_path / "ablation"))
    assert again.frame().equals(found.frame()) and again.questions == found.questions
    assert (again.cost, again.left_out, again.meta) == (found.cost, found.left_out, found.meta)
    assert again.summary() == found.summary()
    assert again.meta["options"]["heads"] == ["L1H2"] and again.meta["method"] == "premise_ablation"
    qk = mh.CircuitAnalysis(tiny.shared("llama")).score("qk", QUESTIONS)
    other = qk.save(tmp_path / "qk")
    with pytest.raises(ResultFileError, match="holds 'candidate_scores', but 'premise_ablation' was asked for"):
        PremiseAblation.load(other)


def test_given_scores_are_used_and_must_be_of_these_trials(stub: Stub) -> None:
    model = tiny.fresh("llama")
    ca = mh.CircuitAnalysis(model)
    own = stubbed(heads="L1H2", arms="gold")
    given = stubbed(heads="L1H2", arms="gold", qk=ca.score("qk", QUESTIONS))
    assert [q["qk_margin"] for q in own.questions] == pytest.approx([q["qk_margin"] for q in given.questions], abs=1e-4)
    with pytest.raises(InvalidInput, match=r"qk has no scores of trial 'q02' \(10 such\)"):
        stubbed(heads="L1H2", qk=ca.score("qk", QUESTIONS[:2]))
    changed = [Trial.from_dict({**t.to_dict(), "tokens": [*t.tokens[:-1], 9]}) for t in QUESTIONS]
    with pytest.raises(InvalidInput, match="qk scored another prompt under the id 'q00'"):
        stubbed(heads="L1H2", qk=ca.score("qk", changed))
    with torch.no_grad():
        model.backend.W_O(0).mul_(2)
    with pytest.raises(InvalidInput, match="qk was scored on other weights than this model's"):
        stubbed(heads="L1H2", qk=mh.CircuitAnalysis(model).score("qk", QUESTIONS))


def test_the_summary_says_what_happened(stub: Stub) -> None:
    told = stubbed().summary()
    assert told.startswith("The model's first verdict is right in 12 of 12 questions. Without the proof's premises, ")
    assert "verdicts move in 0.75 [" in told and "Proof less other premises, question by question: +0.75 [" in told
    assert "times the 144 of one QK-score pass over the same questions" in told
    assert repr(stubbed(arms="gold")) == "PremiseAblation(12 questions, arms=['gold'], rounds=2)"


def test_log_odds_that_rise_are_told_as_rising(stub: Stub) -> None:
    """Where the model is wrong with the key premise and right without, its verdict's log-odds fall; turn them round."""
    found = stubbed(arms=("gold", "random"))
    assert "the first verdict's log-odds fall by 2.25 [" in found.summary() and "rise" not in found.summary()
    rows = found.rows.assign(verdict_log_odds=[4.0 - x for x in found.rows["verdict_log_odds"]])
    turned = PremiseAblation(found.questions, rows, found.cost)
    gold = turned.by_arm().query("arm == 'gold' and round == 'all'").iloc[0]
    assert gold["drop_low"] < gold["drop"] < 0
    told = f"log-odds rise by {-gold['drop']:.2f} [{-gold['drop_high']:.2f}, {-gold['drop_low']:.2f}] nats (n = 12)."
    assert told in turned.summary() and "fall by -" not in turned.summary()


def test_the_analysis_takes_the_same_options_and_passes_them_on(
    monkeypatch: pytest.MonkeyPatch, as_users_run: None
) -> None:
    from mechheads import analysis, pruning

    model = tiny.shared("llama")
    ca = mh.CircuitAnalysis(model, progress=False)
    for name, method, function in (
        ("run_premises", ca.premise_ablation, run_premises),
        ("run_pruning", ca.pruning_check, pruning.run_pruning),
    ):
        wanted = {k: p for k, p in inspect.signature(function).parameters.items() if k != "model"}
        assert dict(inspect.signature(method).parameters) == wanted
        seen: dict[str, Any] = {}
        monkeypatch.setattr(analysis, name, lambda *args, seen=seen, **options: seen.update(options, args=args))
        positional = {k: object() for k, p in wanted.items() if p.kind is not p.KEYWORD_ONLY}
        options = {k: object() for k, p in wanted.items() if p.kind is p.KEYWORD_ONLY}
        method(*positional.values(), **options)  # pyright: ignore[reportArgumentType]
        assert seen == {**options, "args": (model, *positional.values())}
        method(*positional.values())  # pyright: ignore[reportArgumentType]
        assert seen["progress"] is False


def test_questions_of_a_result_that_cannot_be_are_refused(stub: Stub) -> None:
    found = stubbed(arms="gold")

    def made(**change: Any) -> PremiseAblation:
        given: dict[str, Any] = {"questions": found.questions, "rows": found.rows, "cost": found.cost, **change}
        return PremiseAblation(given["questions"], given["rows"], given["cost"])

    with pytest.raises(InvalidInput, match="lacks 'qk_margin'"):
        made(questions=[{k: v for k, v in q.items() if k != "qk_margin"} for q in found.questions])
    with pytest.raises(InvalidInput, match="lacks the column 'verdict'"):
        made(rows=found.rows.drop(columns="verdict"))
    with pytest.raises(InvalidInput, match="has no rows"):
        made(rows=found.rows.iloc[:0])
    with pytest.raises(UnknownName, match="unknown arm in the premise ablation's table 'silver'"):
        made(rows=found.rows.assign(arm="silver"))
    with pytest.raises(UnknownName, match="unknown trial_id in the premise ablation's table 'q00'"):
        made(questions=found.questions[1:])
    with pytest.raises(InvalidInput, match="has two rows for"):
        made(rows=pd.concat([found.rows, found.rows.iloc[:1]]))
    with pytest.raises(InvalidInput, match="log_odds of trial 'q00' is nan"):
        made(rows=found.rows.assign(log_odds=np.nan))
    with pytest.raises(InvalidInput, match=r"cost\['qk'\] needs 'passes' above 0"):
        made(cost={})
    with pytest.raises(UnknownName, match="arm of the premise ablation 'random'"):
        found.per_question("random")
    with pytest.raises(UnknownName, match="order of the premise ablation 'all at once'"):
        found.by_arm("all at once")
    with pytest.raises(UnknownName, match="split of the premise ablation 'rule'"):
        found.by_arm(by="rule")
    with pytest.raises(InvalidInput, match="there are no QK verdicts here; give run_premises the heads"):
        found.agreement()
    with pytest.raises(InvalidInput, match="no question was run without the premises of its proof"):
        stubbed(arms="model").agreement()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no trials": ({"trials": []}, InvalidInput, "there are no trials to take premises from"),
    "no premises": ({"trials": [made_up(0, premises=[])]}, InvalidInput, r"has the premises \[\] in its meta"),
    "none known": ({"trials": [Trial.from_dict({**made_up(0).to_dict(), "meta": {}})]}, InvalidInput,
                   "trial 'q00' has the premises None in its meta; premise ablation needs a list of sentences"),
    "a proof of nothing": ({"trials": [made_up(0, proof=[9])]}, InvalidInput, r"the proof \[9\] names no premises"),
    "an unknown arm": ({"arms": "silver"}, UnknownName, "unknown arm of the premise ablation 'silver'"),
    "no arm": ({"arms": ()}, InvalidInput, "arms is empty; name at least one of: gold, best heads"),
    "no heads": ({"arms": "best heads"}, InvalidInput, "no heads are given; pass heads="),
    "nowhere to look": ({"arms": "best heads", "heads": "L0H1"}, InvalidInput, "pass locate=..., which gives"),
    "too few spans": ({"arms": "best heads", "heads": "L0H1", "locate": lambda m, t: [Span(1, 2)]}, InvalidInput,
                      "trial 'q00' has 6 premises, but locate gave 1 spans"),
    "no such head": ({"heads": "L8H1"}, InvalidInput, "L8H1 does not exist"),
    "a wrong offset": ({"heads": "L0H1", "offset": np.zeros((2, 1, 1))}, InvalidInput, "offset has shape"),
    "another way": ({"replace": "hide"}, UnknownName, "unknown way to replace a premise 'hide'"),
    "no round": ({"rounds": 0}, InvalidInput, "rounds is 0; it must be a whole number >= 1"),
    "no batch": ({"batch_size": 0}, InvalidInput, "batch_size is 0"),
    "a negative seed": ({"seed": -1}, InvalidInput, "seed is -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str, stub: Stub) -> None:
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        stubbed(**{"trials": QUESTIONS[:2], **change})
