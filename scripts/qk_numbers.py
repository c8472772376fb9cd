"""Put what ``mechheads qk report`` found into docs/qk_score.md, and the cards of nano into docs/nano.md.

Usage: python scripts/qk_numbers.py qk-nano qk-smollm2     (folders that ``mechheads qk report`` wrote, one a model)
       python scripts/qk_numbers.py                        (the cards of the shipped models alone)

docs/qk_summary.json keeps exactly what is quoted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, SUMMARY = ROOT / "docs" / "qk_score.md", ROOT / "docs" / "qk_summary.json"
NANO, CARDS = ROOT / "docs" / "nano.md", ROOT / "mechheads" / "nano" / "weights"
START, END = "<!-- qk numbers -->", "<!-- end of qk numbers -->"
NANO_START, NANO_END = "<!-- nano numbers -->", "<!-- end of nano numbers -->"

_ARMS = {
    "gold": "the proof's",
    "best heads": "those that the heads attend to",
    "model": "those that each alone move the model most",
    "random": "as many from outside the proof",
    "random any": "as many at random",
}
_TASKS = {
    "literal": "retrieval, literal",
    "nonliteral": "retrieval, non-literal",
    "recall": "recall",
    "arithmetic": "arithmetic",
}


# -- what is quoted ------------------------------------------------------------------------------------------------


def quoted(report: Mapping[str, Any]) -> dict[str, Any]:
    """What the page quotes of a report's qk.json."""
    model = {k: report["model"][k] for k in ("name", "architecture", "n_layers", "n_heads", "weight_hash")}
    moved = report["transfer"]
    cells = ("chosen_on", "tested_on", "accuracy", "ci_low", "ci_high", "baseline", "inverted")
    return {
        "model": model,
        "options": {k: report["options"][k] for k in ("k", "rotary", "offset", "alpha", "draws", "seed")},
        "sets": {name: _set(one) for name, one in report["sets"].items()},
        "transfer": None if moved is None else [{c: row[c] for c in cells if c in row} for row in moved["cells"]],
    }


def _set(one: Mapping[str, Any]) -> dict[str, Any]:
    """One data set: the first head chosen on calibration questions stands for the chosen."""
    judged, found = one["judgement"], one["evaluation"]
    first = one["heads"][0]
    row = next(r for r in judged["heads"] if r["label"] == first)
    turned = first in one["inverse"]
    wanted = ("by", "value", "scorer", "n", "accuracy", "ci_low", "ci_high", "difference", "difference_low",
              "difference_high")  # fmt: skip
    rows = [{k: r[k] for k in wanted} for r in found["rows"] if r["scorer"] in (first, "majority", "model")]
    debias, premises = one["debias"], one["premises"]
    curve = one["learning_curve"]
    return {
        "n_calibration": judged["n_calibration"],
        "n_test": judged["n_test"],
        "chance": judged["chance"],
        "n_heads": len(judged["heads"]),
        "n_right": len(judged["significant"]),
        "n_inverse": len(judged["inverse"]),
        "chosen": one["heads"],
        "passing": one["passing"],
        "first": {"head": first, "turned": turned, "auroc": row["auroc"], "p": row["p_inverse" if turned else "p"]},
        "rows": [r for r in rows if r["by"] == "overall" or _values(rows, r["by"]) > 1],
        "depth": {k: one["depth"][k] for k in ("first_third_share", "mean_depth")},
        "curve": None
        if curve is None
        else [{k: b[k] for k in ("size", "test", "calibration")} for b in curve["bands"]],
        "debias": None if debias is None else _debias(debias, first),
        "pruning": one["pruning"],
        "premises": None if premises is None else _premises(premises),
        "notes": one["notes"],
    }


def _values(rows: Sequence[Mapping[str, Any]], by: str) -> int:
    return len({str(r["value"]) for r in rows if r["by"] == by})


def _debias(debias: Mapping[str, Any], first: str) -> dict[str, Any]:
    wanted = ("original", "flipped", "difference", "difference_low", "difference_high", "statement_only",
              "statement_low", "statement_high")  # fmt: skip
    row = next(r for r in debias["heads"] if r["label"] == first)
    return {
        "n_pairs": debias["n_pairs"],
        "n_looked_at": len(debias["heads"]),
        "flagged": debias["flagged"],
        "first": {k: row[k] for k in wanted},
    }


