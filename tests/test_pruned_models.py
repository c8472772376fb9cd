"""Pruned models on disk: plain transformers loads them, and they say what the zero-ablated model says."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer import Typer
from typer.testing import CliRunner

import mechheads as mh
from mechheads import pruned_models
from mechheads.cli_prune import _read_heads, prune
from mechheads.errors import InvalidInput, ModelRefused, OutputNotWritable, ResultFileError, UnknownName
from mechheads.generate import generate
from mechheads.heads import HeadSet
from mechheads.interventions import apply, zero_ablation
from mechheads.pruned_layout import Checkpoint, physical_plans
from mechheads.pruned_models import RECORD, PrunedModel, save_pruned

# Four heads in two key/value groups a layer (0 and 1, 2 and 3), three layers.
CASES = {
    "single heads": "L2H3 L0H1",
    "a group of one layer": "L1H0 L1H1",
    "a group of every layer": "L0H0 L0H1 L1H2 L1H3 L2H0 L2H1",
    "a group of every layer and more": "L0H0 L0H1 L0H2 L1H2 L1H3 L2H0 L2H1",
    "a head of every group": "L0H0 L0H3 L1H1 L1H2 L2H0 L2H2",
}
REMOVED = dict(zip(CASES, (0, 0, 6, 6, 6), strict=True))
MASKED_ONLY = {
    "gpt2": "GPT2Config has no head_dim",
    "opt": "OPTConfig has no head_dim",
    "neox": "GPTNeoXConfig has no head_dim",
    "olmo2": "Olmo2ForCausalLM normalises the queries and the keys of all heads together",
    "olmo3": "Olmo3ForCausalLM normalises the queries and the keys of all heads together",
}
EVERY = CASES["a group of every layer"]
PROMPT = tiny.prompt(20, seed=5)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Fail if transformers logs a warning."""
    said: list[str] = []
    handler = logging.Handler(level=logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not said


def reload(folder: Path) -> Any:
    """The folder as plain transformers reads it, nothing missing and nothing to spare."""
    with no_warnings():
        loaded: Any = hf.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
    model, report = loaded
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: list[int] = PROMPT) -> np.ndarray:
    return tiny.array(model(torch.tensor([tokens]), use_cache=False).logits[0])


def zeroed(name: str, heads: str) -> tiny.Reference:
    """The Hugging Face model with the heads' rows of the output projection zero, by hand."""
    reference = tiny.Reference(name)
    for head in HeadSet.parse(heads):
        reference.zero_head(head.layer, head.head)
    return reference


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is in the safetensors files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


@functools.cache
def built(name: str, **changes: Any) -> mh.Model:
    """A tiny model with another configuration."""
    folder = tiny._root() / "-".join([name, *map(str, changes.values())])
    return mh.load(tiny.save(tiny.build(name, **changes), folder))


# -- the same logits, everywhere ---------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_folder_has_the_logits_of_the_ablated_model(name: str, case: str, tmp_path: Path):
    model, heads = tiny.shared(name), CASES[case]
    before = model.weight_hash()
    record = save_pruned(model, heads, tmp_path / "pruned")
    assert model.weight_hash() == before and not model.backend.hooked() and not model.ablations
    got, want = logits(reload(record.folder)), zeroed(name, heads).logits(PROMPT)
    assert tiny.relative(want, tiny.Reference(name).logits(PROMPT)) > 1e-3  # the heads do something
    assert tiny.relative(got, want) < 1e-5
    with apply(model, zero_ablation().on(heads)):
        assert tiny.relative(got, tiny.array(model.logits(PROMPT))) < 1e-5
    assert record.logit_error is not None and record.logit_error < 1e-5
    # Left out or masked. Where one group is all there is, none can go, but two query heads of it can.
    assert record.requested == HeadSet.parse(heads)
    assert set(record.removed) | set(record.masked) == set(record.requested)
    assert len(record.removed) == (0 if name in MASKED_ONLY else REMOVED[case])
    assert bool(record.reason) == bool(record.masked)
    if name in MASKED_ONLY:
        assert record.reason.startswith(MASKED_ONLY[name]) and record.kept == ((0, 1, 2, 3),) * 3


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_it_answers_as_the_ablated_model_does(name: str, tmp_path: Path):
    model, heads = tiny.shared(name), CASES["a group of every layer and more"]
    record = save_pruned(model, heads, tmp_path / "pruned", verify=False)
    prompts = [PROMPT, tiny.prompt(9, seed=6)]
    again = reload(record.folder)
    words = model.tokenizer if name == "qwen2" else None  # see tiny.fresh
    loaded = mh.load(record.folder, tokenizer=words)
    with apply(model, zero_ablation().on(heads)):
        want = generate(model, prompts, max_new_tokens=6)
    assert [g.tokens for g in generate(loaded, prompts, max_new_tokens=6)] == [g.tokens for g in want]
    for tokens, answer in zip(prompts, want, strict=True):
        ids = torch.tensor([tokens])
        said = again.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        new = said[0, len(tokens) :].tolist()
        assert tuple(new[: new.index(tiny.EOS)] if tiny.EOS in new else new) == answer.tokens


