"""Figures of agreement: what is in them is what the results say, and they need no more than the browser can draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import texts

from mechheads import plots
from mechheads.agreement import agreement, by_kv_group
from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.profile import profile_frame
from mechheads.plots.style import DIVERGING, PALETTE
from mechheads.scores import HeadScores

# plotly builds the attributes of its figures at run time, where a type checker does not see them.
agreement_matrix: Any = plots.agreement_matrix
overlap_curves: Any = plots.overlap_curves
method_scatter: Any = plots.method_scatter
layer_profile: Any = plots.layer_profile
kv_group_view: Any = plots.kv_group_view
describe: Any = plots.describe


def scores(method="locos", *, layers=4, heads=6, n=6, seed=0, kv=None, unit="logits", shift=0.0) -> HeadScores:
    values = np.random.default_rng(seed).normal(size=(layers, heads)) + shift
    values = values + 0.2 * np.random.default_rng([seed, 1]).normal(size=(n, layers, heads))
    model = {"name": "tiny", **({"n_key_value_heads": kv} if kv else {})}
    return HeadScores(
        method=method,
        values=values,
        kept=np.ones(n, dtype=bool),
        weights=np.ones(n),
        trial_ids=[f"t{i}" for i in range(n)],
        unit=unit,
        meta={"model": model},
    )


def several(count=3, **fields: Any) -> dict[str, HeadScores]:
    names = ["locos", "dla", "wu", "headkv", "qrhead", "induction", "contrastive", "a<b"]
    return {name: scores(name, seed=i, **fields) for i, name in enumerate(names[:count])}


def all_figures() -> dict[str, Any]:
    maps = several(3, kv=2)
    return {
        "matrix": agreement_matrix(agreement(maps, k=(2, 4), n_boot=20)),
        "curves": overlap_curves(maps, n_boot=20),
        "scatter": method_scatter(maps["locos"], maps["dla"], n_boot=20, k=3),
        "profile": layer_profile(maps, k=5),
        "kv": kv_group_view(maps["locos"], n_boot=20),
    }


@pytest.mark.parametrize("name", ["matrix", "curves", "scatter", "profile", "kv"])
def test_figures_have_one_look_and_a_description(name):
    figure: Any = all_figures()[name]
    assert type(figure).__name__ == "Figure"
    template = figure.layout.template.layout
    assert template.paper_bgcolor == "white" and template.font.size >= 12 and template.colorway == PALETTE
    assert len(describe(figure)) > 40 and figure.layout.meta["description"] == describe(figure)
    assert figure.layout.width and figure.layout.height
    assert figure.layout.title.text and figure.layout.title.subtitle.text
    assert not any("nan" in text.lower().split() for text in texts(figure))


# -- matrix --------------------------------------------------------------------------------------


def test_matrix_shows_the_values_centred_at_zero():
    result = agreement(several(3), k=(2, 4), n_boot=20)
    figure = agreement_matrix(result)
    heat, empty = figure.data
    assert (heat.zmin, heat.zmax) == (-1, 1)
    assert [list(c) for c in heat.colorscale] == DIVERGING and DIVERGING[5] == [0.5, "#FFFFFF"]
    square = result.matrix().to_numpy()
    for i in range(3):
        for j in range(3):
            if i == j:
                assert math.isnan(heat.z[i][j]) and heat.text[i][j] == "" and empty.z[i][j] == 0
            else:
                assert heat.z[i][j] == square[i, j]
                assert heat.text[i][j] == f"{square[i, j]:.2f}".replace("-", "\u2212")
    assert list(heat.x) == list(heat.y) == ["LOCOS", "DLA", "Wu"]
    row = result.pair("locos", "dla")
    hover = heat.customdata[0][1]
    assert hover == heat.customdata[1][0] and hover.startswith("<b>LOCOS and DLA</b><br>spearman: ")
    assert "95% CI: " in hover and "24 heads, 6 common trials" in hover
    assert f"{row['value']:.3g}".replace("-", "\u2212") in hover


def test_matrix_of_shared_heads_runs_from_none_to_all():
    result = agreement(several(2), k=(2, 4), n_boot=20)
    figure = agreement_matrix(result, "overlap", k=4, title="a<b")
    heat = figure.data[0]
    assert (heat.zmin, heat.zmax) == (0, 4) and heat.colorscale[0] == (0.0, "#FFFFFF")
    assert figure.layout.title.text == "a&lt;b"
    assert "number, of 4" in heat.colorbar.title.text
    assert "overlap of the top 4: " in heat.customdata[0][1]
    assert "Chance would give 0.667." in describe(figure)
    assert agreement_matrix(result, "jaccard", k=2).data[0].zmax == 1


def test_matrix_says_why_a_cell_is_empty():
    maps = several(2)
    flat = HeadScores("flat", np.zeros((6, 4, 6)), np.ones(6, bool), np.ones(6), [f"t{i}" for i in range(6)])
    figure = agreement_matrix(agreement({**maps, "flat": flat}, k=2, n_boot=20))
    assert math.isnan(figure.data[0].z[0][2]) and figure.data[1].z[0][2] == 0
    assert "every score of 'flat' is 0, so it ranks nothing" in figure.data[1].customdata[0][2]
    assert "2 pairs without a value." in describe(figure)
    nothing = agreement_matrix(agreement({"flat": flat, "locos": maps["locos"]}, k=2, n_boot=20))
    assert "No pair has a value: every score of 'flat'" in describe(nothing)


def test_matrix_refuses():
    result = agreement(several(2), k=(2, 4), n_boot=5)
    with pytest.raises(InvalidInput, match="the overlap was computed at k in"):
        agreement_matrix(result, "overlap")
    with pytest.raises(UnknownName, match="unknown statistic"):
        agreement_matrix(result, "pearson")


# -- overlap curves ------------------------------------------------------------------------------


def test_curves_are_shares_of_k_beside_chance():
    maps = several(3)
    figure = overlap_curves(maps, "dla", ks=(2, 4, 12), n_boot=30)
    result = agreement(maps, k=(2, 4, 12), n_boot=30, reference="dla")
    lines = {trace.name: trace for trace in figure.data if "interval" not in trace.name}
    assert list(lines) == ["LOCOS", "Wu", "Chance"]
    for name, label in (("locos", "LOCOS"), ("wu", "Wu")):
        line = lines[label]
        wanted = [result.pair("dla", name, "overlap", k)["value"] / k for k in (2, 4, 12)]
        assert list(line.x) == [2, 4, 12] and list(line.y) == pytest.approx(wanted)
    assert list(lines["Chance"].y) == pytest.approx([k / 24 for k in (2, 4, 12)])
    assert "Shared with DLA" in figure.layout.yaxis.title.text and "log scale" in figure.layout.xaxis.title.text
    bands = [trace for trace in figure.data if "interval" in trace.name]
    assert len(bands) == 2 and "bands" in figure.layout.title.subtitle.text
    assert "k from 2 to 12" in describe(figure)


def test_many_curves_have_no_bands_and_room_for_the_legend():
    figure = overlap_curves(several(8), n_boot=10)
    assert not [trace for trace in figure.data if "interval" in trace.name]
    assert "on hovering" in figure.layout.title.subtitle.text
    crowd = {f"m{i}": scores(f"m{i}", seed=i) for i in range(14)}
    assert overlap_curves(crowd, n_boot=2).layout.height >= 30 * 14 + 66 + 56  # no legend that scrolls
    assert figure.layout.legend.orientation == "v"
    assert len({(t.line.color, t.line.dash, t.marker.symbol) for t in figure.data}) == 8
    assert "A&lt;b" in [trace.name for trace in figure.data]
    assert figure.data[0].x[-1] <= 12  # up to half of the heads


def test_curves_refuse():
    with pytest.raises(UnknownName, match="unknown method of the overlap curves 'x'"):
        overlap_curves(several(2), "x")
    with pytest.raises(InvalidInput, match="overlap needs at least 2"):
        overlap_curves(several(1))


# -- scatter -------------------------------------------------------------------------------------


def test_scatter_names_every_head_and_picks_out_the_top():
    a, b = scores("locos", unit="logits"), scores("dla", seed=1, unit="a<b")
    figure = method_scatter(a, b, k=3, n_boot=20)
    points = [(t.name, x, y, h) for t in figure.data for x, y, h in zip(t.x, t.y, t.customdata, strict=True)]
    assert len(points) == 24
    tops = {str(h) for h in a.top(3)}, {str(h) for h in b.top(3)}
    for name, x, y, hover in points:
        label = hover.split("</b>")[0].removeprefix("<b>")
        assert (x, y) == (a.score_of(label), b.score_of(label))
        kind = {
            (False, False): "Other heads",
            (True, False): "Top 3 of LOCOS",
            (False, True): "Top 3 of DLA",
            (True, True): "Top 3 of both",
        }[label in tops[0], label in tops[1]]
        assert name == kind
        assert "logits, rank" in hover
    assert figure.layout.xaxis.title.text == "LOCOS score (logits)"
    assert figure.layout.yaxis.title.text == "DLA score (a&lt;b)"
    rho = agreement({"locos": a, "dla": b}, k=3, n_boot=20).pair("locos", "dla")["value"]
    assert f"Spearman {rho:.2g}".replace("-", "\u2212") in figure.layout.title.subtitle.text
    same = method_scatter(a, scores("locos", seed=2), k=3, n_boot=20)
    assert same.layout.title.text == "Locos 1 and Locos 2"
    with pytest.raises(InvalidInput, match="both maps are named 'x'"):
        method_scatter(a, b, names=("x", "x"))


def test_scatter_of_a_large_model_says_what_it_leaves_out(monkeypatch):
    big = scores("locos", layers=64, heads=64, n=2), scores("dla", layers=64, heads=64, n=2, seed=1)
    whole = method_scatter(*big, n_boot=2)
    assert sum(len(t.x) for t in whole.data) == 4096 and "drawn" not in whole.layout.title.subtitle.text
    monkeypatch.setattr("mechheads.plots.scatter.MOST_POINTS", 500)
    figure = method_scatter(*big, n_boot=2)
    drawn = {t.name: len(t.x) for t in figure.data}
    assert sum(drawn.values()) == 500
    assert drawn["Top 10 of LOCOS"] + drawn["Top 10 of both"] == 10
    others = next(t for t in figure.data if t.name == "Other heads")
    layers = [int(text.split("H")[0].removeprefix("<b>L")) for text in others.customdata]
    assert 20 < np.mean(layers) < 44  # from all over the model
    assert "500 of 4096 heads drawn" in figure.layout.title.subtitle.text
    assert "Only 500 are drawn" in describe(figure)


def test_scatter_without_a_ranking_says_so():
    flat = HeadScores("flat", np.zeros((6, 4, 6)), np.ones(6, bool), np.ones(6), [f"t{i}" for i in range(6)])
    figure = method_scatter(scores(), flat, k=2, n_boot=5)
    assert "There is no rank correlation: every score of 'flat' is 0" in describe(figure)
    assert not [t for t in figure.data if t.name == "Top 2 of Flat" and len(t.x)]


# -- layer profile -------------------------------------------------------------------------------


def test_profile_equals_a_loop():
    one = scores("locos")
    frame = profile_frame({"locos": one}, k=5)
    mean, top = one.mean(), one.top(5)
    total = sum(max(float(x), 0.0) for x in mean.ravel())
    for layer in range(4):
        row = frame.loc[frame["layer"] == layer].iloc[0]
        positive = [max(float(x), 0.0) for x in mean[layer]]
        assert row["mass"] == pytest.approx(sum(positive) / 6)
        assert row["mass_share"] == pytest.approx(sum(positive) / total)
        assert row["top"] == sum(head.layer == layer for head in top)
        assert row["top_share"] == row["top"] / 5
    assert frame["mass_share"].sum() == pytest.approx(1) and frame["top_share"].sum() == pytest.approx(1)


def test_profile_of_one_few_and_many():
    single = layer_profile(scores("locos"), k=5)
    assert single.layout.yaxis.title.text == "Mean positive score a head (logits)"
    assert single.layout.title.text == "LOCOS by layer"
    few = layer_profile(several(3), k=5)
    assert few.layout.yaxis.title.text == "Share of the positive mass (0 to 1)"
    assert [t.type for t in few.data] == ["scatter"] * 6
    assert [t.name for t in few.data if t.showlegend] == ["LOCOS", "DLA", "Wu"]
    assert "has most top heads" in describe(few)
    many = layer_profile(several(6), k=5)
    assert [t.type for t in many.data] == ["heatmap"] * 2
    frame = profile_frame(several(6), k=5)
    wanted = [frame.loc[frame["method"] == name, "top_share"].tolist() for name in several(6)]
    assert [list(row) for row in many.data[1].z] == wanted
    assert describe(many).count("peaks in layer") == 6
    negative = layer_profile(scores(shift=-9.0), k=5)
    assert "LOCOS has no positive score" in describe(negative)


def test_profile_refuses():
    with pytest.raises(InvalidInput, match="a layer profile needs at least 1"):
        layer_profile({})
    with pytest.raises(InvalidInput, match="k is 25, but 'locos' scores only 24 heads"):
        layer_profile(scores(), k=25)
    with pytest.raises(InvalidInput, match="k is 0"):
        layer_profile(scores(), k=0)


# -- KV groups -----------------------------------------------------------------------------------


def test_group_view_shows_the_groups_and_lists_the_highest():
    one = scores("locos", kv=3)
    figure = kv_group_view(one, top=4, n_boot=50)
    groups = by_kv_group(one, n_boot=50)
    heat, listed = figure.data
    np.testing.assert_array_equal(np.array(heat.z, dtype=float), groups.values)
    assert (heat.zmin, heat.zmax) == (-np.abs(groups.values).max(), np.abs(groups.values).max())
    ranked = groups.to_frame().sort_values("rank").head(4)
    assert list(listed.y) == ranked["label"].tolist() and list(listed.x) == ranked["score"].tolist()
    assert list(listed.error_x.array) == pytest.approx((ranked["ci_high"] - ranked["score"]).tolist())
    assert "heads: " in heat.customdata[0][0] and "highest: L" in heat.customdata[0][0]
    assert figure.layout.xaxis2.title.text == "Group score (logits)"
    assert "highest of the 2 query heads" in figure.layout.title.subtitle.text
    assert f"The highest is {ranked['label'].iloc[0]}" in describe(figure)


def test_group_view_of_undefined_heads_and_one_trial():
    values = np.random.default_rng(0).normal(size=(1, 4, 6))
    values[:, 1, :2] = np.nan
    one = HeadScores("ov_copying", values, np.ones(1, bool), np.ones(1), ["weights"], unit="share")
    figure = kv_group_view(one, 3, how="mean")
    assert [t.name for t in figure.data] == ["groups", "undefined", "highest groups"]
    assert figure.data[1].z[1][0] == 0 and "score: undefined" in figure.data[1].customdata[1][0]
    assert set(figure.data[2].error_x.array) == {0.0}
    assert "confidence interval" not in describe(figure)
    assert "from the weights alone" in describe(figure) and "1 trial" not in figure.layout.title.subtitle.text


def test_group_view_refuses():
    with pytest.raises(InvalidInput, match="do not say how many key/value heads"):
        kv_group_view(scores())
    with pytest.raises(InvalidInput, match="top is 0"):
        kv_group_view(scores(kv=2), top=0)
    nothing = HeadScores("x", np.full((2, 2, 2), np.nan), np.ones(2, bool), np.ones(2), ["a", "b"])
    with pytest.raises(InvalidInput, match="no KV group of 'x' has a defined score"):
        kv_group_view(nothing, 1)


def test_describe_an_agreement():
    text = describe(agreement(several(2), k=2, n_boot=20))
    assert text.startswith("Matrix of Spearman's rank correlation between 2 methods. The closest are LOCOS and DLA (")
