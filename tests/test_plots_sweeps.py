"""Figures of sweeps side by side: what is in them is what the tables say."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from helpers import texts
from sweep_samples import planted, right, study, sweep

from mechheads import plots
from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.panels import PAGE, Grid, legend_rows
from mechheads.plots.style import CONTROL_COLOUR, PALETTE, interval, number
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats import dose_response, task_dissociation

# plotly builds the attributes of its figures at run time, where a type checker does not see them.
ablation_curve: Any = plots.ablation_curve
ablation_forest: Any = plots.ablation_forest
control_scatter: Any = plots.control_scatter
describe: Any = plots.describe
dose_response_plot: Any = plots.dose_response_plot
intervention_curves: Any = plots.intervention_curves
necessity_curves: Any = plots.necessity_curves

QUICK: Any = {"n_boot": 40}
LONG = {"passkey_in_a_long<haystack_of_essays_by_many_hands": 1.0, "parametric_recall_of_countries_and_capitals": 0.2}
RANKINGS = {
    "locos": (0.6, 0.2, 0.05), "attention_spatial": (0.85, 0.7, 0.5), "dla": (0.9, 0.8, 0.8),
    "retrieval_score_of_question_tokens": (0.9, 0.9, 0.7),
}  # fmt: skip


def singles(seed: int = 0, **meta: Any) -> SweepResult:
    """Eight heads, each alone; the higher its number the more of the first task is lost."""
    rng, cells = np.random.default_rng(seed), {}
    for task in ("needles", "recall"):
        cells[task, "none", 0] = (rng.random(30) < 0.95).astype(float)
        for head in range(8):
            chance = 0.95 - (0.1 * head if task == "needles" else 0.0)
            cells[task, f"L{head}H3", 1] = (rng.random(30) < chance).astype(float)
    frame = sweep(cells).frame
    named = frame["ranking"].where(frame["k"] == 1, "")
    return SweepResult(frame.assign(heads=named), meta)


def panel(figure: Any, number: int) -> list[Any]:
    axis = "x" if number == 1 else f"x{number}"
    return [trace for trace in figure.data if (trace.xaxis or "x") == axis or trace.xaxis == f"x{number}"]


def named(traces: Any, name: str) -> Any:
    (found,) = [trace for trace in traces if trace.name == name]
    return found


def titles(figure: Any) -> list[str]:
    return [re.sub("</?b>", "", one.text).replace("<br>", " ") for one in figure.layout.annotations]


FIGURES: dict[str, Any] = {
    "interventions": lambda: intervention_curves(study(n=12), **QUICK),
    "interventions, long": lambda: intervention_curves(study(n=12, tasks=LONG, rankings=RANKINGS), **QUICK),
    "sides": lambda: necessity_curves(study(n=12), **QUICK),
    "sides, long": lambda: necessity_curves(study(n=12, tasks=LONG, rankings=RANKINGS), **QUICK),
    "scatter": lambda: control_scatter(planted(n=12), "needles", **QUICK),
    "scatter, long": lambda: control_scatter(planted(n=12, tasks=LONG | {"c": 0.3, "d": 0}), next(iter(LONG)), **QUICK),
    "doses": lambda: dose_response_plot(planted(n=12, tasks=LONG), "locos", **QUICK),
    "single heads": lambda: dose_response_plot(singles(), **QUICK),
    "kept": lambda: ablation_curve(planted(n=12, kept=True), **QUICK),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_one_look_a_description_and_units(name):
    figure = FIGURES[name]()
    template = figure.layout.template.layout
    assert template.paper_bgcolor == "white" and template.colorway == PALETTE
    assert len(describe(figure)) > 60 and figure.layout.meta["description"] == describe(figure)
    assert figure.layout.width <= PAGE and figure.layout.height <= 1000
    assert figure.layout.title.text and figure.layout.title.subtitle.text
    assert not any(re.search(r"\bnan\b|\binf\b", text.lower()) for text in [*texts(figure), describe(figure)])
    assert not any("long<haystack" in text for text in texts(figure) if text != describe(figure))
    layout = figure.to_dict()["layout"]
    shown = [
        layout[key]["title"]["text"] for key in layout if key.startswith(("xaxis", "yaxis")) and "title" in layout[key]
    ]
    shown = [text for text in shown if text]
    assert shown and all(
        text.replace("<br>", " ").endswith(("(number, k)", "(proportion)", "(share)")) for text in shown
    )


@pytest.mark.parametrize("name", FIGURES)
def test_titles_fit_their_panels_and_nothing_meets(name):
    layout = FIGURES[name]().to_dict()["layout"]
    margin = layout["margin"]
    across, up = layout["width"] - margin["l"] - margin["r"], layout["height"] - margin["t"] - margin["b"]
    boxes = [layout[key]["domain"] for key in layout if key.startswith("xaxis")]
    wide = (boxes[0][1] - boxes[0][0]) * across
    between = (
        min((b[0] - boxes[0][1]) * across for b in boxes if b[0] > boxes[0][1]) if max(boxes)[0] > 0 else margin["r"]
    )
    for one in layout["annotations"]:
        lines = one["text"].split("<br>")
        assert all(7.5 * len(re.sub("</?b>|&..;", "", line)) <= wide + between for line in lines)
        # Its lines stand above the panel and below what is over it: the heading, or the axis of the row above.
        tops = sorted({layout[key]["domain"][1] for key in layout if key.startswith("yaxis")})
        low = [
            layout[key]["domain"][0]
            for key in layout
            if key.startswith("yaxis") and layout[key]["domain"][0] > one["y"]
        ]
        room = (min(low) - one["y"]) * up - 45 if low else margin["t"] - 20
        assert 16 * len(lines) + 6 <= room and one["y"] in tops
    for key in layout:
        if key.startswith("xaxis"):
            for line in layout[key]["title"]["text"].split("<br>"):
                assert 6.2 * len(line) <= wide + between


# -- interventions -------------------------------------------------------------------------------


def test_panels_are_the_curves_of_every_intervention():
    sweeps = study(n=12)
    figure = intervention_curves(sweeps, seed=3, **QUICK)
    want = [f"{task}, {label}" for task in ("Needles", "Recall") for label in ("mean", "zero", "resample")]
    assert titles(figure) == want
    for i, (task, label) in enumerate([(t, n) for t in ("needles", "recall") for n in ("mean", "zero", "resample")]):
        curve = sweeps[label].curve("correct", seed=3, **QUICK)
        for ranking, name in (("locos", "LOCOS"), ("dla", "DLA"), ("random", "Random heads (3 draws)")):
            rows = curve.loc[(curve["task"] == task) & (curve["ranking"] == ranking)]
            line = next(t for t in panel(figure, i + 1) if t.name == name and t.mode == "lines+markers")
            assert list(line.x) == [0, 1, 5, 10] and list(line.y) == rows["mean"].tolist()
            hover = line.customdata[2]
            assert hover[0] == "5 heads ablated" and number(rows["mean"].iloc[2]) in hover[1]
            assert interval(rows["ci_low"].iloc[2], rows["ci_high"].iloc[2]) in hover[2]
    colours = {t.name: {u.line.color for u in figure.data if u.name == t.name} for t in figure.data if t.showlegend}
    assert all(len(found) == 1 for found in colours.values()) and colours["Random heads (3 draws)"] == {CONTROL_COLOUR}
    assert list(figure.layout.yaxis.range) == [-0.03, 1.03] == list(figure.layout.yaxis5.range)
    assert sum(bool(t.showlegend is not False) for t in figure.data) == 3
    told = describe(figure)
    assert told.startswith("mean: Curves of correct answers (proportion) against the number of ablated heads")
    assert "zero: Curves" in told and "resample: Curves" in told and "mean, kept" not in told


def test_what_is_asked_for_is_drawn():
    sweeps = study(n=8)
    figure = intervention_curves(sweeps, labels=["zero", "mean, kept"], tasks="recall", rankings="dla", **QUICK)
    assert titles(figure) == ["zero", "mean, kept"] and figure.layout.title.text.startswith("Ablating and keeping")
    assert figure.layout.xaxis.title.text == "Heads ablated (number, k)"
    assert figure.layout.xaxis2.title.text == "Heads kept (number, k)"
    assert {t.name for t in figure.data if t.mode == "lines+markers"} == {"DLA"}
    # DLA has the colour that it has among all.
    assert {t.line.color for t in figure.data if t.mode == "lines+markers"} == {PALETTE[1]}
    assert intervention_curves(sweeps, title="Mine & yours", **QUICK).layout.title.text == "Mine &amp; yours"


def test_unbounded_metrics_share_the_range_of_their_task():
    def turned(one: SweepResult) -> SweepResult:
        return SweepResult(one.frame.assign(metric="answer_logprob", value=-9 * one.frame["value"]), one.meta)

    sweeps = SweepSet({label: turned(one) for label, one in study(n=8, binary=False).items()})
    figure = intervention_curves(sweeps, **QUICK)
    ranges = [list(figure.layout[f"yaxis{n or ''}"].range) for n in ("", 2, 3, 4)]
    assert ranges[0] == ranges[1] == ranges[2] != ranges[3]
    low = min(min(t.y) for t in figure.data[:20] if t.mode == "lines+markers")
    assert ranges[0][0] <= low and figure.layout.yaxis.title.text == "Answer log-probability (nats)"


def test_interventions_are_refused():
    sweeps = study(n=6)
    with pytest.raises(UnknownName, match=r"sweep of the set"):
        intervention_curves(sweeps, labels="men")
    with pytest.raises(UnknownName, match=r"task of the sweep"):
        intervention_curves(sweeps, tasks="no such")
    with pytest.raises(InvalidInput, match=r"^0 interventions are to be drawn; a row holds 1 to 6: choose labels\.$"):
        intervention_curves(sweeps, labels=[])
    seven = SweepSet({f"m{i}": planted(n=4, draws=0) for i in range(7)})
    with pytest.raises(InvalidInput, match=r"^7 interventions are to be drawn; a row holds 1 to 6: choose labels\.$"):
        intervention_curves(seven)
    assert len(titles(intervention_curves(seven, labels=seven.labels[:6], tasks="needles", **QUICK))) == 6
    with pytest.raises(UnknownName, match=r"metric of the sweep"):
        intervention_curves(sweeps, metric="no such")


# -- both sides ----------------------------------------------------------------------------------


def test_both_sides_stand_side_by_side():
    sweeps = study(n=12)
    figure = necessity_curves(sweeps, **QUICK)
    assert titles(figure) == ["Needles, mean", "Needles, mean, kept", "Recall, mean", "Recall, mean, kept"]
    assert figure.layout.title.text == "Necessity and sufficiency, mean"
    whole = sweeps["mean"].cell("none", 0, "needles", "correct")["value"].mean()
    line = named(panel(figure, 2), "No ablation")
    assert set(line.y) == {whole} and list(line.x) == [0, 1, 5, 10] and line.line.dash == "dash"
    assert not [t for t in panel(figure, 1) if t.name == "No ablation"]
    kept = sweeps["mean, kept"].curve("correct", "needles", "locos", **QUICK)
    locos = next(t for t in panel(figure, 2) if t.name == "LOCOS" and t.mode == "lines+markers")
    assert list(locos.y) == kept["mean"].tolist() and locos.customdata[2][0] == "5 heads kept"
    assert "heads kept, all others being ablated" in describe(figure)


def test_both_sides_need_a_complement():
    with pytest.raises(InvalidInput, match=r"^the set holds 'mean', and no complement; sufficiency needs"):
        necessity_curves(SweepSet({"mean": planted(n=6)}))
    with pytest.raises(InvalidInput, match=r"no complement of 'zero'; sufficiency needs"):
        necessity_curves(study(n=6), "zero")


def test_single_sweeps_of_kept_heads():
    kept = planted(n=8, kept=True)
    figure = ablation_curve(kept, **QUICK)
    assert figure.layout.title.text == "Keeping only the highest-ranked heads"
    assert figure.layout.xaxis.title.text == "Heads kept (number, k)"
    assert "heads kept, all others being ablated" in describe(figure) and "heads kept" in describe(kept)
    line = next(t for t in figure.data if t.mode == "lines+markers")
    assert [hover[0] for hover in line.customdata] == ["no head kept", "1 head kept", "5 heads kept", "10 heads kept"]
    with pytest.raises(InvalidInput, match=r"k counts the heads kept, and the forest is of ablated heads; necessity_"):
        ablation_forest(kept, k=5)


# -- target and controls -------------------------------------------------------------------------


def test_scatter_is_the_table_of_dissociation():
    result = planted(n=20, tasks={"needles": 1.0, "recall": 0.2, "sums": 0.5})
    figure = control_scatter(result, "needles", **QUICK)
    table = task_dissociation(result, "needles", n_perm=1, **QUICK)
    assert titles(figure) == ["Recall", "Sums"]
    for i, control in enumerate(("recall", "sums")):
        for ranking, name in (("locos", "LOCOS"), ("random", "Random heads (3 draws)")):
            rows = table.loc[(table["control"] == control) & (table["ranking"] == ranking)]
            path = named(panel(figure, i + 1), name)
            assert list(path.x) == rows["lost"].tolist() and list(path.y) == rows["control_lost"].tolist()
            np.testing.assert_allclose(np.array(path.x) + path.error_x.array, rows["lost_high"])
            np.testing.assert_allclose(np.array(path.x) - path.error_x.arrayminus, rows["lost_low"])
            np.testing.assert_allclose(np.array(path.y) + path.error_y.array, rows["control_high"])
            np.testing.assert_allclose(np.array(path.y) - path.error_y.arrayminus, rows["control_low"])
            last = rows.iloc[-1]
            assert f"difference {number(last['difference'])}" in path.customdata[-1]
            assert "10 heads ablated" in path.customdata[-1]
        assert named(panel(figure, i + 1), "LOCOS").text[-1] == "k 10"
        assert set(named(panel(figure, i + 1), "Random heads (3 draws)").text) == {""}
    span = list(figure.layout.xaxis.range)
    assert span == list(figure.layout.yaxis2.range) and span[0] <= 0 and span[1] >= 1
    row = table.loc[(table["control"] == "sums") & (table["ranking"] == "locos")].iloc[-1]
    assert f"LOCOS at 10 heads loses {number(row['lost'])} and {number(row['control_lost'])}" in describe(figure)


def test_names_that_would_meet_are_left_out():
    cells: dict[Any, Any] = {}
    for task in ("needles", "recall"):
        cells |= {(task, "none", 0): right(20, 20), (task, "a", 5): right(10, 20), (task, "b", 5): right(9, 20)}
        cells[task, "c", 5] = right(2, 20)
    figure = control_scatter(sweep(cells), "needles", **QUICK)
    assert [t.text[-1] for t in figure.data if t.text is not None] == ["k 5", "", "k 5"]


def test_cells_without_a_share_are_counted():
    cells: dict[Any, Any] = {("needles", "none", 0): right(20, 20), ("needles", "a", 5): right(4, 20)}
    cells |= {("recall", "none", 0): right(20, 20), ("recall", "a", 5): right(18, 20)}
    cells |= {("sums", "none", 0): right(0, 20), ("sums", "a", 5): right(0, 20)}
    figure = control_scatter(sweep(cells), "needles", **QUICK)
    assert "1 cell without a valid share left out" in figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "1 cell without a valid share." in describe(figure)
    nothing = control_scatter(sweep(cells), "sums", "needles", **QUICK)
    assert [t.name for t in nothing.data] == ["both lose alike"]
    assert "1 cell without a valid share left out" in nothing.layout.title.subtitle.text.replace("<br>", " ")


def test_scatter_is_refused():
    result = planted(n=6)
    with pytest.raises(UnknownName, match=r"task of the sweep"):
        control_scatter(result, "no such")
    with pytest.raises(UnknownName, match=r"ranking of the sweep"):
        control_scatter(result, "needles", rankings="wu")
    with pytest.raises(
        InvalidInput, match=r"^the controls of 'needles' are \[\]; give other tasks of \['needles'\]\.$"
    ):
        control_scatter(planted(n=6, tasks={"needles": 1.0}), "needles")
    with pytest.raises(InvalidInput, match=r"k counts the heads kept, .*; a share lost needs one"):
        control_scatter(planted(n=6, kept=True), "needles")


# -- doses ---------------------------------------------------------------------------------------


def dots(figure: Any, number: int) -> dict[float, tuple[Any, int]]:
    """Dot by its place from the top."""
    traces = [t for t in panel(figure, number) if t.mode == "markers" and t.x[0] is not None]
    return {y: (trace, i) for trace in traces for i, y in enumerate(trace.y)}


def test_doses_are_the_table():
    result = planted(n=20)
    figure = dose_response_plot(result, "locos", **QUICK)
    table = dose_response(result, ranking="locos", **QUICK)
    assert titles(figure) == ["Needles", "Recall"]
    assert list(figure.layout.yaxis.ticktext) == ["L0H0 (k 0 to 1)", "+4 heads (k 1 to 5)", "+5 heads (k 5 to 10)"]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # the first on top
    assert figure.layout.xaxis.title.text == "Change of<br>correct answers (proportion)"
    for i, task in enumerate(("needles", "recall")):
        rows = table.loc[table["task"] == task].to_dict("records")
        for place, (trace, at) in sorted(dots(figure, i + 1).items()):
            row = rows[int(place)]
            assert trace.x[at] == row["change"]
            assert trace.x[at] + trace.error_x.array[at] == pytest.approx(row["ci_high"])
            assert trace.x[at] - trace.error_x.arrayminus[at] == pytest.approx(row["ci_low"])
            assert (trace.marker.symbol == "circle") == (row["p_holm"] <= 0.05)
            assert f"corrected {number(row['p_holm'], 2)}" in trace.customdata[at]
            assert f"a head: {number(row['per_head'])}" in trace.customdata[at]
        assert len(dots(figure, i + 1)) == 3
    assert {t.name for t in figure.data if t.showlegend is not False} == {"Changed", "Not told from no change"}


def test_single_heads_are_sorted_by_what_they_take_away():
    result = singles()
    figure = dose_response_plot(result, **QUICK)
    table = dose_response(result, **QUICK)
    first = table.loc[table["task"] == "needles"].sort_values("change", kind="stable")
    assert list(figure.layout.yaxis.ticktext) == first["ranking"].tolist()
    found = [trace.x[i] for _, (trace, i) in sorted(dots(figure, 1).items())]
    assert found == first["change"].tolist() and figure.layout.title.text == "Single heads: dose and response"
    worst = first.iloc[0]
    assert f"the greatest change is {number(worst['change'])}" in describe(figure)
    assert f"at {worst['ranking']}" in describe(figure)


def test_doses_are_refused():
    with pytest.raises(UnknownName, match=r"ranking of the sweep"):
        dose_response_plot(planted(n=6), "wu")
    with pytest.raises(InvalidInput, match=r"was measured for none of the rankings on the tasks asked for\.$"):
        dose_response_plot(sweep({("a", 5): right(2, 4)}))
    cells = {("needles", "none", 0): right(2, 4), ("recall", "none", 0): right(2, 4), ("recall", "a", 5): right(1, 4)}
    apart = sweep(cells)
    with pytest.raises(InvalidInput, match=r"^no step was measured on 'needles'; there is nothing to draw\.$"):
        dose_response_plot(apart, "a", tasks=["needles", "recall"])
    assert titles(dose_response_plot(apart, "a", **QUICK)) == ["Recall"]


def test_seeds_of_an_intervention_make_no_control_of_a_ranking():
    seeds = np.array([right(9, 12), right(6, 12), right(8, 12)])
    frame = sweep({("none", 0): right(12, 12), ("locos", 5): seeds, ("mine", 5): seeds, ("random", 5): seeds}).frame
    shared = SweepResult(frame.assign(heads=frame["heads"].where(frame["ranking"] != "locos", "L0H0, L1H0")))
    for figure in (
        ablation_curve(shared, **QUICK),
        intervention_curves(SweepSet({"resample": shared}), **QUICK),
    ):
        lines = {trace.name: trace.line for trace in figure.data if trace.showlegend}
        assert (lines["LOCOS"].color, lines["LOCOS"].dash) == (PALETTE[0], "solid")
        # The heads of these two differ from draw to draw.
        assert lines["Mine (3 draws)"].color == lines["Random heads (3 draws)"].color == CONTROL_COLOUR
    dots = {
        trace.name: list(trace.y) for trace in ablation_forest(shared, k=5, **QUICK).data if trace.mode == "markers"
    }
    assert len(dots["Highest-ranked heads"]) == 1 and len(dots["Random heads"]) == 2


# -- panels --------------------------------------------------------------------------------------


def test_grid_by_hand():
    grid = Grid(2, 2, 100, 50, between=20, below=30)
    assert grid.inner == (220, 130)
    assert grid.domains(0, 0) == ([0.0, 100 / 220], [pytest.approx(80 / 130), 1])
    across, up = grid.domains(1, 1)
    assert across == [120 / 220, 1.0] and up == [pytest.approx(0), pytest.approx(50 / 130)]
    # A title of two lines moves the rows apart by one.
    long = Grid(2, 2, 100, 50, between=20, below=30, titles=("short", "two words here"))
    assert long.inner[1] == grid.inner[1] + 18 and long.above == grid.above + 18
    axis = Grid(2, 2, 100, 50, between=20, below=30, x_title="Lost on the target (share)")
    assert axis.inner[1] == grid.inner[1] + 18 * (len(axis.broken(axis.x_title)) - 1) > grid.inner[1]


def test_legends_take_as_many_rows_as_they_need():
    assert legend_rows([], 300) == 0
    one, two = legend_rows(["ab", "cd"], 300), legend_rows(["a name of thirty letters or so"] * 2, 300)
    assert two - one == 29 and legend_rows(["x" * 100], 100) == one
    assert math.isclose(legend_rows(["a"] * 20, 102), 8 + 29 * 10)