def _premises(premises: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("arm", "n", "flipped", "flipped_low", "flipped_high", "drop", "drop_low", "drop_high")
    return {
        "n_questions": premises["n_questions"],
        "arms": [{k: r[k] for k in wanted} for r in premises["arms"] if r["round"] == "all"],
        "cost_ratio": premises["cost_ratio"],
        "seconds_ratio": premises["seconds_ratio"],
    }


# -- how it is told ------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def number(value: float | None, sign: str = "") -> str:
    """Two digits, or a dash."""
    return "-" if value is None else f"{value:{sign}.2f}"


def interval(row: Mapping[str, Any], name: str, lead: str = "ci", sign: str = "") -> str:
    """A number with its interval."""
    low, high = row[f"{lead}_low"], row[f"{lead}_high"]
    bounds = "" if low is None or high is None else f" [{number(low, sign)}, {number(high, sign)}]"
    return "-" if row[name] is None else f"{number(row[name], sign)}{bounds}"


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """The block of docs/qk_score.md."""
    lines: list[str] = []
    for report in reports:
        model = report["model"]
        lines += [
            f"### {model['name']}",
            "",
            f"{model['architecture']}, {model['n_layers']} layers of {model['n_heads']} heads, weights "
            f"{model['weight_hash']}; {report['options']['k']} heads chosen, seed {report['options']['seed']}.",
            "",
        ]
        for name, one in report["sets"].items():
            lines += _told(name, one, report["options"])
        if report["transfer"] is not None:
            rows = [
                [r["chosen_on"], r["tested_on"], interval(r, "accuracy"), number(r["baseline"]), str(r["inverted"])]
                for r in report["transfer"]
            ]
            header = ("chosen on", "tested on", "accuracy of the heads", "model's own output", "heads inverted there")
            lines += ["#### From one data set to another", "", *table(header, rows), ""]
    return "\n".join(lines).strip()


def _told(name: str, one: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """One data set."""
    head = _first_name(one)
    lines = [
        f"#### {name}",
        "",
        f"{one['n_calibration']} questions choose heads, {one['n_test']} others test them; guessing is right in "
        f"{number(one['chance'])}.",
        "",
        f"* Right more often than chance, corrected for {one['n_heads']} heads (p <= {options['alpha']:g}): "
        f"{one['n_right']}; wrong more often: {one['n_inverse']}. Of the {len(one['chosen'])} heads chosen, "
        f"{len(one['passing'])} stand" + (f": {', '.join(one['passing'])}." if one["passing"] else "."),
        f"* {head[0].upper()}{head[1:]}: AUROC {number(one['first']['auroc'])}, corrected p = {one['first']['p']:.2g}.",
        *_wording(one["debias"], head),
        *_sizes(one["curve"]),
        "",
        *_accuracy_table(one, head),
        "",
    ]
    if one["pruning"] is not None:
        lines += [*_pruning_table(one["pruning"]), ""]
    if one["premises"] is not None:
        lines += [*_premise_table(one["premises"]), ""]
    return lines + [f"* {note}" for note in one["notes"]] + ([""] if one["notes"] else [])


def _first_name(one: Mapping[str, Any]) -> str:
    """The head chosen first by its name if it stands, else without: it was only the luckiest."""
    first = one["first"]
    if first["head"] not in one["passing"]:
        return "the head chosen first (it does not stand)"
    return first["head"] + (" (sign turned)" if first["turned"] else "")


def _sizes(curve: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if curve is None:
        return []
    told = ", ".join(f"{b['size']}: {number(b['test'])} ({number(b['calibration'])})" for b in curve)
    return [
        "* By number of calibration questions, the best head of them is right in (in brackets: on the questions it was "
        f"chosen by) {told}."
    ]


def _wording(debias: Mapping[str, Any] | None, head: str) -> list[str]:
    if debias is None:
        return []
    first, flagged = debias["first"], ", ".join(debias["flagged"]) or "none"
    return [
        f"* Wording: of {debias['n_looked_at']} heads on {debias['n_pairs']} label-flipped twins flagged: {flagged}. "
        f"{head[0].upper()}{head[1:]} is right in {number(first['original'])} of the originals, in "
        f"{number(first['flipped'])} of their twins (difference {interval(first, 'difference', 'difference', '+')}), "
        f"and in {interval(first, 'statement_only', 'statement')} of the bare statements."
    ]


def _accuracy_table(one: Mapping[str, Any], head: str) -> list[str]:
    """Held-out accuracy, over all questions and by kind."""
    kinds: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in one["rows"]:
        kinds.setdefault((row["by"], str(row["value"])), {})[row["scorer"]] = row
    rows = []
    for (by, value), mine in kinds.items():
        first, own = mine[one["first"]["head"]], mine["model"]
        told = "all" if by == "overall" else f"{by} {value}".replace("_", " ")
        rows.append(
            [
                told,
                str(own["n"]),
                interval(own, "accuracy"),
                interval(first, "accuracy"),
                interval(first, "difference", "difference", "+"),
                interval(mine["majority"], "accuracy") if "majority" in mine else "-",
            ]
        )
    header = ("questions", "n", "model's own output", head, "difference", f"majority of {len(one['chosen'])}")
    return table(header, rows)


def _pruning_table(pruning: Sequence[Mapping[str, Any]]) -> list[str]:
    whole = next(r for r in pruning if r["k"] == 0)
    rows = [["none", interval(whole, "mean"), interval(whole, "mean")]]
    for k in sorted({r["k"] for r in pruning} - {0}):
        at = {r["ranking"]: r for r in pruning if r["k"] == k}
        rows.append([str(k), interval(at["best"], "mean"), interval(at["random"], "mean")])
    return table(("heads pruned", "model's accuracy without the best", "without random ones"), rows)


def _premise_table(premises: Mapping[str, Any]) -> list[str]:
    rows = [
        [_ARMS[r["arm"]], str(r["n"]), interval(r, "flipped", "flipped"), interval(r, "drop", "drop", "+")]
        for r in premises["arms"]
    ]
    return [
        *table(("premises removed", "n", "verdicts that move", "log-odds lost (nats)"), rows),
        "",
        f"Removing premises took {premises['cost_ratio']:.1f} times the tokens and {premises['seconds_ratio']:.1f} "
        f"times the seconds of one QK-score pass over the same {premises['n_questions']} questions.",
    ]


def cards() -> list[dict[str, Any]]:
    """The card of each shipped model."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(CARDS.rglob("card.json"))]


def card_markdown(shipped: Sequence[Mapping[str, Any]]) -> str:
    """The block of docs/nano.md: a line and a table a model."""
    lines: list[str] = []
    for card in shipped:
        chance, recipe = card["chance"], card["recipe"]
        rows = []
        for task, accuracy in card["accuracy"].items():
            told = _TASKS.get(task, f"logic, {task.replace('_', ' ')}")
            rows.append([told, f"{accuracy:.3f}", number(chance.get(task, chance["logic"]))])
        heads = f"{recipe['layers']} layers of {recipe['heads']} heads ({recipe['kv_heads']} key/value heads)"
        lines += [
            f"`{card['name']}`: {heads}, {card['parameters']:,} parameters; {recipe['steps']:,} steps, "
            f"{card['training_seconds'] / 60:.0f} minutes of training; each accuracy is over "
            f"{card['held_out_prompts']} held-out prompts.",
            "",
            *table(("task", "accuracy", "chance"), rows),
            "",
        ]
    return "\n".join(lines).strip()


# -- files ---------------------------------------------------------------------------------------------------------


def put(path: Path, start: str, end: str, text: str) -> None:
    """Rewrite the block between two marks of a file."""
    before, rest = path.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def main(folders: Sequence[str]) -> None:
    """Rewrite the block of the cards, and that of the reports if any are named."""
    put(NANO, NANO_START, NANO_END, card_markdown(cards()))
    if not folders:
        return
    reports = [quoted(json.loads((Path(f) / "qk.json").read_text(encoding="utf-8"))) for f in folders]
    names = [report["model"]["name"] for report in reports]
    if len(set(names)) < len(names):
        raise SystemExit(f"the folders are of the models {', '.join(names)}; give one folder a model.")
    put(PAGE, START, END, markdown(reports))
    SUMMARY.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
