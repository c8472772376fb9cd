"""Provenance is plain JSON: the same content gives the same hash, and what JSON cannot hold is named."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechheads.errors import InvalidInput
from mechheads.provenance import canonical_json, collect, content_hash, package_versions


def test_canonical_json_ignores_key_order_and_container_type():
    a = {"b": (1, 2.5, None), "a": {"y": True, "x": "é"}}
    b = {"a": {"x": "é", "y": np.bool_(True)}, "b": [np.int64(1), np.float64(2.5), None]}
    assert canonical_json(a) == canonical_json(b)
    assert content_hash(a) == content_hash(b) and re.fullmatch("[0-9a-f]{16}", content_hash(a))
    assert content_hash(a) != content_hash({**a, "c": 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_canonical_json_reads_back_as_it_was(value):
    assert json.loads(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": {1, 2}}}, r"value\['a'\]\['b'\] is a set"),
        ({"a": [0, float("nan")]}, r"value\['a'\]\[1\] is nan, which JSON cannot hold; use None"),
        ({"a": np.float32("inf")}, r"value\['a'\] is inf"),
        ({"a": {1: "x"}}, r"value\['a'\] has the key 1; JSON keys must be text"),
        ({"a": np.zeros(2)}, r"value\['a'\] is a ndarray"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_key(value, message):
    with pytest.raises(InvalidInput, match=message):
        canonical_json(value)


def test_collect_gathers_everything_and_guards_its_keys():
    options = {"unembed": "raw"}
    meta = collect({"name": "nano"}, "locos", options, "facts", "abc", {"n": 3}, seed=1, interrupted=True)
    assert meta["trials"] == {"name": "facts", "hash": "abc", "options": {"n": 3}}
    assert meta["interrupted"] is True and meta["seed"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", meta["created"])
    names = {"python", "mechheads", "torch", "transformers", "transformer_lens", "numpy"}
    assert set(meta["versions"]) == names
    assert json.loads(json.dumps(meta)) == meta
    with pytest.raises(InvalidInput, match="provenance already has the key 'created'"):
        collect({}, "locos", {}, "facts", "abc", {}, created="now")
    with pytest.raises(InvalidInput, match=r"provenance\['options'\]\['f'\]"):
        collect({}, "locos", {"f": object()}, "facts", "abc", {})


def test_versions_are_those_installed():
    versions = package_versions()
    assert versions["numpy"] == np.__version__ and versions["transformer_lens"]
