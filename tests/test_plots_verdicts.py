"""Figures of verdicts: what is in them is what the results say, and chance has the middle colour."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import texts
from verdict_samples import noisy

from mechheads import plots
from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.style import DIVERGING, PALETTE, UNDEFINED_COLOUR, number
from mechheads.plots.verdict_parts import (
    band,
    bound_of,
    chance_colours,
    ends_told,
    heading,
    ink_on,
    legend_room,
    wrapped,
    zoomed,
)
from mechheads.premise_result import PremiseAblation
from mechheads.verdicts import debias, depth_profile, evaluate, judge, learning_curve, transfer

# plotly builds the attributes of its figures at run time, where a type checker does not see them.
accuracy_heatmap: Any = plots.accuracy_heatmap
accuracy_profile: Any = plots.accuracy_profile
calibration_curve: Any = plots.calibration_curve
debias_plot: Any = plots.debias_plot
describe: Any = plots.describe
premise_curves: Any = plots.premise_curves
transfer_matrix: Any = plots.transfer_matrix
verdict_curves: Any = plots.verdict_curves

PLANTED = {(1, 2): 0.95, (2, 0): 0.85, (3, 3): 0.08}
QUICK: Any = {"n_boot": 40, "n_perm": 99}


def sample(split: str, n: int = 120, *, seed: int = 0, undefined=(), model: str = "", **fields: Any) -> CandidateScores:
    """Scores with depth, distractors and rule; planted heads unless others are asked for."""
    fields = {"planted": PLANTED, "own": 0.6, "group_size": 2} | fields
    columns = {
        "depth": [1 + i % 3 for i in range(n)],
        "distractors": [i % 2 for i in range(n)],
        "rule": [("modus ponens", "a<b", None)[i // 2 % 3] for i in range(n)],
    }
    seed = seed + (1000 if split == "test" else 0)
    scores = noisy(n, split=split, seed=seed, name=f"{split}{seed}_", **columns, **fields)
    values = scores.values.copy()
    for layer, head in undefined:
        values[:, :, layer, head] = np.nan
    return replace(scores, values=values, meta={"model": {"name": model}} if model else {})


def judged(**fields: Any) -> Any:
    return judge(sample("calibration", **fields), sample("test", **fields), **QUICK)


def evaluated(heads: Any = "L1H2, L2H0, L3H3", **fields: Any) -> Any:
    inverse = fields.pop("inverse", "L3H3" if "L3H3" in heads else ())
    return evaluate(sample("test", **fields), heads, inverse=inverse, **QUICK)


def travelled(**fields: Any) -> Any:
    sets = {}
    for i, name in enumerate(("one", "a<b")):
        planted = PLANTED if not i else {**PLANTED, (1, 2): 0.1}
        own = {"planted": planted, "seed": 10 * i, "width": fields.get("widths", (2, 2))[i]}
        sets[name] = sample("calibration", **own).merge(sample("test", **own))
    return transfer(sets, k=2, mix=fields.get("mix", True), **QUICK)


def learnt(**fields: Any) -> Any:
    scores = sample("calibration", 480, **fields.pop("scores", {})).merge(sample("test", 200))
    options: Any = {"draws": 4, "k": 2} | fields
    return learning_curve(scores, **options)


def biased(*, alone: bool = True, heads: Any = None, n: int = 80, **fields: Any) -> Any:
    original = sample("test", n, **fields)

    def variant(seed: int, planted: Any) -> CandidateScores:
        one = sample("test", n, seed=seed, **(fields or {"planted": planted}))
        records = [{**r, "twin": twin} for r, twin in zip(one.records, original.trial_ids, strict=True)]
        return replace(one, records=records)

    flipped, statements = variant(1, {**PLANTED, (2, 0): 0.2}), variant(2, {(1, 2): 0.95})
    return debias(original, flipped, statements if alone else None, heads=heads, **QUICK)


def ablated(rounds: int = 3, arms: tuple[str, ...] = ("random", "gold"), n: int = 24) -> PremiseAblation:
    """Verdicts fall by 1 nat a gold premise from 1.5 on, so they move in round 2; random ones do nothing."""
    questions, rows = [], []
    for i in range(n):
        own = 1 + i % rounds
        questions.append(
            {
                "trial_id": f"q{i}", "group": f"w{i // 2}", "candidates": [" true", " false"], "label": 0, "verdict": 0,
                "p_label": 0.8, "log_odds": 1.5, "verdict_log_odds": 1.5, "n_premises": 6, "proof": list(range(own)),
                "number": own, "qk_right": None, "qk_margin": None,
            }
        )  # fmt: skip
        for arm in arms:
            for order in ("one at a time", "cumulative"):
                for r in range(1, own + 1):
                    left = 1.5 - (r if order == "cumulative" else 1) * (arm == "gold") + 0.001 * i
                    rows.append(
                        {
                            "trial_id": f"q{i}", "arm": arm, "order": order, "round": r, "removed": list(range(r)),
                            "verdict": int(left < 0), "p_label": 0.5, "log_odds": left, "verdict_log_odds": left,
                        }
                    )  # fmt: skip
    cost = {name: {"passes": 1, "tokens": 10, "seconds": 1.0} for name in ("qk", "ablation")}
    return PremiseAblation(questions, pd.DataFrame(rows), cost, {}, {"model": {"name": "tiny"}})


def named(figure: Any, name: str) -> Any:
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


def colour_at(trace: Any, value: float) -> str:
    """The colour of a heatmap at a value, by its own scale."""
    lowest, highest = trace.zmin, trace.zmax
    at = (value - lowest) / (highest - lowest)
    (colour,) = {c.upper() for p, c in trace.colorscale if abs(p - at) < 1e-9}
    return colour


FIGURES: dict[str, Any] = {
    "heatmap": lambda: accuracy_heatmap(judged(undefined=[(0, 0)])),
    "lines": lambda: verdict_curves(evaluated()),
    "rows": lambda: verdict_curves(evaluated(), by="rule"),
    "transfer": lambda: transfer_matrix(travelled()),
    "calibration": lambda: calibration_curve(learnt()),
    "profile": lambda: accuracy_profile(depth_profile(judged(undefined=[(0, i) for i in range(5)]))),
    "debias": lambda: debias_plot(biased()),
    "premises": lambda: premise_curves(ablated(), n_boot=40),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_have_one_look_and_a_description(name):
    figure = FIGURES[name]()
    assert type(figure).__name__ == "Figure"
    template = figure.layout.template.layout
    assert template.paper_bgcolor == "white" and template.colorway == PALETTE
    assert len(describe(figure)) > 60 and figure.layout.meta["description"] == describe(figure)
    assert figure.layout.width <= 900 and figure.layout.height <= 900
    assert figure.layout.title.text and figure.layout.title.subtitle.text
    assert not any(re.search(r"\bnan\b", text.lower()) for text in [*texts(figure), describe(figure)])
    assert not any("a<b" in text for text in texts(figure) if text != describe(figure))


@pytest.mark.parametrize("name", FIGURES)
def test_titles_fit_beside_the_buttons(name):
    layout = FIGURES[name]().layout
    room = layout.width - layout.margin.l
    for text, letter in ((layout.title.text, 8), (layout.title.subtitle.text, 5.5)):
        assert all(letter * len(line) <= room for line in text.split("<br>"))
    lines = len(layout.title.text.split("<br>")), len(layout.title.subtitle.text.split("<br>"))
    assert layout.margin.t >= 18 * lines[0] + 14 * lines[1]


# -- the parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "bound"), [(0.5, 0.3), (0.2, 0.7), (1 / 3, 0.25), (0.0, 0.4)])
def test_colours_are_even_about_chance_and_cut_where_nothing_can_be(chance, bound):
    low = -1.0 if chance == 0 else 0.0
    found = chance_colours(chance, bound, low=low)
    assert found["zmin"] == max(chance - bound, low) and found["zmax"] == chance + bound
    places = [p for p, _ in found["colorscale"]]
    assert places == sorted(places) and places[0] == 0 and places[-1] == 1
    values = {round(found["zmin"] + p * (found["zmax"] - found["zmin"]), 9): c for p, c in found["colorscale"]}
    assert values[round(chance, 9)] == "#FFFFFF"
    for place, colour in DIVERGING:  # equal distances have the diverging map's equal colours
        value = round(chance + (2 * float(place) - 1) * bound, 9)
        if found["zmin"] <= value <= found["zmax"]:
            assert values[value] == str(colour).upper()


def test_the_end_of_the_colours():
    assert bound_of(np.array([0.02, np.nan, -0.1]), None) == 0.25
    assert bound_of(np.array([0.02, -0.4]), None) == 0.4
    assert bound_of(np.array([np.nan]), None) == 0.25 and bound_of(np.array([0.4]), 0.1) == 0.1
    for limit in (0, -0.1, math.inf, 1.5, math.nan):
        with pytest.raises(InvalidInput, match=rf"limit is {limit!r}; give the distance from chance .* at most 1\."):
            bound_of(np.array([0.4]), limit)


def test_ink_is_readable_on_every_colour():
    scale = chance_colours(0.5, 0.5)
    inks = ink_on(scale, np.array([0.0, 0.5, 0.7, 1.0]))
    assert inks == ["white", "#1A1A1A", "#1A1A1A", "white"]


def test_small_parts():
    assert ends_told(0.25, 0.75) == "0.25 to 0.75" and "fewer than two groups" in ends_told(math.nan, math.nan)
    assert wrapped("", 100) == [""] and len(wrapped("word " * 40, 200)) > 5
    text, top = heading("a<b", ["x & y", "z"], width=600, left=60)
    assert text == {"text": "a&lt;b", "subtitle": {"text": "x &amp; y<br>z"}}
    assert heading("t " * 90, ["z"], width=600, left=60)[1] > top
    assert legend_room([], 300) == 0 and legend_room(["name"] * 9, 300) > legend_room(["name"], 300)
    assert zoomed([0.5, math.nan, 0.52]) == pytest.approx([0.46, 0.56]) and zoomed([0.0, 1.0]) == [-0.03, 1.03]
    (area,) = band([1, 2, 3, 4], [0, 0, math.nan, 0], [1, 1, math.nan, 1], "#000000", "m")
    assert area.x == (1, 2, 2, 1, 1, None, 4, 4, 4) and area.y == (0, 0, 1, 1, 0, None, 0, 1, 0)
    assert band([1], [math.nan], [math.nan], "#000000", "m") == []


# -- the accuracy heatmap ------------------------------------------------------------------------


def test_heatmap_shows_the_accuracies_about_chance():
    judgement = judged(undefined=[(0, 1)], model="tiny")
    figure = accuracy_heatmap(judgement)
    cells, grey = figure.data[:2]
    np.testing.assert_array_equal(np.array(cells.z, dtype=float), judgement.accuracy("test"))
    assert colour_at(cells, 0.5) == "#FFFFFF" and 0.5 - cells.zmin == pytest.approx(cells.zmax - 0.5)
    bound = np.nanmax(np.abs(judgement.accuracy("test") - 0.5))
    assert cells.zmax == pytest.approx(0.5 + bound)
    assert {c for _, c in grey.colorscale} == {UNDEFINED_COLOUR} and np.isfinite(np.array(grey.z, float)).sum() == 1
    assert tuple(figure.layout.yaxis.range) == (-0.5, 3.5) and tuple(figure.layout.xaxis.range) == (-0.5, 4.5)
    assert figure.layout.title.text == "Accuracy of each head, tiny"
    low, high = judgement.baseline().low, judgement.baseline().high
    own = f"model's own output {judgement.baseline().estimate:.2f} (95% CI {low:.2f} to {high:.2f})"
    subtitle = figure.layout.title.subtitle.text
    assert f"120 held-out trials; chance 0.50; {own}" in subtitle.replace("<br>", " ")
    assert "2 of 19 heads right more often than chance, 1 inverse" in subtitle.replace("<br>", " ")
    assert judgement.verdict() in describe(figure) and "Undefined: 1 head." in describe(figure)


def test_heatmap_hover_has_interval_p_values_and_trials():
    judgement = judged(undefined=[(0, 1)])
    figure = accuracy_heatmap(judgement)
    low, high = judgement.interval("test")
    got = figure.data[0].customdata[1][2]
    assert list(got) == [
        "<b>L1H2</b>",
        f"accuracy: {number(judgement.accuracy()[1, 2])}",
        f"95% CI: {number(low[1, 2])} to {number(high[1, 2])}",
        f"AUROC: {number(judgement.auroc()[1, 2])}",
        f"corrected p: {number(judgement.p()[1, 2])} (right), {number(judgement.p_inverse()[1, 2])} (inverse)",
        "120 held-out trials",
    ]
    assert "undefined" in figure.data[1].customdata[0][1][1]
    assert all(f"customdata[{i}]" in figure.data[0].hovertemplate for i in range(6))
    assert not any("CI" in str(t) for t in np.ravel(accuracy_heatmap(judgement, ci=False).data[0].customdata))


def test_heatmap_marks_what_passes():
    judgement = judged()
    figure = accuracy_heatmap(judgement, heads="L0H0")
    rings = named(figure, "Right more often than chance")
    crosses = named(figure, "Inverse: wrong more often than chance")
    assert rings.meta["heads"] == judgement.significant().labels and set(rings.meta["heads"]) == {"L1H2", "L2H0"}
    assert list(zip(rings.y, rings.x, strict=True)) == [(h.layer, h.head) for h in judgement.significant()]
    assert crosses.meta["heads"] == ["L3H3"] and rings.marker.symbol != crosses.marker.symbol
    assert named(figure, "Chosen heads").meta["heads"] == ["L0H0"]
    assert len(accuracy_heatmap(judgement, mark="none").data) == 1
    both = named(accuracy_heatmap(judgement, mark="both"), "Right more often than chance")
    assert both.meta["heads"] == judgement.significant(on="both").labels


def test_heatmap_says_plainly_that_no_head_passes():
    judgement = judged(planted={}, own=0.5)
    figure = accuracy_heatmap(judgement)
    assert len(figure.data) == 1
    least = f"smallest corrected p = {np.nanmin(judgement.p('test')):.2g}"
    subtitle = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "No head passes correction: none of 20 is right more often" in subtitle and least in subtitle
    assert "No head passes correction" in describe(figure)
    # Noise stays pale: the colours do not end at the luckiest head.
    assert figure.data[0].zmax == pytest.approx(max(0.75, 0.5 + np.abs(judgement.accuracy() - 0.5).max()))
    both = accuracy_heatmap(judgement, mark="both").layout.title.subtitle.text.replace("<br>", " ")
    least = np.nanmin(np.maximum(judgement.p("test"), judgement.p("calibration")))
    assert f"on calibration and on test trials, smallest corrected p = {least:.2g}" in both


def test_heatmap_of_calibration_of_scores_and_of_scores_without_splits():
    calibration, test = sample("calibration"), sample("test")
    merged = calibration.merge(test)
    tried = accuracy_heatmap(merged, ci=False)
    np.testing.assert_array_equal(np.array(tried.data[0].z), judge(calibration, test).accuracy("test"))
    own = accuracy_heatmap(merged, split="calibration", ci=False)
    np.testing.assert_array_equal(np.array(own.data[0].z), judge(calibration).accuracy())
    assert "120 calibration trials" in own.layout.title.subtitle.text and "calibration trials" in describe(own)
    bare = replace(test, records=[{} for _ in test.trial_ids])
    assert "120 calibration trials" in accuracy_heatmap(bare, ci=False).layout.title.subtitle.text
    with pytest.raises(InvalidInput, match="this judgement has no test trials"):
        accuracy_heatmap(bare, split="test")


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (2, 40)])
def test_heatmap_of_any_shape(shape):
    planted = {(shape[0] - 1, 0): 0.97}
    figure = accuracy_heatmap(judged(shape=shape, planted=planted, n=80))
    assert np.array(figure.data[0].z).shape == shape
    assert named(figure, "Right more often than chance").meta["heads"] == [f"L{shape[0] - 1}H0"]
    assert 500 <= figure.layout.width <= 900 and 250 <= figure.layout.height <= 900


def test_heatmap_without_a_single_score():
    figure = accuracy_heatmap(judged(shape=(1, 2), planted={}, undefined=[(0, 0), (0, 1)]))
    assert "No head has a score in every trial." in figure.layout.title.subtitle.text
    assert "No head has a score in every trial." in describe(figure)


def test_heatmap_with_more_candidates_has_their_chance_in_the_middle():
    figure = accuracy_heatmap(judged(width=5, planted={(1, 2): 0.9}))
    cells = figure.data[0]
    assert colour_at(cells, 0.2) == "#FFFFFF" and cells.zmin == 0 and "chance 0.20" in figure.layout.title.subtitle.text


def test_heatmap_refuses():
    judgement = judged()
    with pytest.raises(UnknownName, match="mark of the accuracy heatmap"):
        accuracy_heatmap(judgement, mark="best")
    with pytest.raises(UnknownName, match="split of a judgement"):
        accuracy_heatmap(judgement, split="train")
    with pytest.raises(InvalidInput, match="L9H0 does not exist"):
        accuracy_heatmap(judgement, heads="L9H0")
    with pytest.raises(InvalidInput, match=r"alpha is 2\.0; a significance level"):
        accuracy_heatmap(judgement, alpha=2.0)


# -- heads against the model ---------------------------------------------------------------------


def drawn(figure: Any) -> dict[str, Any]:
    return {trace.meta["scorer"]: trace for trace in figure.data if trace.meta}


@pytest.mark.parametrize("by", ["depth", "distractors"])
def test_lines_are_the_evaluation(by):
    evaluation = evaluated()
    figure = verdict_curves(evaluation, by=by)
    frame = evaluation.frame().query("by == @by")
    assert list(drawn(figure)) == ["L1H2", "L2H0", "L3H3", "majority"]
    for scorer, line in drawn(figure).items():
        rows = frame.loc[frame["scorer"] == scorer]
        assert list(line.y) == rows["accuracy"].tolist()
        assert np.round(line.x).tolist() == rows["value"].tolist()  # beside the value, by less than half a step
        np.testing.assert_allclose(np.array(line.y) + line.error_y.array, np.maximum(rows["ci_high"], line.y))
        np.testing.assert_allclose(np.array(line.y) - line.error_y.arrayminus, np.minimum(rows["ci_low"], line.y))
    own = frame.loc[frame["scorer"] == "model"]
    line, area = named(figure, "Model's own output"), named(figure, "Model's own output, interval")
    assert list(line.x) == own["value"].tolist() and list(line.y) == own["accuracy"].tolist()
    n = len(own)
    assert list(area.y[:n]) == own["ci_low"].tolist() and list(area.y[n : 2 * n]) == own["ci_high"].tolist()[::-1]
    assert set(named(figure, "Chance").y) == {0.5}
    ticks = [f"{v}<br>n={k}" for v, k in zip(own["value"], own["n"], strict=True)]
    assert list(figure.layout.xaxis.ticktext) == ticks and "number of trials" in figure.layout.xaxis.title.text
    assert "L3H3 (inverse, sign turned)" in [t.name for t in figure.data]


def test_lines_hover_has_numbers_differences_and_n():
    evaluation = evaluated()
    row = evaluation.frame().query("by == 'depth' and scorer == 'L1H2' and value == 2").iloc[0]
    hover = drawn(verdict_curves(evaluation))["L1H2"].customdata[1]
    assert (
        f"accuracy: {number(row['accuracy'])}<br>95% CI: {number(row['ci_low'])} to {number(row['ci_high'])}" in hover
    )
    assert f"{row['n']} trials" in hover and f"model's own: {number(row['baseline'])}" in hover
    assert f"difference {number(row['difference'])}" in hover
    assert f"corrected p of the difference: {number(row['p_holm'])}" in hover
    told = describe(verdict_curves(evaluation))
    assert f"Depth 2 ({row['n']} trials): L1H2 {row['accuracy']:.2f}" in told and "chance 0.50" in told


def test_rules_have_a_row_each():
    evaluation = evaluated()
    figure = verdict_curves(evaluation, by="rule")
    frame = evaluation.frame().query("by == 'rule'")
    own = frame.loc[frame["scorer"] == "model"].reset_index(drop=True)
    labels = list(figure.layout.yaxis.ticktext)
    assert labels == [f"A&lt;b  n={own['n'][0]}", f"Modus ponens  n={own['n'][1]}", f"None  n={own['n'][2]}"]
    for scorer, dots in drawn(figure).items():
        rows = frame.loc[frame["scorer"] == scorer]
        assert list(dots.x) == rows["accuracy"].tolist() and np.round(dots.y).tolist() == [0, 1, 2]
        np.testing.assert_allclose(np.array(dots.x) + dots.error_x.array, np.maximum(rows["ci_high"], dots.x))
    stroke, block = named(figure, "Model's own output"), named(figure, "Model's own output, interval")
    assert [x for x in stroke.x[::4]] == own["accuracy"].tolist()
    assert list(block.x[::6]) == own["ci_low"].tolist() and list(block.x[1::6]) == own["ci_high"].tolist()
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # the first on top


def test_which_scorers_are_drawn():
    evaluation = evaluated("L1H2, L2H0, L0H0, L0H1, L0H2", inverse=())
    figure = verdict_curves(evaluation)
    assert list(drawn(figure)) == ["L1H2", "L2H0", "L0H0", "majority"]
    assert "2 of 5 heads not drawn" in figure.layout.title.subtitle.text
    assert list(drawn(verdict_curves(evaluation, scorers="L0H2"))) == ["L0H2"]
    every = verdict_curves(evaluation, scorers=evaluation.scorers)
    assert list(drawn(every)) == [*evaluation.heads.labels, "majority"]
    assert "not drawn" not in every.layout.title.subtitle.text
    assert len({(t.line.color, t.line.dash, t.marker.symbol) for t in drawn(every).values()}) == 6
    assert list(drawn(verdict_curves(evaluated("L1H2")))) == ["L1H2"]


def test_one_kind_and_one_group_still_draw():
    one = sample("test", 8, group_size=8)
    one = one.take([i for i, depth in enumerate(one.column("depth")) if depth == 1])
    evaluation = evaluate(one, "L1H2", **QUICK)
    for by in ("depth", "rule"):
        figure = verdict_curves(evaluation, by=by)
        assert not [t for t in figure.data if t.name == "Model's own output, interval"]
        assert "none (fewer than two groups)" in drawn(figure)["L1H2"].customdata[0]


def test_lines_refuse():
    evaluation = evaluated(heads="L1H2")
    with pytest.raises(UnknownName, match="column that the evaluation is broken down by"):
        verdict_curves(evaluation, by="colour")
    with pytest.raises(UnknownName, match="scorer of the evaluation"):
        verdict_curves(evaluation, scorers=["L2H0"])
    with pytest.raises(InvalidInput, match="no scorer is left to draw beside the model; give some of L1H2, or None"):
        verdict_curves(evaluation, scorers="model")


# -- transfer ------------------------------------------------------------------------------------


def test_matrix_is_the_transfer_with_the_models_row():
    result = travelled()
    figure = transfer_matrix(result)
    cells = named(figure, "accuracy")
    z = np.array(cells.z, dtype=float)
    np.testing.assert_array_equal(z, np.vstack([result.matrix, result.baseline]))
    assert colour_at(cells, 0.5) == "#FFFFFF" and 0.5 - cells.zmin == pytest.approx(cells.zmax - 0.5)
    numbers = named(figure, "numbers")
    rows = result.cells.to_dict("records")
    assert len(numbers.text) == z.size == 8
    for text, row, x, y in zip(numbers.text, rows, numbers.x, numbers.y, strict=False):
        assert z[y, x] == row["accuracy"]
        wanted = f"<b>{row['accuracy']:.2f}</b><br>{row['ci_low']:.2f} to {row['ci_high']:.2f}"
        wanted += f"<br>\u25bc {row['inverted']} inverted" if row["inverted"] else ""
        assert text == wanted
    assert any("inverted" in text for text in numbers.text)
    last = rows[1]
    assert numbers.text[-1] == (
        f"<b>{last['baseline']:.2f}</b><br>{last['baseline_low']:.2f} to {last['baseline_high']:.2f}"
    )
    assert list(figure.layout.yaxis.ticktext)[2:] == ["mix of all<br>n=240", "<b>Model's</b><br><b>own output</b>"]
    assert list(figure.layout.xaxis.ticktext) == [f"{name}<br>n=120, chance 0.50" for name in ("one", "a&lt;b")]
    assert result.summary() in describe(figure) and "The best transfer is from" in describe(figure)


def test_matrix_hover_has_the_difference_and_the_heads():
    result = travelled()
    hover = named(transfer_matrix(result), "accuracy").customdata
    row = result.cells.iloc[1]
    assert hover[0][1].startswith("<b>chosen on one, tested on a&lt;b</b><br>accuracy: ")
    ends = f"{number(row['difference_low'])} to {number(row['difference_high'])}"
    assert f"difference: {number(row['difference'])} ({ends})" in hover[0][1]
    assert "120 test trials; chance 0.5" in hover[0][1]
    assert f"of 2 heads: {row['right']} right, {row['inverted']} inverted" in hover[0][1]
    assert ", ".join(result.heads["one"].labels) in hover[0][1]
    assert hover[3][0].startswith("<b>Model's own output, tested on one</b>")


def test_matrix_of_sets_that_differ_in_chance_shows_what_is_above_it():
    result = travelled(widths=(2, 4), mix=False)
    cells = named(transfer_matrix(result), "accuracy")
    accuracy = np.vstack([result.matrix, result.baseline])
    np.testing.assert_allclose(np.array(cells.z, dtype=float), accuracy - [0.5, 0.25])
    assert colour_at(cells, 0.0) == "#FFFFFF"
    assert "less chance" in cells.colorbar.title.text.replace("<br>", " ")
    assert named(transfer_matrix(result), "numbers").text[0].startswith(f"<b>{accuracy[0, 0]:.2f}</b>")
    with pytest.raises(InvalidInput, match="limit is 0;"):
        transfer_matrix(result, limit=0)


# -- calibration size ----------------------------------------------------------------------------


def test_calibration_curve_has_both_accuracies_bands_and_the_mark():
    curve = learnt()
    figure = calibration_curve(curve, level=0.8)
    bands = curve.bands(0.8)
    n = len(bands)
    for name, label in (("test", "On held-out trials"), ("calibration", "On the calibration trials (optimistic)")):
        line, area = named(figure, label), named(figure, f"{label}, interval")
        assert list(line.x) == bands["size"].tolist() and list(line.y) == bands[name].tolist()
        assert list(area.y[:n]) == bands[f"{name}_low"].tolist()
        assert list(area.y[n : 2 * n]) == bands[f"{name}_high"].tolist()[::-1]
    assert set(named(figure, "Model's own output").y) == {curve.baseline}
    assert set(named(figure, "Chance").y) == {curve.chance}
    (mark,) = figure.layout.shapes
    assert mark.x0 == mark.x1 == 400 and figure.layout.annotations[0].text == "400"
    assert figure.layout.annotations[0].x == pytest.approx(math.log10(400))
    assert figure.layout.xaxis.type == "log" and "middle 80% of draws" in figure.layout.title.subtitle.text
    hover = named(figure, "On held-out trials").customdata[0]
    assert "25 calibration trials" in hover and "mean of 4 draws" in hover and "200 held-out trials" in hover
    assert f"that all 480 trials choose: {number(bands['overlap'][0])}" in hover
    low, high = figure.layout.yaxis.range
    assert low <= min(curve.chance, bands["test_low"].min()) and high >= bands["calibration_high"].max()


def test_calibration_curve_of_one_size_has_bars_and_no_mark_beyond_its_range():
    figure = calibration_curve(learnt(sizes=[50]))
    assert not figure.layout.shapes and not figure.layout.annotations
    line = named(figure, "On held-out trials")
    assert len(line.error_y.array) == 1 and calibration_curve(learnt()).data[1].error_y.array is None


def test_calibration_curve_says_when_groups_do_not_fill_a_size():
    curve = learnt(sizes=[25, 50], scores={"group_size": 6})
    assert (curve.bands()["n"] < curve.bands()["size"]).any()
    assert "groups are kept whole" in named(calibration_curve(curve), "On held-out trials").customdata[0]
    with pytest.raises(InvalidInput, match="level is 1"):
        calibration_curve(curve, level=1.0)


# -- depth ---------------------------------------------------------------------------------------


def test_profile_has_accuracies_and_counts():
    profile = depth_profile(judged(undefined=[(0, i) for i in range(5)]))
    figure = accuracy_profile(profile)
    frame = profile.frame
    for name, label in (("best", "Best head of the layer"), ("mean", "Mean of the layer's heads")):
        line = named(figure, label)
        np.testing.assert_array_equal(np.array(line.y, dtype=float), frame[name])
        assert list(line.x) == [0, 1, 2, 3]
    assert list(named(figure, "Right more often than chance").y) == frame["significant"].tolist() == [0, 1, 1, 0]
    assert list(named(figure, "Inverse: wrong more often").y) == [-n for n in frame["inverse"]] == [0, 0, 0, -1]
    assert set(named(figure, "Chance").y) == {0.5}
    assert all(not t.startswith("\u2212") and "-" not in t for t in figure.layout.yaxis2.ticktext)
    best = named(figure, "Best head of the layer").customdata
    assert "best head: L1H2" in best[1] and "5 heads, 120 trials" in best[1]
    assert "no head has a score in every trial" in best[0]
    subtitle = figure.layout.title.subtitle.text.replace("<br>", " ")
    assert f"2 heads right more often than chance, {profile.first_third_share:.0%} of them in the first" in subtitle
    assert "The best head is L1H2" in describe(figure)


def test_profile_without_a_head_that_passes_says_so():
    figure = accuracy_profile(depth_profile(judged(planted={}, own=0.5)))
    assert "No head passes correction." in figure.layout.title.subtitle.text
    assert "No head is significant" in describe(figure)


@pytest.mark.parametrize("shape", [(1, 1), (80, 2)])
def test_profile_of_any_shape(shape):
    figure = accuracy_profile(depth_profile(judged(shape=shape, planted={}, n=40)))
    assert len(figure.data[0].x) == shape[0] and len(figure.layout.xaxis2.tickvals) <= 20


# -- wording -------------------------------------------------------------------------------------


def test_debias_plot_has_every_head_and_picks_out_the_flagged():
    result = biased()
    figure = debias_plot(result)
    frame = result.frame().set_index("label")
    flagged, others = named(figure, "Flagged: exploits wording"), named(figure, "Other heads")
    assert flagged.meta["heads"] == result.flagged.labels and {"L1H2", "L2H0"} <= set(flagged.meta["heads"])
    assert len(others.x) + len(flagged.x) == 20
    for trace in (flagged, others):
        rows = frame.loc[trace.meta["heads"]]
        assert list(trace.x) == rows["original"].tolist() and list(trace.y) == rows["flipped"].tolist()
        chance = result.statement_chance[[result.heads.labels.index(h) for h in trace.meta["heads"]]]
        np.testing.assert_allclose(trace.marker.color, rows["statement_only"] - chance)
        np.testing.assert_allclose(
            np.array(trace.x) + trace.error_x.array, np.maximum(rows["original_high"], rows["original"])
        )
        np.testing.assert_allclose(
            np.array(trace.y) - trace.error_y.arrayminus, np.minimum(rows["flipped_low"], rows["flipped"])
        )
    assert others.marker.cmin == -others.marker.cmax and others.marker.colorscale[5][1] == "#FFFFFF"
    assert [bool(t.marker.showscale) for t in (others, flagged)] == [True, False]
    diagonal, line = named(figure, "Equally often right"), named(figure, "Drop put up with (0.03)")
    assert list(diagonal.x) == list(diagonal.y) == list(figure.layout.xaxis.range) == list(figure.layout.yaxis.range)
    np.testing.assert_allclose(np.array(line.y), np.array(line.x) - 0.03)
    hover = flagged.customdata[flagged.meta["heads"].index("L2H0")]
    assert f"drop: {number(frame.loc['L2H0', 'difference'])}" in hover and "80 pairs" in hover
    assert "flagged: wording: less often right on flipped twins" in hover and "statement alone: " in hover
    assert f"{len(result.flagged)} of 20 heads flagged" in figure.layout.title.subtitle.text
    assert result.summary() in describe(figure)


def test_debias_plot_without_statements_and_without_flags():
    figure = debias_plot(biased(alone=False, heads="L1H2, L0H0"))
    assert [t.name for t in figure.data if t.mode != "lines"] == ["Other heads"]
    assert figure.data[-1].marker.color == UNDEFINED_COLOUR and "statement" not in "".join(figure.data[-1].customdata)
    assert "No head is flagged for exploiting wording, of 2 looked at" in figure.layout.title.subtitle.text


def test_debias_plot_of_many_heads_keeps_the_flagged_and_says_what_is_left_out():
    result = biased(shape=(80, 70), n=24)
    flagged = set(result.flagged.labels)
    figure = debias_plot(result, seed=3)
    points = [t for t in figure.data if t.meta]
    assert sum(len(t.x) for t in points) == 5000
    assert flagged == {h for t in points if "Flagged" in t.name for h in t.meta["heads"]} and flagged
    assert "5000 of 5600 heads drawn" in figure.layout.title.subtitle.text
    assert named(figure, "Other heads").error_x.array is None


# -- premises ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("measure", "order"), [("flipped", "cumulative"), ("drop", "one at a time")])
def test_premise_lines_are_the_arms(measure, order):
    result = ablated()
    figure = premise_curves(result, measure=measure, order=order, n_boot=40, level=0.9)
    cells = result.by_arm(order, n_boot=40, level=0.9)
    lines = {trace.meta["arm"]: trace for trace in figure.data}
    assert list(lines) == ["gold", "random"]
    for arm, line in lines.items():
        rows = cells.loc[(cells["arm"] == arm) & (cells["round"] != "all")]
        assert np.round(line.x).tolist() == [1, 2, 3] and list(line.y) == rows[measure].tolist()
        above = np.nan_to_num(np.maximum(rows[f"{measure}_high"] - rows[measure], 0))
        np.testing.assert_allclose(line.error_y.array, above)
        assert [f"{n} questions" in text for n, text in zip(rows["n"], line.customdata, strict=True)] == [True] * 3
    assert lines["random"].line.dash == "dash" and lines["random"].line.color == "#6E6E6E"
    assert list(figure.layout.xaxis.ticktext) == ["1<br>n=24", "2<br>n=16", "3<br>n=8"]
    assert "90%" in figure.layout.title.subtitle.text and "tiny" in figure.layout.title.text
    if measure == "flipped":
        assert list(lines["gold"].y) == [0, 1, 1] and list(lines["random"].y) == [0, 0, 0]
        assert "Premises of the proof: 0 after 1 removal, 1 after 3 removals" in describe(figure)
        assert "proportion" in figure.layout.yaxis.title.text and result.summary() in describe(figure)
    else:
        assert "nats" in figure.layout.yaxis.title.text


def test_premise_arms_keep_their_look_and_their_order():
    every = ablated(1, ("random any", "random", "model", "best heads", "gold"))
    figure = premise_curves(every, n_boot=10)
    assert [t.meta["arm"] for t in figure.data] == ["gold", "best heads", "model", "random", "random any"]
    assert len({(t.line.color, t.line.dash, t.marker.symbol) for t in figure.data}) == 5
    (alone,) = premise_curves(every, arms="model", n_boot=10).data
    assert alone.line.color == figure.data[2].line.color


def test_premises_refuse():
    result = ablated()
    with pytest.raises(UnknownName, match="measure of the premise ablation"):
        premise_curves(result, measure="flips")
    with pytest.raises(UnknownName, match="order of the premise ablation"):
        premise_curves(result, order="all")
    with pytest.raises(UnknownName, match="arm of the premise ablation"):
        premise_curves(result, arms=["gold", "model"])
    with pytest.raises(InvalidInput, match="no arm is left to draw; give some of random, gold, or None for all"):
        premise_curves(result, arms=[])
    rows = result.rows.loc[result.rows["order"] == "cumulative"]
    with pytest.raises(InvalidInput, match="no premise was removed 'one at a time' in the arms gold, random"):
        premise_curves(replace(result, rows=rows), order="one at a time", n_boot=10)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (plots.accuracy_heatmap, "result is a int; give the Judgement that judge"),
        (plots.verdict_curves, "evaluation is a int; give what evaluate"),
        (plots.transfer_matrix, "transfer is a int; give what transfer"),
        (plots.calibration_curve, "curve is a int; give what learning_curve"),
        (plots.accuracy_profile, "profile is a int; give what depth_profile"),
        (plots.debias_plot, "debias is a int; give what debias"),
        (plots.premise_curves, "result is a int; give what run_premises"),
    ],
)
def test_another_value_is_refused(draw, message):
    # The type checks of the tests refuse it first; the function itself does without them.
    with pytest.raises(InvalidInput, match=message):
        inspect.unwrap(draw)(3)
