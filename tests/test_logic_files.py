"""Logic trials from files: every format, its oddities, and rows that cannot be used. Samples are written here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from test_datasets import Plain, Words

from mechheads.datasets import (
    flipped,
    folio,
    hub,
    multi_logieval,
    pararule_plus,
    prontoqa,
    prontoqa_ood,
    proofwriter,
    rebuild,
    statement_only,
)
from mechheads.datasets.logic_prontoqa import refuted
from mechheads.errors import InvalidInput
from mechheads.trials import TrialSet

# -- samples ----------------------------------------------------------------------------------------------------


def pronto(k: int, **changes: Any) -> dict[str, Any]:
    true = k % 2 == 0
    loud = "loud" if true else "not loud"
    return {
        "id": f"P_{k}",
        "context": f"Every grib is a tarn{k}. Each tarn{k} is {loud}. Fens are shy. Ned is a grib.",
        "question": "Is the following statement true or false? Ned is loud.",
        "options": ["A) True", "B) False"],
        "answer": "A" if true else "B",
        "explanation": [
            "Ned is a grib.",
            f"Every grib is a tarn{k}.",
            f"Ned is a tarn{k}.",
            f"Each tarn{k} is {loud}.",
            f"Ned is {loud}.",
        ],
        **changes,
    }


def example(statement: str, *, prove: bool, answer: str | None = None, context: str, chain: list[str]) -> dict:
    test = {
        "question": context,
        "query": f"{'Prove' if prove else 'True or false'}: {statement}",
        "chain_of_thought": chain,
    }
    return {
        "in_context_example0": {"question": "x", "query": "y", "chain_of_thought": []},
        "test_example": {**test, **({} if answer is None else {"answer": answer})},
    }


def ood_proofs() -> dict[str, Any]:
    """Four of a conjunction and one of a disjunction, to be proved; the questions begin with a space."""
    made = {}
    for k, name in enumerate(("Ann", "Bo", "Cy", "Di"), 1):
        made[f"example{k}"] = example(
            f"{name} is a fen and loud.",
            prove=True,
            context=f" {name} is a fen. {name} is loud. Gribs are shy.",
            chain=[f"{name} is loud.", f"{name} is a fen.\n\n", f"{name} is a fen and loud.\n"],
        )
    made["example5"] = example(
        "Ed is shy or loud.", prove=True, context="Ed is shy.", chain=["Ed is shy.", "Ed is shy or loud."]
    )
    return made


def ood_answers() -> dict[str, Any]:
    chain = ["Ann is a fen.", "Fens are loud.", "Ann is loud."]
    return {
        "example1": example(
            "Ann is loud.", prove=False, answer="True", context="Fens are loud. Ann is a fen.", chain=chain
        ),
        "example2": example(
            "Ann is not loud.",
            prove=False,
            answer="False",
            context="Fens are loud. Ann is a fen. Bo is shy.",
            chain=chain,
        ),
    }


def pararule(k: int, **changes: Any) -> dict[str, Any]:
    questions = [
        {"id": f"R-{k}{i}", "text": text, "label": label, "meta": {"QDep": "2", "QCat": "0_a"}}
        for i, (text, label) in enumerate([("The dog is big.", "true"), ("The dog is not big.", "false")])
    ]
    return {
        "id": f"R-{k}", "context": f"The dog is cute. The cat {k} is shy. All cute animals are big.",
        "questions": questions, **changes,
    }  # fmt: skip


def multi(rule: str = "MP", answers: tuple[str, ...] = ("yes", "Yes", "no", "No"), **changes: Any) -> dict[str, Any]:
    samples = [
        {
            "id": k,
            "context": f"If it rains, Joe{k}\u2019s road is wet. It rains.",
            "question": "Is it wet?",
            "answer": a,
        }
        for k, a in enumerate(answers, 1)
    ]
    return {"logic": "pl", "rule": rule, "depth": "d2", "samples": samples, **changes}


def story(k: int, label: str, **changes: Any) -> dict[str, Any]:
    return {
        "premises": [f"All {k // 2} fens are shy. ", "Ann is a fen."],
        "premises-FOL": ["only one"],
        "conclusion": f"Ann is shy{k}.",
        "conclusion-FOL": "x",
        "label": label,
        **changes,
    }


LABELS = ("True", "False", "Uncertain", "Unknown", "true", "False")
STORIES = [story(k, label) for k, label in enumerate(LABELS)]


def theory(k: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"AttNeg-{k}", "maxD": 1, "NFact": 2, "NRule": 1,
        "theory": f"Anne is kind{k}. Bob is cold. All kind{k} people are nice.",
        "triples": {"triple1": {"text": f"Anne is kind{k}."}, "triple2": {"text": "Bob is cold."}},
        "rules": {"rule1": {"text": f"All kind{k} people are nice."}},
        "questions": {
            "Q1": {"question": "Anne is nice.", "answer": True, "QDep": 1, "strategy": "proof",
                   "proofs": "[(((triple1) -> rule1))]"},
            "Q2": {"question": "Anne is not nice.", "answer": False, "QDep": 1, "strategy": "inv-proof",
                   "proofs": "[(((triple1) -> rule1)) OR ((triple2))]"},
            "Q3": {"question": "Bob is nice.", "answer": "Unknown", "QDep": 0, "strategy": "random", "proofs": "[]"},
        },
        **changes,
    }  # fmt: skip


def flat(k: int, answer: Any, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"T-{k // 2}", "maxD": 3, "theory": f"Anne is kind{k // 2}. All kind people are nice.",
        "question": f"Anne is nice{k}.", "answer": answer, "QDep": k, **changes,
    }  # fmt: skip


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SAMPLES: dict[str, tuple[Callable[..., TrialSet], list[dict[str, Any]]]] = {
    "prontoqa": (lambda model, path, **o: prontoqa(model, path=path, **o), [pronto(k) for k in range(6)]),
    "prontoqa_ood": (prontoqa_ood, [ood_answers()]),
    "pararule_plus": (pararule_plus, [pararule(k) for k in range(4)]),
    "multi_logieval": (multi_logieval, [multi()]),
    "folio": (folio, STORIES),
    "proofwriter": (proofwriter, [theory(k) for k in range(3)]),
}

# -- all of them ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SAMPLES)
def test_formats_files_folders_and_records_are_the_same(kind, tmp_path):
    load, rows = SAMPLES[kind]
    (tmp_path / "in").mkdir()
    one, many = tmp_path / "in" / "one.json", tmp_path / "many.jsonl"
    one.write_text(json.dumps(rows if len(rows) > 1 else rows[0]), encoding="utf-8-sig")
    many.write_text(lines(rows).replace("\n", "\n\n"), encoding="utf-8")
    sets = [load(Plain(), source) for source in (rows, one, str(one), tmp_path / "in", many)]
    texts = [[(t.meta["premises"], t.meta["statement"], t.label, t.split) for t in s] for s in sets]
    assert all(text == texts[0] for text in texts) and len(texts[0]) >= 2
    assert sets[1].hash == load(Plain(), one).hash
    for trials in sets:
        assert {"kind", "source", "source_hash", "left_out", "calibration", "seed"} <= set(trials.options)
        assert trials.options["kind"] == kind == trials[0].meta["dataset"]
        assert str(tmp_path) not in json.dumps([t.to_dict() for t in trials])
        assert TrialSet.load(trials.save(tmp_path / "saved.trials")).hash == trials.hash


@pytest.mark.parametrize("kind", SAMPLES)
def test_variants_of_every_source(kind, recwarn):
    model = Words()
    load, rows = SAMPLES[kind]
    trials = load(model, rows)
    alone = statement_only(model, trials)
    assert [t.meta["twin"] for t in alone] == [t.id for t in trials]
    part = rebuild(model, trials[0], premises=[0])
    assert part.meta["premises"] == trials[0].meta["premises"][:1]
    if kind == "multi_logieval":
        with pytest.raises(InvalidInput, match="none of the 4 questions can be flipped"):
            flipped(model, trials)
        return
    for trial, twin in zip(trials, flipped(model, trials), strict=True):
        verdicts = [t.meta["verdicts"][t.label or 0] for t in (trial, twin)]
        assert verdicts in (["true", "false"], ["false", "true"], ["unknown", "unknown"])


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_and_refusals_of_every_source(kind, tmp_path, as_users_run):
    load, rows = SAMPLES[kind]
    everything = load(Plain(), rows)
    some = load(Plain(), rows, n=2, seed=1, calibration=None)
    assert len(some) == 2 and {t.id for t in some} <= {t.id for t in everything}
    assert some.hash == load(Plain(), rows, n=2, seed=1, calibration=None).hash
    assert len({t.label for t in some}) == 2
    for options, message in (
        ({"n": len(everything) + 1}, f"has {len(everything)} questions, too few for n={len(everything) + 1}; use n="),
        ({"n": 0}, "n=0 trials: give a whole number of 1 or more, or None for all"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"template": "nonee"}, "unknown logic template 'nonee'"),
    ):
        with pytest.raises(InvalidInput, match=message):
            load(Plain(), rows, **options)
    with pytest.raises(InvalidInput, match=r"does not exist; check the path"):
        load(Plain(), tmp_path / "none.json")
    with pytest.raises(InvalidInput, match=r"holds no \.json or \.jsonl file"):
        load(Plain(), tmp_path)
    with pytest.raises(InvalidInput, match=r"cannot read .* from a dict; give a path or a list of dicts"):
        load(Plain(), rows[0])
    with pytest.raises(InvalidInput, match="records is empty"):
        load(Plain(), [])
    with pytest.raises(InvalidInput, match="records, record 1, is '3', a int; each must be an object"):
        load(Plain(), [3])
    with pytest.raises(InvalidInput, match=r"record 1.* (has no '[a-z]+'|must be an object)"):
        load(Plain(), [{"other": 1}])


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"", "a.json is empty"),
        ("a.json", b"[1,", "a.json is not JSON"),
        ("a.jsonl", b'{"id": 1}\n\n{"id":', "a.jsonl, line 3, is not JSON: .*; it begins '{\"id\":'"),
        ("a.jsonl", b"{}\n\n7", "a.jsonl, line 3, is '7', a int"),
    ],
)
def test_damaged_files(kind, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        SAMPLES[kind][0](Plain(), tmp_path / name)


@pytest.mark.parametrize("kind", [k for k in SAMPLES if k != "multi_logieval"])
def test_only_one_source_is_known_not_to_be_utf8(kind, tmp_path):
    (tmp_path / "a.json").write_bytes(b'[{"id": "\x92"}]')
    with pytest.raises(InvalidInput, match=r"a.json is not UTF-8 \(byte 9: invalid start byte\); save it as UTF-8"):
        SAMPLES[kind][0](Plain(), tmp_path / "a.json")


def test_rows_from_the_hub(monkeypatch):
    calls = []

    def load_dataset(repo: str, subset: Any, **options: Any) -> list[dict[str, Any]]:
        calls.append((repo, subset, options["split"]))
        return [{**r, "premises": "\n".join(r["premises"]), "example_id": k + 50} for k, r in enumerate(STORIES)]

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "datasets", fake)
    trials = folio(Plain(), "hub:yale-nlp/FOLIO")
    assert calls == [("yale-nlp/FOLIO", None, "validation")]
    assert [t.id for t in trials] == [f"folio/{k}" for k in range(50, 56)]
    assert trials[0].meta["premises"] == ["All 0 fens are shy.", "Ann is a fen."]
    folio(Plain(), hub("yale-nlp/FOLIO", split="train"))
    assert calls[-1] == ("yale-nlp/FOLIO", None, "train")


def test_files_from_the_hub(monkeypatch, tmp_path):
    (tmp_path / "dev.json").write_text(json.dumps([pronto(k) for k in range(4)]), encoding="utf-8")
    fake = ModuleType("huggingface_hub")
    fake.hf_hub_download = lambda filename, **_: str(tmp_path / filename)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", fake)
    trials = prontoqa(Plain(), path="hub:renma/ProntoQA/dev.json")
    assert len(trials) == 4 and trials.options["source"] == "hub:renma/ProntoQA/dev.json"


# -- ProntoQA ---------------------------------------------------------------------------------------------------


def test_prontoqa_rows():
    trial = prontoqa(Words(), path=[pronto(0), pronto(1)])[0]
    assert trial.id == "prontoqa/P_0" and trial.label == 0
    assert trial.meta["statement"] == "Ned is loud." and len(trial.meta["premises"]) == 4
    assert (trial.meta["depth"], trial.meta["distractors"], trial.meta["proof"]) == (2, 1, [0, 1, 3])
    assert trial.meta["rule"] == "modus_ponens"


def test_a_chain_that_ends_elsewhere_is_no_proof():
    trial = prontoqa(Words(), path=[pronto(0, explanation=["Ned is a grib."]), pronto(1)])[0]
    assert (trial.meta["proof"], trial.meta["depth"], trial.meta["distractors"]) == (None, None, None)
    trial = prontoqa(Words(), path=[pronto(0, explanation=[]), pronto(1)])[0]
    assert trial.meta["proof"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": None}, "records, record 1 has no 'context'; it has"),
        ({"context": 4}, "record 1: 'context' is 4, a int; it must be text"),
        ({"question": "Ned is loud."}, "record 1: 'question' is 'Ned is loud.'; the statement must follow"),
        ({"question": "True or false? "}, "the statement must follow its question mark"),
        ({"options": ["A) True", "B) Maybe"]}, r"record 1: 'options' has 'B\) Maybe'; expected such as 'A\) True' of "),
        ({"options": ["True"]}, "'options' has 'True'"),
        ({"answer": "C"}, r"record 1: 'answer' is 'C', none of the options \['A', 'B'\]"),
        ({"id": "P_1"}, "records, record 2: the id 'prontoqa/P_1' is that of records, record 1 too; ids must differ"),
        ({"explanation": 3}, "record 1: 'explanation' is 3"),
    ],
)
def test_bad_prontoqa(changes, message):
    with pytest.raises(InvalidInput, match=message):
        prontoqa(Plain(), path=[pronto(0, **changes), pronto(1)])


# -- ProntoQA-OOD -----------------------------------------------------------------------------------------------


def test_ood_with_answers(tmp_path):
    (tmp_path / "1hop_1shot_random.json").write_text(json.dumps(ood_answers()), encoding="utf-8")
    trials = prontoqa_ood(Words(), tmp_path)
    assert [t.id for t in trials] == [f"prontoqa_ood/1hop_1shot_random/example{k}" for k in (1, 2)]
    assert [t.label for t in trials] == [0, 1] and {t.meta["rule"] for t in trials} == {"modus_ponens"}
    assert [t.meta["depth"] for t in trials] == [1, 1] and [t.meta["proof"] for t in trials] == [[0, 1], [0, 1]]
    assert [t.meta["distractors"] for t in trials] == [0, 1]


def test_ood_proofs_become_true_or_false(tmp_path):
    (tmp_path / "1hop_OOD_AndIntro_x.json").write_text(json.dumps(ood_proofs()), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"1 of 5 statements of .* have no safe negation; they are left out"):
        trials = prontoqa_ood(Words(), tmp_path)
    assert len(trials) == 4 and trials.options["left_out"] == {"no safe negation": 1}
    assert Counter(t.label for t in trials) == {0: 2, 1: 2} and trials.options["made_false"] == 2
    for trial in trials:
        name, parts = trial.meta["statement"].split(" is ", 1)
        assert trial.meta["made_false"] == (trial.label == 1)
        if trial.label == 1:
            assert parts in ("not a fen and loud.", "a fen and not loud.")
        else:
            assert parts == "a fen and loud."
        assert trial.meta["premises"][:2] == [f"{name} is a fen.", f"{name} is loud."]
        assert (trial.meta["rule"], trial.meta["depth"]) == ("conjunction_introduction", 1)
        assert trial.meta["proof"] == [0, 1] and trial.meta["asked"] == "Prove"
    with pytest.warns(UserWarning):
        again, other = (prontoqa_ood(Words(), tmp_path, seed=s) for s in (0, 3))
    assert again.hash == trials.hash != other.hash


@pytest.mark.parametrize(
    ("statement", "forms"),
    [
        ("Ann is loud.", {"Ann is not loud."}),
        ("Ann is not a fen.", {"Ann is a fen."}),
        ("Ann is not loud and shy.", {"Ann is loud and shy.", "Ann is not loud and not shy."}),
        (
            "Ann is loud, shy, and a fen.",
            {
                "Ann is not loud, shy, and a fen.",
                "Ann is loud, not shy, and a fen.",
                "Ann is loud, shy, and not a fen.",
            },
        ),
        ("Ann is loud or shy.", {None}),
        ("Fens are loud.", {None}),
        ("If Ann is loud, Bo is.", {None}),
    ],
)
def test_made_false(statement, forms):
    import random

    assert {refuted(statement, random.Random(s)) for s in range(40)} == forms


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "record 1 has no examples"),
        ({"example1": {}}, "record 1, example1 has no 'test_example'"),
        ({"example1": 3}, "record 1, example1, is '3', a int; it must be an object"),
        (
            {"example1": {"test_example": {"question": "x", "query": "Say: Ann is shy."}}},
            "example1, test_example: 'query' is 'Say: Ann is shy.'; it must begin 'True or false: ' or 'Prove: '",
        ),
        (
            {"example1": {"test_example": {"question": "x", "query": "True or false: Ann is shy."}}},
            "example1, test_example has no 'answer'",
        ),
        (
            {"example1": {"test_example": {"question": "x", "query": "True or false: Ann is shy.", "answer": "maybe"}}},
            r"'answer' is 'maybe'; it must be one of \['false', 'true'\]",
        ),
        (
            {"example1": {"test_example": {"question": " ", "query": "Prove: Ann is shy."}}},
            "example1, test_example: 'question' is empty",
        ),
    ],
)
def test_bad_ood(row, message):
    with pytest.raises(InvalidInput, match=message):
        prontoqa_ood(Plain(), [row])


def test_nothing_that_can_be_used():
    rows = [{"example1": ood_proofs()["example5"]}]
    with (
        pytest.warns(UserWarning, match="no safe negation"),
        pytest.raises(InvalidInput, match=r"no question that can be used; left out: \{'no safe negation': 1\}"),
    ):
        prontoqa_ood(Plain(), rows)


# -- PARARULE Plus ----------------------------------------------------------------------------------------------


def test_pararule_rows():
    trials = pararule_plus(Words(), [pararule(k) for k in range(4)])
    assert len(trials) == 8 and trials[0].id == "pararule_plus/R-00"
    assert trials[0].meta["depth"] == 2 and trials[0].meta["category"] == "0_a" and trials[0].meta["rule"] is None
    assert trials[0].meta["premises"] == ["The dog is cute.", "The cat 0 is shy.", "All cute animals are big."]
    for k in range(4):
        assert len({t.split for t in trials if t.meta["group"] == f"pararule_plus {k}"}) == 1


def test_pararule_of_the_hub():
    rows = [
        {"id": str(k), "context": f"Ann is shy{k}.", "question": "Ann is loud.", "label": k % 2, "meta": {"QDep": "3"}}
        for k in range(4)
    ]
    trials = pararule_plus(Plain(), rows)
    assert [t.label for t in trials] == [1, 0, 1, 0] and trials[0].meta["depth"] == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (pararule(0, questions=[]), "record 1: 'questions' is empty"),
        (pararule(0, questions=[4]), "record 1, question 1, is '4', a int"),
        (
            pararule(0, questions=[{"id": "a", "text": "x", "label": "maybe"}]),
            "question 1: 'label' is 'maybe'; it must",
        ),
        (pararule(0, questions=[{"id": "a", "label": "true"}]), "question 1 has no 'text'"),
        (
            pararule(0, questions=[{"id": "a", "text": "x", "label": "true", "meta": {"QDep": "deep"}}]),
            "question 1, meta: 'QDep' is 'deep'; it must be a whole number",
        ),
    ],
)
def test_bad_pararule(row, message):
    with pytest.raises(InvalidInput, match=message):
        pararule_plus(Plain(), [row])


# -- Multi-LogiEval ---------------------------------------------------------------------------------------------


def logi_folder(root: Path) -> Path:
    """Two folders, the one with a file in Windows-1252 that names its logic wrongly."""
    for folder, rule, answers in (
        ("pl", "MP", ("yes",) * 4),
        ("pl", "MT", ("No", "yes", "yes")),
        ("nm", "x_1", ("no",)),
    ):
        path = root / "d2_Data" / folder / f"{rule}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"logic": "mm"} if folder == "nm" else {}
        text = json.dumps(multi(rule, answers, **said), ensure_ascii=False)
        path.write_bytes(text.encode("cp1252" if folder == "nm" else "utf-8"))
    return root


def test_multi_logieval_folder(tmp_path):
    trials = multi_logieval(Words(), logi_folder(tmp_path))
    assert trials.options["recoded"] == ["d2_Data/nm/x_1.json"]
    assert [t.id for t in trials][:2] == ["multi_logieval/d2/nm/x_1/1", "multi_logieval/d2/pl/MP/1"]
    first = trials[0]
    assert first.meta["premises"][0] == "If it rains, Joe1\u2019s road is wet."
    assert (first.meta["logic"], first.meta["logic_in_file"], first.meta["depth"]) == ("nm", "mm", 2)
    assert first.meta["statement"] == "Is it wet?" and first.candidates == (" yes", " no") and first.label == 1
    assert Counter(t.label for t in trials) == {0: 6, 1: 2}
    # The same context of two files is one group.
    assert len({t.split for t in trials if "Joe1\u2019s" in t.meta["premises"][0]}) == 1


def test_multi_logieval_file_has_the_same_ids(tmp_path):
    logi_folder(tmp_path)
    alone = multi_logieval(Words(), tmp_path / "d2_Data" / "pl" / "MT.json")
    assert [t.id for t in alone] == [f"multi_logieval/d2/pl/MT/{k}" for k in (1, 2, 3)]


def test_multi_logieval_balanced(tmp_path):
    trials = multi_logieval(Words(), logi_folder(tmp_path), balance=True, calibration=None)
    counts = Counter((t.meta["rule"], t.label) for t in trials)
    # Four of six yes go, from the rule with the most excess first.
    assert counts == {("MT", 1): 1, ("x_1", 1): 1, ("MT", 0): 1, ("MP", 0): 1}
    assert trials.options["left_out"] == {"for balance": 4}


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (multi(samples=[]), {}, "record 1: 'samples' is empty"),
        (multi(answers=("maybe",)), {}, r"sample 1: 'answer' is 'maybe'; it must be one of \['no', 'yes'\]"),
        (multi(depth="deep"), {}, "record 1: 'depth' is 'deep'; it must be a whole number"),
        (multi(answers=("yes", "yes")), {"balance": True}, "balance=True, but all 2 questions have the label 'yes'"),
        (multi(), {"balance": 1}, "balance=1: give True or False"),
    ],
)
def test_bad_multi_logieval(row, options, message, as_users_run):
    with pytest.raises(InvalidInput, match=message):
        multi_logieval(Plain(), [row], **options)


# -- FOLIO ------------------------------------------------------------------------------------------------------


def test_folio_rows():
    trials = folio(Words(), STORIES)
    assert [t.meta["verdicts"][t.label or 0] for t in trials] == [
        "true",
        "false",
        "unknown",
        "unknown",
        "true",
        "false",
    ]
    assert trials[0].id == "folio/1" and trials[0].candidates == (" true", " false", " unknown")
    assert trials[0].meta["premises"] == ["All 0 fens are shy.", "Ann is a fen."]
    for k in range(3):  # two rows share their premises
        assert trials[2 * k].split == trials[2 * k + 1].split


def test_folio_of_two_labels():
    trials = folio(Words(), STORIES, labels=2)
    assert len(trials) == 4 and trials.options["left_out"] == {"unknown": 2}
    assert {t.candidates for t in trials} == {(" true", " false")} and [t.label for t in trials] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (story(0, "Perhaps"), {}, "record 1: 'label' is 'Perhaps'; it must be one of"),
        ({"premises": ["Ann is shy."], "conclusion": "Ann is shy."}, {}, "record 1 has no 'label'"),
        (story(0, "True", premises=[]), {}, r"record 1: 'premises' is \[\]; give a list of non-empty texts"),
        (story(0, "True", premises=["a", ""]), {}, "'premises' is .*; give a list of non-empty texts"),
        (story(0, "True", conclusion=" "), {}, "record 1: 'conclusion' is empty"),
        (story(0, "True"), {"labels": 4}, "labels=4: give 3, or 2 to leave out"),
    ],
)
def test_bad_folio(row, options, message):
    with pytest.raises(InvalidInput, match=message):
        folio(Plain(), [row], **options)


# -- ProofWriter ------------------------------------------------------------------------------------------------


def test_proofwriter_release():
    trials = proofwriter(Words(), [theory(k) for k in range(3)])
    assert [t.id for t in trials][:3] == [f"proofwriter/AttNeg-0/Q{k}" for k in (1, 2, 3)]
    assert [t.label for t in trials][:3] == [0, 1, 2]
    one, two, three = trials[:3]
    # Only the first has one proof alone.
    assert (one.meta["proof"], two.meta["proof"], three.meta["proof"]) == ([0, 2], None, None)
    assert (one.meta["depth"], one.meta["max_depth"], one.meta["strategy"]) == (1, 1, "proof")
    assert len(proofwriter(Words(), [theory(k) for k in range(3)], labels=2)) == 6


def test_proofwriter_flat():
    trials = proofwriter(Words(), [flat(0, "True"), flat(1, "False"), flat(2, "Unknown"), flat(3, True)])
    assert [t.id for t in trials] == ["proofwriter/T-0", "proofwriter/T-0/2", "proofwriter/T-1", "proofwriter/T-1/2"]
    assert [t.label for t in trials] == [0, 1, 2, 0] and [t.meta["depth"] for t in trials] == [0, 1, 2, 3]
    assert trials[0].split == trials[1].split != trials[2].split


def test_proofwriter_in_a_closed_world_has_two_candidates():
    trials = proofwriter(Words(), [flat(0, True), flat(2, False)])
    assert {t.candidates for t in trials} == {(" true", " false")} and trials.options["left_out"] == {}


def test_proofwriter_with_options():
    rows = [
        {
            "id": f"L{k}",
            "context": f"Anne is kind{k}.",
            "question": "Based on the above, is the following statement true, false, or unknown? Anne is nice.",
            "options": ["A) True", "B) False", "C) Unknown"],
            "answer": "ABC"[k],
        }
        for k in range(3)
    ]
    trials = proofwriter(Words(), rows)
    assert [t.label for t in trials] == [0, 1, 2] and trials[0].meta["statement"] == "Anne is nice."
    assert trials[0].meta["rule"] is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (theory(0, questions={}), "record 1: 'questions' is empty"),
        (theory(0, questions={"Q1": {"question": "x", "answer": "so"}}), "record 1, Q1: 'answer' is 'so'; it must be"),
        (theory(0, questions={"Q1": 1}), "record 1, Q1, is '1', a int"),
        (theory(0, theory=None), "record 1 has no 'theory'"),
        (flat(0, "True", QDep="x"), "record 1: 'QDep' is 'x'; it must be a whole number"),
    ],
)
def test_bad_proofwriter(row, message):
    with pytest.raises(InvalidInput, match=message):
        proofwriter(Plain(), [row])


# -- published files --------------------------------------------------------------------------------------------

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def published() -> Path:
    if not (SHARED / "prontoqa").is_dir():
        pytest.skip(f"the published files are not at {SHARED}")
    return SHARED


def labels(trials: TrialSet) -> dict[str, int]:
    return dict(Counter(t.meta["verdicts"][t.label or 0] for t in trials))


def check_split(trials: TrialSet) -> None:
    where: dict[str, set] = {}
    for trial in trials:
        where.setdefault(trial.meta["group"], set()).add(trial.split)
    assert all(len(s) == 1 for s in where.values())
    left = trials.split("calibration")
    assert abs(len(left) - len(trials) / 2) <= 10
    for label, count in labels(trials).items():
        assert abs(labels(left)[label] - count / 2) <= 5


@pytest.mark.realdata
def test_published_prontoqa(published):
    trials = prontoqa(Plain(), path=published / "prontoqa")
    assert labels(trials) == {"true": 258, "false": 242}
    assert {t.meta["depth"] for t in trials} == {5} and all(len(t.meta["proof"]) == 6 for t in trials)
    check_split(trials)
    for trial in trials:
        chain = [trial.meta["premises"][i] for i in trial.meta["proof"]]
        assert sum(p.startswith(trial.meta["statement"].split(" ")[0]) for p in chain) == 1


@pytest.mark.realdata
def test_published_prontoqa_ood(published):
    trials = prontoqa_ood(Plain(), published / "prontoqa-ood")
    assert len(trials) == 110 and labels(trials) == {"true": 27 + 28 + 6 - 1, "false": 23 + 22 + 4 + 1}
    assert Counter(t.meta["depth"] for t in trials) == {1: 55, 2: 55}
    assert Counter(t.meta["rule"] for t in trials) == {"modus_ponens": 105, "conjunction_introduction": 5}
    assert trials.options["made_false"] == 5 and all(t.meta["proof"] for t in trials)
    check_split(trials)


@pytest.mark.realdata
@pytest.mark.slow
def test_published_pararule_plus(published):
    trials = pararule_plus(Plain(), published / "pararule-plus")
    assert len(trials) == 301 * 10 + 299 * 8 == 5402 and labels(trials) == {"true": 2701, "false": 2701}
    assert Counter(t.meta["depth"] for t in trials) == {2: 2708, 3: 2694}
    assert len({t.meta["group"] for t in trials}) == 600
    check_split(trials)


@pytest.mark.realdata
def test_published_multi_logieval(published):
    trials = multi_logieval(Plain(), published / "multi-logieval")
    assert len(trials) == 620 and labels(trials) == {"yes": 501, "no": 119}
    assert trials.options["recoded"] == ["d1_Data/nm/default_reasoning_open.json", "d1_Data/pl/CT.json"]
    assert any("\u2019" in p for t in trials for p in t.meta["premises"])
    assert Counter(t.meta["logic"] for t in trials) == {"pl": 225, "fol": 235, "nm": 160}
    check_split(trials)
    even = multi_logieval(Plain(), published / "multi-logieval", balance=True)
    assert labels(even) == {"yes": 119, "no": 119} and even.options["left_out"] == {"for balance": 382}


@pytest.mark.realdata
def test_published_folio(published):
    trials = folio(Plain(), published / "folio")
    assert labels(trials) == {"true": 72, "false": 63, "unknown": 69}
    assert len({t.meta["group"] for t in trials}) == 73
    check_split(trials)
    assert labels(folio(Plain(), published / "folio", labels=2)) == {"true": 72, "false": 63}
    twins = flipped(Plain(), trials)
    assert labels(twins) == {"true": 63, "false": 72, "unknown": 69}
