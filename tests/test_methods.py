"""The method registry, a user's own method from end to end, and what is refused."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from helpers import answered, counted

import mechheads as mh
from mechheads.methods import get_method, method_names
from mechheads.runner import MethodFailed

# As in the documentation; executed, so that its annotations are evaluated like a user's.
NEEDLE_MASS = '''
from jaxtyping import Float
from torch import Tensor

import mechheads as mh


@mh.method("needle_mass", needs=("pattern",))
def needle_mass(acts: mh.LayerActs, trial: mh.Trial) -> Float[Tensor, "head"]:
    """Attention on the needle, mean over answer steps (probability, 0 to 1)."""
    return acts.pattern[..., acts.mask("needle")].sum(-1).mean(-1)
'''


def run_cell(source: str, module: str = "user_notebook") -> dict[str, Any]:
    """Run code as a notebook cell would."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(textwrap.dedent(source), namespace)
    return namespace


pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture(scope="module")
def trials(llama: mh.Model) -> mh.TrialSet:
    return answered(llama)


@pytest.fixture
def ca(llama: mh.Model) -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(llama, progress=False)


# -- a user's method -----------------------------------------------------------------------------


def test_own_method_works_like_a_built_in_one(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    run_cell(NEEDLE_MASS)
    both = ca.score(["needle_mass", "attention_spatial"], trials)
    mine = both["needle_mass"]
    assert mine.shape == (6, 3, 4) and mine.kept.all()
    np.testing.assert_allclose(mine.values, both["attention_spatial"].parts["plus"], atol=1e-6)
    assert mine.values.min() > 0 and mine.values.max() < 1
    assert not get_method("needle_mass").builtin and get_method("locos").builtin
    assert mine.meta["method"] == "needle_mass"
    assert len(mine.top(5)) == 5


def test_own_options_with_defaults_reach_the_method_and_the_record(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    @mh.method("scaled_mass", needs=("pattern",), unit="probability")
    def scaled_mass(acts: mh.LayerActs, trial: mh.Trial, *, factor: float = 1.0) -> torch.Tensor:
        return factor * acts.need("pattern")[..., acts.mask("needle")].sum(-1).mean(-1)

    once, thrice = ca.score("scaled_mass", trials), ca.score("scaled_mass", trials, factor=3.0)
    np.testing.assert_allclose(thrice.values, 3 * once.values, rtol=1e-6)
    assert once.meta["options"]["factor"] == 1.0 and thrice.meta["options"]["factor"] == 3.0
    assert once.unit == "probability"


def test_methods_see_only_the_answers_steps(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    seen = {}

    @mh.method("watch", needs=("q", "k", "v", "z", "pattern"))
    def watch(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        steps, keys = len(acts.steps), len(acts.tokens)
        assert acts.need("q").shape == acts.need("z").shape == (4, steps, 16)
        assert acts.need("k").shape == acts.need("v").shape == (2, keys, 16)
        assert acts.need("pattern").shape == (4, steps, keys) and acts.visible.shape == (steps, keys)
        seen[trial.id] = (acts.steps.tolist(), acts.targets.tolist())
        return torch.zeros(4)

    ca.score("watch", trials, max_new_tokens=6)
    assert len(seen) == len(trials)
    for trial in trials:
        steps, targets = seen[trial.id]
        assert steps == [1, 2]
        assert ca.model.decode(targets) == trial.answer


def test_the_same_cell_run_again_replaces_the_method(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    run_cell(NEEDLE_MASS)
    before = ca.score("needle_mass", trials)
    run_cell(NEEDLE_MASS.replace("mean(-1)\n", "mean(-1) * 2\n"))
    np.testing.assert_allclose(ca.score("needle_mass", trials).values, 2 * before.values, rtol=1e-6)


def test_another_function_cannot_take_a_name() -> None:
    run_cell(NEEDLE_MASS)
    with pytest.raises(mh.InvalidInput, match=r"'needle_mass' is taken by user_notebook\.needle_mass"):
        run_cell(NEEDLE_MASS, module="somebody_else")
    with pytest.raises(mh.InvalidInput, match=r"'locos' is taken by mechheads\.methods\.locos\.locos"):
        run_cell(NEEDLE_MASS.replace('"needle_mass"', '"locos"'))
    assert get_method("locos").builtin


# -- refusals ------------------------------------------------------------------------------------


def test_unknown_need_names_the_near_one() -> None:
    with pytest.raises(mh.UnknownName, match=r"'patern'.*'pattern'"):
        mh.method("x", needs=("patern",))


def test_a_single_need_may_be_a_plain_text(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    run_cell(NEEDLE_MASS.replace('("pattern",)', '"pattern"'))
    assert get_method("needle_mass").needs == ("pattern",)
    assert ca.score("needle_mass", trials).n_kept == 6


def test_unknown_method_names_the_near_one(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    with pytest.raises(mh.UnknownName, match=r"unknown method 'locus'.*'locos'.*@mh\.method"):
        ca.score("locus", trials)


@pytest.mark.parametrize(
    "source",
    [
        "def f(acts): return 0",
        "def f(acts, trial, more): return 0",
        "def f(acts, trial, *, needed): return 0",
        "def f(acts, trial, **anything): return 0",
    ],
)
def test_signatures_that_cannot_be_called_are_refused(source: str) -> None:
    with pytest.raises(mh.InvalidInput, match=r"must take \(acts, trial\) and keyword-only options"):
        mh.method("odd")(run_cell(source)["f"])
    assert "odd" not in method_names()


@pytest.mark.parametrize("methods", ["locos", ["locos", "dla"]])
def test_unknown_option_lists_the_known_ones(ca: mh.CircuitAnalysis, trials: mh.TrialSet, methods: Any) -> None:
    with pytest.raises(mh.InvalidInput, match=r"no option 'unembd' for locos.*unembed.*pooling"):
        ca.score(methods, trials, unembd="raw")


def test_option_of_another_method_is_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    with pytest.raises(mh.InvalidInput, match=r"no option 'unembed' for attention_spatial.*\(none\)"):
        ca.score("attention_spatial", trials, unembed="raw")


def test_unknown_unembed_names_the_near_one(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    with pytest.raises(mh.UnknownName, match=r"unknown unembed 'normd'.*'normed'"):
        ca.score("locos", trials, unembed="normd")


def test_unembeds_differ_and_dla_is_the_sum_of_phi(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    values = {u: ca.score("dla", trials, unembed=u).values for u in ("raw", "normed", "centered")}
    assert not np.allclose(values["raw"], values["normed"], atol=1e-3)
    assert not np.allclose(values["raw"], values["centered"], atol=1e-3)
    # The mean row of W_U is the same for every token: what centring takes away does not depend on the answer.
    W_U = ca.model.W_U.detach().float()

    @mh.method("from_z", needs=("z",))
    def from_z(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        written = torch.einsum("hsd,hdm->hsm", acts.need("z"), acts.W_O)
        rows = W_U[:, acts.targets].T - W_U.mean(-1)
        return (written * rows).sum(-1).mean(-1)

    np.testing.assert_allclose(ca.score("from_z", trials).values, values["centered"], atol=1e-4)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(4, 2), r"returned \(4, 2\) for 'score'; expected a tensor of shape \(4,\)"),
        (torch.zeros(2), r"returned \(2,\) for 'score'"),
        (0.5, "returned float for 'score'"),
        ({"plus": torch.zeros(4)}, r"returned \['plus'\]; a dict must have the key 'score'"),
        ({"score": torch.zeros(4), "plus": torch.zeros(3)}, r"returned \(3,\) for 'plus'"),
    ],
)
def test_wrong_shapes_are_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet, value: Any, told: str) -> None:
    mh.method("odd")(lambda acts, trial: value)
    with pytest.raises(mh.InvalidInput, match=told):
        ca.score("odd", trials)


def test_parts_are_kept_beside_the_score(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mh.method("two")(lambda acts, trial: {"score": torch.ones(4), "half": torch.full((4,), 0.5)})
    two = ca.score("two", trials)
    assert (two.values == 1).all() and (two.parts["half"] == 0.5).all() and set(two.parts) == {"half"}


def test_nan_means_undefined_for_that_head_alone(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mh.method("some")(lambda acts, trial: torch.tensor([1.0, float("nan"), 2.0, 3.0]))
    some = ca.score("some", trials)
    assert np.isnan(some.mean()[:, 1]).all() and (some.mean()[:, 2] == 2).all() and len(some.ranking()) == 9


def test_an_activation_that_was_not_captured_says_how_to_get_it(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mh.method("greedy_one", needs=("pattern",))(lambda acts, trial: acts.need("z").sum((1, 2)))
    with pytest.raises(mh.InvalidInput, match=r"'z' was not captured.*needs=\('z', \.\.\.\)"):
        ca.score("greedy_one", trials)


def test_missing_span_names_trial_and_spans(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    bare = mh.Trial(id="bare", tokens=trials[0].tokens, spans={"needl": (2, 5)}, answer=trials[0].answer)
    with pytest.raises(mh.UnknownName, match=r"span of trial 'bare' 'needle'.*'needl'"):
        ca.score("locos", bare)


# -- a method that raises ------------------------------------------------------------------------


def failing_on(trial_id: str) -> Any:
    def fails(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        if trial.id == trial_id and acts.layer == 1:
            raise ZeroDivisionError("no luck")
        return torch.full((4,), float(acts.layer))

    return fails


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_raising_method_keeps_the_trials_before_it(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, batch_size: int
) -> None:
    longest = max(trials, key=lambda t: len(t.tokens)).id
    mh.method("fails")(failing_on(longest))
    told = rf"method 'fails' failed on trial '{longest}', layer 1: no luck"
    with pytest.raises(MethodFailed, match=told) as caught:
        ca.score(["locos", "fails"], trials, batch_size=batch_size)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    partial = caught.value.partial
    assert set(partial) == {"locos", "fails"}
    for scores in partial.values():
        assert scores.trial_ids == tuple(t.id for t in trials if t.id != longest)
        assert scores.meta["complete"] is False and scores.meta["n_trials_asked"] == 6
        assert scores.kept.all() and np.isfinite(scores.values).all()
    np.testing.assert_allclose(
        partial["locos"].values, ca.score("locos", mh.TrialSet(t for t in trials if t.id != longest)).values, atol=1e-4
    )


def test_a_method_that_fails_on_the_first_trial_is_told_as_such(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    shortest = min(trials, key=lambda t: len(t.tokens)).id
    mh.method("fails")(failing_on(shortest))
    with pytest.raises(MethodFailed, match=r"'fails' failed on trial .*no luck") as caught:
        ca.score("fails", trials)
    assert caught.value.partial == {}


# -- one capture ---------------------------------------------------------------------------------


def test_three_methods_cost_what_one_costs(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["locos", "attention_spatial", "dla"]
    with counted(ca.model, monkeypatch) as one:
        alone = {"locos": ca.score("locos", trials, batch_size=3)}
    with counted(ca.model, monkeypatch) as three:
        together = ca.score(names, trials, batch_size=3)
    assert one == three
    assert one["prefill"] == 2 and one["run"] > 2
    assert list(together) == names
    np.testing.assert_array_equal(together["locos"].values, alone["locos"].values)
    for name in names[1:]:
        np.testing.assert_array_equal(ca.score(name, trials, batch_size=3).values, together[name].values)
