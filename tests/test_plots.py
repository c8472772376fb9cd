"""Figures: what is in them is what the results say. Nothing is rendered here; test_report.py does that."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from mechheads import plots
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.plots.style import DIVERGING, PALETTE, UNDEFINED_COLOUR, count_ticks, number, spread_ticks
from mechheads.scores import HeadScores, SweepResult

# plotly builds the attributes of its figures at run time, where a type checker does not see them.
ablation_curve: Any = plots.ablation_curve
ablation_curves: Any = plots.ablation_curves
describe: Any = plots.describe
head_heatmap: Any = plots.head_heatmap
score_heatmaps: Any = plots.score_heatmaps
template: Any = plots.template


def scores(layers=4, heads=3, n=6, *, method="locos", unit="logits", seed=0, undefined=(), **fields: Any) -> HeadScores:
    values = np.random.default_rng(seed).normal(size=(n, layers, heads))
    for layer, head in undefined:
        values[:, layer, head] = np.nan
    fields = {"kept": np.ones(n, dtype=bool), "weights": np.ones(n)} | fields
    ids = [f"t{i}" for i in range(n)]
    return HeadScores(method=method, values=values, trial_ids=ids, unit=unit, **fields)


def sweep(*, tasks=("passkey", "recall"), metric="correct", draws=3, n=8, meta=None) -> SweepResult:
    """Locos loses a trial per head; each random draw d loses d trials at any k; recall loses nothing."""
    rows = []
    for task in tasks:

        def add(ranking, draw, k, wrong, heads, task=task):
            for i in range(n):
                right = 1.0 if task == "recall" or i >= wrong else 0.0
                rows.append((ranking, draw, k, task, f"{task}{i}", metric, right, heads))

        add("none", 0, 0, 0, "")
        for k in (1, 5):
            add("locos", 0, k, k, ", ".join(f"L{i}H0" for i in range(k)))
            for draw in range(draws):
                add("random", draw, k, draw, ", ".join(f"L{draw}H{i + 1}" for i in range(k)))
    columns = ["ranking", "draw", "k", "task", "trial_id", "metric", "value", "heads"]
    return SweepResult(frame=pd.DataFrame(rows, columns=columns), meta=meta or {})


def named(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


# -- the look --------------------------------------------------------------------------------


def test_nothing_is_registered_and_nothing_needs_torch():
    code = (
        "import sys, plotly.io as pio; before = (list(pio.templates), pio.templates.default); "
        "import mechheads.plots, mechheads.report; "
        "assert 'torch' not in sys.modules and 'transformer_lens' not in sys.modules; "
        "assert (list(pio.templates), pio.templates.default) == before"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_template_is_readable_and_made_anew():
    layout = template().layout
    fonts = [
        layout.font,
        layout.xaxis.tickfont,
        layout.yaxis.tickfont,
        layout.legend.font,
        layout.xaxis.title.font,
        layout.title.font,
        layout.title.subtitle.font,
    ]
    sizes = [font.size for font in fonts]
    assert min(sizes) >= 12
    assert layout.paper_bgcolor == layout.plot_bgcolor == "white"
    changed = template()
    changed.layout.font.size = 99
    assert template().layout.font.size != 99


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def test_diverging_map_is_blue_white_red_and_even():
    places, colours = [float(p) for p, _ in DIVERGING], [str(c) for _, c in DIVERGING]
    assert places == sorted(places) and places[0] == 0 and places[-1] == 1
    assert dict(zip(places, colours, strict=True))[0.5] == "#FFFFFF"
    light = [luminance(c) for c in colours]
    middle = len(light) // 2
    assert light[: middle + 1] == sorted(light[: middle + 1])
    assert light[middle:] == sorted(light[middle:], reverse=True)
    assert int(colours[1][5:7], 16) > int(colours[1][1:3], 16)  # the low end is more blue than red
    assert int(colours[-2][1:3], 16) > int(colours[-2][5:7], 16)
    assert len(set(PALETTE)) == len(PALETTE)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (-2.0, "\u22122"), (1234.4, "1234"), (2.5e7, "2.5e+07"), (0.0, "0"), (float("nan"), "\u2013")],
)
def test_number(value, text):
    assert number(value) == text


def test_ticks():
    assert count_ticks(1) == [0] and count_ticks(12) == list(range(12))
    assert len(count_ticks(64)) <= 12 and count_ticks(64)[:2] == [0, 8]
    assert spread_ticks([0, 1, 2, 5, 10]) == [0, 1, 2, 5, 10]
    assert spread_ticks([0, 1, 2, 50, 99, 100]) == [0, 50, 100]
    assert spread_ticks([0]) == [0]


# -- the heatmap -----------------------------------------------------------------------------


def test_heatmap_shows_the_means_about_zero():
    result = scores()
    figure = head_heatmap(result)
    (trace,) = figure.data
    assert trace.type == "heatmap"
    np.testing.assert_allclose(np.array(trace.z, dtype=float), result.mean())
    assert trace.zmid == 0 and trace.zmax == -trace.zmin == pytest.approx(np.abs(result.mean()).max())
    assert trace.colorbar.title.text == "LOCOS score (logits)"
    # Row l of z stands at height l, so the last layer is on top.
    assert tuple(figure.layout.yaxis.range) == (-0.5, 3.5) and tuple(figure.layout.xaxis.range) == (-0.5, 2.5)
    assert "Layer" in figure.layout.yaxis.title.text and "Head" in figure.layout.xaxis.title.text


def test_heatmap_hover_says_label_score_interval_rank_trials():
    result = scores(kept=np.array([True] * 5 + [False]))
    (trace,) = head_heatmap(result, level=0.9).data
    best = result.top(1)[0]
    label, score, interval, rank, trials = trace.customdata[best.layer][best.head]
    low, high = (float(bound[best.layer, best.head]) for bound in result.ci(level=0.9))
    assert label == str(best) and score == f"score: {number(result.score_of(best))} logits"
    assert interval == f"90% CI: {number(low)} to {number(high)}"
    assert rank == "rank: 1 of 12" and trials == "5 trials"
    assert all(f"customdata[{i}]" in trace.hovertemplate for i in range(5))


def test_heatmap_without_intervals():
    (trace,) = head_heatmap(scores(), ci=False).data
    assert np.array(trace.customdata, dtype=object).shape == (4, 3, 4)
    assert "CI" not in str(trace.customdata[0][0])


def test_undefined_heads_are_grey_and_say_so():
    result = scores(undefined=[(0, 1), (3, 2)])
    defined, grey = head_heatmap(result).data
    assert grey.name == "undefined" and {c for _, c in grey.colorscale} == {UNDEFINED_COLOUR}
    assert not grey.showscale
    holes = np.isnan(np.array(defined.z, dtype=float))
    np.testing.assert_array_equal(holes, np.isfinite(np.array(grey.z, dtype=float)))
    assert holes.sum() == 2 and holes[0, 1] and holes[3, 2]
    assert grey.customdata[0][1][0] == "L0H1" and "undefined" in grey.customdata[0][1][1]
    assert defined.customdata[1][1][3].endswith("of 10")
    assert "Undefined: 2 heads" in describe(head_heatmap(result))


def test_all_undefined_and_all_zero_still_draw():
    nowhere = scores(1, 2, undefined=[(0, 0), (0, 1)])
    assert [t.zmax for t in head_heatmap(nowhere).data] == [1, 1]
    assert "No head has a defined score" in describe(nowhere)
    zero = HeadScores(
        method="m", values=np.zeros((2, 1, 1)), kept=np.ones(2, dtype=bool), weights=np.ones(2), trial_ids=["a", "b"]
    )
    (trace,) = head_heatmap(zero).data
    assert (trace.zmin, trace.zmax) == (-1, 1) and trace.colorbar.title.text == "M score"


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (2, 40)])
def test_any_shape_draws(shape):
    figure = head_heatmap(scores(*shape), top=1)
    trace, outline = figure.data
    assert np.array(trace.z).shape == shape and len(outline.meta["heads"]) == 1
    assert 300 <= figure.layout.width <= 900 and 250 <= figure.layout.height <= 800
    assert len(figure.layout.xaxis.tickvals) <= 16 and len(figure.layout.yaxis.tickvals) <= 16


def test_one_trial_has_no_interval():
    (trace,) = head_heatmap(scores(1, 1, n=1)).data
    assert trace.customdata[0][0][2] == "95% CI: none (fewer than two trials)"
    assert trace.customdata[0][0][4] == "1 trial"


def test_outlines():
    result = scores()
    figure = head_heatmap(result, heads="L0H0, L3H2", top=2)
    top, chosen = figure.data[1:]
    assert top.name == "Top 2" and top.meta["heads"] == result.top(2).labels
    assert chosen.meta["heads"] == ["L0H0", "L3H2"] and chosen.line.dash != top.line.dash
    assert chosen.x[:5] == (-0.5, 0.5, 0.5, -0.5, -0.5) and chosen.y[6:11] == (2.5, 2.5, 3.5, 3.5, 2.5)
    assert [t.name for t in head_heatmap(result, heads=HeadSet()).data] == ["locos"]


def test_limit_sets_the_colour_bar():
    (trace,) = head_heatmap(scores(), limit=2.5).data
    assert (trace.zmin, trace.zmid, trace.zmax) == (-2.5, 0, 2.5)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf")])
def test_bad_limit(limit):
    with pytest.raises(InvalidInput, match="limit is"):
        head_heatmap(scores(), limit=limit)


def test_bad_heads_and_top():
    with pytest.raises(InvalidInput, match="L9H0 does not exist"):
        head_heatmap(scores(), heads="L9H0")
    with pytest.raises(InvalidInput, match="k is 13"):
        head_heatmap(scores(), top=13)


def test_no_kept_trial_is_said_clearly():
    nothing = scores(n=2, kept=np.zeros(2, dtype=bool), records=[{"reason": "wrong answer"}] * 2)
    with pytest.raises(InvalidInput, match=r"none of the 2 trials of 'locos' is kept \(2 x wrong answer\)"):
        head_heatmap(nothing)


def test_panels_have_their_own_colour_bars():
    a, b = scores(seed=1), scores(method="attention_spatial", unit="probability", seed=2, undefined=[(0, 0)])
    figure = score_heatmaps([a, b], top=2)
    bars = [t for t in figure.data if t.type == "heatmap" and t.showscale is not False]
    assert [t.colorbar.title.text for t in bars] == [
        "LOCOS score (logits)",
        "Attention-spatial score (probability)",
    ]
    assert bars[0].zmax != bars[1].zmax and all(t.zmid == 0 for t in bars)
    left, right = figure.layout.xaxis.domain, figure.layout.xaxis2.domain
    assert left[1] <= bars[0].colorbar.x < right[0] and right[1] <= bars[1].colorbar.x
    outlines = named(figure, "Top 2 of each score")
    assert [t.meta["heads"] for t in outlines] == [a.top(2).labels, b.top(2).labels]
    assert [t.showlegend for t in outlines] == [True, False]
    assert {t.xaxis for t in figure.data} == {"x", "x2"} or {t.xaxis for t in figure.data} == {"x1", "x2"}


def boxes_of(figure: Any, count: int) -> list[tuple[float, ...]]:
    """Left, right, bottom and top of each panel in pixels, with its colour bar, ticks and heading."""
    layout = figure.layout
    wide = layout.width - layout.margin.l - layout.margin.r
    high = layout.height - layout.margin.t - layout.margin.b
    found = []
    for n in ["", *range(2, count + 1)]:
        x, y = layout[f"xaxis{n}"].domain, layout[f"yaxis{n}"].domain
        # 26 pixels of tick labels to the left, 90 of colour bar to the right, 20 of ticks below, 20 of heading above.
        found.append((x[0] * wide - 26, x[1] * wide + 90, y[0] * high - 20, y[1] * high + 20))
    return found


@pytest.mark.parametrize(
    ("count", "heads", "rows"),
    [(4, 9, 1), (5, 9, 2), (12, 9, 3), (13, 9, 4), (4, 64, 2), (3, 64, 1), (6, 32, 2), (4, 200, 4), (7, 1, 2)],
)
def test_many_maps_wrap_without_overlap(count, heads, rows):
    figure = score_heatmaps([scores(30, heads, 2, seed=i) for i in range(count)], ci=False)
    found = boxes_of(figure, count)
    assert len({box[2] for box in found}) == rows
    if count > 3:
        assert figure.layout.width <= 900
        assert min(box[1] - box[0] - 116 for box in found) >= 4 * min(heads, 160)
    for i, a in enumerate(found):
        for b in found[i + 1 :]:
            assert a[1] <= b[0] + 1e-6 or b[1] <= a[0] + 1e-6 or a[3] <= b[2] + 1e-6 or b[3] <= a[2] + 1e-6


def test_wrapped_maps_keep_what_a_row_of_maps_has():
    named = ["locos", "dla", "wu", "a_name_that_is_far_too_long_for_a_single_line"]
    results = [scores(method=name, seed=i, unit="" if name == "wu" else "logits") for i, name in enumerate(named)]
    figure = score_heatmaps(results, top=2, heads="L0H0")
    bars = [t for t in figure.data if t.type == "heatmap" and t.showscale is not False]
    assert [t.colorbar.title.text for t in bars] == [
        "<br>Score (logits)",
        "<br>Score (logits)",
        "<br>Score",
        "<br>Score (logits)",
    ]
    for i, (bar, result) in enumerate(zip(bars, results, strict=True), start=1):
        x, y = (figure.layout[f"{axis}axis{i if i > 1 else ''}"].domain for axis in "xy")
        assert bar.colorbar.x == x[1] and bar.colorbar.len == pytest.approx(y[1] - y[0])
        assert bar.colorbar.y == pytest.approx((y[0] + y[1]) / 2)
        np.testing.assert_allclose(np.array(bar.z, dtype=float), result.mean())
        assert "CI" in str(bar.customdata[0][0])
    outlines = [t for t in figure.data if t.name == "Top 2 of each score"]
    assert [t.meta["heads"] for t in outlines] == [r.top(2).labels for r in results]
    headings = [a.text for a in figure.layout.annotations]
    assert headings[:3] == ["<b>LOCOS</b>", "<b>DLA</b>", "<b>Wu</b>"]
    assert "<br>" in headings[3] and headings[3].replace("<br>", " ").startswith("<b>A name that is far too long")
    assert [figure.layout[f"yaxis{n}"].title.text for n in ("", 2, 3, 4)] == ["Layer (index, last on top)", "", "", ""]
    assert describe(figure).count("Heatmap of") == 4
    # A page may make it narrower, but not so far that the parts meet.
    assert 800 <= figure.layout.meta["least_width"] <= figure.layout.width
    assert "least_width" not in score_heatmaps(results[:3]).layout.meta


def test_only_the_lowest_panel_of_a_column_names_its_heads():
    figure = score_heatmaps([scores(seed=i) for i in range(5)], ci=False)
    titles = [figure.layout[f"xaxis{n}"].title.text for n in ("", 2, 3, 4, 5)]
    assert titles == ["", "", "Head (index)", "Head (index)", "Head (index)"]


def test_long_units_take_more_room():
    long = "share of the tokens of the needle that are copied, norm left out"
    short, wide = (score_heatmaps([scores(unit=u, seed=i) for i in range(4)], ci=False) for u in ("logits", long))
    assert wide.data[0].colorbar.title.text.count("<br>") >= 3
    gap = [figure.layout.xaxis2.domain[0] - figure.layout.xaxis.domain[1] for figure in (short, wide)]
    assert gap[1] > gap[0] and wide.layout.margin.r > short.layout.margin.r


def test_up_to_three_maps_stand_in_one_row_as_wide_as_they_like():
    figure = score_heatmaps([scores(30, 12, 2, seed=i) for i in range(3)], ci=False)
    layout = figure.layout
    assert layout.width == 62 + 3 * 340 + 2 * 138 + 112 and layout.height == 90 + 450 + 58
    assert [layout[f"yaxis{n}"].domain for n in ("", 2, 3)] == [(0, 1)] * 3
    assert figure.data[0].colorbar.title.text == "LOCOS score (logits)"
    assert layout.xaxis.title.text == "Head (index in its layer)"


def test_no_panels():
    with pytest.raises(InvalidInput, match="no scores to draw"):
        score_heatmaps([])


def test_names_are_escaped_for_plotly():
    (trace,) = head_heatmap(scores(method="<b>mine</b>", unit="a<b"), title="x < y & z").data
    assert trace.colorbar.title.text == "&lt;b&gt;mine&lt;/b&gt; score (a&lt;b)"
    assert head_heatmap(scores(), title="x < y & z").layout.title.text == "x &lt; y &amp; z"
    assert head_heatmap(scores(meta={"model": {"name": "tiny"}})).layout.title.text == "LOCOS, tiny"


# -- the curve -------------------------------------------------------------------------------


def test_curve_lines_are_the_means():
    result = sweep()
    figure = ablation_curve(result)
    expected = result.curve("correct")
    lines = [t for t in figure.data if t.mode == "lines+markers"]
    assert len(lines) == 4  # two rankings in two panels
    for name, ranking in (("LOCOS", "locos"), ("Random heads (3 draws)", "random")):
        for line, task in zip(named(figure, name), ("passkey", "recall"), strict=True):
            rows = expected.loc[(expected["ranking"] == ranking) & (expected["task"] == task)]
            assert list(line.x) == [0, 1, 5] and list(line.y) == rows["mean"].tolist()
    assert list(named(figure, "LOCOS")[0].y) == [1, 7 / 8, 3 / 8]


def test_curve_bands_are_the_intervals():
    result = sweep()
    figure = ablation_curve(result, tasks="passkey", rankings="locos", level=0.8)
    band, line = figure.data
    rows: Any = result.curve("correct", task="passkey", ranking="locos", level=0.8)
    assert band.fill == "toself" and list(band.x) == [0, 1, 5, 5, 1, 0, 0]
    assert list(band.y[:3]) == rows["ci_low"].tolist() and list(band.y[3:6]) == rows["ci_high"].tolist()[::-1]
    assert line.customdata[1][2] == f"80% CI: {number(rows['ci_low'][1])} to {number(rows['ci_high'][1])}"
    assert "80%" in figure.layout.title.subtitle.text


def test_random_controls_are_grey_dashed_with_the_range_of_draws():
    figure = ablation_curve(sweep(), tasks=["passkey"])
    (control,) = named(figure, "Random heads (3 draws)")
    (tested,) = named(figure, "LOCOS")
    assert control.line.dash == "dash" and control.line.color == "#6E6E6E" and tested.line.dash == "solid"
    mean = np.array(control.y)
    np.testing.assert_allclose(mean + control.error_y.array, [1, 1, 1])
    np.testing.assert_allclose(mean - control.error_y.arrayminus, [1, 6 / 8, 6 / 8])
    assert tested.error_y.array is None
    assert control.customdata[1][3] == "8 trials, 3 draws (means 0.75 to 1)"
    assert control.customdata[2][4] == "heads differ by draw"
    assert list(tested.customdata[2][:2]) == ["5 heads ablated", "mean: 0.375"]
    assert tested.customdata[2][4] == "heads: L0H0, L1H0, L2H0, L3H0, L4H0"
    assert tested.customdata[0][0] == "no head ablated"


def test_curve_panels_axes_and_legend():
    figure = ablation_curve(sweep())
    layout = figure.layout
    assert [a.text for a in layout.annotations] == ["<b>Passkey</b>", "<b>Recall</b>"]
    assert layout.yaxis.title.text == "Correct answers (proportion)" and not layout.yaxis2.title.text
    assert "number" in layout.xaxis.title.text and "number" in layout.xaxis2.title.text
    for axis in (layout.yaxis, layout.yaxis2):
        assert axis.range[0] <= 0 and axis.range[1] >= 1 and axis.range[1] - axis.range[0] < 1.1
    assert layout.xaxis.domain[1] < layout.xaxis2.domain[0]
    assert [t.showlegend for t in named(figure, "LOCOS")] == [True, False]


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_panels_wrap_without_overlap(n):
    layout = ablation_curve(sweep(tasks=[f"task{i}" for i in range(n)]), n_boot=20).layout
    boxes = [(*layout[f"xaxis{i or ''}"].domain, *layout[f"yaxis{i or ''}"].domain) for i in ["", *range(2, n + 1)]]
    assert len(boxes) == n
    for i, a in enumerate(boxes):
        assert a[0] < a[1] and a[2] < a[3]
        for b in boxes[i + 1 :]:
            assert a[1] < b[0] or b[1] < a[0] or a[3] < b[2] or b[3] < a[2]


def test_colours_stay_with_the_ranking():
    result = sweep()
    frame = result.frame.copy()
    extra = frame.loc[frame["ranking"] == "locos"].assign(ranking="dla")
    both = SweepResult(frame=pd.concat([frame, extra]))
    all_of_them, alone = ablation_curve(both), ablation_curve(both, rankings=["dla"])
    assert named(alone, "DLA")[0].line.color == named(all_of_them, "DLA")[0].line.color
    assert named(all_of_them, "DLA")[0].line.color != named(all_of_them, "LOCOS")[0].line.color


def test_other_metrics_have_units_and_free_range():
    result = sweep(metric="answer_logprob")
    frame = result.frame.assign(value=result.frame["value"] * -7.5)
    figure = ablation_curve(SweepResult(frame=frame), metric="answer_logprob")
    assert figure.layout.yaxis.title.text == "Answer log-probability (nats)"
    assert figure.layout.yaxis.range[0] < -7.5
    own = sweep(metric="my_score", meta={"units": {"my_score": "points"}})
    assert ablation_curve(own, metric="my_score").layout.yaxis.title.text == "My score (points)"


def test_few_trials_have_no_band():
    figure = ablation_curve(sweep(n=1), rankings="locos")
    assert [t.mode for t in figure.data] == ["lines+markers"] * 2
    assert figure.data[0].customdata[0][2] == "95% CI: none (fewer than two trials)"


def test_band_breaks_where_the_interval_is_undefined():
    frame = sweep(tasks=("passkey",)).frame
    frame.loc[(frame["ranking"] == "locos") & (frame["k"] == 1), "value"] = np.nan
    band, line = ablation_curve(SweepResult(frame=frame), rankings="locos").data
    assert None in band.x and 1 not in band.x
    assert np.isnan(line.y[1]) and not line.connectgaps


def test_baseline_alone_draws():
    frame = sweep().frame
    figure = ablation_curve(SweepResult(frame=frame.loc[frame["k"] == 0]))
    assert [list(t.x) for t in named(figure, "No ablation")] == [[0], [0]]


def test_curve_refuses_what_is_not_there():
    with pytest.raises(UnknownName, match="Did you mean 'locos'"):
        ablation_curve(sweep(), rankings=["locus"])
    with pytest.raises(UnknownName, match="'passkey'"):
        ablation_curve(sweep(), tasks="passkeys")
    with pytest.raises(UnknownName, match="metric"):
        ablation_curve(sweep(), metric="corect")
    with pytest.raises(InvalidInput, match="no task is left"):
        ablation_curve(sweep(), tasks=[])
    other = sweep(tasks=("cloze",), metric="perplexity").frame
    both = SweepResult(frame=pd.concat([sweep().frame, other]))
    # cloze lacks the metric: not asked for, not drawn.
    assert len(ablation_curve(both).layout.annotations) == 2
    with pytest.raises(InvalidInput, match="not measured on 'cloze'"):
        ablation_curve(both, tasks=["passkey", "cloze"])


def test_the_alias_draws_the_same():
    a, b = ablation_curve(sweep(), level=0.9), ablation_curves(sweep(), level=0.9)
    assert pio.to_json(a) == pio.to_json(b)


# -- in words --------------------------------------------------------------------------------


def test_describe_heatmap():
    result = scores()
    best, worst = result.top(1)[0], result.bottom(1)[0]
    for text in (describe(result), describe(head_heatmap(result))):
        assert "LOCOS scores (logits)" in text and "4 layers by 3 heads" in text and "6 trials" in text
        assert f"highest is {best} with {number(result.score_of(best))} (95% confidence interval" in text
        assert f"lowest is {worst}" in text


def test_describe_curve():
    for text in (describe(sweep()), describe(ablation_curve(sweep()))):
        assert "Passkey: LOCOS from 1 at 0 heads to 0.375 at 5 heads" in text
        assert "Recall: LOCOS from 1 at 0 heads to 1 at 5 heads" in text


def test_describe_other_things():
    assert describe(go.Figure(layout={"title": {"text": "Mine"}})) == "Figure: Mine."
    assert "0 traces" in describe(go.Figure())
    # The type checks of the tests refuse it first; the function itself does without them.
    with pytest.raises(InvalidInput, match="cannot describe a value of type int"):
        inspect.unwrap(describe)(3)