# -- sizes -------------------------------------------------------------------------------------------


def test_sizes_counted_by_hand(tmp_path: Path):
    """Llama: a query head owns 64 x 16 twice, a key/value head likewise; four and two of them in three layers."""
    record = save_pruned(tiny.shared("llama"), CASES["a group of every layer and more"], tmp_path / "pruned")
    one = 64 * 16
    assert record.attention_before == 3 * (4 + 2) * 2 * one
    assert record.requested_parameters == (7 * 2 + 3 * 2) * one
    assert record.attention_before - record.attention_after == (6 * 2 + 3 * 2) * one
    assert record.parameters_before - record.parameters_after == (6 * 2 + 3 * 2) * one
    assert record.requested_fraction == pytest.approx(20 / 36)
    assert record.achieved_fraction == pytest.approx(18 / 36)
    assert record.requested_fraction_of_all == pytest.approx(20 * one / record.parameters_before)
    assert record.achieved_fraction_of_all == pytest.approx(18 * one / record.parameters_before)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_sizes_are_those_of_the_files(name: str, tmp_path: Path):
    model = tiny.shared(name)
    record = save_pruned(model, EVERY, tmp_path / "pruned", verify=False)
    for folder, parameters, size in (
        (tiny.folder(name), record.parameters_before, record.bytes_before),
        (record.folder, record.parameters_after, record.bytes_after),
    ):
        assert parameters == sum(int(np.prod(shape)) for shape in stored(folder).values())
        assert size == 4 * parameters
    gone = record.attention_before - record.attention_after
    assert gone == record.parameters_before - record.parameters_after
    assert gone == (0 if name in MASKED_ONLY else record.requested_parameters)


def test_tied_embeddings_stay_tied_and_count_once(tmp_path: Path):
    model = built("llama", tie_word_embeddings=True)
    record = save_pruned(model, EVERY, tmp_path / "pruned")
    assert "lm_head.weight" not in stored(record.folder)
    assert record.parameters_after == sum(int(np.prod(shape)) for shape in stored(record.folder).values())
    again = reload(record.folder)
    assert again.lm_head.weight is again.model.embed_tokens.weight


# -- which heads can go ------------------------------------------------------------------------------

LAYERS, HEADS, GROUPS = 2, 6, 3


@functools.cache
def source() -> Checkpoint:
    """Mistral, whose configuration takes any number of heads: two layers, three groups of two."""
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": 4}
    return Checkpoint(built("mistral", **sizes))


def best_by_trying(requested: set[tuple[int, int]]) -> int:
    """Most heads that can go so that all groups of all layers are alike, by trying every subset of every layer."""
    likes: list[dict[tuple[int, ...], int]] = []
    for layer in range(LAYERS):
        mine = [head for at, head in requested if at == layer]
        found = {}
        for n in range(len(mine) + 1):
            for gone in itertools.combinations(mine, n):
                sizes = [sum(h // 2 == g and h not in gone for h in range(HEADS)) for g in range(GROUPS)]
                left = tuple(size for size in sizes if size)
                if left and len(set(left)) == 1:
                    found[left] = n
        likes.append(found)
    return max(sum(found[left] for found in likes) for left in likes[0] if all(left in found for found in likes))


@settings(max_examples=60, deadline=None)
@given(st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, HEADS - 1)), min_size=1, max_size=11))
def test_as_many_heads_go_as_can(requested: set[tuple[int, int]]):
    why_not: list[str] = []
    plan = next(physical_plans(source(), HeadSet(sorted(requested)), why_not), None)
    gone = 0
    if plan is not None:
        kept = {(layer, head) for layer, heads in enumerate(plan.kept) for head in heads}
        removed = {(layer, head) for layer in range(LAYERS) for head in range(HEADS)} - kept
        assert removed | {(h.layer, h.head) for h in plan.masked} == requested and not removed & set(plan.masked)
        gone = len(removed)
    assert gone == best_by_trying(requested)
    assert bool(why_not) == (gone < len(requested))


