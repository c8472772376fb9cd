"""One test for every trap that was found in published implementations (``tests/golden/README.md``).

Each fails with the reference's behaviour. Those that stand elsewhere already are only named here:

| trap | test |
| --- | --- |
| raw scores are no share of the logit | ``test_architectures.test_normed_parts_sum_to_the_logit`` |
| the post-attention norm is left out of phi | the same, on Gemma, OLMo |
| a query norm over all heads lets one head's ablation scale the others | ``test_interventions`` |
| ROUGE-L F falls with the length of a right answer | ``test_text`` |
| heads chosen on the trials that test them | ``test_sweep`` |
| random controls draw tested heads | ``test_sweep`` |
| "bottom k" as the unimportant ones | ``test_scores`` |
| all trials fail: an IndexError | ``test_runner`` |
| needle and haystack tokenised again for every trial | ``test_datasets`` |
| the stop token's step, copies counted by the step | ``test_golden``, ``test_detectors`` |
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any

import detector_loops as loops
import handbuilt
import numpy as np
import pytest
import tiny
import transformers as hf
from helpers import answered
from tokenizers import Tokenizer, models, pre_tokenizers

import mechheads as mh
from mechheads.capture import capture
from mechheads.heads import HeadSet
from mechheads.methods import get_method, method_names
from mechheads.model import Model
from mechheads.text import contains_answer, denies_answer, rouge1_recall

COVERED = {
    "test_architectures": ["test_normed_parts_sum_to_the_logit"],
    "test_interventions": ["test_a_shared_query_norm_warns_at_q_only"],
    "test_text": ["test_a_full_sentence_keeps_its_recall_and_loses_its_f"],
    "test_sweep": [
        "test_choosing_heads_on_the_tested_trials_warns_and_is_recorded",
        "test_random_never_draws_a_tested_head",
    ],
    "test_scores": ["test_rankings_by_hand_with_ties_in_order_of_layer_and_head"],
    "test_runner": ["test_if_no_trial_is_kept_the_mean_says_why"],
    "test_datasets": ["test_few_encodings"],
    "test_golden": ["test_copies_are_counted_exactly", "test_every_step_of_the_contrast_is_the_published_one"],
    "test_detectors": ["test_the_stop_tokens_step_is_one_of_the_others"],
}


@pytest.mark.parametrize(("module", "test"), [(m, t) for m, tests in COVERED.items() for t in tests])
def test_traps_that_are_covered_elsewhere(module: str, test: str) -> None:
    assert callable(getattr(importlib.import_module(module), test))
    assert f"``{module}" in str(__doc__)


def test_post_norms_are_among_the_architectures_of_the_exact_decomposition() -> None:
    normed = [n for n in tiny.ARCHITECTURES if tiny.shared(n).backend.post_norm(0) is not None]
    assert {"gemma2", "gemma3", "olmo2", "olmo3"} <= set(normed)


# -- the norm ----------------------------------------------------------------------------------------


def test_raw_and_normed_scores_have_other_units() -> None:
    """Trap: scores in units of W_U's rows, presented as logits."""
    ca = mh.CircuitAnalysis(tiny.shared("llama"), progress=False)
    trials = answered(tiny.shared("llama"))
    assert ca.score("locos", trials).unit == "logits, norm left out"
    assert ca.score("locos", trials, unembed="normed").unit == "logits"


# -- sliding windows ---------------------------------------------------------------------------------

WINDOWED = ("mistral", "gemma3", "olmo3", "gptoss")


def windowed_scores(name: str, needle: tuple[int, int]) -> tuple[mh.Trial, dict[str, mh.HeadScores], tiny.Run, int]:
    """Detectors on a prompt of 30 tokens with a needle there; window 8, two answer tokens."""
    tokens, said, _ = tiny.talkative(tiny.Reference(name), 30, 3, seed=500)
    trial = mh.Trial(
        id="w", tokens=tokens, spans={"needle": needle, "question": (28, 30)}, answer=f"w{said[0]}",
    )  # fmt: skip
    ca = mh.CircuitAnalysis(tiny.shared(name), progress=False)
    names = ["attention_spatial", "locos", "wu", "contrastive", "headkv", "qrhead"]
    got = ca.score(names, trial, max_new_tokens=3, filtered=False, normalised=False, window=2)
    return trial, got, tiny.Reference(name).run([*tokens, *said]), said.index(said[0])


