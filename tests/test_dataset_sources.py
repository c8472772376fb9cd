"""Where trials come from: haystack files, the hub, templates, splits."""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dataset_files import DATA, MUSIQUE, NIAH, NOLIMA, lines, module
from test_datasets import Words

from mechheads.datasets import Haystack, documents, hub, needles, niah, nolima
from mechheads.datasets.sources import cut_all, fill, frame, grouped
from mechheads.errors import InvalidInput

# -- haystacks ---------------------------------------------------------------------------------------


def test_folder_of_json_lines(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "Third one."}\n{"text": "Cut o', encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "First one. Second one."}\n\n', encoding="utf-8-sig")
    (tmp_path / "notes.md").write_text("Not read.", encoding="utf-8")
    haystack = Haystack.load(tmp_path)
    assert haystack.sentences == ("First one.", "Second one.", "Third one.")
    assert (haystack.files, haystack.truncated) == (2, 1)
    assert Haystack.load(haystack) is haystack


def test_a_last_line_cut_inside_a_character(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "Whole."}\n{"text": "Caf\u00e9'.encode()[:-1])
    assert (Haystack.load(path).sentences, Haystack.load(path).truncated) == (("Whole.",), 1)


def test_truncated_lines_are_counted_in_the_options(tmp_path):
    filler = " ".join(f"The {a} {b} slept under a hedge." for a in ("red", "old", "wet") for b in "abcdefghijk")
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": filler}) + '\n{"body": "Cut', encoding="utf-8")
    prose = Haystack.load(tmp_path, field="body")
    for trials in (
        niah(Words(), NIAH, context_length=150, haystack=prose),
        needles("passkey", Words(), n=2, context_length=150, haystack=prose),
    ):
        assert trials.options["haystack"] == str(tmp_path)
        assert (trials.options["haystack_files"], trials.options["haystack_truncated_lines"]) == (1, 1)


def test_subfolders_are_read_where_the_folder_itself_holds_nothing(tmp_path):
    for name, text in (("p2/x.txt", "Second."), ("p1/y.TXT", "First."), ("p10/a.txt", "In between.")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert Haystack.load(tmp_path).sentences == ("First.", "In between.", "Second.")
    (tmp_path / "top.txt").write_text("Top.", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "Not read."}', encoding="utf-8")
    assert Haystack.load(tmp_path).sentences == ("Top.",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "A."}\n{"text": \n{"text": "B."}\n', r"bad.jsonl, line 2, is not JSON: .*Only a cut-off last line"),
        (b'{"text": "A."}\n\n{"text": "\xe9"}\n{"text": "B."}', r"bad.jsonl, line 3, is not UTF-8"),
        (b'{"text": "A', r"bad.jsonl, line 1, is not JSON"),
        (b'{"body": "A."}', r"bad.jsonl, line 1, has no text field 'text' \(it has \['body'\]\); name the field"),
        (b'["A."]', r"line 1, has no text field 'text' \(it has list\)"),
        (b'{"text": 1}', "line 1, has no text field"),
        (b'{"text": " "}', "holds no text"),
        (b"", "holds no text"),
    ],
)
def test_bad_json_lines_are_named(content, message, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        Haystack.load(tmp_path)


def test_bad_text_is_named_by_its_file(tmp_path):
    (tmp_path / "a.txt").write_text("Fine.", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"Caf\xe9.")
    with pytest.raises(InvalidInput, match=r"b\.txt is not UTF-8 \(byte 3"):
        Haystack.load(tmp_path)


# -- the hub -----------------------------------------------------------------------------------------


@pytest.fixture
def fake_hub(monkeypatch):
    """A hub library that serves the samples; its calls are kept."""
    calls: list[dict[str, Any]] = []

    def hf_hub_download(**asked: Any) -> str:
        calls.append(asked)
        if asked["filename"] == "gone.json":
            raise ConnectionError("no route to host\nand more")
        name: str = asked["filename"]
        return str(NOLIMA if name == "needlesets/needle_set.json" else DATA / name)

    def snapshot_download(**asked: Any) -> str:
        calls.append(asked)
        return str(asked["repo_id"])

    fake = module("huggingface_hub", hf_hub_download=hf_hub_download, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return calls


def test_nolima_from_the_hub(fake_hub):
    trials = nolima(Words(), "hub:amodaresi/NoLiMa", n=4)
    (asked,) = fake_hub
    assert asked.pop("filename") == "needlesets/needle_set.json"
    assert asked == {"repo_id": "amodaresi/NoLiMa", "repo_type": "dataset", "revision": None}
    assert trials.options["source"] == "hub:amodaresi/NoLiMa/needlesets/needle_set.json"
    assert trials.hash == nolima(Words(), NOLIMA, n=4).hash
    assert trials.options["source_hash"] == nolima(Words(), NOLIMA, n=4).options["source_hash"]


def test_file_and_revision_of_the_hub(fake_hub):
    for source in ("hub:me/mine@abc123/niah.jsonl", hub("me/mine", file="niah.jsonl", revision="abc123")):
        trials = niah(Words(), source)
        assert fake_hub.pop() == {
            "filename": "niah.jsonl", "repo_id": "me/mine", "repo_type": "dataset", "revision": "abc123"
        }  # fmt: skip
        assert trials.options["source"] == "hub:me/mine@abc123/niah.jsonl"
    with pytest.raises(InvalidInput, match=r"hub:me/mine names no file; write 'hub:me/mine/path"):
        niah(Words(), "hub:me/mine")
    with pytest.raises(InvalidInput, match=r"gone.json could not be fetched \(ConnectionError: no route to host\)"):
        niah(Words(), "hub:me/mine/gone.json")


def test_haystack_from_the_hub(fake_hub, tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("A book.", encoding="utf-8")
    haystack = Haystack.load(hub(str(tmp_path), file="books/"))
    assert haystack.sentences == ("A book.",) and haystack.source == f"hub:{tmp_path}/books/"
    assert fake_hub[0]["allow_patterns"] == ["books/*"]


def test_rows_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args: Any, **options: Any) -> list[dict[str, Any]]:
        asked.append((args, options))
        if options["split"] == "none":
            raise ValueError("Unknown split")
        return lines(MUSIQUE)

    monkeypatch.setitem(sys.modules, "datasets", module("datasets", load_dataset=load_dataset))
    trials = documents(Words(), "hub:me/MuSiQue")
    assert asked == [(("me/MuSiQue", None), {"split": "validation", "revision": None})]
    assert trials.options["source"] == "hub:me/MuSiQue validation"
    assert trials.hash == documents(Words(), MUSIQUE).hash
    documents(Words(), hub("me/MuSiQue", split="train", subset="answerable", revision="v1"))
    assert asked[1] == (("me/MuSiQue", "answerable"), {"split": "train", "revision": "v1"})
    with pytest.raises(InvalidInput, match=r"could not be fetched \(ValueError: Unknown split\)"):
        documents(Words(), hub("me/MuSiQue", split="none"))


@pytest.mark.parametrize(
    ("library", "source"), [("huggingface_hub", "hub:a/b/c.json"), ("datasets", hub("a/b", split="test"))]
)
def test_a_missing_library_is_named(library, source, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InvalidInput, match=rf"needs the Python package {library}.*`pip install {library}`"):
        documents(Words(), source)


def test_without_a_network_it_says_where_to_download():
    pytest.importorskip("huggingface_hub")
    with pytest.raises(InvalidInput, match=r"could not be fetched .* https://huggingface.co/datasets/a/b "):
        nolima(Words(), "hub:a/b/c.json")


@pytest.mark.parametrize("bad", ["hub:", "hub:name", "hub:a/b@", "hub:a/b@/c"])
def test_hub_names_that_are_none(bad):
    with pytest.raises(InvalidInput, match="write 'hub:owner/name'"):
        niah(Words(), bad)
    with pytest.raises(InvalidInput, match="give 'owner/name'"):
        hub(bad)


def test_hub_takes_a_file_or_a_split():
    with pytest.raises(InvalidInput, match="give one of the two"):
        hub("a/b", file="c.json", split="test")
    with pytest.raises(InvalidInput, match="names neither a file nor a split"):
        hub("a/b").rows()


# -- helpers -----------------------------------------------------------------------------------------


def test_values_are_not_filled_twice():
    assert fill("{1} {2}", {"1": "{2}", "2": "x"}, "here") == "{2} x"
    assert frame("{question}{haystack}", "haystack", "{haystack}?", where="t", strip=False).opening == "{haystack}?"


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=3), max_size=12))
def test_groups_are_the_connected_components(keys):
    groups = grouped(keys)
    assert sorted(i for g in groups for i in g) == list(range(len(keys)))
    together = {i: k for k, g in enumerate(groups) for i in g}
    reach = {i: {i} for i in range(len(keys))}  # by repeated joining, the slow way
    for _ in keys:
        for i in reach:
            for j in reach:
                if set(keys[i]) & set(keys[j]):
                    reach[i] |= reach[j]
    assert all((j in reach[i]) == (together[i] == together[j]) for i in reach for j in reach)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=10), st.floats(0.1, 0.9), st.integers(0, 99))
def test_all_are_cut_as_near_to_the_share_as_groups_allow(sizes, share, seed):
    starts = [0, *itertools.accumulate(sizes)]
    groups = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    left, right = cut_all(groups, share, random.Random(seed), what="it", unit="things")
    assert sorted(left + right) == list(range(starts[-1]))
    assert all(set(g) <= set(left) or set(g) <= set(right) for g in groups)
    sums = {sum(c) for r in range(1, len(sizes)) for c in itertools.combinations(sizes, r)}
    assert abs(len(left) - share * starts[-1]) == pytest.approx(min(abs(s - share * starts[-1]) for s in sums))