def test_heads_that_stay_keep_their_order_and_are_listed(tmp_path: Path):
    model = tiny.shared("llama")
    record = save_pruned(model, EVERY, tmp_path / "pruned")
    assert record.kept == ((2, 3), (0, 1), (2, 3))
    again = mh.load(record.folder)
    assert (again.spec.n_heads, again.spec.n_key_value_heads, again.spec.d_head) == (2, 1, 16)
    for layer, heads in enumerate(record.kept):
        assert torch.equal(again.W_O(layer), model.W_O(layer)[list(heads)])
        assert torch.equal(again.W_Q(layer), model.W_Q(layer)[list(heads)])
        assert torch.equal(again.W_V(layer), model.W_V(layer)[[heads[0] // 2]])


def test_masked_heads_of_a_smaller_model_have_their_new_numbers(tmp_path: Path):
    record = save_pruned(tiny.shared("llama"), f"{EVERY} L1H1", tmp_path / "pruned")
    assert record.masked == HeadSet("L1H1") == HeadSet.parse(record.masked.labels)
    again = mh.load(record.folder)
    silent = [(layer, h) for layer in range(3) for h in range(2) if not again.W_O(layer)[h].any()]
    assert silent == [(1, record.kept[1].index(1))]


def test_a_number_of_heads_that_the_configuration_refuses_is_masked(tmp_path: Path):
    """LlamaConfig wants hidden_size (64) to be a multiple of the number of heads."""
    model = built("llama", num_attention_heads=8, num_key_value_heads=8, head_dim=8)
    five = [(layer, head) for layer in range(3) for head in range(5)]
    record = save_pruned(model, five, tmp_path / "five")
    assert len(record.removed) == 12 and len(record.masked) == 3 and {len(kept) for kept in record.kept} == {4}
    why = "The hidden size (64) is not a multiple of the number of attention heads (3)"
    assert record.reason == f"LlamaConfig refuses 3 heads a layer: {why}"
    three = [(layer, head) for layer in range(3) for head in range(3)]
    record = save_pruned(model, three, tmp_path / "three")
    assert not record.removed and [f"refuses {n} heads" in record.reason for n in (5, 6, 7, 8)] == [True] * 3 + [False]


def test_masking_alone_keeps_numbers_and_size(tmp_path: Path):
    model = tiny.shared("llama")
    record = save_pruned(model, EVERY, tmp_path / "pruned", method="masked")
    assert record.masked == record.requested and record.reason == "masking was asked for"
    assert record.achieved_fraction == 0 and record.bytes_after == record.bytes_before
    assert tiny.relative(logits(reload(record.folder)), zeroed("llama", EVERY).logits(PROMPT)) < 1e-5
    old, new = (json.loads((f / "config.json").read_text()) for f in (tiny.folder("llama"), record.folder))
    assert old == new


def test_physical_refuses_what_it_cannot_do(tmp_path: Path):
    assert save_pruned(tiny.shared("llama"), EVERY, tmp_path / "a", method="physical").removed == HeadSet.parse(EVERY)
    with pytest.raises(InvalidInput, match=r"not all of these heads can go physically: a configuration has one number"):
        save_pruned(tiny.shared("llama"), f"{EVERY} L0H2", tmp_path / "b", method="physical")
    with pytest.raises(InvalidInput, match="GPT2Config has no head_dim: a head's width follows from the number of"):
        save_pruned(tiny.shared("gpt2"), EVERY, tmp_path / "b", method="physical")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


# -- what else is in the folder ----------------------------------------------------------------------


def test_half_precision_stays(tmp_path: Path):
    model = mh.load(tiny.folder("llama"), dtype="bfloat16")
    record = save_pruned(model, EVERY, tmp_path / "pruned")
    assert reload(record.folder).dtype == torch.bfloat16 and record.bytes_after == 2 * record.parameters_after


def test_edits_of_the_live_model_are_saved(tmp_path: Path):
    model = tiny.fresh("llama")
    with torch.no_grad():
        model.backend.bridge.original_model.model.embed_tokens.weight.mul_(1.5)  # type: ignore[attr-defined]
    record = save_pruned(model, EVERY, tmp_path / "pruned")
    with apply(model, zero_ablation().on(EVERY)):
        want = tiny.array(model.logits(PROMPT))
    assert tiny.relative(logits(reload(record.folder)), want) < 1e-5
    assert tiny.relative(zeroed("llama", EVERY).logits(PROMPT), want) > 1e-2


def test_record_and_card(tmp_path: Path):
    model = tiny.shared("llama")
    record = save_pruned(model, f"{EVERY} L0H2", tmp_path / "new" / "pruned")
    assert PrunedModel.load(record.folder) == record
    raw = json.loads((record.folder / RECORD).read_text())
    assert raw["requested"] == record.requested.labels and raw["achieved_fraction"] == record.achieved_fraction
    assert raw["model"]["weight_hash"] == model.weight_hash()
    card = (record.folder / "README.md").read_text()
    assert "6 of 7 heads removed, 1 masked." in card and str(tiny.folder("llama").parent) not in card
    assert "* masked (their rows of the output projection are zero): L0H2\n" in card and "new numbers" in card
    for name in ("generation_config.json", "tokenizer.json", "config.json", "model.safetensors"):
        assert (record.folder / name).is_file()
    assert "_name_or_path" not in json.loads((record.folder / "config.json").read_text())
    assert {p.name for p in record.folder.parent.iterdir()} == {"pruned"}


def test_records_that_cannot_be_read(tmp_path: Path):
    record = save_pruned(tiny.shared("llama"), "L0H0", tmp_path / "pruned", verify=False)
    assert record.logit_error is None
    path = record.folder / RECORD
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format": 99}))
    with pytest.raises(ResultFileError, match=r"written by a newer mechheads \(format 99\): upgrade"):
        PrunedModel.load(record.folder)
    del raw["kept"]
    for text in (json.dumps(raw), "[1", "[]"):
        path.write_text(text)
        with pytest.raises(ResultFileError, match="is no record of a pruned model that can be read"):
            PrunedModel.load(record.folder)
    with pytest.raises(ResultFileError, match="give a folder that save_pruned wrote"):
        PrunedModel.load(tmp_path)


# -- what is refused ---------------------------------------------------------------------------------

ALL = [(layer, head) for layer in range(3) for head in range(4)]


@pytest.mark.parametrize(
    ("heads", "options", "error", "message"),
    [
        ("", {}, InvalidInput, "there are no heads to prune; name some"),
        (ALL, {}, InvalidInput, "these are all 12 heads of the model, and a model needs some; leave at least one"),
        ("L0H4", {}, InvalidInput, "L0H4 does not exist: the model has layers 0 to 2 and heads 0 to 3"),
        ("L0H0", {"method": "mask"}, UnknownName, "unknown method 'mask'. Did you mean 'masked'"),
    ],
)
def test_heads_and_methods_that_cannot_be(heads: Any, options: Any, error: Any, message: str, tmp_path: Path):
    with pytest.raises(error, match=message):
        save_pruned(tiny.shared("llama"), heads, tmp_path / "pruned", **options)
    assert not (tmp_path / "pruned").exists()


def test_folders_that_are_not_replaced(tmp_path: Path):
    model = tiny.shared("llama")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="is a file; give a folder"):
        save_pruned(model, "L0H0", tmp_path / "file")
    (tmp_path / "mine").mkdir()
    save_pruned(model, "L0H0", tmp_path / "mine")  # an empty folder is taken
    with pytest.raises(InvalidInput, match=r"is not empty; give another one, or overwrite=True"):
        save_pruned(model, "L0H1", tmp_path / "mine")
    assert save_pruned(model, "L0H1", tmp_path / "mine", overwrite=True) == PrunedModel.load(tmp_path / "mine")
    again = mh.load(tmp_path / "mine")
    with pytest.raises(InvalidInput, match="is the folder this model was loaded from; give another one"):
        save_pruned(again, "L0H2", tmp_path / "mine", overwrite=True)
    (tmp_path / "mine" / RECORD).unlink()
    with pytest.raises(InvalidInput, match=rf"has no {RECORD}, so save_pruned did not write it"):
        save_pruned(model, "L0H2", tmp_path / "mine", overwrite=True)
    with pytest.raises(OutputNotWritable, match=r"cannot write the model into .*Choose a folder you may write to"):
        save_pruned(model, "L0H0", tmp_path / "file" / "pruned")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "mine"]


def test_models_with_hooks_are_refused(tmp_path: Path):
    model = tiny.fresh("llama")
    message = "there are hooks or interventions on the model, and a folder cannot hold them"
    with apply(model, zero_ablation().on("L0H0")):
        model.logits(PROMPT)
        with pytest.raises(InvalidInput, match=message):
            save_pruned(model, "L0H1", tmp_path / "pruned")
    inner: Any = model.backend
    handle = inner.bridge.original_model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(InvalidInput, match=message):
        save_pruned(model, "L0H1", tmp_path / "pruned")
    handle.remove()
    assert save_pruned(model, "L0H1", tmp_path / "pruned").masked == HeadSet("L0H1")


def test_weights_that_are_not_hugging_faces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.fresh("llama")
    bridge: Any = model.backend
    bridge.bridge.enable_compatibility_mode()
    with pytest.raises(InvalidInput, match="are processed: TransformerLens folded norms into them, which no Hugging"):
        save_pruned(mh.load(bridge.bridge, tokenizer=model.tokenizer), "L0H0", tmp_path / "pruned")
    monkeypatch.setattr(model.backend, "kind", "HookedTransformer")
    with pytest.raises(InvalidInput, match="is a HookedTransformer, whose weights are in TransformerLens' own layout"):
        save_pruned(model, "L0H0", tmp_path / "pruned")
    assert not (tmp_path / "pruned").exists()


def test_quantised_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tiny.fresh("llama")
    inner: Any = model.backend
    monkeypatch.setattr(inner.bridge.original_model, "is_quantized", True, raising=False)
    with pytest.raises(InvalidInput, match="is quantised, so its heads are no plain slices of weights"):
        save_pruned(model, "L0H0", tmp_path / "pruned")


@pytest.mark.parametrize("part", ["joint", "split"])
@pytest.mark.parametrize("name", tiny.JOINT)
def test_edits_of_joint_projections_are_saved_or_refused(name: str, part: str, tmp_path: Path):
    """The bridge runs on views of GPT-2's and Phi-3's joint projections, and on copies of GPT-NeoX's."""
    model = tiny.fresh(name)
    found = Checkpoint(model)
    joint = next(
        n for n in found.layouts[1].owners if n in ("c_attn.weight", "query_key_value.weight", "qkv_proj.weight")
    )
    with torch.no_grad():
        (found.weight(1, joint) if part == "joint" else model.W_V(1)).mul_(1.5)
    if name == "neox":
        message = (
            rf"{joint}, divided among heads, is not what the model runs on: it was edited after loading, or GPTNeoX"
        )
        with pytest.raises(ModelRefused, match=message):
            save_pruned(model, "L0H0", tmp_path / "pruned")
        return
    record = save_pruned(model, EVERY, tmp_path / "pruned")
    with apply(model, zero_ablation().on(EVERY)):
        want = tiny.array(model.logits(PROMPT))
    assert tiny.relative(logits(reload(record.folder)), want) < 1e-5
    assert tiny.relative(zeroed(name, EVERY).logits(PROMPT), want) > 1e-3


def test_an_output_projection_of_an_unknown_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mechheads.pruned_layout._OUT", ("wo",))
    message = "LlamaForCausalLM: its LlamaAttention has no output projection by a name that is known, so none can be"
    with pytest.raises(ModelRefused, match=message):
        save_pruned(tiny.shared("llama"), "L0H0", tmp_path / "pruned")


def test_parameters_of_unknown_owners_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mechheads.pruned_layout._NORMS", ())
    record = save_pruned(tiny.shared("qwen3"), EVERY, tmp_path / "pruned")
    assert record.reason == "it is not known which heads 'q_norm.weight' of Qwen3ForCausalLM's attention belongs to"
    assert record.masked == record.requested


def test_logits_that_differ_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pruned_models, "_reload_error", lambda *_: float("nan"))
    with pytest.raises(ModelRefused, match=r"with 2 heads a layer the reloaded .* with 4 heads a layer .* is neither"):
        save_pruned(tiny.shared("llama"), EVERY, tmp_path / "pruned")
    assert not any(tmp_path.iterdir())


