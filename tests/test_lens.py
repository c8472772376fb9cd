"""The tuned lens: what pulling back means, and how it is fitted to tiny models."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mechheads.errors import InvalidInput, ModelRefused, UnknownName
from mechheads.kernels import norm_direction
from mechheads.lens import TunedLens
from mechheads.lens_files import load_lens
from mechheads.lens_fit import LensFit, fit_lens, haystack_texts, kl_frame
from mechheads.lens_readout import Readout, mean_kl, streams_of, windows_of

ARCHITECTURES = ("llama", "gpt2", "gemma3", "olmo2")
SMALL: dict[str, Any] = {"steps": 60, "tokens": 1200, "batch": 32, "holdout": 120, "context": 24, "lr": 3e-3}


def random_lens(n_layers: int = 3, d: int = 6, *, seed: int = 0, first: int = 0) -> TunedLens:
    g = torch.Generator().manual_seed(seed)
    n = n_layers - first
    return TunedLens(0.1 * torch.randn(n, d, d, generator=g), torch.randn(n, d, generator=g), n_layers, first)


def texts(n: int = 40, words: int = 200) -> list[str]:
    """Texts in which the next word depends on the one before, over few words."""
    rng = np.random.default_rng(0)
    return [" ".join(f"w{3 + w}" for w in np.cumsum(rng.integers(1, 4, words)) % 90) for _ in range(n)]


def prepared(name: str) -> tuple[Any, torch.Tensor]:
    """A tiny model and windows of text for it."""
    model = tiny.shared(name)
    return model, windows_of(model, texts(3, 60), context=20)


# -- the map -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    layer=st.integers(0, 2), at=st.sampled_from(["after", "before"]), steps=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_pulled_back_direction_gives_the_reading_up_to_a_constant(layer: int, at: str, steps: int, seed: int) -> None:
    lens = random_lens(seed=seed)
    g = torch.Generator().manual_seed(seed + 1000)
    directions, hidden = torch.randn(steps, 6, generator=g), torch.randn(7, 6, generator=g)
    pulled = lens.pull_back(directions, layer, at=at)
    stream = layer + 1 if at == "after" else layer
    for t in range(steps):
        for h in hidden:
            # T(h) by loops: component m of h A^T is the sum over n of h_n A_mn.
            read = h.clone()
            constant = 0.0
            if stream < 3:
                for m in range(6):
                    read[m] += sum(h[n] * lens.weights[stream, m, n] for n in range(6)) + lens.biases[stream, m]
                constant = float(directions[t] @ lens.biases[stream])
            assert float(directions[t] @ read) == pytest.approx(float(pulled[t] @ h) + constant, abs=1e-4)


@pytest.mark.parametrize("at", ["after", "before"])
def test_pull_back_is_the_gradient_of_the_reading(at: str) -> None:
    lens = random_lens()
    direction = torch.randn(1, 6, generator=torch.Generator().manual_seed(3))
    for layer in range(3):
        h = torch.randn(6, generator=torch.Generator().manual_seed(layer)).requires_grad_()
        (lens.translate(h, lens.for_head(layer, at=at)) @ direction[0]).backward()
        assert h.grad is not None
        torch.testing.assert_close(lens.pull_back(direction, layer, at=at)[0], h.grad, atol=1e-6, rtol=1e-5)


def test_heads_are_read_from_the_first_stream_that_holds_what_they_wrote() -> None:
    lens = random_lens()
    assert [lens.for_head(layer) for layer in range(3)] == [1, 2, 3]
    assert [lens.for_head(layer, at="before") for layer in range(3)] == [0, 1, 2]


def test_the_last_stream_is_read_as_it_is() -> None:
    direction = torch.randn(2, 6)
    assert torch.equal(random_lens().pull_back(direction, 2), direction)
    assert torch.equal(random_lens().translate(direction, 3), direction)


def test_half_precision_directions_are_pulled_back_in_float32() -> None:
    assert random_lens().pull_back(torch.ones(1, 6, dtype=torch.bfloat16), 0).dtype == torch.float32


def test_full_matrices_are_the_identity_more() -> None:
    lens = random_lens()
    again = TunedLens.from_full(lens.weights + torch.eye(6), lens.biases, n_layers=3)
    torch.testing.assert_close(again.weights, lens.weights, atol=1e-6, rtol=0)
    bare = TunedLens.from_full(torch.eye(6).expand(3, 6, 6), n_layers=3)
    assert not bare.weights.any()
    assert not bare.biases.any()


def test_identity_lens_reads_what_the_logit_lens_reads() -> None:
    lens = TunedLens.identity(3, 6)
    hidden = torch.randn(2, 6)
    for stream in range(4):
        assert torch.equal(lens.translate(hidden, stream), hidden)
    for layer in range(3):
        assert torch.equal(lens.pull_back(hidden, layer), hidden)


def test_hash_follows_the_numbers_and_their_place_alone() -> None:
    lens = random_lens()
    assert replace(lens, name="other", meta={"a": 1}).hash == lens.hash
    assert random_lens(seed=1).hash != lens.hash
    assert TunedLens(lens.weights, lens.biases + 1e-6, 3).hash != lens.hash
    assert TunedLens(lens.weights, lens.biases, 4, first=1).hash != lens.hash


def test_a_lens_keeps_its_own_copy() -> None:
    weights, biases = torch.zeros(2, 3, 3), torch.zeros(2, 3)
    lens = TunedLens(weights, biases, 2)
    before = lens.hash
    weights += 1
    assert not lens.weights.any()
    assert TunedLens(lens.weights, lens.biases, 2).hash == before


def test_describe_is_json_ready_and_says_the_convention() -> None:
    lens = replace(random_lens(), meta={"options": {"seed": 1}})
    said = json.loads(json.dumps(lens.describe()))
    assert said["hash"] == lens.hash
    assert said["meta"] == {"options": {"seed": 1}}
    assert "h A^T + b" in said["convention"]
    assert lens.hash in repr(lens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(3, 6, 5)}, "shape \\(3, 6, 5\\); expected square"),
        ({"biases": torch.zeros(3, 5)}, "biases have the shape \\(3, 5\\); expected \\(3, 6\\)"),
        ({"n_layers": 4}, "3 translators that begins at stream 0 cannot be for 4 layers"),
        ({"first": 3}, "begins at stream 3 cannot be for 3 layers"),
        ({"biases": torch.full((3, 6), torch.nan)}, "streams \\[0, 1, 2\\] hold NaN or infinity"),
        ({"meta": {"x": object()}}, "meta of the lens\\['x'\\] is a object"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_bad_translators_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        replace(random_lens(), **change)


@pytest.mark.usefixtures("as_users_run")
def test_bad_requests_are_refused() -> None:
    lens = random_lens()
    with pytest.raises(InvalidInput, match="layer 3 does not exist: the lens is for layers 0 to 2"):
        lens.pull_back(torch.zeros(1, 6), 3)
    with pytest.raises(InvalidInput, match="layer -1 does not exist"):
        lens.for_head(-1)
    with pytest.raises(InvalidInput, match="stream 4 does not exist: the lens reads streams 0 to 3"):
        lens.translate(torch.zeros(6), 4)
    with pytest.raises(UnknownName, match=r"place to read a head at 'afer'. Did you mean 'after'"):
        lens.for_head(0, at="afer")
    with pytest.raises(InvalidInput, match="last axis is 5 wide, but the lens is for d_model 6"):
        lens.pull_back(torch.zeros(1, 5), 2)
    with pytest.raises(InvalidInput, match="no translator for stream 0: it begins at stream 1"):
        random_lens(first=1).pull_back(torch.zeros(1, 6), 0, at="before")
    with pytest.raises(InvalidInput, match=r"matrices have the shape \(6, 6\)"):
        TunedLens.from_full(torch.eye(6), n_layers=1)


# -- models it is for ----------------------------------------------------------------------------


def test_a_lens_of_another_shape_is_refused(llama: Any) -> None:
    with pytest.raises(InvalidInput, match=r"3 layers of d_model 6, but .* has 3 layers of d_model 64"):
        random_lens().check(llama)


def test_a_lens_without_a_record_is_taken_by_its_shape(llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TunedLens.identity(3, 64).check(llama)


def test_other_weights_are_said(llama: Any) -> None:
    lens = replace(TunedLens.identity(3, 64), meta={"model": llama.describe()})
    lens.check(llama)
    other = {**llama.describe(), "weight_hash": "0" * 16}
    with pytest.warns(UserWarning, match=r"was fitted on .* \(weights 0000000000000000\)"):
        replace(lens, meta={"model": other}).check(llama)
    with pytest.raises(InvalidInput, match=r"fitted on folded weights, but .* has raw ones"):
        replace(lens, meta={"model": {**other, "weights": "folded"}}).check(llama)


# -- the frozen readout --------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_readout_gives_the_models_logits(name: str) -> None:
    model = tiny.shared(name)
    reference = tiny.Reference(name).run(tiny.prompt(12, seed=5))
    logits = Readout.of(model).logits(torch.tensor(reference.resid).float())
    np.testing.assert_allclose(logits.numpy(), reference.logits, atol=2e-4 * np.abs(reference.logits).max())


def test_readout_of_some_tokens_is_part_of_the_whole(llama: Any) -> None:
    readout, hidden = Readout.of(llama), torch.randn(3, 64)
    some = torch.tensor([5, 90, 0])
    torch.testing.assert_close(readout.of_tokens(some).logits(hidden), readout.logits(hidden)[:, some])


def test_a_readout_that_does_not_give_the_logits_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.backend, "logit_softcap", 0.5, raising=False)
    with pytest.raises(ModelRefused, match=r"reproduce its logits only to .* \(allowed 1e-04\)"):
        Readout.of(llama)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streams_are_those_of_the_plain_model(name: str) -> None:
    model, windows = prepared(name)
    streams = streams_of(model, windows, batch=2)
    length = windows.shape[1] - 1
    for w, tokens in enumerate(windows.tolist()):
        run = tiny.Reference(name).run(tokens)
        rows = slice(w * length, (w + 1) * length)
        np.testing.assert_allclose(streams[0, rows].numpy(), run.embedding[1:], atol=1e-4)
        np.testing.assert_allclose(streams[-1, rows].numpy(), run.resid[1:], atol=1e-4 * np.abs(run.resid).max())


def test_kl_is_that_of_the_definition(llama: Any) -> None:
    readout = Readout.of(llama)
    streams = streams_of(llama, windows_of(llama, texts(2, 60), context=20), batch=4)
    lens = random_lens(3, 64)
    found = mean_kl(readout, streams[-1], lambda i, rows: lens.translate(streams[i, rows], i), 3)
    for stream in range(3):
        total = 0.0
        for row in range(streams.shape[1]):
            p = np.exp(_log_softmax(readout.logits(streams[-1, row : row + 1])[0]))
            q = _log_softmax(readout.logits(lens.translate(streams[stream, row : row + 1], stream))[0])
            total += sum(p[v] * (np.log(p[v]) - q[v]) for v in range(len(p)) if p[v] > 0)
        assert float(found[stream]) == pytest.approx(total / streams.shape[1], rel=1e-4)


def _log_softmax(logits: torch.Tensor) -> np.ndarray:
    x = logits.detach().double().numpy()
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def test_windows_begin_with_the_bos_where_texts_do(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(f"w{i}" for i in range(3, 24))
    plain = windows_of(llama, [text, "w5 w6"], context=10)
    assert plain.tolist() == [list(range(3, 13)), list(range(13, 23))]
    encode = llama.encode
    with_bos = lambda t, **kw: replace(e := encode(t, **kw), tokens=(tiny.EOS, *e.tokens))  # noqa: E731
    monkeypatch.setattr(llama, "encode", with_bos)
    assert windows_of(llama, [text], context=8).tolist() == [
        [tiny.EOS, *range(3 + i, 10 + i)] for i in (0, 7, 14)
    ]  # fmt: skip


# -- fitting -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fits() -> dict[str, LensFit]:
    return {name: fit_lens(tiny.shared(name), texts(), **SMALL) for name in ARCHITECTURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fitted_lens_reads_better_than_the_logit_lens(fits: dict[str, LensFit], name: str) -> None:
    fit = fits[name]
    assert fit.worse == ()
    assert all(after < 0.8 * before for before, after in zip(fit.kl_logit_lens, fit.kl_tuned_lens, strict=True))
    fit.lens.check(tiny.shared(name))
    assert fit.lens.meta["model"]["weight_hash"] == tiny.shared(name).weight_hash()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_adds_to_the_regression(fits: dict[str, LensFit], name: str) -> None:
    start = fit_lens(tiny.shared(name), texts(), **{**SMALL, "steps": 0})
    assert set(start.kept) <= {"least_squares", "identity"}
    assert sum(fits[name].kl_tuned_lens) < 0.97 * sum(start.kl_tuned_lens)


def test_reported_kl_is_of_the_lens_on_the_held_out_windows(fits: dict[str, LensFit], llama: Any) -> None:
    from mechheads.lens_fit import _Options, _split

    fit = fits["llama"]
    options = _Options(**fit.lens.meta["options"])
    train, choose, held = _split(windows_of(llama, texts(), context=24), options)
    streams = streams_of(llama, held, batch=8)
    found = mean_kl(Readout.of(llama), streams[-1], lambda i, r: fit.lens.translate(streams[i, r], i), 3)
    np.testing.assert_allclose(found.numpy(), fit.kl_tuned_lens, rtol=1e-4)
    assert fit.n_holdout == streams.shape[1]
    assert len(held) + len(choose) + len(train) <= len(windows_of(llama, texts(), context=24))


def test_windows_fitted_on_are_not_those_reported_on() -> None:
    from mechheads.lens_fit import _Options, _split

    windows = torch.arange(30 * 5).reshape(30, 5)
    options = _Options(1, 10**6, 1e-3, 4, 3, 17, "identity", 5, 1.0, 10)
    parts = _split(windows, options)
    rows = [tuple(w) for part in parts for w in part.tolist()]
    assert len(set(rows)) == len(rows) == 30
    assert [len(p) for p in parts] == [20, 5, 5]


def test_the_same_seed_gives_the_same_lens(fits: dict[str, LensFit], llama: Any) -> None:
    assert fit_lens(llama, texts(), **SMALL).lens.hash == fits["llama"].lens.hash
    assert fit_lens(llama, texts(), **{**SMALL, "seed": 1}).lens.hash != fits["llama"].lens.hash


def test_identity_start_learns_too(llama: Any) -> None:
    fit = fit_lens(llama, texts(), **{**SMALL, "init": "identity"})
    assert set(fit.kept) == {"trained"}
    assert sum(fit.kl_tuned_lens) < 0.9 * sum(fit.kl_logit_lens)


def test_sampled_tokens_stand_for_all(llama: Any) -> None:
    """The KL over a sample, averaged over samples, is about the KL over all; over all it is exact."""
    from mechheads.lens_fit import _target

    readout = Readout.of(llama)
    streams = streams_of(llama, windows_of(llama, texts(2, 60), context=20), batch=4)
    generator = torch.Generator().manual_seed(0)
    exact = float(mean_kl(readout, streams[-1], lambda i, r: streams[1, r], 1))
    whole = _target(readout, streams[-1], 97, generator)
    assert float(whole.kl(streams[1])) == pytest.approx(exact, rel=1e-4)
    sampled = [float(_target(readout, streams[-1], 60, generator).kl(streams[1])) for _ in range(60)]
    assert len(set(sampled)) > 1
    assert np.mean(sampled) == pytest.approx(exact, rel=0.05)


def test_regression_is_the_weighted_ridge_solution(llama: Any) -> None:
    """Against the normal equations, solved for each output at a time with the mean as a further column."""
    from mechheads.lens_fit import _Options, _start

    streams = streams_of(llama, windows_of(llama, texts(4, 200), context=20), batch=8)
    options = _Options(0, 1, 1e-3, 1, 0, 1, "least_squares", 20, 1e-9, 10)
    start = _start(streams, options, None)
    final = streams[-1].double()
    share = (1 / final.square().mean(-1)).sqrt()[:, None]
    for stream in range(3):
        h = torch.cat([streams[stream].double(), torch.ones(len(final), 1, dtype=torch.float64)], 1)
        solved = np.linalg.lstsq((h * share).numpy(), (final * share).numpy(), rcond=None)[0]
        want = h.numpy() @ solved
        got = streams[stream] + streams[stream] @ start.weights[stream].T + start.biases[stream]
        np.testing.assert_allclose(got.numpy(), want, atol=2e-2 * np.abs(want).max())


def test_a_worse_stream_is_said(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import mechheads.lens_fit as module

    bad = (torch.randn(3, 64, 64), torch.zeros(3, 64), ("trained",) * 3)
    monkeypatch.setattr(module, "_best", lambda *_: bad)
    with pytest.warns(UserWarning, match=r"reads the streams \[.*\] worse than the logit lens"):
        fit = fit_lens(llama, texts(), **SMALL)
    assert fit.worse
    assert fit.to_frame()["worse"].to_numpy().nonzero()[0].tolist() == list(fit.worse)


def test_training_that_diverges_is_not_kept(llama: Any) -> None:
    fit = fit_lens(llama, texts(), **{**SMALL, "steps": 5, "lr": 1e4})
    assert "trained" not in fit.kept
    assert fit.worse == ()


def test_frame_has_a_row_a_stream(fits: dict[str, LensFit]) -> None:
    frame = fits["gpt2"].to_frame()
    assert list(frame) == ["stream", "kl_logit_lens", "kl_tuned_lens", "kept", "worse"]
    assert frame["stream"].tolist() == [0, 1, 2]
    assert frame["kl_tuned_lens"].tolist() == list(fits["gpt2"].kl_tuned_lens)
    assert not frame["worse"].any()
    with pytest.raises(InvalidInput, match="does not record how well it reads held-out text"):
        kl_frame({})


def test_progress_is_told(llama: Any) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    fit_lens(llama, texts(), **SMALL, progress=lambda what, at, of: seen.setdefault(what, []).append((at, of)))
    assert seen["training"] == [(i, 60) for i in range(1, 61)]
    assert {"reading text", "regression", "choosing", "logit lens", "tuned lens"} < set(seen)
    assert all(at <= of for calls in seen.values() for at, of in calls)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init": "ones"}, "unknown start of a lens 'ones'"),
        ({"steps": -1}, "steps is -1; expected a whole number of at least 0"),
        ({"batch": 0}, "batch is 0"),
        ({"lr": 0.0}, "lr is 0.0; expected a positive number"),
        ({"ridge": float("nan")}, "ridge is nan"),
        ({"vocabulary": 1}, "vocabulary is 1; expected a whole number of at least 2"),
        ({"context": 1}, "context is 1; expected 2 to 128 tokens"),
        ({"context": 129}, "context is 129; expected 2 to 128 tokens"),
        ({"holdout": 100_000}, "holding out 100000 positions to report on"),
    ],
)
def test_bad_options_are_refused(llama: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        fit_lens(llama, texts(), **{**SMALL, **change})


def test_too_little_text_is_refused(llama: Any) -> None:
    with pytest.raises(InvalidInput, match="none of the 2 texts has 24 tokens"):
        fit_lens(llama, ["w3 w4", "  "], **SMALL)


def test_a_model_under_hooks_is_refused(llama: Any) -> None:
    with (
        llama.hooks([("blocks.0.attn.hook_z", torch.zeros_like)]),
        pytest.raises(InvalidInput, match="a lens is fitted to the model as it is"),
    ):
        fit_lens(llama, texts(), **SMALL)


def test_shipped_prose_becomes_passages(tmp_path: Any) -> None:
    shipped = haystack_texts(None)
    assert len(shipped) > 1
    assert all(0 < len(p) < 8000 for p in shipped)
    file = tmp_path / "a.txt"
    file.write_text("One sentence. Another one!\n\nA third.")
    assert haystack_texts(file) == ["One sentence. Another one! A third."]
    with pytest.raises(InvalidInput, match="does not exist"):
        haystack_texts(tmp_path / "b.txt")


# -- beside the other readings -------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_directions_through_a_lens_are_gradients_of_the_lens_logit(name: str) -> None:
    """Final norm (its scale frozen), translator and post-attention norm in turn, against autograd through all three."""
    model = tiny.shared(name)
    lens = random_lens(3, 64, seed=4)
    token, norm = 17, model.final_norm
    for layer in range(3):
        written = torch.randn(1, 64, generator=torch.Generator().manual_seed(layer)).requires_grad_()
        scales = torch.tensor([[1.7]]), torch.tensor([[0.6]])
        post = model.backend.post_norm(layer)
        x = written if post is None else _frozen(written, post[0], scales[1])
        read = _frozen(lens.translate(x, layer + 1), norm, scales[0])
        (read @ model.W_U.detach()[:, token].float()).sum().backward()
        row = norm_direction(model.W_U[:, [token]].T.detach(), norm.weight, scales[0], centers=norm.centers)
        row = lens.pull_back(row, layer)
        if post is not None:
            row = norm_direction(row, post[0].weight, scales[1], centers=post[0].centers)
        assert written.grad is not None
        torch.testing.assert_close(row.detach(), written.grad, atol=1e-5, rtol=1e-4)


def _frozen(x: torch.Tensor, norm: Any, scale: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True) if norm.centers else x
    return x / scale * (1 if norm.weight is None else norm.weight.detach())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_locos_through_the_identity_lens_is_the_normed_one(name: str) -> None:
    from mechheads.capture import capture

    model, lens = tiny.shared(name), TunedLens.identity(3, 64)
    case = tiny.cases(name)[0]
    (captured,) = capture(model, [case.trial], max_new_tokens=4)
    for layer in range(3):
        acts = captured.layer(layer)
        torch.testing.assert_close(acts.phi("tuned_lens", lens=lens), acts.phi("normed"), atol=1e-6, rtol=1e-5)


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    from mechheads.cli_lens import app

    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(a) for a in args])


FEW = ["--steps", "5", "--tokens", "600", "--holdout", "60", "--context", "24", "--lr", "0.001"]


def test_fit_prints_the_table_and_writes_the_lens(run: Any, tmp_path: Any) -> None:
    file = tmp_path / "text.txt"
    file.write_text(". ".join(texts(6)))
    out = tmp_path / "lens.safetensors"
    result = run("fit", "--model", tiny.folder("llama"), "--text", file, "--out", out, *FEW)
    assert result.exit_code == 0, result.output
    lens = load_lens(out)
    table = kl_frame(lens.meta)
    for value in table["kl_tuned_lens"]:
        assert f"{value:.4g}" in result.output
    assert "kl_logit_lens" in result.output
    assert "nats" in result.output
    assert str(out) in result.output

    shown = run("show", out, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["hash"] == lens.hash
    assert lens.hash in shown.stderr
    assert "kl_tuned_lens" in shown.stderr


def test_show_a_lens_that_records_no_kl(run: Any, tmp_path: Any) -> None:
    random_lens().save(tmp_path / "a.npz")
    result = run("show", tmp_path / "a.npz")
    assert result.exit_code == 0
    assert "size of A" in result.output
    assert "kl_tuned_lens" not in result.output


def test_commands_say_what_is_wrong(run: Any, tmp_path: Any) -> None:
    bad = run("fit", "--model", tiny.folder("llama"), "--out", tmp_path / "lens.json")
    assert bad.exit_code == 2
    assert "cannot be written to 'lens.json'" in bad.stderr
    absent = run("show", tmp_path / "none.pt")
    assert absent.exit_code == 1
    assert "does not exist" in absent.stderr
