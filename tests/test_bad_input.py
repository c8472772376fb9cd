"""Every bad input a newcomer is likely to give, with the parts a message needs: what, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from helpers import answered, counted, prompts

import mechheads as mh
from mechheads.interventions import apply
from mechheads.methods import get_method
from mechheads.verify import verify

PROMPT = "w5 w6 w7 w8 w6 w9"


def model() -> mh.Model:
    return tiny.shared("llama")


def ca() -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(model(), progress=False)


def trial(**changes: Any) -> mh.Trial:
    fields: dict[str, Any] = {"id": "mine", "tokens": prompts()[0], "spans": {"needle": (2, 5)}, "answer": "w5"}
    return mh.Trial(**{**fields, **changes})


def run_under(intervention: mh.Intervention) -> None:
    with apply(model(), intervention):
        model().logits([5, 6, 7])


def run_nothing_under(intervention: mh.Intervention) -> None:
    with ca().intervene(intervention):
        pass


def damaged(folder: Path, keep: float) -> Path:
    path = ca().score("dla", answered(model(), at=slice(0, 1))).save(folder / "scores.parquet")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    return path


def foreign(folder: Path) -> Path:
    path = folder / "notes.parquet"
    path.write_text("not a result")
    return path


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("in the way")
    return folder / "file" / "runs"


# Case: what is done in an empty folder, the error, and what its message must hold.
CASES: dict[str, tuple[Callable[[Path], Any], type[Exception], list[str]]] = {
    # needles and spans
    "needle not in the prompt": (
        lambda f: mh.Trial.from_text(model(), PROMPT, needle="w10 w11", answer="w5"),
        mh.InvalidInput,
        ["needle", "'w10 w11'", "not in the prompt", "exact substring", "same case, spaces and punctuation"],
    ),
    "needle twice in the prompt": (
        lambda f: mh.Trial.from_text(model(), PROMPT, needle="w6", answer="w5"),
        mh.InvalidInput,
        ["needle", "'w6'", "2 times", "make it longer", "tokens and spans"],
    ),
    "needle text empty": (
        lambda f: mh.Trial.from_text(model(), PROMPT, needle=" ", answer="w5"),
        mh.InvalidInput,
        ["needle text is empty"],
    ),
    "span beyond the prompt": (
        lambda f: trial(spans={"needle": (18, 21)}),
        mh.InvalidInput,
        ["'mine'", "'needle'", "[18, 21)", "out of range", "20 tokens"],
    ),
    "span before the prompt": (
        lambda f: trial(spans={"needle": (-2, 3)}),
        mh.InvalidInput,
        ["[-2, 3)", "0 <= start < stop"],
    ),
    "span empty": (
        lambda f: trial(spans={"needle": (4, 4)}),
        mh.InvalidInput,
        ["[4, 4)", "empty", "half-open"],
    ),
    "span without an interval": (
        lambda f: trial(spans={"needle": []}),
        mh.InvalidInput,
        ["'needle'", "no interval"],
    ),
    "needle as long as the context": (
        lambda f: trial(spans={"needle": (0, 20)}),
        mh.InvalidInput,
        ["'mine'", "as long as the whole context", "20 tokens", "some rest is needed"],
    ),
    "needles that cover the context together": (
        lambda f: trial(spans={"needle": [(0, 9), (9, 20)]}),
        mh.InvalidInput,
        ["as long as the whole context"],
    ),
    "no needle": (
        lambda f: ca().score("locos", trial(spans={"question": (2, 5)}, answer=None)),
        mh.UnknownName,
        ["span of trial 'mine'", "'needle'", "Known: question"],
    ),
    # answers and prompts
    "empty answer": (
        lambda f: trial(answer="  "),
        mh.InvalidInput,
        ["'mine'", "empty answer", "text the model should produce", "None"],
    ),
    "prompt without tokens": (lambda f: trial(tokens=[], spans={}), mh.InvalidInput, ["'mine'", "no tokens"]),
    "context over the limit": (
        lambda f: ca().score("locos", trial(tokens=[5] * 129)),
        mh.InvalidInput,
        ["'mine'", "129 tokens", "at most 128", "make the context shorter"],
    ),
    "context over the limit, generating": (
        lambda f: ca().generate(tokens=[5] * 200),
        mh.InvalidInput,
        ["200 tokens", "at most 128", "make the context shorter"],
    ),
    "tokens of another model": (
        lambda f: ca().score("locos", trial(tokens=[5, 6, 7, 8, 9, 4000])),
        mh.InvalidInput,
        ["'mine'", "outside 0 to 96", "another model's tokenizer"],
    ),
    "answer that is no text": (
        lambda f: trial(answer=5),
        mh.InvalidInput,
        ["'mine'", "answer is 5", "must be text", "'5'"],
    ),
    "meta that no file can hold": (
        lambda f: trial(meta={"from": f}),
        mh.InvalidInput,
        ["'mine'", "meta['from']", "JSON cannot hold"],
    ),
    "trials that are none": (
        lambda f: ca().score("locos", [{"id": 1}]),  # pyright: ignore[reportCallIssue, reportArgumentType]
        mh.InvalidInput,
        ["item 0", "a dict", "Trial.from_dict"],
    ),
    "trial file that is not there": (
        lambda f: mh.TrialSet.load(f / "none.jsonl"),
        mh.ResultFileError,
        ["none.jsonl", "does not exist"],
    ),
    # heads and layers
    "head out of range": (
        lambda f: run_under(mh.zero_ablation().on("L0H4")),
        mh.InvalidInput,
        ["L0H4 does not exist", "layers 0 to 2", "heads 0 to 3"],
    ),
    "layer out of range": (
        lambda f: run_under(mh.zero_ablation().on((3, 0))),
        mh.InvalidInput,
        ["L3H0 does not exist", "layers 0 to 2", "heads 0 to 3"],
    ),
    "layer of a weight out of range": (
        lambda f: model().W_O(3),
        mh.InvalidInput,
        ["layer 3 does not exist", "layers 0 to 2"],
    ),
    "head that is no head": (
        lambda f: mh.zero_ablation().on("layer nine"),
        mh.InvalidInput,
        ["cannot read a head from", "'L9H6'", "(9, 6)"],
    ),
    "heads that are none": (
        lambda f: mh.zero_ablation().on(7),
        mh.InvalidInput,
        ["cannot read heads from 7", "'L9H6'", "a list"],
    ),
    "head named twice": (
        lambda f: mh.zero_ablation().on("L0H1, 0.1"),
        mh.InvalidInput,
        ["L0H1 stands twice", "name every head once"],
    ),
    # names
    "unknown method": (
        lambda f: ca().score("loccos", trial()),
        mh.UnknownName,
        ["unknown method 'loccos'", "Did you mean 'locos'?", "attention_spatial", "@mh.method"],
    ),
    "unknown method, looked up": (
        lambda f: get_method("attention_spacial"),
        mh.UnknownName,
        ["Did you mean 'attention_spatial'"],
    ),
    "unknown option": (
        lambda f: ca().score("locos", trial(), unembeds="raw"),
        mh.InvalidInput,
        ["no option 'unembeds'", "unembed", "rouge_threshold"],
    ),
    "unknown site": (
        lambda f: mh.zero_ablation(site="qq"),
        mh.UnknownName,
        ["unknown site 'qq'", "Known: attn_scores, pattern, q, z"],
    ),
    "unknown site of a mean": (
        lambda f: mh.mean_ablation(site="pattern", reference=[trial()]),
        mh.UnknownName,
        ["unknown site 'pattern'", "Known: q, z"],
    ),
    "unknown model": (
        lambda f: mh.load("smollm"),
        mh.UnknownName,
        ["unknown model 'smollm'", "Did you mean 'smollm2'?", "hub id", "folder"],
    ),
    "unknown folder": (
        lambda f: mh.load(f / "nothing"),
        mh.UnknownName,
        ["unknown model", "nothing", "existing folder"],
    ),
    "folder without a model": (
        lambda f: mh.load(f),
        mh.InvalidInput,
        ["cannot load the model", "config.json, weights and tokenizer"],
    ),
    "unknown split": (
        lambda f: mh.TrialSet([trial(split="test")]).split("tset"),
        mh.UnknownName,
        ["'tset'", "Did you mean 'test'?"],
    ),
    # interventions
    "mean without a reference": (
        lambda f: mh.mean_ablation(),
        mh.InvalidInput,
        ["needs a reference set", "reference=trials", 'split("calibration")'],
    ),
    "mean over an empty reference": (
        lambda f: mh.mean_ablation(reference=[]),
        mh.InvalidInput,
        ["needs a reference set"],
    ),
    "intervention without a run": (
        lambda f: run_nothing_under(mh.zero_ablation().on("L0H0")),
        mh.HookNeverFired,
        ["never fired", "blocks.0.attn.hook_z", "not run inside the block"],
    ),
    # files
    "result file cut short": (
        lambda f: mh.HeadScores.load(damaged(f, 0.5)),
        mh.ResultFileError,
        ["scores.parquet", "truncated or damaged", "write it again"],
    ),
    "result file without content": (
        lambda f: mh.HeadScores.load(damaged(f, 0.0)),
        mh.ResultFileError,
        ["scores.parquet", "truncated or damaged"],
    ),
    "result file of something else": (
        lambda f: mh.HeadScores.load(foreign(f)),
        mh.ResultFileError,
        ["notes.parquet", "not a Parquet file"],
    ),
    "result file that is not there": (
        lambda f: mh.SweepResult.load(f / "none.parquet"),
        mh.ResultFileError,
        ["none.parquet", "does not exist"],
    ),
    "output folder not writable": (
        lambda f: ca().score("dla", answered(model(), at=slice(0, 1))).save(below_a_file(f) / "scores"),
        mh.OutputNotWritable,
        ["scores.parquet", "Choose a folder you may write to"],
    ),
    "store not writable": (
        lambda f: mh.CircuitAnalysis(model(), store=below_a_file(f)),
        mh.OutputNotWritable,
        ["store", "runs", "Choose a folder you may write to"],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("as_users_run")
def test_message_of(case: str, tmp_path: Path) -> None:
    act, error, parts = CASES[case]
    with pytest.raises(error) as caught:
        act(tmp_path)
    assert isinstance(caught.value, mh.MechheadsError)
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert message.rstrip().endswith((".", "?", ")", "mechheads get smollm2"))
    assert not model().backend.hooked()


def test_good_input_of_the_same_kinds_is_taken(tmp_path: Path) -> None:
    """So that no case above passes because everything is refused."""
    found = mh.Trial.from_text(model(), PROMPT, needle="w7 w8", answer="w5")
    assert found.positions("needle") == (2, 3)
    trials = answered(model(), at=slice(0, 1))
    analysis = mh.CircuitAnalysis(model(), store=tmp_path / "runs")
    scores = analysis.score("locos", trials, unembed="raw")
    assert mh.HeadScores.load(scores.save(tmp_path / "scores")).n_kept == 6
    run_under(mh.zero_ablation(site="q").on("L2H3"))
    run_under(mh.mean_ablation(reference=trials).on("L0H0"))


def test_a_broken_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers 5.24 does to TransformerLens: the cache stays empty, and no error is raised."""
    broken = tiny.fresh("llama")
    verify(broken)
    inner = broken.backend.run

    def forgets(tokens: Any, mask: Any, cache: Any, *, last_only: bool) -> Any:
        if cache is None:
            return inner(tokens, mask, None, last_only=last_only)
        return inner(tokens, mask[:, -tokens.shape[1] :], broken.backend.new_cache(len(tokens)), last_only=last_only)

    monkeypatch.setattr(broken.backend, "run", forgets)
    monkeypatch.setattr(broken.backend, "twin", None)
    with pytest.raises(mh.ModelRefused) as caught:
        broken.verify()
    for part in ("cached and uncached logits agree", "relative error", "transformers>=5.9,<5.24"):
        assert part in str(caught.value)


def test_bad_trials_cost_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    good = answered(model(), at=slice(0, 1))
    with counted(model(), monkeypatch) as calls, pytest.raises(mh.InvalidInput):
        ca().score("locos", [*good, trial(id="long", tokens=[5] * 129)])
    assert calls == {"run": 0, "prefill": 0}