def test_masking_where_leaving_out_changes_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    errors = iter([0.5, 1e-7])
    monkeypatch.setattr(pruned_models, "_reload_error", lambda *_: next(errors))
    record = save_pruned(tiny.shared("llama"), EVERY, tmp_path / "pruned")
    assert record.masked == record.requested and record.logit_error == 1e-7
    assert record.reason == "with 2 heads a layer the reloaded model's logits are off by 5.0e-01"


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "200")
    app = Typer(pretty_exceptions_enable=False)
    app.command()(prune)
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


def test_command(run: Callable[..., Any], tmp_path: Path):
    out = tmp_path / "pruned"
    result = run(tiny.folder("llama"), "L0H0, L0H1, L1H2, L1H3, L2H0, L2H1", "--out", out)
    assert result.exit_code == 0, result.stderr
    assert f"{out}: 6 of 6 heads removed, 0 masked." in result.stdout and "loaded again: logits within" in result.stdout
    assert PrunedModel.load(out).removed == HeadSet.parse(EVERY)
    again = run(tiny.folder("llama"), "L0H0", "-o", out, "--overwrite", "--no-verify", "--json")
    printed = json.loads(again.stdout)
    assert printed["masked"] == ["L0H0"] and printed["logit_error"] is None and printed["out"] == str(out)
    assert "Masked because a configuration has one number of heads for all layers" in again.stderr
    refused = run(tiny.folder("llama"), "L0H0", "-o", out)
    assert refused.exit_code == 2 and "is not empty" in refused.stderr


