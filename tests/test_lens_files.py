"""Tuned lenses in files: both layouts, three formats, and everything that is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.lens import TunedLens
from mechheads.lens_files import load_lens, save_lens

N, D = 3, 6


@pytest.fixture
def lens() -> TunedLens:
    g = torch.Generator().manual_seed(0)
    return TunedLens(
        0.1 * torch.randn(N, D, D, generator=g), torch.randn(N, D, generator=g), N, name="mine",
        meta={"options": {"seed": 3}},
    )  # fmt: skip


@pytest.fixture
def state(lens: TunedLens) -> dict[str, torch.Tensor]:
    """As the tuned-lens package writes it."""
    out = {}
    for i in range(N):
        out[f"{i}.weight"], out[f"{i}.bias"] = lens.weights[i].clone(), lens.biases[i].clone()
    return out


def same(a: TunedLens, b: TunedLens) -> bool:
    return (
        torch.allclose(a.weights, b.weights, atol=1e-6)
        and torch.equal(a.biases, b.biases)
        and (a.n_layers, a.first) == (b.n_layers, b.first)
    )


def whole(lens: TunedLens) -> torch.Tensor:
    return lens.weights + torch.eye(D)


# -- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["residual", "full"])
@pytest.mark.parametrize("extension", [".safetensors", ".npz", ".pt"])
def test_round_trip(lens: TunedLens, tmp_path: Path, extension: str, layout: str) -> None:
    path = lens.save(tmp_path / "deep" / f"lens{extension}", layout=layout)
    again = load_lens(path, d_model=D, n_layers=N)
    assert same(again, lens)
    if layout == "residual":
        assert again.hash == lens.hash
    if extension != ".pt":
        assert again.name == "mine"
        assert again.meta["options"] == {"seed": 3}
    assert again.meta["file"] == {"name": path.name, "layout": layout, "reads": "entering"}


@pytest.mark.parametrize("extension", [".safetensors", ".npz"])
def test_a_lens_that_begins_later_comes_back(lens: TunedLens, tmp_path: Path, extension: str) -> None:
    later = TunedLens(lens.weights[1:], lens.biases[1:], N, first=1)
    assert same(load_lens(later.save(tmp_path / f"a{extension}")), later)
    with pytest.raises(InvalidInput, match=r"begins at stream 1, which a .pt file cannot say"):
        later.save(tmp_path / "a.pt")


@pytest.mark.parametrize("prefix", ["", "layer_translators.", "lens.layer_translators."])
def test_residual_state_dicts(lens: TunedLens, state: dict[str, torch.Tensor], tmp_path: Path, prefix: str) -> None:
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / "params.pt")
    assert same(load_lens(tmp_path / "params.pt"), lens)


def test_frozen_parts_of_a_saved_module_are_passed_over(
    lens: TunedLens, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    module = {f"layer_translators.{k}": v for k, v in state.items()}
    module |= {"unembed.unembedding.weight": torch.zeros(11, D), "unembed.final_norm.weight": torch.zeros(D)}
    torch.save({"state_dict": module}, tmp_path / "a.pt")
    assert same(load_lens(tmp_path / "a.pt"), lens)


def test_what_torch_linear_computes_is_what_the_lens_computes(tmp_path: Path) -> None:
    """The published form: a module list of Linear, each beside a skip connection."""
    torch.manual_seed(0)
    modules = torch.nn.ModuleList([torch.nn.Linear(D, D) for _ in range(N)])
    torch.save(modules.state_dict(), tmp_path / "params.pt")
    lens = load_lens(tmp_path / "params.pt", layout="residual")
    hidden = torch.randn(4, D)
    for i in range(N):
        torch.testing.assert_close(lens.translate(hidden, i), hidden + modules[i](hidden).detach())


def test_a_published_folder(lens: TunedLens, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(state, tmp_path / "params.pt")
    config = {"base_model_name_or_path": "some/model", "d_model": D, "num_hidden_layers": N, "bias": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "lens_type": "linear_tuned_lens"}))
    found = load_lens(tmp_path)
    assert same(found, lens)
    assert found.name == "some/model"
    with pytest.raises(ResultFileError, match="says layout 'residual', but layout='full' was asked for"):
        load_lens(tmp_path, layout="full")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": N + 1}))
    with pytest.raises(ResultFileError, match="translators up to layer 2, but the model's layers are 0 to 3"):
        load_lens(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "d_model": 7}))
    with pytest.raises(ResultFileError, match="matrices of 6, but what comes with it says d_model 7"):
        load_lens(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "lens_type": "other"}))
    with pytest.raises(ResultFileError, match="describes a 'other'; only 'linear_tuned_lens'"):
        load_lens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ResultFileError, match="not a lens' configuration"):
        load_lens(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ResultFileError, match=r"no lens folder: expected params.pt and config.json in it, found params"
    ):
        load_lens(tmp_path)


@pytest.mark.parametrize("form", ["bare", "names", "dictionaries", "stack", "stack with biases", "wrapped"])
def test_full_matrices_in_torch_files(lens: TunedLens, tmp_path: Path, form: str) -> None:
    matrices, biases = whole(lens), lens.biases
    content: Any = {
        "bare": {i: matrices[i].clone() for i in range(N)},
        "names": {f"layer_{i}": matrices[i].clone() for i in range(N)},
        "dictionaries": {f"layer_{i}": {"weight": matrices[i].clone(), "bias": biases[i].clone()} for i in range(N)},
        "stack": matrices,
        "stack with biases": {"weights": matrices, "biases": biases},
        "wrapped": {"translators": {str(i): matrices[i].clone() for i in range(N)}},
    }[form]
    torch.save(content, tmp_path / "a.pt")
    want = lens if form in ("dictionaries", "stack with biases") else TunedLens(lens.weights, 0 * biases, N)
    assert same(load_lens(tmp_path / "a.pt"), want)


def test_full_matrices_of_other_people_in_numpy_and_safetensors(lens: TunedLens, tmp_path: Path) -> None:
    bare = TunedLens(lens.weights, 0 * lens.biases, N)
    np.savez(tmp_path / "a.npz", **{str(i): whole(lens)[i].numpy() for i in range(N)})  # pyright: ignore[reportArgumentType]
    assert same(load_lens(tmp_path / "a.npz"), bare)
    np.savez(tmp_path / "b.npz", whole(lens).double().numpy())
    assert same(load_lens(tmp_path / "b.npz"), bare)
    save_file({"lens": whole(lens)}, tmp_path / "c.safetensors")
    assert same(load_lens(tmp_path / "c.safetensors"), bare)


def test_half_precision_files_are_read_as_float32(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save({k: v.bfloat16() for k, v in state.items()}, tmp_path / "a.pt")
    assert load_lens(tmp_path / "a.pt").weights.dtype == torch.float32


# -- which stream --------------------------------------------------------------------------------


def test_leaving_is_entering_the_next_block(lens: TunedLens, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(state, path)
    found = load_lens(path, reads="leaving", n_layers=N + 1)
    assert (found.first, found.n_layers) == (1, N + 1)
    hidden = torch.randn(2, D)
    for i in range(N):
        torch.testing.assert_close(found.translate(hidden, i + 1), lens.translate(hidden, i))
        torch.testing.assert_close(found.pull_back(hidden, i), lens.pull_back(hidden, i, at="before"))
    with pytest.raises(ResultFileError, match="does not show whether the last of its 3 translators"):
        load_lens(path, reads="leaving")
    with pytest.raises(
        ResultFileError, match=r"holds 3 translators .* model of 3 layers needs 2: the last block's out"
    ):
        load_lens(path, reads="leaving", n_layers=N)
    torch.save({**state, "2.weight": torch.zeros(D, D), "2.bias": torch.zeros(D)}, path)
    found = load_lens(path, reads="leaving")
    assert (found.first, found.n_layers) == (1, N)
    assert len(found.weights) == N - 1


def test_a_file_that_says_which_stream_is_not_overruled(lens: TunedLens, tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match="says reads 'entering', but reads='leaving' was asked for"):
        load_lens(lens.save(tmp_path / "a.npz"), reads="leaving")


def test_only_the_last_identity_is_no_lens(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(D, D)}, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match="no translator but the last block's"):
        load_lens(tmp_path / "a.pt", reads="leaving")


# -- what is refused -----------------------------------------------------------------------------


class _Touch:
    """Unpickling it writes a file: what a malicious one would do, harmlessly."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for name, content in (("a.pt", {**state, "x": _Touch(mark)}), ("b.pt", _Touch(mark))):
        torch.save(content, tmp_path / name)
        with pytest.raises(
            ResultFileError, match=r"is refused: it holds something else than tensors .* could run code"
        ):
            load_lens(tmp_path / name)
    (tmp_path / "c.pt").write_bytes(pickle.dumps(_Touch(mark), protocol=2))
    with pytest.raises(ResultFileError, match="is refused"):
        load_lens(tmp_path / "c.pt")
    np.savez(tmp_path / "d.npz", a=np.array([_Touch(mark)], dtype=object))
    with pytest.raises(ResultFileError, match="is refused: it holds pickled Python objects"):
        load_lens(tmp_path / "d.npz")
    (tmp_path / "e.npz").write_bytes(pickle.dumps(_Touch(mark)))
    with pytest.raises(ResultFileError, match=r"is refused|damaged"):
        load_lens(tmp_path / "e.npz")
    assert not mark.exists()
    # The files are as dangerous as they should be: opened without care, they run.
    torch.load(tmp_path / "b.pt", weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("extension", [".safetensors", ".npz", ".pt"])
def test_cut_and_empty_files_are_refused(lens: TunedLens, tmp_path: Path, extension: str) -> None:
    path = lens.save(tmp_path / f"a{extension}")
    content = path.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 10):
        path.write_bytes(content[:size])
        with pytest.raises(ResultFileError, match=r"damaged|refused|no PyTorch file"):
            load_lens(path)


