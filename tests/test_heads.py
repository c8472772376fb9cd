"""Heads are read from every spelling in use, and sets keep their order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechheads.errors import InvalidInput
from mechheads.heads import Head, HeadSet, draw_random_heads

heads = st.builds(Head, st.integers(0, 99), st.integers(0, 99))


@given(heads)
def test_every_spelling_of_a_head_reads_back(head):
    spellings = [str(head), str(head).lower(), f"{head.layer}.{head.head}", f"{head.layer}-{head.head}"]
    for spelling in [*spellings, f" {head} ", (head.layer, head.head), [head.layer, head.head], head]:
        assert Head.parse(spelling) == head
    assert Head.parse(np.array([head.layer, head.head])) == head


@pytest.mark.parametrize("bad", ["L9", "H6", "9:6", "", "L-1H2", "L9H6x", (9,), (1, 2, 3), None, 9])
def test_what_is_no_head_is_refused_with_the_spellings(bad):
    with pytest.raises(InvalidInput, match=r"cannot read a head from .*'L9H6', '9.6', '9-6' or \(9, 6\)"):
        Head.parse(bad)


@pytest.mark.parametrize("bad", [(-1, 0), (0, -1)])
def test_negative_indices_are_refused(bad):
    with pytest.raises(InvalidInput, match="whole number >= 0"):
        Head(*bad)


def test_heads_sort_by_layer_then_head():
    assert sorted([Head(1, 0), Head(0, 9), Head(0, 2)]) == [Head(0, 2), Head(0, 9), Head(1, 0)]


def test_kv_group_under_grouped_query_attention():
    assert [Head(0, h).kv_group(9, 3) for h in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [Head(0, h).kv_group(4, 1) for h in range(4)] == [0, 0, 0, 0]
    assert [Head(0, h).kv_group(4, 4) for h in range(4)] == [0, 1, 2, 3]


@given(st.lists(heads, unique=True, max_size=8))
def test_a_set_keeps_the_order_and_reads_its_own_labels(chosen):
    made = HeadSet(chosen)
    assert list(made) == chosen
    assert HeadSet.parse(", ".join(made.labels)) == made
    assert HeadSet.parse(made) is made
    assert len(made) == len(chosen)


@given(st.lists(heads, unique=True, max_size=8), st.lists(heads, unique=True, max_size=8))
def test_set_algebra(a, b):
    left, right = HeadSet(a), HeadSet(b)
    assert set(left | right) == set(a) | set(b)
    assert set(left & right) == set(a) & set(b)
    assert list(left - right) == [h for h in a if h not in b]
    assert list((left | right)[: len(a)]) == a


def test_one_head_is_a_set_too():
    for one in ["L1H2", Head(1, 2), (1, 2), [(1, 2)], ["1.2"]]:
        assert HeadSet.parse(one) == HeadSet(["L1H2"])


def test_order_counts_for_equality_and_hash_agrees():
    a, b = HeadSet(["L0H0", "L0H1"]), HeadSet(["L0H1", "L0H0"])
    assert a != b and set(a) == set(b)
    assert len({a, HeadSet(["0.0", "0.1"])}) == 1


def test_a_head_named_twice_is_refused():
    with pytest.raises(InvalidInput, match="L1H2 stands twice"):
        HeadSet(["L1H2", "1.2"])


@pytest.mark.parametrize("bad", [7, None, 1.5, np.array(3)])
def test_what_is_no_set_of_heads_is_refused(bad):
    for read in (HeadSet, HeadSet.parse):
        with pytest.raises(InvalidInput, match=r"cannot read heads from .*; give one head such as 'L9H6', or several"):
            read(bad)


def test_membership_takes_any_spelling_and_nonsense():
    made = HeadSet(["L1H2"])
    assert "1-2" in made and (1, 2) in made
    assert "L1H3" not in made and "nonsense" not in made


def test_slices_are_sets_and_items_are_heads():
    made = HeadSet(["L0H0", "L0H1", "L0H2"])
    assert made[:2] == HeadSet(["L0H0", "L0H1"])
    assert made[2] == Head(0, 2)


def test_by_layer_and_mask_agree():
    made = HeadSet(["L2H1", "L0H3", "L2H0"])
    assert made.by_layer() == {0: [3], 2: [0, 1]}
    mask = made.mask(3, 4)
    assert mask.shape == (3, 4) and mask.dtype == bool
    assert [tuple(x) for x in np.argwhere(mask).tolist()] == [(0, 3), (2, 0), (2, 1)]


@pytest.mark.parametrize("label", ["L3H0", "L0H4"])
def test_a_head_outside_the_model_is_named(label):
    with pytest.raises(InvalidInput, match=f"{label} does not exist: .* layers 0 to 2 and heads 0 to 3"):
        HeadSet(["L0H0", label]).check(3, 4)


@given(st.integers(0, 10), st.integers(0, 2**31))
def test_random_draws_are_distinct_seeded_and_never_the_tested_heads(k, seed):
    tested = HeadSet(["L0H0", "L1H1", "L2H2"])
    drawn = draw_random_heads(4, 4, k, seed=seed, exclude=tested)
    assert len(drawn) == k
    assert not set(drawn) & set(tested)
    assert drawn.check(4, 4) == draw_random_heads(4, 4, k, seed=seed, exclude=tested)


def test_random_draws_reach_every_head_about_equally():
    counts = np.zeros((2, 5))
    for seed in range(500):
        counts += draw_random_heads(2, 5, 2, seed=seed).mask(2, 5)
    assert counts.sum() == 1000
    assert counts.min() > 60 and counts.max() < 140  # 100 expected, standard deviation 9


@given(st.integers(0, 2**31))
def test_random_draws_matched_by_layer(seed):
    tested = HeadSet(["L0H0", "L2H1", "L2H3"])
    drawn = draw_random_heads(3, 6, 3, seed=seed, exclude=tested, match_layers=tested)
    assert {layer: len(h) for layer, h in drawn.by_layer().items()} == {0: 1, 2: 2}
    assert not set(drawn) & set(tested)


def test_too_few_heads_to_draw_from_is_said():
    with pytest.raises(InvalidInput, match="cannot draw 4 random heads: 4 heads less 1 excluded leaves 3"):
        draw_random_heads(2, 2, 4, seed=0, exclude=HeadSet(["L0H0"]))
    full = HeadSet(["L0H0", "L0H1"])
    with pytest.raises(InvalidInput, match="cannot draw 2 random heads in layer 0: only 0 are left"):
        draw_random_heads(2, 2, 2, seed=0, exclude=full, match_layers=full)
    with pytest.raises(InvalidInput, match="match_layers has 2 heads but k is 3"):
        draw_random_heads(2, 4, 3, seed=0, match_layers=full)