def test_command_with_files_of_heads(run: Callable[..., Any], tmp_path: Path):
    scores = {f"{layer}-{head}": [float(4 * layer + head)] for layer in range(3) for head in range(4)}
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(scores))
    model = tiny.folder("llama")
    assert run(model, path, "--k", 2, "-o", tmp_path / "a", "--method", "masked").exit_code == 0
    assert PrunedModel.load(tmp_path / "a").requested.labels == ["L2H3", "L2H2"]
    listed = tmp_path / "heads.yaml"
    listed.write_text("attn_head_set: 1-0,0-1\n")
    assert run(model, listed, "-o", tmp_path / "b").exit_code == 0
    assert PrunedModel.load(tmp_path / "b").requested.labels == ["L1H0", "L0H1"]
    for heads, k, message in (
        (path, None, "holds scores of every head; say how many of the best to prune with --k"),
        (listed, 3, "--k is 3, but .* lists 2 heads"),
        ("L0H0", 1, "--k goes with a file of heads, but there is no file 'L0H0'"),
    ):
        with pytest.raises(InvalidInput, match=message):
            _read_heads(str(heads), tiny.shared("llama"), k)


# -- a real model ------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_without_a_group_of_every_layer(smollm2_model: Any, tmp_path: Path):
    spec = smollm2_model.spec
    heads = [(layer, head) for layer in range(spec.n_layers) for head in range(3)]
    record = save_pruned(smollm2_model, [*heads, (7, 5)], tmp_path / "pruned")
    assert len(record.removed) == 3 * spec.n_layers and record.masked == HeadSet("L7H5")
    assert record.achieved_fraction == pytest.approx(1 / 3) and 0 < record.achieved_fraction_of_all < 0.1
    tokens = list(smollm2_model.encode("The capital of France is Paris, and the capital of Italy is").tokens)
    with apply(smollm2_model, zero_ablation().on(record.requested)):
        want = tiny.array(smollm2_model.logits(tokens))
    assert tiny.relative(logits(reload(record.folder), tokens), want) < 1e-5
