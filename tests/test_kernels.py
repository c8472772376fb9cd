"""The arithmetic of head scores against loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mechheads.errors import InvalidInput
from mechheads.kernels import contrast, expand_kv, norm_direction, phi, qk_scores, value_gain


@dataclass
class Drawn:
    """Random activations of one layer."""

    pattern: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    w_o: Tensor
    direction: Tensor

    @property
    def group(self) -> int:
        return len(self.pattern) // len(self.v)


@st.composite
def layers(draw: st.DrawFn) -> Drawn:
    kv, group, steps, keys, d_head, width = (draw(st.integers(1, n)) for n in (3, 3, 3, 6, 4, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    heads = kv * group
    return Drawn(
        pattern=normal(heads, steps, keys).softmax(-1),
        q=normal(heads, steps, d_head),
        k=normal(kv, keys, d_head),
        v=normal(kv, keys, d_head),
        w_o=normal(heads, d_head, width),
        direction=normal(steps, width),
    )


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a, b, strict=True))


@given(layers())
@settings(max_examples=25, deadline=None)
def test_phi_and_value_gain_are_their_loops(drawn: Drawn) -> None:
    got, gain = phi(drawn.pattern, drawn.v, drawn.w_o, drawn.direction), value_gain(drawn.v, drawn.w_o, drawn.direction)
    assert got.shape == gain.shape == drawn.pattern.shape
    for head, step, key in np.ndindex(*got.shape):
        value = drawn.v[head // drawn.group, key]
        written = [dot(value, drawn.w_o[head, :, m]) for m in range(drawn.w_o.shape[2])]
        want = dot(torch.tensor(written), drawn.direction[step])
        assert float(gain[head, step, key]) == pytest.approx(want, abs=1e-4)
        alpha = float(drawn.pattern[head, step, key])
        assert float(got[head, step, key]) == pytest.approx(alpha * want, abs=1e-4)


@given(layers())
@settings(max_examples=25, deadline=None)
def test_phi_sums_to_what_the_head_writes(drawn: Drawn) -> None:
    z = drawn.pattern @ drawn.v.repeat_interleave(drawn.group, 0)
    want = torch.einsum("hsd,hdm,sm->hs", z, drawn.w_o, drawn.direction)
    assert torch.allclose(phi(drawn.pattern, drawn.v, drawn.w_o, drawn.direction).sum(-1), want, atol=1e-4)


@given(layers())
@settings(max_examples=25, deadline=None)
def test_query_heads_read_their_own_group(drawn: Drawn) -> None:
    wide = expand_kv(drawn.k, len(drawn.q))
    scores = qk_scores(drawn.q, drawn.k)
    for head in range(len(drawn.q)):
        assert torch.equal(wide[head], drawn.k[head // drawn.group])
        for step, key in np.ndindex(*scores.shape[1:]):
            want = dot(drawn.q[head, step], drawn.k[head // drawn.group, key])
            assert float(scores[head, step, key]) == pytest.approx(want, abs=1e-4)


@given(layers(), st.data())
@settings(max_examples=50, deadline=None)
def test_contrast_is_its_loop(drawn: Drawn, data: st.DataObject) -> None:
    values = drawn.pattern - 0.3
    _, steps, keys = values.shape
    booleans = st.lists(st.booleans(), min_size=keys, max_size=keys)
    needle = data.draw(booleans)
    visible = data.draw(st.lists(booleans, min_size=steps, max_size=steps))
    plus, minus = contrast(values, torch.tensor(needle), torch.tensor(visible))
    for head, step in np.ndindex(*plus.shape):
        on = off = 0.0
        n = total = 0
        for key in range(keys):
            if visible[step][key]:
                total += 1
                n += needle[key]
                on += needle[key] * float(values[head, step, key])
                off += (not needle[key]) * float(values[head, step, key])
        assert float(plus[head, step]) == pytest.approx(on, abs=1e-5)
        if n == 0:
            assert float(minus[head, step]) == 0
        elif n == total:
            assert minus[head, step].isnan()
        else:
            assert float(minus[head, step]) == pytest.approx(n / (total - n) * off, abs=1e-5)


def test_contrast_of_uniform_values_is_zero_whatever_the_needle() -> None:
    values, visible = torch.full((2, 1, 6), 1 / 6), torch.ones(1, 6, dtype=torch.bool)
    for n in range(1, 6):
        plus, minus = contrast(values, torch.arange(6) < n, visible)
        assert torch.allclose(plus, torch.tensor(n / 6)) and torch.allclose(plus, minus)


def test_contrast_at_the_edges() -> None:
    values = torch.tensor([[[0.5, 0.25, 0.25]]])
    first = torch.tensor([True, False, False])
    # The window has moved past the needle: nothing is there to compare, and nothing is undefined.
    plus, minus = contrast(values, first, torch.tensor([[False, True, True]]))
    assert plus.item() == minus.item() == 0
    # Only the needle is in sight: there is nothing to compare it with.
    plus, minus = contrast(values, first, torch.tensor([[True, False, False]]))
    assert plus.item() == 0.5 and minus.isnan().all()
    # A value at a key that is out of sight counts nowhere, not even if it is not a number.
    values[0, 0, 2] = float("nan")
    plus, minus = contrast(values, first, torch.tensor([[True, True, False]]))
    assert plus.item() == 0.5 and minus.item() == 0.25


def test_phi_is_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(2, 1, 64, generator=generator).softmax(-1)
    v, w_o = torch.randn(1, 64, 8, generator=generator), torch.randn(2, 8, 16, generator=generator)
    direction = torch.randn(1, 16, generator=generator)
    half = [t.bfloat16() for t in (pattern, v, w_o, direction)]
    got = phi(*half)
    assert got.dtype == torch.float32
    exact = phi(*(t.double() for t in half))
    assert torch.allclose(got, exact, atol=1e-5)


@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_norm_direction_moves_the_norm_to_the_other_side(centers: bool, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, u = torch.randn(3, 8, generator=generator), torch.randn(3, 8, generator=generator)
    weight = torch.randn(8, generator=generator) if weighted else None
    scale = torch.rand(3, 1, generator=generator) + 0.5
    normed = (x - x.mean(-1, keepdim=True) if centers else x) / scale
    normed = normed if weight is None else normed * weight
    want = (normed * u).sum(-1)
    got = (norm_direction(u, weight, scale, centers=centers) * x).sum(-1)
    assert torch.allclose(got, want, atol=1e-5)


def test_heads_that_do_not_divide_are_refused() -> None:
    for heads, kv in ((3, 2), (4, 3), (2, 4)):
        with pytest.raises(InvalidInput, match=f"{heads} query heads"):
            expand_kv(torch.zeros(kv, 1, 1), heads)
        with pytest.raises(InvalidInput, match=f"{heads} query heads"):
            phi(torch.zeros(heads, 1, 1), torch.zeros(kv, 1, 1), torch.zeros(heads, 1, 1), torch.zeros(1, 1))