def test_numbers_that_changed_are_noticed(lens: TunedLens, tmp_path: Path) -> None:
    path = lens.save(tmp_path / "a.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ResultFileError, match=f"says its hash is {lens.hash}, but its numbers have .* damaged"):
        load_lens(path)


def test_newer_and_unreadable_headers_are_refused(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(D, D)}, tmp_path / "a.safetensors", metadata={"mechheads_lens": '{"format": 2}'})
    with pytest.raises(ResultFileError, match=r"written by a newer mechheads \(lens format 2\)"):
        load_lens(tmp_path / "a.safetensors")
    save_file({"0.weight": torch.zeros(D, D)}, tmp_path / "a.safetensors", metadata={"mechheads_lens": "{"})
    with pytest.raises(ResultFileError, match="header that cannot be read"):
        load_lens(tmp_path / "a.safetensors")


EYES = torch.eye(D).expand(N, D, D)


@pytest.mark.parametrize(
    ("content", "layout", "message"),
    [
        # Residual keys, but whole matrices; whole-matrix keys, but corrections; numbers in between.
        ({f"{i}.weight": EYES[i].clone() for i in range(N)}, None, "like the 'residual' layout, .* 1.00 on average"),
        ({i: 0 * EYES[i] for i in range(N)}, None, "like the 'full' layout, and their diagonals are 0.00 on average"),
        ({f"{i}.weight": 0.5 * EYES[i] for i in range(N)}, None, "Give layout='residual' if h \\+ h A\\^T"),
        ({f"{i}.weight": 0.1 * EYES[i] for i in range(N)}, "full", "would throw most of the residual stream away"),
        ({i: EYES[i].clone() for i in range(N)}, "residual", "would add the residual stream to itself"),
    ],
)
def test_doubtful_and_implausible_layouts(content: Any, layout: str | None, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match=message):
        load_lens(tmp_path / "a.pt", layout=layout)