@pytest.mark.parametrize("name", WINDOWED)
def test_a_needle_out_of_the_window_scores_0(name: str) -> None:
    """Trap: absolute needle positions in the window's coordinates; the reference scored 0.36 there."""
    needle = (3, 6)
    _, got, run, _ = windowed_scores(name, needle)
    for layer, window in enumerate(tiny.windows(name)):
        if window is None:
            assert np.abs(got["attention_spatial"].values[0, layer]).max() > 1e-4
            assert got["headkv"].values[0, layer].max() > 1e-4
            continue
        for scores in got.values():
            assert (scores.values[0, layer] == 0).all(), (scores.method, layer)
        mistaken = run.attention[layer][:, 29, 22:30][:, needle[0] : needle[1]].sum(-1)
        assert mistaken.max() > 0.05  # what the window's third to fifth key would have given


@pytest.mark.parametrize("name", WINDOWED)
def test_a_needle_inside_the_window_scores_what_it_gets(name: str) -> None:
    """Trap: the same; inside the reference scored 0, truth 0.35."""
    trial, got, run, step = windowed_scores(name, (24, 27))
    at = len(trial.tokens) - 1 + step
    for layer in range(tiny.LAYERS):
        want = run.attention[layer][:, at, 24:27].sum(-1)
        assert want.max() > 1e-3
        np.testing.assert_allclose(got["attention_spatial"].parts["plus"][0, layer], want, atol=1e-5)
        np.testing.assert_allclose(got["contrastive"].parts["plus"][0, layer], want, atol=1e-5)
        best = run.attention[layer][:, 28:30, 24:27].sum(-1)
        np.testing.assert_allclose(got["headkv"].values[0, layer], best.max(-1), atol=1e-5)
        np.testing.assert_allclose(got["qrhead"].parts["raw"][0, layer], best.mean(-1), atol=1e-5)


def test_copies_inside_a_window_are_counted() -> None:
    """Trap: the same, for the retrieval score."""
    for name in ("mistral", "gemma3"):
        echo, reference = loops.echoes(name)[0], tiny.Reference(name)
        want = loops.wu(name, echo, reference, counting="step", span="needle")
        ca = mh.CircuitAnalysis(tiny.shared(name), progress=False)
        got = ca.score("wu", echo.trial, counting="step", max_new_tokens=6)
        windowed = [layer for layer, window in enumerate(tiny.windows(name)) if window is not None]
        assert want[windowed].max() > 0
        np.testing.assert_allclose(got.values[0], want, atol=1e-6)


# -- the gate ----------------------------------------------------------------------------------------


def speaking(words: Mapping[int, str]) -> Model:
    """The tiny Llama with other words for some of its tokens; every other token is a word of its own."""
    vocab = {"<pad>": 0, "<eos>": tiny.EOS, "<unk>": 2}
    vocab |= {words.get(i, f"w{i}"): i for i in range(tiny.FIRST_WORD, tiny.VOCAB)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", bos_token="<eos>"
    )
    return mh.load(tiny.folder("llama"), tokenizer=fast)


@functools.cache
def said_first() -> tuple[mh.Trial, list[int]]:
    """A prompt, and four different words that the tiny Llama says to it."""
    for seed in range(100):
        tokens, said, _ = tiny.talkative(tiny.Reference("llama"), 20, 4, seed=100 * seed)
        if len(set(said)) == 4:
            return mh.Trial(id="said", tokens=tokens, spans={"needle": (3, 6)}), said
    raise AssertionError("the tiny Llama always repeats itself")


