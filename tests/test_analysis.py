"""``CircuitAnalysis``: what it accepts, and what its store remembers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import answered, counted, prompts

import mechheads as mh
from mechheads.generate import generate

NOTHING = {"run": 0, "prefill": 0}
OF_PATTERNS = {"attention_spatial", "wu", "contrastive"}
BUILT_IN = OF_PATTERNS | {"locos", "dla"}  # what one capture for locos serves


pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture(scope="module")
def trials(llama: mh.Model) -> mh.TrialSet:
    return answered(llama, at=[slice(0, 1), slice(1, 3), slice(1, 4), slice(0, 3), slice(2, 4), slice(0, 1)])


@pytest.fixture
def ca(llama: mh.Model, tmp_path: Path) -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(llama, store=tmp_path / "runs")


def stored(ca: mh.CircuitAnalysis) -> set[str]:
    assert ca.store is not None
    return {f.name.rsplit("-", 1)[0] for f in ca.store.path.iterdir()}


# -- score ---------------------------------------------------------------------------------------


def test_one_name_gives_scores_and_a_list_gives_a_dict(llama: mh.Model, trials: mh.TrialSet) -> None:
    ca = mh.CircuitAnalysis(llama)
    one = ca.score("dla", trials)
    assert isinstance(one, mh.HeadScores) and one.method == "dla"
    for names in (["dla"], ("dla",)):
        many = ca.score(names, trials)
        assert list(many) == ["dla"]
        np.testing.assert_array_equal(many["dla"].values, one.values)
    two = ca.score(["locos", "dla"], trials)
    assert list(two) == ["locos", "dla"] and two["locos"].method == "locos"


def test_options_go_to_the_run_or_to_the_method(llama: mh.Model, trials: mh.TrialSet) -> None:
    both = mh.CircuitAnalysis(llama).score(
        ["locos", "attention_spatial"], trials, unembed="centered", rouge_threshold=0.9, pooling="trial", batch_size=2
    )
    assert both["locos"].meta["options"]["unembed"] == "centered"
    assert "unembed" not in both["attention_spatial"].meta["options"]
    for scores in both.values():
        assert scores.meta["options"]["rouge_threshold"] == 0.9 and scores.pooling == "trial"


def test_one_trial_or_any_sequence_of_trials(llama: mh.Model, trials: mh.TrialSet) -> None:
    ca = mh.CircuitAnalysis(llama)
    alone = ca.score("locos", trials[1])
    assert alone.trial_ids == ("t1",)
    two = ca.score("locos", [trials[1], trials[0]])
    assert two.trial_ids == ("t1", "t0")
    np.testing.assert_allclose(two.values[0], alone.values[0], atol=1e-4)


def test_no_method_lists_them(llama: mh.Model, trials: mh.TrialSet) -> None:
    with pytest.raises(
        mh.InvalidInput,
        match="name at least one method, of: attention_spatial, attribution_patching, contrastive, cri, dla",
    ):
        mh.CircuitAnalysis(llama).score([], trials)


def test_repr_says_model_and_store(ca: mh.CircuitAnalysis, llama: mh.Model) -> None:
    text = repr(ca)
    assert "LlamaForCausalLM" in text and "3 layers x 4 heads" in text and str(ca.store and ca.store.path) in text
    assert "store=None" in repr(mh.CircuitAnalysis(llama))


def test_it_takes_what_load_takes() -> None:
    ca = mh.CircuitAnalysis(tiny.folder("llama"))
    assert ca.model.spec.n_key_value_heads == 2 and ca.model.verification is not None
    with pytest.raises(mh.InvalidInput, match="cannot load a model from a int"):
        mh.CircuitAnalysis(3)


# -- generate and intervene ----------------------------------------------------------------------


def test_generate_from_text_and_from_tokens(llama: mh.Model) -> None:
    ca, tokens = mh.CircuitAnalysis(llama), prompts()[0]
    want = generate(llama, [tokens], max_new_tokens=5)[0]
    assert ca.generate(tokens=tokens, max_new_tokens=5) == want
    assert ca.generate(" ".join(f"w{t}" for t in tokens), max_new_tokens=5) == want
    assert want.text == " ".join(f"w{t}" for t in want.tokens)


@pytest.mark.parametrize("given", [{}, {"prompt": "w5", "tokens": [5]}])
def test_generate_takes_text_or_tokens(llama: mh.Model, given: dict[str, Any]) -> None:
    with pytest.raises(mh.InvalidInput, match=r"either a prompt as text or tokens=\[\.\.\.\]"):
        mh.CircuitAnalysis(llama).generate(**given)


@pytest.mark.parametrize(("given", "told"), [({"prompt": ""}, "the prompt is empty"), ({"tokens": []}, "no tokens")])
def test_generate_from_nothing(llama: mh.Model, given: dict[str, Any], told: str) -> None:
    with pytest.raises(mh.InvalidInput, match=told):
        mh.CircuitAnalysis(llama).generate(**given)


def test_generate_is_under_the_intervention_in_force(llama: mh.Model) -> None:
    ca, tokens = mh.CircuitAnalysis(llama), prompts()[0]
    before = ca.generate(tokens=tokens, max_new_tokens=5)
    with ca.intervene(mh.zero_ablation().on("L0H0, L1H1, L2H2")):
        inside = ca.generate(tokens=tokens, max_new_tokens=5)
    assert inside.tokens != before.tokens
    assert ca.generate(tokens=tokens, max_new_tokens=5) == before


# -- sweep ---------------------------------------------------------------------------------------


def test_sweep_of_one_task_and_of_several(llama: mh.Model, trials: mh.TrialSet) -> None:
    ca = mh.CircuitAnalysis(llama)
    asked: dict[str, Any] = {"k": (1,), "intervention": mh.zero_ablation(), "max_new_tokens": 6}
    one = ca.sweep({"mine": ["L0H0"]}, trials=trials, **asked)
    assert one.tasks == ["tiny"]
    assert ca.sweep({"mine": "L0H0"}, trials=list(trials), **asked).tasks == ["trials"]
    many = ca.sweep({"mine": ["L0H0"]}, trials={"x": trials, "y": trials[:2]}, **asked)
    assert many.tasks == ["x", "y"]
    assert (
        many.cell("mine", 1, "x", "rougeL_f")["value"].tolist()
        == one.cell("mine", 1, "tiny", "rougeL_f")["value"].tolist()
    )
    assert len(many.cell("mine", 1, "y", "correct")) == 2


# -- the store -----------------------------------------------------------------------------------


def test_a_second_call_reads_what_the_first_computed(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(ca.model, monkeypatch) as first:
        new = ca.score("locos", trials)
    assert first["run"] > 0
    with counted(ca.model, monkeypatch) as second:
        old = ca.score("locos", trials)
    assert second == NOTHING
    np.testing.assert_array_equal(old.values, new.values)
    assert old.meta == new.meta and old.records == new.records and old.weights.tolist() == new.weights.tolist()


def test_methods_on_the_same_capture_are_stored_with_it(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(ca.model, monkeypatch) as alone:
        mh.CircuitAnalysis(ca.model).score("locos", trials)
    with counted(ca.model, monkeypatch) as first:
        ca.score("locos", trials)
    assert first == alone
    assert stored(ca) == BUILT_IN
    with counted(ca.model, monkeypatch) as later:
        both = ca.score(["dla", "attention_spatial"], trials)
    assert later == NOTHING
    fresh = mh.CircuitAnalysis(ca.model).score(["dla", "attention_spatial"], trials)
    for name, scores in both.items():
        np.testing.assert_array_equal(scores.values, fresh[name].values)


def test_a_method_with_fewer_needs_does_not_pull_the_others_in(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    ca.score("attention_spatial", trials)
    assert stored(ca) == OF_PATTERNS


def test_pooling_is_no_new_run(ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch) -> None:
    by_step = ca.score("locos", trials)
    with counted(ca.model, monkeypatch) as calls:
        by_trial = ca.score("locos", trials, pooling="trial")
    assert calls == NOTHING and by_trial.pooling == "trial" and by_step.pooling == "step"
    assert not np.allclose(by_trial.mean(), by_step.mean(), atol=1e-4)
    with counted(ca.model, monkeypatch) as calls:
        assert ca.score("locos", trials).pooling == "step"
    assert calls == NOTHING


@pytest.mark.parametrize("run", [{"batch_size": 2}, {"padding": "right"}])
def test_what_changes_no_number_is_no_new_run(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, run: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca.score("locos", trials)
    with counted(ca.model, monkeypatch) as calls:
        ca.score("locos", trials, **run)
    assert calls == NOTHING


@pytest.mark.parametrize(
    "options",
    [{"unembed": "normed"}, {"rouge_threshold": 0.9}, {"max_new_tokens": 7}, {"stop_at_newline": False}],
)
def test_other_options_are_another_result(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca.score("locos", trials)
    with counted(ca.model, monkeypatch) as calls:
        scores = ca.score("locos", trials, **options)
    assert calls["run"] > 0 and options.items() <= scores.meta["options"].items()
    with counted(ca.model, monkeypatch) as calls:
        ca.score("locos", trials)
    assert calls == NOTHING


def test_other_trials_are_another_result(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca.score("locos", trials)
    moved = [mh.Trial(id=t.id, tokens=t.tokens, spans={"needle": (3, 6)}, answer=t.answer) for t in trials]
    for other in (trials[:5], moved, trials.with_split("test")):
        with counted(ca.model, monkeypatch) as calls:
            ca.score("locos", other)
        assert calls["run"] > 0


def test_edited_weights_are_another_result(
    trials: mh.TrialSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny.fresh("llama")
    ca = mh.CircuitAnalysis(model, store=tmp_path)
    first = ca.score("dla", trials)
    weight = model.backend.bridge.blocks[2].attn.o.original_component.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, :16] *= 1.5
    with counted(model, monkeypatch) as calls:
        second = ca.score("dla", trials)
    assert calls["run"] > 0 and second.meta["model"]["weight_hash"] != first.meta["model"]["weight_hash"]
    assert not np.array_equal(second.values, first.values, equal_nan=True)
    with torch.no_grad():
        weight.copy_(kept)
    with counted(model, monkeypatch) as calls:
        np.testing.assert_array_equal(ca.score("dla", trials).values, first.values)
    assert calls == NOTHING


def test_only_what_is_missing_is_computed(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    ca.score("attention_spatial", trials)
    assert ca.store is not None
    stamps = {file: file.stat().st_mtime_ns for file in ca.store.path.iterdir()}
    assert stored(ca) == OF_PATTERNS
    both = ca.score(["locos", "attention_spatial"], trials)
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps and stored(ca) == BUILT_IN
    assert list(both) == ["locos", "attention_spatial"]


def test_own_methods_are_not_stored_because_their_code_may_change(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    def mine(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        return torch.full((4,), value)

    for value in (1.0, 2.0):
        mh.method("mine")(mine)
        assert (ca.score("mine", trials).values == value).all()
    assert "mine" not in stored(ca)


def test_unknown_options_are_refused_with_a_full_store_too(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    ca.score("locos", trials)
    with pytest.raises(mh.InvalidInput, match="no option 'unembd' for locos"):
        ca.score("locos", trials, unembd="normed")


def test_an_option_of_a_companion_is_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mh.method("mine", needs=("pattern", "v"))(lambda acts, trial: torch.zeros(4))
    with pytest.raises(mh.InvalidInput, match="no option 'unembed' for mine"):
        ca.score("mine", trials, unembed="raw")


def test_scores_under_an_intervention_are_not_stored_and_not_read(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    bare = mh.TrialSet(mh.Trial(id=t.id, tokens=t.tokens, spans=t.spans) for t in trials)
    with ca.intervene(mh.zero_ablation().on("L0H0")):
        inside = ca.score("locos", bare)
    assert stored(ca) == set()
    clean = ca.score("locos", bare)
    with ca.intervene(mh.zero_ablation().on("L0H0")):
        np.testing.assert_array_equal(ca.score("locos", bare).values, inside.values)
    assert not np.allclose(clean.values, inside.values, atol=1e-3, equal_nan=True)


def test_a_damaged_file_is_named(ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch) -> None:
    ca.score("locos", trials)
    assert ca.store is not None
    (file,) = ca.store.path.glob("locos-*.parquet")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(mh.ResultFileError) as caught:
        ca.score("locos", trials)
    assert file.name in str(caught.value) and "truncated or damaged" in str(caught.value)
    file.unlink()
    with counted(ca.model, monkeypatch) as calls:
        assert ca.score("locos", trials).n_kept == 6
    assert calls["run"] > 0 and file.exists()


def test_a_store_that_cannot_be_made(llama: mh.Model, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(mh.OutputNotWritable) as caught:
            mh.CircuitAnalysis(llama, store=path)
        assert str(path) in str(caught.value) and "Choose a folder you may write to" in str(caught.value)


def test_a_store_without_permission_is_refused_at_the_start(
    llama: mh.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # a root user may write anywhere
    with pytest.raises(mh.OutputNotWritable, match="no permission to write"):
        mh.CircuitAnalysis(llama, store=tmp_path)


def test_a_store_that_cannot_be_written(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(mh.OutputNotWritable, match="Permission denied") as caught:
        ca.score("locos", trials)
    assert ca.store is not None and str(ca.store.path) in str(caught.value)
    assert not list(ca.store.path.iterdir())


def test_a_store_that_vanished_is_made_again(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    assert ca.store is not None
    ca.store.path.rmdir()
    assert ca.score("locos", trials).n_kept == 6 and stored(ca) == BUILT_IN