def test_a_doubtful_file_is_read_when_told_how(tmp_path: Path) -> None:
    torch.save({f"{i}.weight": 0.5 * EYES[i] for i in range(N)}, tmp_path / "a.pt")
    torch.testing.assert_close(load_lens(tmp_path / "a.pt", layout="residual").weights, 0.5 * EYES)
    torch.testing.assert_close(load_lens(tmp_path / "a.pt", layout="full").weights, -0.5 * EYES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.weight": None, "1.bias": None}, "lacks the translators of the layers \\[1\\]"),
        ({"0.weight": None, "0.bias": None}, "lacks the translators of the layers \\[0\\]"),
        ({"1.bias": None}, "no bias for the layers \\[1\\], though others have one"),
        ({"1.weight": torch.zeros(D, D + 1)}, "translator of layer 1 has the shape \\[6, 7\\]; expected a square"),
        (
            {"2.weight": torch.zeros(4, 4)},
            "translator of layer 2 has the shape \\[4, 4\\]; .* \\[6, 6\\], like the first",
        ),
        ({"0.weight": torch.tensor(1.0)}, "translator of layer 0 has the shape \\[\\]"),
        ({"2.bias": torch.zeros(5)}, "bias of layer 2 has the shape \\[5\\]; expected \\[6\\]"),
        ({"1.weight": torch.full((D, D), torch.nan)}, "the weight of layer 1 holds NaN or infinity"),
        ({"0.bias": torch.full((D,), torch.inf)}, "the bias of layer 0 holds NaN or infinity"),
        ({"scale": torch.zeros(1)}, "the entry 'scale' \\(a tensor \\[1\\]\\) is no translator"),
        ({"3.weight": 5}, "the entry '3.weight' \\(a int\\) is no translator"),
        ({"mlp.0.weight": torch.zeros(D, D)}, "several families of layers \\('0', 'mlp.0', ...\\)"),
        ({"0": torch.zeros(D, D)}, "names the weight of layer 0 twice"),
    ],
)
def test_bad_entries_are_named(state: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = {k: v for k, v in {**state, **change}.items() if v is not None}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match=message):
        load_lens(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds a dict; expected translators keyed by layer"),
        ([1, 2], "holds a list"),
        ({"unembed.weight": torch.zeros(2, 2)}, "holds no translators"),
        ({"a": EYES.clone(), "b": EYES.clone()}, "holds 2 stacks of matrices and 0 other entries"),
        ({"a": EYES.clone(), "b": torch.zeros(2, D)}, "holds 3 matrices and 2 biases"),
        (torch.zeros(3, 4, 5), "translator of layer 0 has the shape \\[4, 5\\]"),
    ],
)
def test_contents_that_are_no_lens(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match=message):
        load_lens(tmp_path / "a.pt")


