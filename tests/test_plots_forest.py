"""The ablation forest: rows, order, intervals and words are what the sweep says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from mechheads import plots
from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.style import CONTROL_COLOUR, PALETTE, number
from mechheads.scores import SweepResult

# plotly builds the attributes of its figures at run time, where a type checker does not see them.
ablation_forest: Any = plots.ablation_forest
describe: Any = plots.describe

WRONG = {"dla": 2, "locos": 6, "wu": 4}
COLUMNS = ["ranking", "draw", "k", "task", "trial_id", "metric", "value", "heads"]


def sweep(*, wrong=None, tasks=("passkey", "recall"), metric="correct", draws=3, n=8, meta=None) -> SweepResult:
    """Each detector loses its number of trials on passkey; draw d of random heads loses d; recall loses one more."""
    rows = []
    for t, task in enumerate(tasks):

        def add(ranking, draw, k, lost, heads, task=task):
            for i in range(n):
                rows.append((ranking, draw, k, task, f"{task}{i}", metric, float(i >= lost), heads))

        add("none", 0, 0, t, "")
        for k in (1, 5):
            for ranking, lost in (WRONG if wrong is None else wrong).items():
                add(ranking, 0, k, (lost if k == 5 else 0) + t, ", ".join(f"L{i}H0" for i in range(k)))
            for draw in range(draws):
                add("random", draw, k, draw + t, ", ".join(f"L{draw}H{i + 1}" for i in range(k)))
    return SweepResult(frame=pd.DataFrame(rows, columns=COLUMNS), meta=meta or {})


def named(figure: Any, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def rows_of(figure: Any) -> list[str]:
    return list(figure.layout.yaxis.ticktext)


def test_lowest_of_the_first_task_stands_on_top():
    figure = ablation_forest(sweep(), k=5)
    assert rows_of(figure) == ["LOCOS", "Wu", "DLA", "Random heads (3 draws)"]
    top, bottom = figure.layout.yaxis.range[::-1]
    assert top == -0.5 and bottom == 3.5  # turned round: place 0 is the highest
    assert figure.layout.yaxis2.range == figure.layout.yaxis.range
    # The order is that of the first task asked for, also where the others would give another.
    frame = sweep().frame
    frame.loc[(frame["task"] == "recall") & (frame["ranking"] == "dla") & (frame["k"] == 5), "value"] = 0.0
    turned = SweepResult(frame=frame)
    assert rows_of(ablation_forest(turned, k=5))[0] == "LOCOS"
    assert rows_of(ablation_forest(turned, k=5, tasks=["recall", "passkey"]))[0] == "DLA"


def test_dots_and_intervals_are_those_of_the_curve():
    result = sweep()
    figure = ablation_forest(result, k=5, level=0.8)
    curve = result.curve("correct", level=0.8)
    for name, rankings in (("Highest-ranked heads", ["locos", "wu", "dla"]), ("Random heads", ["random"])):
        for dots, task in zip(named(figure, name), ("passkey", "recall"), strict=True):
            seen = dict(zip(dots.y, range(len(dots.y)), strict=True))
            order = ["locos", "wu", "dla", "random"]
            assert len(seen) == len(rankings)
            for ranking in rankings:
                here = (curve["ranking"] == ranking) & (curve["task"] == task) & (curve["k"] == 5)
                row = curve.loc[here].iloc[0]
                j = seen[order.index(ranking)]
                assert dots.x[j] == row["mean"]
                assert dots.x[j] + dots.error_x.array[j] == pytest.approx(row["ci_high"])
                assert dots.x[j] - dots.error_x.arrayminus[j] == pytest.approx(row["ci_low"])
                assert f"80% CI: {number(row['ci_low'])} to {number(row['ci_high'])}" in dots.customdata[j]
    assert "80% intervals" in figure.layout.title.subtitle.text


def test_random_heads_are_grey_with_the_range_of_their_draws():
    figure = ablation_forest(sweep(), k=5)
    bars = named(figure, "Lowest to highest random draw")
    assert [list(bar.x) for bar in bars] == [[6 / 8, 1, None], [5 / 8, 7 / 8, None]]
    assert [list(bar.y) for bar in bars] == [[3, 3, None]] * 2
    assert {dots.marker.color for dots in named(figure, "Random heads")} == {CONTROL_COLOUR}
    assert {dots.marker.color for dots in named(figure, "Highest-ranked heads")} == {PALETTE[0]}
    assert not named(ablation_forest(sweep(draws=1), k=5), "Lowest to highest random draw")


def test_the_line_is_the_run_without_ablation():
    result = sweep()
    figure = ablation_forest(result, k=5)
    lines, bands = named(figure, "No ablation"), named(figure, "No ablation, interval")
    for line, band, task in zip(lines, bands, ("passkey", "recall"), strict=True):
        baseline: Any = result.curve("correct", task=task, ranking="dla").iloc[0]
        assert baseline["k"] == 0 and set(line.x) == {baseline["mean"]}
        assert (min(line.y), max(line.y)) == (-0.5, 3.5) == (min(band.y), max(band.y))
        assert (min(band.x), max(band.x)) == (baseline["ci_low"], baseline["ci_high"])
        assert f"mean: {number(baseline['mean'])}" in line.hovertemplate and "8 trials" in line.hovertemplate


def test_hover_says_what_the_dot_is():
    figure = ablation_forest(sweep(), k=5, tasks="passkey")
    dots, random = named(figure, "Highest-ranked heads")[0], named(figure, "Random heads")[0]
    best = list(dots.customdata[list(dots.y).index(0)])
    assert best[:3] == ["<b>LOCOS</b>", "5 heads ablated", "mean: 0.25"]
    assert best[4] == "8 trials" and best[5] == "heads: L0H0, L1H0, L2H0, L3H0, L4H0"
    assert list(random.customdata[0][4:]) == ["8 trials, 3 draws (means 0.75 to 1)", "heads differ by draw"]
    assert all(f"customdata[{i}]" in dots.hovertemplate for i in range(6))


def test_axes_title_and_legend():
    figure = ablation_forest(sweep(meta={"model": {"name": "tiny<1>"}}), k=5)
    layout = figure.layout
    assert [a.text for a in layout.annotations] == ["<b>Passkey</b>", "<b>Recall</b>"]
    assert layout.title.text == "Ablating the 5 highest-ranked heads, tiny&lt;1&gt;"
    assert ablation_forest(sweep(), k=1).layout.title.text == "Ablating the highest-ranked head"
    assert ablation_forest(sweep(), k=1, title="a < b").layout.title.text == "a &lt; b"
    assert layout.xaxis.title.text == layout.xaxis2.title.text == "Correct answers (proportion)"
    assert layout.xaxis.range == layout.xaxis2.range == (-0.03, 1.03)
    assert layout.yaxis.showticklabels and not layout.yaxis2.showticklabels
    for name in ("Highest-ranked heads", "Random heads", "Lowest to highest random draw", "No ablation"):
        assert [t.showlegend for t in named(figure, name)] == [True, False]
    assert not any(t.showlegend for t in named(figure, "No ablation, interval"))


def test_other_metrics_have_their_unit_and_a_common_range():
    frame = sweep(metric="answer_logprob").frame
    frame["value"] *= -7.5
    layout = ablation_forest(SweepResult(frame=frame), k=5, metric="answer_logprob").layout
    assert layout.xaxis.title.text == "Answer log-probability (nats)"
    assert layout.xaxis.range == layout.xaxis2.range and layout.xaxis.range[0] < -7.5
    own = sweep(
        metric="mine", meta={"units": {"mine": "points of a scale that takes far more than one line to name it"}}
    )
    title = ablation_forest(own, k=5, metric="mine").layout.xaxis.title.text
    assert "<br>" in title and title.replace("<br>", " ").startswith("Mine (points of a scale")


@pytest.mark.parametrize("count", [2, 30])
@pytest.mark.parametrize("tasks", [1, 3, 5])
def test_any_number_of_rows_and_panels(count, tasks):
    wrong = {f"detector_{i}": i % 8 for i in range(count - 1)} | {"random_" + "of_the_same_layers_" * 3: 1}
    figure = ablation_forest(sweep(wrong=wrong, tasks=[f"t{i}" for i in range(tasks)], draws=0), k=5, n_boot=20)
    layout = figure.layout
    assert len(layout.yaxis.ticktext) == count and layout.width <= 900
    plot = layout.height - layout.margin.t - layout.margin.b
    high = (layout.yaxis.domain[1] - layout.yaxis.domain[0]) * plot
    lines = max(text.count("<br>") for text in layout.yaxis.ticktext) + 1
    assert lines == 2 and high / count >= 15 * lines
    assert max(len(part) for text in layout.yaxis.ticktext for part in text.split("<br>")) * 7 < layout.margin.l
    boxes = [(*layout[f"xaxis{n}"].domain, *layout[f"yaxis{n}"].domain) for n in ["", *range(2, tasks + 1)]]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a[1] < b[0] or b[1] < a[0] or a[3] < b[2] or b[3] < a[2]


def test_one_trial_has_no_intervals():
    figure = ablation_forest(sweep(n=1), k=5)
    assert (
        "too few for intervals" in figure.layout.title.subtitle.text and "1 trial;" in figure.layout.title.subtitle.text
    )
    (dots, _) = named(figure, "Highest-ranked heads")
    assert set(dots.error_x.array) == set(dots.error_x.arrayminus) == {0.0}
    assert dots.customdata[0][3] == "95% CI: none (fewer than two trials)"
    assert not named(figure, "No ablation, interval") and len(named(figure, "No ablation")) == 2


def test_rows_without_a_value_say_so_and_stand_last():
    frame = sweep().frame
    frame.loc[(frame["ranking"] == "locos") & (frame["task"] == "passkey") & (frame["k"] == 5), "value"] = np.nan
    frame = frame.loc[~((frame["ranking"] == "wu") & (frame["task"] == "recall"))]
    figure = ablation_forest(SweepResult(frame=frame), k=5)
    assert rows_of(figure) == ["Wu", "DLA", "Random heads (3 draws)", "LOCOS"]
    assert [list(t.y) for t in named(figure, "no value")] == [[3], [0]]
    assert "1 ranking without a value" in describe(figure)
    assert "mean over 8 trials" in figure.layout.title.subtitle.text


def test_nothing_finite_still_draws():
    frame = sweep().frame.assign(value=np.nan)
    figure = ablation_forest(SweepResult(frame=frame), k=5)
    assert [list(t.y) for t in named(figure, "no value")] == [[0, 1, 2, 3]] * 2
    assert not named(figure, "No ablation")


def test_without_a_baseline_there_is_no_line():
    frame = sweep().frame
    figure = ablation_forest(SweepResult(frame=frame.loc[frame["k"] > 0]), k=5)
    assert not named(figure, "No ablation") and "without ablation" not in describe(figure)


def test_rankings_and_tasks_may_be_chosen():
    figure = ablation_forest(sweep(), k=5, rankings=["dla", "locos"], tasks="recall")
    assert rows_of(figure) == ["LOCOS", "DLA"] and [a.text for a in figure.layout.annotations] == ["<b>Recall</b>"]
    assert rows_of(ablation_forest(sweep(), k=5, rankings="wu")) == ["Wu"]


def test_what_was_not_measured_at_k_is_left_out_unless_asked_for():
    frame = sweep().frame
    part = SweepResult(frame=frame.loc[~((frame["ranking"] == "wu") & (frame["k"] == 5))])
    assert rows_of(ablation_forest(part, k=5)) == ["LOCOS", "DLA", "Random heads (3 draws)"]
    with pytest.raises(InvalidInput, match=r"'correct' on 'passkey' was not measured for 'wu' at k=5.*\[1\]"):
        ablation_forest(part, k=5, rankings=["locos", "wu"])
    early = SweepResult(frame=frame.loc[~((frame["task"] == "recall") & (frame["k"] == 5))])
    assert len(ablation_forest(early, k=5).layout.annotations) == 1
    with pytest.raises(InvalidInput, match="on 'recall' was not measured for 'dla' at k=5"):
        ablation_forest(early, k=5, tasks=["passkey", "recall"])


def test_it_refuses_what_is_not_there():
    with pytest.raises(UnknownName, match="Did you mean 'locos'"):
        ablation_forest(sweep(), k=5, rankings=["locus"])
    with pytest.raises(UnknownName, match="'passkey'"):
        ablation_forest(sweep(), k=5, tasks="passkeys")
    with pytest.raises(UnknownName, match="metric"):
        ablation_forest(sweep(), k=5, metric="corect")
    with pytest.raises(InvalidInput, match="no task is left"):
        ablation_forest(sweep(), k=5, tasks=[])
    with pytest.raises(InvalidInput, match="no ranking is left"):
        ablation_forest(sweep(), k=5, rankings=[])
    with pytest.raises(InvalidInput, match="level"):
        ablation_forest(sweep(), k=5, level=95.0)
    frame = sweep().frame
    with pytest.raises(InvalidInput, match="only the run without ablation"):
        ablation_forest(SweepResult(frame=frame.loc[frame["k"] == 0]), k=5)


@pytest.mark.parametrize("k", [0, 2, -1, True])
def test_bad_k(k):
    with pytest.raises(InvalidInput, match=rf"k is {k}; .* measured: 1, 5\."):
        ablation_forest(sweep(), k=k)


def test_k_that_is_no_number(as_users_run):
    with pytest.raises(InvalidInput, match="k is '5'"):
        ablation_forest(sweep(), k="5")


def test_in_words():
    text = describe(ablation_forest(sweep(wrong=WRONG | {f"d{i}": 3 for i in range(5)}), k=5, rankings=None))
    assert text.startswith(
        "Dot plot of correct answers (proportion) after ablating the 5 highest-ranked heads of 9 rankings"
    )
    assert "with 95% intervals. Passkey: 1 (" in text and ") without ablation; LOCOS 0.25 (" in text
    assert "Random heads 0.875 (" in text and "5 others between" in text
    assert "after ablating the highest-ranked head of 4 rankings" in describe(ablation_forest(sweep(), k=1))
    assert "Passkey: 1 without ablation; DLA 0;" in describe(ablation_forest(sweep(n=1), k=5))
