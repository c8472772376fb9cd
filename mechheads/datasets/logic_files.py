"""Logic trials from published files: PARARULE Plus, Multi-LogiEval, FOLIO, ProofWriter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from mechheads.datasets.logic_prompts import TemplateSource
from mechheads.datasets.logic_prontoqa import places, with_options
from mechheads.datasets.logic_questions import (
    THREE,
    TRUE_FALSE,
    YES_NO,
    LogicQuestion,
    sentences_of,
)
from mechheads.datasets.logic_read import TRUTHS, VERDICTS, Row, balanced, finish, read_rows
from mechheads.datasets.sources import Source
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, TrialSet

_YES_NO = {"yes": "yes", "no": "no"}
_Asked = tuple[Row, LogicQuestion]


def _check_labels(labels: Any) -> None:
    if labels not in (2, 3) or isinstance(labels, bool):
        raise InvalidInput(f"labels={labels!r}: give 3, or 2 to leave out what is unknown.")


def _by_labels(asked: Sequence[_Asked], labels: int) -> tuple[list[_Asked], dict[str, int]]:
    """All questions with three candidates, or those that are true or false with two; and how many went."""
    if labels == 3:
        return list(asked), {}
    kept = []
    for row, q in asked:
        if q.candidates[q.label] != "unknown":
            two = {"candidates": TRUE_FALSE, "label": TRUE_FALSE.index(q.candidates[q.label])}
            kept.append((row, LogicQuestion.from_dict({**q.to_dict(), **two})))
    gone = len(asked) - len(kept)
    return kept, {"unknown": gone} if gone else {}


# -- PARARULE Plus --------------------------------------------------------------------------------------------


def pararule_plus(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    seed: int = 0,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
) -> TrialSet:
    """Trials of PARARULE Plus (Bao et al. 2022, IJCLR-NeSy), true or false in a closed world.

    A row is ``{id, context, questions: [{id, text, label, meta {QDep, QCat}}]}``, or, on the hub
    (``hub("qbao775/PARARULE-Plus", split="test")``), one question each ``{id, context, question, label, meta}`` with
    1 for true. A context's questions share a split. No proof is known; the rule is ``meta["category"]``, unnamed.

    Args and errors as in ``prontoqa_ood``.
    """
    read = read_rows(path, what="PARARULE Plus", split="test")
    asked = []
    for row in read.rows:
        premises = sentences_of(row.get("context", str))
        if "questions" in row.data:
            listed = row.get("questions", list)
            parts = [(row.part(q, f"question {k}"), "text") for k, q in enumerate(listed, 1)]
        else:
            parts = [(row, "question")]
        if not parts:
            raise InvalidInput(f"{row.where}: 'questions' is empty.")
        for part, text in parts:
            asked.append((part, _pararule(part, text, premises)))
    return finish(model, "pararule_plus", read, asked, n=n, seed=seed, template=template, calibration=calibration)


def _pararule(row: Row, text: str, premises: Sequence[str]) -> LogicQuestion:
    about = row.part(row.get("meta", Mapping, default={}), "meta")
    return LogicQuestion(
        id=f"pararule_plus/{row.get('id', (str, int))}",
        premises=premises,
        statement=row.get(text, str),
        candidates=TRUE_FALSE,
        label=TRUE_FALSE.index(row.verdict("label", TRUTHS)),
        depth=about.whole("QDep", default=None),
        dataset="pararule_plus",
        meta={"record": row.place, "category": about.get("QCat", str, default=None)},
    )


# -- Multi-LogiEval -------------------------------------------------------------------------------------------

_LOGICS = ("pl", "fol", "nm")


def multi_logieval(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    seed: int = 0,
    balance: bool = False,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
) -> TrialSet:
    """Trials of Multi-LogiEval (Patel et al. 2024, arXiv 2406.17169): yes/no questions of 33 rules.

    A file is ``{logic, rule, depth, samples: [{id, context, question, answer}]}``; the statement is the question.
    Files that are not UTF-8 are read as Windows-1252 (``options["recoded"]``). Ids are made of depth, logic, file name
    and the small id in it; the logic is that of the folder (``pl``, ``fol``, ``nm``), where there is one.

    71% of the published answers are yes, and most rules have one answer alone, so the rule gives the label away.

    Args:
        model: A model, or anything with ``encode``.
        path: A file, a folder (searched in full), records or a hub data set.
        n: Number of trials, a seeded sample in file order with labels in proportion; None is all.
        seed: Of every choice.
        balance: Thin out the commoner answer until there are as many of each, where a rule's are most unequal.
        template: See ``logic_template``.
        calibration: Calibration share; see ``build_trials``.

    Raises:
        InvalidInput: Naming file, row and field, if something cannot be used; or as ``build_trials`` does.
    """
    if not isinstance(balance, bool):
        raise InvalidInput(f"balance={balance!r}: give True or False.")
    read = read_rows(path, what="Multi-LogiEval", split="test", cp1252=True)
    asked = []
    for row in read.rows:
        samples = row.get("samples", list)
        if not samples:
            raise InvalidInput(f"{row.where}: 'samples' is empty.")
        for k, sample in enumerate(samples, 1):
            part = row.part(sample, f"sample {k}")
            asked.append((part, _multi(row, part)))
    left_out: dict[str, int] = {}
    if balance:
        asked, left_out = balanced(asked, seed)
    return finish(
        model, "multi_logieval", read, asked, n=n, seed=seed, template=template, calibration=calibration,
        left_out=left_out, balance=balance,
    )  # fmt: skip


def _multi(file: Row, row: Row) -> LogicQuestion:
    rule, said, depth = file.get("rule", str), file.get("logic", str).lower(), file.whole("depth")
    folder = next((p for p in reversed(PurePosixPath(file.file).parts[:-1]) if p in _LOGICS), None)
    logic = folder or {"mm": "nm"}.get(said, said)
    return LogicQuestion(
        id=f"multi_logieval/d{depth}/{logic}/{file.stem or rule}/{row.get('id', (int, str))}",
        premises=sentences_of(row.get("context", str)),
        statement=row.get("question", str),
        candidates=YES_NO,
        label=YES_NO.index(row.verdict("answer", _YES_NO)),
        rule=rule,
        depth=depth,
        dataset="multi_logieval",
        meta={"record": row.place, "logic": logic, "logic_in_file": said},
    )


# -- FOLIO ----------------------------------------------------------------------------------------------------


def folio(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    seed: int = 0,
    labels: int = 3,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
) -> TrialSet:
    """Trials of FOLIO (Han et al. 2022, arXiv 2209.00840): true, false or unknown.

    A row is ``{premises, conclusion, label}`` (and formulas, which are not read); premises are a list, or lines of a
    text. ``Uncertain`` and ``Unknown`` are the same label. On the hub: ``hub("yale-nlp/FOLIO", split="validation")``,
    which asks for an account.

    Args:
        model: A model, or anything with ``encode``.
        path: A file, a folder of them, records or a hub data set.
        n: Number of trials, a seeded sample in file order with labels in proportion; None is all.
        seed: Of every choice.
        labels: 3 candidates, or 2 to leave out what is unknown (counted in ``options["left_out"]``).
        template: See ``logic_template``.
        calibration: Calibration share; see ``build_trials``.

    Raises:
        InvalidInput: Naming file, row and field, if something cannot be used; or as ``build_trials`` does.
    """
    _check_labels(labels)
    read = read_rows(path, what="FOLIO", split="validation")
    several = len({row.file for row in read.rows}) > 1
    asked = []
    for row in read.rows:
        given = row.get("premises", (list, str))
        lines = given.splitlines() if isinstance(given, str) else row.texts("premises")
        own = row.get("example_id", (int, str), default=row.place.rsplit(" ", 1)[-1])
        asked.append(
            (
                row,
                LogicQuestion(
                    id=f"folio/{row.stem}/{own}" if several else f"folio/{own}",
                    premises=[line for line in lines if line.strip()],
                    statement=row.get("conclusion", str),
                    candidates=THREE,
                    label=THREE.index(row.verdict("label", VERDICTS)),
                    dataset="folio",
                    meta={"record": row.place},
                ),
            )
        )
    kept, left_out = _by_labels(asked, labels)
    return finish(
        model, "folio", read, kept, n=n, seed=seed, template=template, calibration=calibration,
        left_out=left_out, labels_kept=labels,
    )  # fmt: skip


# -- ProofWriter ----------------------------------------------------------------------------------------------


def proofwriter(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    seed: int = 0,
    labels: int = 3,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
) -> TrialSet:
    """Trials of ProofWriter (Tafjord et al. 2021, arXiv 2012.13048): true, false and, in an open world, unknown.

    A row is that of the release (``{id, maxD, theory, triples, rules, questions: {Q1: {question, answer, QDep,
    strategy, proofs}}}``) or one question each (``{id, maxD, theory, question, answer, QDep}``, as on the hub:
    ``hub("tasksource/proofwriter", split="test")``), or Logic-LM's with lettered options. Files in which nothing is
    unknown get two candidates. A proof is taken over where the release gives one alone, without negation as failure,
    and all of its premises stand in the theory.

    Args:
        model: A model, or anything with ``encode``.
        path: A file, a folder of them, records or a hub data set.
        n: Number of trials, a seeded sample in file order with labels in proportion; None is all.
        seed: Of every choice.
        labels: 3 candidates, or 2 to leave out what is unknown (counted in ``options["left_out"]``).
        template: See ``logic_template``.
        calibration: Calibration share; see ``build_trials``.

    Raises:
        InvalidInput: Naming file, row and field, if something cannot be used; or as ``build_trials`` does.
    """
    _check_labels(labels)
    read = read_rows(path, what="ProofWriter", split="test")
    asked = [pair for row in read.rows for pair in _writer_row(row)]
    seen: Counter[str] = Counter()
    for k, (row, q) in enumerate(asked):  # flat rows repeat the theory's id
        seen[q.id] += 1
        if "questions" not in row.data and row.data.get("theory") is not None and seen[q.id] > 1:
            asked[k] = (row, LogicQuestion.from_dict({**q.to_dict(), "id": f"{q.id}/{seen[q.id]}", "group": ""}))
    closed = all(q.candidates[q.label] != "unknown" for _, q in asked)
    kept, left_out = _by_labels(asked, 2 if closed else labels)
    return finish(
        model, "proofwriter", read, kept, n=n, seed=seed, template=template, calibration=calibration,
        left_out=left_out, labels_kept=2 if closed else labels,
    )  # fmt: skip


def _writer_row(row: Row) -> list[_Asked]:
    """The questions of one row."""
    if "options" in row.data:
        return [(row, with_options(row, "proofwriter", THREE))]
    if "questions" not in row.data:
        return [(row, _writer(row, row, f"proofwriter/{row.get('id', (str, int))}"))]
    listed = row.get("questions", Mapping)
    if not listed:
        raise InvalidInput(f"{row.where}: 'questions' is empty.")
    out = []
    for name, data in listed.items():
        part = row.part(data, str(name))
        out.append((part, _writer(row, part, f"proofwriter/{row.get('id', (str, int))}/{name}")))
    return out


def _writer(theory: Row, row: Row, id: str) -> LogicQuestion:
    premises = sentences_of(theory.get("theory", str))
    return LogicQuestion(
        id=id,
        premises=premises,
        statement=row.get("question", str),
        candidates=THREE,
        label=THREE.index(row.verdict("answer", VERDICTS)),
        depth=row.whole("QDep", default=None),
        proof=_written_proof(theory, row, premises),
        dataset="proofwriter",
        meta={
            "record": row.place,
            "max_depth": theory.whole("maxD", default=None),
            "strategy": row.get("strategy", str, default=None),
        },
    )


def _written_proof(theory: Row, row: Row, premises: Sequence[str]) -> list[int] | None:
    """Premises of the only proof of a row of the release, as ``[(((triple1) -> rule3))]`` names them, or None."""
    written = row.data.get("proofs")
    if not isinstance(written, str) or re.search(r"\bOR\b|NAF|CWA|FAIL", written):
        return None
    names = set(re.findall(r"(?:triple|rule)\d+", written))
    texts = []
    for name in names:
        entry = theory.data.get("triples" if name.startswith("triple") else "rules")
        entry = entry.get(name) if isinstance(entry, Mapping) else None
        text = entry.get("text") if isinstance(entry, Mapping) else None
        if not isinstance(text, str):
            return None
        texts.append(" ".join(text.split()))
    found = places(premises, texts)
    return found if found and set(texts) <= set(premises) else None
