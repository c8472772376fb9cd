"""Keys and results of cells: one name for one thing, and nothing unfit gets in."""

from __future__ import annotations

import itertools
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mechheads.cells import CellFailure, CellKey, CellResult
from mechheads.errors import InvalidInput

HEADS = ("L2H1", "L10H0", "L0H3")


def test_a_key_is_the_same_in_whatever_order_its_heads_come() -> None:
    keys = {CellKey("m", "t", heads, "i") for heads in itertools.permutations(HEADS)}
    assert len(keys) == 1
    (key,) = keys
    assert key.heads == ("L0H3", "L2H1", "L10H0")  # by layer, not by letters
    assert CellKey("m", "t", ("0.3", "10-0", "L2H1"), "i") == key  # other spellings
    assert CellKey.from_description(key.describe()) == key


def test_the_digest_is_fixed() -> None:
    # A store of today must be found again tomorrow: this text may change with the format's number only.
    assert CellKey("m", "t", ("L0H1",), "i").digest == "fb17f3eb5daf9ffb"


def test_every_part_of_a_key_changes_the_digest() -> None:
    keys = [
        CellKey("m", "t", ("L0H1",), "i"),
        CellKey("M", "t", ("L0H1",), "i"),
        CellKey("m", "T", ("L0H1",), "i"),
        CellKey("m", "t", ("L0H2",), "i"),
        CellKey("m", "t", ("L0H1", "L0H2"), "i"),
        CellKey("m", "t", ("L0H1",), "I"),
        CellKey("m", "t", (), "none"),
    ]
    assert len({key.digest for key in keys}) == len(keys)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("", "t", (), "none"), "model of a cell is ''; give its hash, a text that is not empty."),
        (("m", 3, (), "none"), "task of a cell is 3; give its hash, a text that is not empty."),
        (("m", "t", "L0H1", "i"), "heads of a cell are 'L0H1'; give a tuple of labels, such as ('L9H6',)."),
        (("m", "t", ("L0H1", "0.1"), "i"), "L0H1 stands twice in a head set; name every head once."),
        (("m", "t", ("head",), "i"), "cannot read a head from 'head'"),
        (
            ("m", "t", ("L0H1",), "none"),
            "a cell has 1 heads and the intervention 'none'; the intervention is 'none' where there are no heads, and "
            "only there.",
        ),
        (("m", "t", (), "i"), "a cell has no heads and the intervention 'i'"),
    ],
)
def test_an_unfit_key_is_refused(as_users_run: None, parts: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        CellKey(*parts)


def test_a_description_with_a_part_missing_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"is no description of a cell: KeyError\('task'\)"):
        CellKey.from_description({"model": "m"})


def test_a_result_is_a_copy_that_nobody_changes() -> None:
    mine = np.array([1.0, 2.0])
    result = CellResult(("a", "b"), {"hit": mine})
    mine[0] = 9
    assert result.values["hit"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        result.values["hit"][0] = 5
    with pytest.raises(TypeError, match="does not support item assignment"):
        result.values["more"] = mine  # pyright: ignore[reportIndexIssue]


@given(
    st.lists(st.floats(allow_infinity=False), min_size=1, max_size=6),
    st.lists(st.sampled_from(["hit", "rank", "p q"]), min_size=1, unique=True),
)
def test_equal_results_have_equal_bytes(values: list[float], names: list[str]) -> None:
    ids = tuple(map(str, range(len(values))))
    # Another NaN, and zeros of the other sign: equal numbers in other bits.
    other_bits = [-0.0 if v == 0 else -np.nan if np.isnan(v) else v for v in values]
    one = CellResult(ids, dict.fromkeys(names, np.array(values)))
    two = CellResult(ids, dict.fromkeys(reversed(names), np.array(other_bits)))
    assert one.equals(two) and one.equals(pickle.loads(pickle.dumps(one)))
    assert [v.tobytes() for v in one.values.values()] == [v.tobytes() for v in two.values.values()]
    assert list(one.values) == sorted(names)
    assert one.undefined == all(v != v for v in values)


def test_results_differ_by_trials_values_metrics_and_answers() -> None:
    one = CellResult(("a",), {"hit": np.ones(1)}, ("yes",))
    others = [
        CellResult(("b",), {"hit": np.ones(1)}, ("yes",)),
        CellResult(("a",), {"hit": np.zeros(1)}, ("yes",)),
        CellResult(("a",), {"hat": np.ones(1)}, ("yes",)),
        CellResult(("a",), {"hit": np.ones(1)}, ("no",)),
    ]
    assert not any(one.equals(other) for other in others)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((), {"hit": []}), "a cell has 0 trials and 1 metrics; it needs one of each at least."),
        ((("a",), {}), "a cell has 1 trials and 0 metrics; it needs one of each at least."),
        ((("a", "b", "a"), {"hit": [1, 1, 1]}), "trial 'a' stands twice in a cell"),
        (("ab", {"hit": [1, 1]}), "trial_ids of a cell are 'ab'; give a tuple of texts, one for each trial."),
        (((1, 2), {"hit": [1, 1]}), "trial_ids of a cell are (1, 2)"),
        ((("a",), {"hit": [1]}, ("x", "y")), "a cell has 1 trials and 2 answers; give one a trial, or none at all."),
        ((("a", "b"), {"hit": [1]}), "metric 'hit' has the shape (1,), but the cell has 2 trials"),
        ((("a",), {"hit": [[1]]}), "metric 'hit' has the shape (1, 1), but the cell has 1 trials"),
        ((("a",), {"hit": ["x"]}), "metric 'hit' holds ['x'], which is no list of numbers."),
        ((("a", "b"), {"hit": [1, -np.inf]}), "metric 'hit' is infinite for trial 'b'; use NaN where it is undefined."),
        ((("a",), {"said": [1]}), "a metric is named 'said'; give it a text, but not 'trial_id' or 'said'."),
        ((("a",), {"": [1]}), "a metric is named ''"),
    ],
)
def test_an_unfit_result_is_refused(as_users_run: None, parts: tuple, message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        CellResult(*parts)


def test_a_failure_keeps_type_message_and_traceback() -> None:
    cell = CellKey("m", "t", ("L0H1",), "i")
    try:
        raise KeyError("needle")
    except KeyError as error:
        failure = CellFailure.of(cell, error)
    assert (failure.error, failure.message) == ("KeyError", "'needle'")
    assert 'raise KeyError("needle")' in failure.traceback
    assert str(failure) == "KeyError: 'needle'" and str(CellFailure(cell, "MemoryError", "")) == "MemoryError"