def test_an_output_that_denies_the_answer_is_not_kept() -> None:
    """Trap: the gate passes "It is not Yuki, it is Katie" for Yuki."""
    trial, said = said_first()
    model = speaking(dict(zip(said, ("not", "Yuki", "but", "Katie"), strict=True)))
    ca = mh.CircuitAnalysis(model, progress=False)
    yuki, katie = (dataclasses.replace(trial, id=name, answer=name) for name in ("Yuki", "Katie"))
    got = ca.score("locos", [yuki, katie], max_new_tokens=4)
    assert [r["generated"] for r in got.records] == ["not Yuki but Katie"] * 2
    assert got.kept.tolist() == [False, True]
    assert got.records[0]["reason"] == "the output denies the answer" and got.records[0]["rouge1_recall"] == 1.0
    assert np.isnan(got.values[0]).all() and got.records[1]["answer_steps"] == [3]
    published = ca.score("locos", [yuki, katie], max_new_tokens=4, reject_denials=False)
    assert published.kept.tolist() == [True, True]
    assert got.meta["options"]["reject_denials"] is True and published.meta["options"]["reject_denials"] is False


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("答案", "是", "东京", "。"), "东京"),
        (("答え", "は", "カタカナ", "です"), "カタカナ"),
        (("こたえ", "富士", "山", "です"), "富士 山"),
        (("정답은", "서울", "입니다", "."), "서울"),
    ],
)
def test_answers_in_other_scripts_are_kept_and_scored(words: tuple[str, ...], answer: str) -> None:
    """Trap: the gate's ROUGE tokeniser drops such an answer, so its recall is always 0."""
    trial, said = said_first()
    ca = mh.CircuitAnalysis(speaking(dict(zip(said, words, strict=True))), progress=False)
    names = ["locos", "attention_spatial", "dla", "wu", "contrastive"]
    got = ca.score(names, dataclasses.replace(trial, answer=answer), max_new_tokens=4, filtered=False)
    record = got["locos"].records[0]
    assert record["generated"] == " ".join(words)
    assert rouge1_recall(record["generated"], answer, cjk=False) == 0.0
    steps = [i for i, word in enumerate(words) if word in answer.split()]
    assert record["rouge1_recall"] == 1.0 and record["answer_steps"] == steps
    # The same numbers as for the same tokens by other names.
    plain = mh.CircuitAnalysis(tiny.shared("llama"), progress=False)
    same = dataclasses.replace(trial, answer=" ".join(f"w{said[s]}" for s in steps))
    for name, want in plain.score(names, same, max_new_tokens=4, filtered=False).items():
        assert got[name].kept[0] and np.isfinite(got[name].values).all()
        np.testing.assert_allclose(got[name].values, want.values, atol=1e-6)


