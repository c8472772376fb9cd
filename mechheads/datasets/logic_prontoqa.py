"""Logic trials from ProntoQA and ProntoQA-OOD files."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping, Sequence

from mechheads.datasets.logic_prompts import TemplateSource
from mechheads.datasets.logic_questions import TRUE_FALSE, LogicQuestion, plainly_negated, sentences_of
from mechheads.datasets.logic_read import TRUTHS, VERDICTS, Row, finish, read_rows
from mechheads.datasets.sources import Source
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, TrialSet


def places(premises: Sequence[str], said: Sequence[str]) -> list[int]:
    """Indices of the premises that stand word for word among some sentences."""
    wanted = {" ".join(s.split()) for s in said}
    return [i for i, p in enumerate(premises) if p in wanted]


# -- ProntoQA -------------------------------------------------------------------------------------------------


def prontoqa_file(
    model: Encoder, path: Source, *, n: int | None, seed: int, template: TemplateSource, calibration: float | None
) -> TrialSet:
    """Trials of a ProntoQA file; see ``prontoqa``."""
    read = read_rows(path, what="ProntoQA", split="validation")
    asked = [(row, with_options(row, "prontoqa", TRUE_FALSE)) for row in read.rows]
    return finish(
        model, "prontoqa", read, asked, n=n, seed=seed, template=template, calibration=calibration
    )  # fmt: skip


_OPTION = re.compile(r"\s*([A-Z])\)\s*(\S.*?)\s*")


def with_options(row: Row, dataset: str, candidates: Sequence[str]) -> LogicQuestion:
    """A question with lettered options, the statement after the question mark."""
    premises = sentences_of(row.get("context", str))
    asked = row.get("question", str)
    _, mark, statement = asked.partition("?")
    if not mark or not statement.strip():
        raise InvalidInput(f"{row.where}: 'question' is {asked!r}; the statement must follow its question mark.")
    options = {}
    for text in row.texts("options"):
        match = _OPTION.fullmatch(text)
        said = match and VERDICTS.get(match[2].lower())
        if not match or said not in candidates:
            raise InvalidInput(
                f"{row.where}: 'options' has {text!r}; expected such as 'A) True' of {list(candidates)}."
            )
        options[match[1]] = said
    answer = row.get("answer", str).strip()
    if answer not in options:
        raise InvalidInput(f"{row.where}: 'answer' is {answer!r}, none of the options {sorted(options)}.")
    chain = row.texts("explanation", default=(), empty=True)
    proof = _proof(premises, chain, statement)
    return LogicQuestion(
        id=f"{dataset}/{row.get('id', (str, int))}",
        premises=premises,
        statement=statement,
        candidates=candidates,
        label=candidates.index(options[answer]),
        rule="modus_ponens" if dataset == "prontoqa" else None,
        depth=_steps(chain),
        distractors=None if proof is None else len(premises) - len(proof),
        proof=proof,
        dataset=dataset,
        meta={"record": row.place},
    )


def _steps(chain: Sequence[str]) -> int | None:
    """Inference steps of a chain that begins with a fact, then names a rule and what follows, in turn."""
    return (len(chain) - 1) // 2 if len(chain) > 2 and len(chain) % 2 else None


def _proof(premises: Sequence[str], chain: Sequence[str], statement: str) -> list[int] | None:
    """Premises named in a chain of thought, if it ends in the statement or its plain negation; else None."""
    steps = [" ".join(step.split()) for step in chain if step.strip()]
    wanted = " ".join(statement.split())
    if not steps or steps[-1] not in (wanted, plainly_negated(wanted)):
        return None
    return places(premises, steps[:-1]) or None


# Parts of a ProntoQA-OOD file name, and the rule they stand for.
_OOD_RULES = {
    "AndIntro": "conjunction_introduction",
    "AndElim": "conjunction_elimination",
    "OrIntro": "disjunction_introduction",
    "OrElim": "disjunction_elimination",
    "ProofByContra": "contradiction",
    "Composed": "composed",
}


def prontoqa_ood(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    seed: int = 0,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
) -> TrialSet:
    """Trials of ProntoQA-OOD files (Saparov et al. 2023, arXiv 2305.15269).

    A file is an object ``example1 .. exampleN``, each with ``test_example {question, query, chain_of_thought, answer}``
    (and in-context examples, which are left alone). Rule and depth are read from the file's name
    (``2hop_Composed_...``), else from the chain of thought.

    Files of proofs alone have no ``answer`` and only statements that hold (``Prove: X``). Half of these, drawn by the
    seed, are negated and then false (``meta["made_false"]``): ``X is Y`` by "not", a conjunction in one of its parts.
    Where that cannot be done safely the question is left out, true or not, or its form would give the label away; a
    warning and ``options["left_out"]`` count them. Where few of a file's statements have a "not", that word still tells
    which were negated: see how ``statement_only`` trials fare before reading anything into an accuracy.

    Args:
        model: A model, or anything with ``encode``.
        path: A file, a folder of them, records or a hub data set.
        n: Number of trials, a seeded sample in file order with labels in proportion; None is all.
        seed: Of every choice.
        template: See ``logic_template``.
        calibration: Calibration share; see ``build_trials``.

    Raises:
        InvalidInput: Naming file, row and field, if something cannot be used; or as ``build_trials`` does.
    """
    read = read_rows(path, what="ProntoQA-OOD", split="test")
    tests = [test for row in read.rows for test in _examples(row)]
    proofs = [test for test in tests if _query(test)[0] == "Prove"]
    false = _made_false(proofs, seed)
    asked, unsafe = [], 0
    for test in tests:
        if _query(test)[0] == "Prove" and test.where not in false:
            unsafe += 1
            continue
        asked.append((test, _ood(test, false.get(test.where))))
    if unsafe:
        warnings.warn(
            f"{unsafe} of {len(tests)} statements of {read.source} are to be proved and have no safe negation; they "
            "are left out, or all of their form would be true.",
            stacklevel=2,
        )
    left_out = {"no safe negation": unsafe} if unsafe else {}
    return finish(
        model, "prontoqa_ood", read, asked, n=n, seed=seed, template=template, calibration=calibration,
        left_out=left_out, made_false=sum(v is not None for v in false.values()),
    )  # fmt: skip


def _examples(row: Row) -> list[Row]:
    """The test examples of a file (an object of examples), or of one example that was handed in."""
    if "test_example" in row.data:
        return [row.part(row.data["test_example"], "test_example")]
    if "query" in row.data:
        return [row]
    found = []
    for name, example in row.data.items():
        inner = row.part(example, str(name))
        inner.get("test_example", Mapping)
        found.append(inner.part(inner.data["test_example"], "test_example"))
    if not found:
        raise InvalidInput(f"{row.where} has no examples.")
    return found


_QUERY = re.compile(r"\s*(?P<kind>True or false|Prove):\s*(?P<statement>\S.*?)\s*", re.DOTALL)


def _query(row: Row) -> tuple[str, str]:
    """How it is asked, and the statement."""
    query = row.get("query", str)
    match = _QUERY.fullmatch(query)
    if match is None:
        raise InvalidInput(f"{row.where}: 'query' is {query!r}; it must begin 'True or false: ' or 'Prove: '.")
    return match["kind"], " ".join(match["statement"].split())


def _made_false(rows: Sequence[Row], seed: int) -> dict[str, str | None]:
    """For each statement that has a safe negation, by place: its false form, or None where it is left true."""
    rng = random.Random(f"mechheads/prontoqa_ood/{seed}")
    forms = {row.where: refuted(_query(row)[1], rng) for row in rows}
    safe = [where for where, form in forms.items() if form is not None]
    chosen = set(rng.sample(safe, len(safe) // 2))
    return {where: forms[where] if where in chosen else None for where in safe}


def refuted(statement: str, rng: random.Random) -> str | None:
    """A statement of the same form that is false where this one holds, or None if there is no safe one.

    ``X is Y`` is negated; in ``X is Y and Z`` one part is. A disjunction is not: that one part holds says nothing of
    the other.
    """
    match = re.fullmatch(r"(?P<who>[A-Z]\w*) is (?P<what>[^.]+)\.", statement)
    if match is None or re.search(r"\b(?:or|if|either|neither|both)\b", match["what"]):
        return None
    parts = re.split(r"(,? and |, )", match["what"])
    at = 2 * rng.randrange((len(parts) + 1) // 2)
    part = parts[at]
    parts[at] = part.removeprefix("not ") if part.startswith("not ") else f"not {part}"
    return f"{match['who']} is {''.join(parts)}."


def _ood(row: Row, false: str | None) -> LogicQuestion:
    """The question of one test example."""
    kind, statement = _query(row)
    premises = sentences_of(row.get("question", str))
    chain = [step for step in row.get("chain_of_thought", list, default=[]) if isinstance(step, str) and step.strip()]
    hops = re.search(r"(?:^|_)(\d+)hop", row.stem)
    rule = next((name for part, name in _OOD_RULES.items() if part in row.stem), "modus_ponens" if row.stem else None)
    proof = _proof(premises, chain, statement)
    proved = "true" if false is None else "false"
    said = proved if kind == "Prove" else row.verdict("answer", TRUTHS)
    example = row.place.removesuffix(", test_example").split(", ")[-1]
    return LogicQuestion(
        id=f"prontoqa_ood/{row.stem or 'records'}/{example}",
        premises=premises,
        statement=false if false is not None else statement,
        candidates=TRUE_FALSE,
        label=TRUE_FALSE.index(said),
        rule=rule,
        depth=int(hops[1]) if hops else _steps(chain),
        distractors=None if proof is None else len(premises) - len(proof),
        proof=proof,
        dataset="prontoqa_ood",
        meta={"record": row.place, "asked": kind, "made_false": false is not None, "file": row.file},
    )