def test_wrong_model_is_refused(state: dict[str, torch.Tensor], lens: TunedLens, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match="translators of d_model 6, but the model has 8"):
        load_lens(tmp_path / "a.pt", d_model=8)
    with pytest.raises(ResultFileError, match="up to layer 2, but the model's layers are 0 to 3"):
        load_lens(tmp_path / "a.pt", n_layers=4)
    with pytest.raises(ResultFileError, match="is for 3 layers, but the model has 4"):
        load_lens(lens.save(tmp_path / "a.npz"), n_layers=4)


def test_paths_and_names_are_checked(lens: TunedLens, tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"none.pt does not exist"):
        load_lens(tmp_path / "none.pt")
    (tmp_path / "a.txt").touch()
    with pytest.raises(ResultFileError, match=r"has the extension '.txt'; expected one of .safetensors, .npz"):
        load_lens(tmp_path / "a.txt")
    np.save(tmp_path / "b.npy", np.zeros(3))
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(ResultFileError, match="holds a single array, not an archive"):
        load_lens(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", **{"0.weight": np.array([["a"]])})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ResultFileError, match=r"'0.weight' holds <U1, not numbers"):
        load_lens(tmp_path / "c.npz")
    with pytest.raises(UnknownName, match=r"unknown lens layout 'ful'. Did you mean 'full'"):
        load_lens(tmp_path / "none.pt", layout="ful")
    with pytest.raises(UnknownName, match="unknown reading of a lens 'in'"):
        load_lens(tmp_path / "none.pt", reads="in")
    with pytest.raises(UnknownName, match="unknown lens layout 'ful'"):
        save_lens(lens, tmp_path / "a.pt", layout="ful")
    with pytest.raises(InvalidInput, match=r"cannot be written to 'a.bin'; choose .safetensors, .npz or .pt"):
        lens.save(tmp_path / "a.bin")
    with pytest.raises(OutputNotWritable, match=r"cannot write 'x.npz' into the folder"):
        lens.save(tmp_path / "a.txt" / "x.npz")


def test_overflow_in_float32_is_refused(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.full((D, D), 1e300, dtype=torch.float64)}, tmp_path / "a.pt")
    with pytest.raises(ResultFileError, match="weight of layer 0 holds NaN or infinity"):
        load_lens(tmp_path / "a.pt", layout="residual")