@pytest.mark.parametrize(
    ("prediction", "gold", "denied"),
    [
        ("It is not Yuki, it is Katie", "Yuki", True),
        ("It is not Yuki, it is Katie", "Katie", False),
        ("It is not Katie, it is Yuki", "Yuki", False),
        ("It is Yuki, not Katie", "Yuki", False),
        ("It is Yuki, not Katie", "Katie", True),
        ("IT IS NOT YUKI", "Yuki", True),
        ("It isn't Yuki.", "Yuki", True),
        ("It wasn\u2019t Yuki.", "Yuki", True),
        ("It cannot be Yuki.", "Yuki", True),
        ("She was never in Rome.", "Rome", True),
        ("She did not live in Rome.", "Rome", True),
        ("Neither Yuki nor Katie.", "Yuki", True),
        ("Neither Yuki nor Katie.", "Katie", True),
        ('It is not "Yuki".', "Yuki", True),
        ("It is not \u201cYuki\u201d.", "Yuki", True),
        ("It is not (Yuki).", "Yuki", True),
        ("It is not\nYuki.", "Yuki", True),
        ("It is not the  Eiffel\nTower.", "Eiffel Tower", True),
        # the denial is of something else, or taken back
        ("It is not Katie but Yuki.", "Yuki", False),
        ("It is not only Yuki, it is Katie too.", "Yuki", False),
        ("I do not know. Yuki.", "Yuki", False),
        ("I am not sure, Yuki?", "Yuki", False),
        ("It is not Yuki. Or is it? It is Yuki.", "Yuki", False),
        ("It is not Yuki, not Yuki at all", "Yuki", True),
        ("Yuki", "Yuki", False),
        ("Knot Yuki", "Yuki", False),
        ("Notably Yuki", "Yuki", False),
        ("", "Yuki", False),
        ("It is not Katie.", "Yuki", False),
        # whole words alone
        ("It is not 15, it is 5.", "5", False),
        ("It is 15, not 5.", "5", True),
        ("Anna was there, not Ann.", "Ann", True),
        # what means something in a pattern
        ("It is not C++ (2.0).", "C++ (2.0)", True),
        ("It is C++ (2.0).", "C++ (2.0)", False),
        ("It is not $5.00", "$5.00", True),
        ("It is not axb, it is a.b", "a.b", False),
        ("It is not [a-z]*", "[a-z]*", True),
        ("It is not \\d", "\\d", True),
        # Chinese
        ("\u4e0d\u662f\u4e1c\u4eac\u3002", "\u4e1c\u4eac", True),
        ("\u5e76\u975e\u4e1c\u4eac\u3002", "\u4e1c\u4eac", True),
        ("\u7b54\u6848\u4e0d\u662f\u300c\u4e1c\u4eac\u300d\uff0c\u800c\u662f\u5927\u962a", "\u4e1c\u4eac", True),
        ("\u7b54\u6848\u4e0d\u662f\u5927\u962a\uff0c\u800c\u662f\u4e1c\u4eac", "\u4e1c\u4eac", False),
        ("\u4e26\u4e0d\u662f\u6771\u4eac", "\u6771\u4eac", True),
        # Japanese
        ("\u6771\u4eac\u3067\u306f\u306a\u3044\u3002", "\u6771\u4eac", True),
        ("\u6771\u4eac\u3058\u3083\u306a\u3044", "\u6771\u4eac", True),
        ("\u6771\u4eac\u3067\u306f\u3042\u308a\u307e\u305b\u3093\u3002", "\u6771\u4eac", True),
        ("\u300c\u6771\u4eac\u300d\u3067\u306f\u306a\u304f\u5927\u962a\u3067\u3059", "\u6771\u4eac", True),
        ("\u5927\u962a\u3067\u306f\u306a\u304f\u6771\u4eac\u3067\u3059", "\u6771\u4eac", False),
        # names in Latin letters inside both
        ("\u7b54\u6848\u4e0d\u662fYuki\u3002", "Yuki", True),
        ("\u7b54\u3048\u306fYuki\u3067\u306f\u306a\u3044", "Yuki", True),
        ("\u7b54\u3048\u306fYuki\u3067\u3059", "Yuki", False),
    ],
)
def test_what_denies_an_answer(prediction: str, gold: str, denied: bool) -> None:
    assert denies_answer(prediction, gold) is denied


def test_a_name_in_latin_letters_is_found_in_text_without_spaces() -> None:
    said = "\u7b54\u3048\u306fYuki\u3067\u3059\u3002"
    assert contains_answer(said, "Yuki") and not contains_answer(said, "Yuk")
    assert contains_answer("\u7b54\u6848\u662f5\u3002", "5") and not contains_answer("\u7b54\u6848\u662f15\u3002", "5")


@pytest.mark.parametrize("gold", ["", " ", "\n"])
def test_nothing_cannot_be_denied(gold: str) -> None:
    with pytest.raises(mh.InvalidInput, match=r"the gold answer is .*; give the text that was to be found"):
        denies_answer("It is not so.", gold)


# -- rankings and controls ---------------------------------------------------------------------------


def test_the_lowest_heads_are_not_the_unimportant_ones() -> None:
    """Trap: "bottom k" as a control takes the most negative heads."""
    values = np.array([[[3.0, -2.0, 0.01], [0.5, -0.02, -1.0]]], dtype=np.float32)
    scores = mh.HeadScores(
        method="locos", values=values, kept=np.array([True]), weights=np.array([1.0]), trial_ids=("t",),
        unit="logits", pooling="step", meta={},
    )  # fmt: skip
    assert scores.bottom(2) == HeadSet(["L0H1", "L1H2"])
    assert scores.nearest_zero(2) == HeadSet(["L0H2", "L1H1"])


# -- resuming and the store --------------------------------------------------------------------------


def test_a_result_put_together_from_stored_halves_is_the_whole(tmp_path: Any) -> None:
    """Trap: a resumed run reported 0 passed trials with 7 stored, and its interval covered the new trials only."""
    model = tiny.shared("llama")
    trials = answered(model)
    trials = mh.TrialSet([dataclasses.replace(t, answer="w93 w94") if i == 1 else t for i, t in enumerate(trials)])
    whole = mh.CircuitAnalysis(model, progress=False).score("locos", trials)
    for part in (trials[:4], trials[4:]):
        mh.CircuitAnalysis(model, store=tmp_path, progress=False).score("locos", part)
    ca = mh.CircuitAnalysis(model, store=tmp_path, progress=False)
    stored = [ca.score("locos", part) for part in (trials[:4], trials[4:])]
    merged = stored[0].merge(stored[1])
    assert merged.n_kept == whole.n_kept == 5 and merged.trial_ids == whole.trial_ids
    np.testing.assert_allclose(merged.mean(), whole.mean(), atol=1e-4)
    for mine, theirs in zip(merged.ci(n_boot=200), whole.ci(n_boot=200), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    late = stored[1].ci(n_boot=200)
    assert not np.allclose(late[0], merged.ci(n_boot=200)[0], atol=1e-3)  # the trap's interval is another


def key_file(ca: mh.CircuitAnalysis, name: str, trials: mh.TrialSet, **options: Any) -> str:
    """Where the store keeps a result of these settings."""
    from mechheads.runner import RunOptions

    fields = RunOptions.__dataclass_fields__
    run = RunOptions(**{k: v for k, v in options.items() if k in fields})
    assert ca.store is not None
    own = {k: v for k, v in options.items() if k not in fields}
    return ca.store.file(ca._keys([name], trials, run, own)[name]).name


RUN_CHANGES = {
    "rouge_threshold": 0.8,
    "reject_denials": False,
    "max_new_tokens": 7,
    "stop_at_newline": False,
}
# A value other than the default for every option of every built-in method.
CHANGES: dict[str, Any] = {
    "unembed": "normed", "counting": "step", "span": "answer", "form": "topk", "top": 5, "normalised": False,
    "filtered": False, "window": 4, "query": "to_end", "calibrated": False, "null_query": "w7",
    "drop_outliers": True, "metric": "logprob", "filler": 7, "steps": 3, **RUN_CHANGES,
}  # fmt: skip


def changed(default: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    return True if default is None else f"{default}x"


@pytest.mark.parametrize("name", [n for n in method_names() if get_method(n).builtin])
def test_every_option_is_in_the_key_of_a_stored_result(name: str, tmp_path: Any) -> None:
    """Trap: a key without length, depths, seed, dtype and calibration returned old results for new settings."""
    ca = mh.CircuitAnalysis(tiny.shared("llama"), store=tmp_path, progress=False)
    trials, method = answered(tiny.shared("llama")), get_method(name)
    files = {"as it is": key_file(ca, name, trials)}
    for option, default in method.options.items():
        if option in ("lens", "patch_batch"):  # a lens has a test of its own; rows at once change only rounding
            continue
        value = CHANGES.get(option, changed(default))
        assert value != default
        files[option] = key_file(ca, name, trials, **{option: value})
    if method.gated:
        files |= {option: key_file(ca, name, trials, **{option: value}) for option, value in RUN_CHANGES.items()}
    assert len(set(files.values())) == len(files), files
    assert key_file(ca, name, trials, pooling="trial", batch_size=1, padding="right") == files["as it is"]


def test_every_property_of_the_trials_is_in_the_key_of_a_stored_result(tmp_path: Any) -> None:
    """Trap: the same, for what makes the prompts."""
    ca = mh.CircuitAnalysis(tiny.shared("llama"), store=tmp_path, progress=False)

    def made(length: int = 20, depth: int = 4, seed: int = 0, **changes: Any) -> mh.TrialSet:
        spans = {"needle": (depth, depth + 3), "question": (length - 3, length)}
        trial = mh.Trial(id="t", tokens=tiny.prompt(length, seed=seed), spans=spans, answer="w5")
        return mh.TrialSet([dataclasses.replace(trial, **changes)])

    sets = [
        made(), made(length=21), made(depth=5), made(seed=1), made(answer="w6"), made(split="test"), made(id="u"),
        made(meta={"depth": 0.5}),
    ]  # fmt: skip
    for name in ("locos", "qrhead", "cri"):
        assert len({key_file(ca, name, trials) for trials in sets}) == len(sets)


def test_type_and_weights_of_the_model_are_in_the_key_of_a_stored_result(tmp_path: Any) -> None:
    """Trap: the same, for the model."""
    made = [
        tiny.shared("llama"), mh.load(tiny.folder("llama"), dtype="bfloat16"), tiny.shared("llama_mqa"),
        mh.load(tiny.save(tiny.build("llama", seed=1), tmp_path / "other")),
    ]  # fmt: skip
    trials = answered(tiny.shared("llama"))
    for name in ("locos", "ov_copying"):
        files = {key_file(mh.CircuitAnalysis(m, store=tmp_path / "s", progress=False), name, trials) for m in made}
        assert len(files) == len(made)


# -- cost and precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_the_prompt_has_logits_at_its_last_position_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap: logits of every position cost 15 to 20% of a prefill at 600 to 1,600 tokens."""
    model = tiny.shared(name)
    widths: list[int] = []

    def watch(head: Any) -> None:
        inner = head.forward

        def forward(x: Any, *args: Any, **kwargs: Any) -> Any:
            widths.append(x.shape[1])
            return inner(x, *args, **kwargs)

        monkeypatch.setattr(head, "forward", forward)

    trial = tiny.cases(name)[0].trial
    watch(model.backend.twin.model.get_output_embeddings())
    capture(model, [trial], max_new_tokens=2, tail=4)
    assert widths == [1]  # the twin ran once, for all but the last tokens
    seen: list[int] = []
    with model.hooks([("unembed.hook_in", lambda x: seen.append(x.shape[1]))]):
        capture(model, [trial], max_new_tokens=2, tail=4)
    assert seen == [1, 1]  # through hooks: the whole prompt, then a step


def test_half_precision_names_the_same_heads() -> None:
    """Trap to rule out: bfloat16 weights that change who ranks first."""
    folder = handbuilt.folder()
    half = mh.CircuitAnalysis(mh.load(folder, dtype="bfloat16"), progress=False)
    full = mh.CircuitAnalysis(handbuilt.model(), progress=False)
    names = ["locos", "attention_spatial", "headkv", "contrastive"]
    for trials in (handbuilt.non_literal(), handbuilt.literal()):
        ours, theirs = half.score(names, trials), full.score(names, trials)
        for name in names:
            assert ours[name].kept.all() and ours[name].top(2) == theirs[name].top(2)
            largest = np.abs(theirs[name].values).max()
            np.testing.assert_allclose(ours[name].values, theirs[name].values, atol=0.03 * largest)


@pytest.mark.smollm2
@pytest.mark.slow
def test_half_precision_names_the_same_heads_in_a_real_model(smollm2_model: Model) -> None:
    """At most 2.7% of the largest score, the same top 10."""
    from test_golden import REFERENCE

    one = next(t for t in REFERENCE if t["answer_steps"])
    trial = mh.Trial(
        id=one["id"], tokens=one["input_ids"], spans={"needle": (one["needle_start"], one["needle_end"])},
        answer=one["answer"],
    )  # fmt: skip
    half = mh.CircuitAnalysis(mh.load("smollm2", dtype="bfloat16"), progress=False).score("locos", trial)
    full = mh.CircuitAnalysis(smollm2_model, progress=False).score("locos", trial)
    assert half.kept.all() and set(half.top(10)) == set(full.top(10))
    assert np.abs(half.values - full.values).max() < 0.05 * np.abs(full.values).max()
