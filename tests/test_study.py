"""Study files: what they mean, every default, and errors that name the line."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_datasets import Words

from mechheads import study as study_module
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.study import Reference, Study, Vocabulary, explain, fields, load_study, parse_study
from mechheads.study_fields import SITES, Part
from mechheads.study_trials import dataset_functions, make_trials, measured_trials, pick, vocabulary
from mechheads.tasks import METRICS
from mechheads.trials import Trial, TrialSet

STUDIES = Path(__file__).resolve().parent.parent / "studies"
SMALL = """\
model: nano
tasks:
  needles:
    dataset: nano.retrieval
    calibration: 0.5
    options: {facts: 4}
  recall: {dataset: nano.recall, role: control}
rankings:
  locos: {method: locos}
  mine: {heads: L1H0 L0H0}
k: [1, 2]
interventions:
  - {kind: mean, reference: needles.calibration}
  - zero
"""


def changed(old: str, new: str) -> str:
    assert SMALL.count(old) == 1, old
    return SMALL.replace(old, new)


def refused(text: str, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_study(text, source="my.yaml", **options)
    return str(caught.value)


# -- what a study says -------------------------------------------------------------------------------


def test_a_small_study() -> None:
    study = parse_study(SMALL, name="small")
    assert (study.name, study.store, study.model.name, study.seed) == ("small", "runs/small", "nano", 0)
    assert study.targets == ["needles"]
    assert (study.tasks["needles"].tested, study.tasks["recall"].tested) == ("test", "all")
    assert study.trials_of("locos") == "needles.calibration"
    assert study.rankings["mine"].head_set == HeadSet(["L1H0", "L0H0"])
    assert [(i.label, i.site) for i in study.interventions] == [("mean", "z"), ("zero", "z")]
    assert [size.count for size in study.k] == [1, 2]
    assert study.controls.random is not None and study.controls.random.draws == 7
    assert study.engine.kind == "local" and study.sides == ("ablated",)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("model: nano", "model: {name: nano}"),
        ("k: [1, 2]", "k: [{count: 1}, {count: 2}]"),
        ("  - zero\n", "  - {kind: zero, site: z, positions: all, seeds: [0]}\n"),
        ("  mine: {heads: L1H0 L0H0}", "  mine: {heads: ['1.0', [0, 0]]}"),
        ("k: [1, 2]", "k: [1, 2]\nsides: ablated\nengine: local"),
        ("k: [1, 2]", "k: [1, 2]\ncontrols: {random: 7}"),
        ("k: [1, 2]", "k: [1, 2]\ncontrols: {random: true}"),
    ],
)
def test_short_forms(short: str, long: str) -> None:
    assert parse_study(changed(short, long)).to_dict() == parse_study(SMALL).to_dict()


def test_one_k_and_one_intervention_need_no_list() -> None:
    text = SMALL[: SMALL.index("interventions")].replace("[1, 2]", "0.1") + "interventions: zero\n"
    study = parse_study(text)
    assert [size.short() for size in study.k] == [0.1]
    assert [i.label for i in study.interventions] == ["zero"]


def test_false_switches_the_random_control_off() -> None:
    study = parse_study(f"{SMALL}controls: {{random: false}}\n")
    assert study.controls.random is None
    assert parse_study(study.resolved()).controls.random is None


def test_labels_say_an_unusual_site() -> None:
    study = parse_study(
        changed("  - zero", "  - {kind: zero, site: q}\n  - {kind: prune}\n  - {kind: zero, name: none left}")
    )
    assert [i.label for i in study.interventions] == ["mean", "zero at q", "prune", "none left"]
    assert study.interventions[2].site == "weights"


def test_resolved_has_every_default_and_reads_back() -> None:
    study = parse_study(SMALL, name="small")
    text = study.resolved()
    plain = yaml.safe_load(text)
    assert plain["tasks"]["recall"]["seed"] == 0 and plain["controls"]["random"]["seed"] == 0
    assert plain["rankings"]["locos"]["trials"] == "needles.calibration"
    assert parse_study(text).resolved() == text
    # Every field that explain() lists stands there, whatever names of one's own the path goes through.
    for info in fields():
        if info.path[0] in ("for_model", "k"):
            continue
        here = [plain]
        for part in info.path:
            here = [x for one in here for x in (one.values() if part == "*" else one if part == "[]" else [one[part]])]
        assert here, info.label


sizes = st.one_of(
    st.integers(1, 500),
    st.floats(0.01, 0.99),
    st.fixed_dictionaries({"threshold": st.floats(-3, 3), "rankings": st.just(["locos"])}),
)


@given(
    k=st.lists(sizes, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["zero", "prune"]),
    draws=st.integers(1, 9),
    sides=st.sampled_from([["ablated"], ["kept"], ["kept", "ablated"]]),
)
def test_any_study_reads_back_from_its_resolved_text(k: list, seed: int, kind: str, draws: int, sides: list) -> None:
    plain = yaml.safe_load(SMALL)
    plain |= {"k": k, "seed": seed, "interventions": [kind], "controls": {"random": {"draws": draws}}, "sides": sides}
    study = parse_study(yaml.safe_dump(plain))
    again = parse_study(study.resolved())
    assert again.to_dict() == study.to_dict()
    assert again.to_dict()["k"] == k and again.task_seed("needles") == seed and list(again.sides) == sides


def test_a_study_cannot_be_changed() -> None:
    study = parse_study(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        study.seed = 3  # pyright: ignore[reportAttributeAccessIssue]


# -- models, overrides, paths -------------------------------------------------------------------------

VARIED = (
    SMALL + "for_model:\n  tiny:\n    k: [1]\n    tasks:\n      recall: null\n      needles: {options: {facts: 2}}\n"
)


def test_what_is_said_for_a_model_is_laid_over_the_rest() -> None:
    plain = parse_study(VARIED)
    assert plain.to_dict() == parse_study(SMALL).to_dict()
    tiny = parse_study(VARIED, model="tiny")
    assert list(tiny.tasks) == ["needles"] and tiny.model.name == "tiny"
    assert tiny.tasks["needles"].options == {"facts": 2} and tiny.tasks["needles"].calibration == 0.5
    assert [size.count for size in tiny.k] == [1]
    other = parse_study(VARIED, model="Qwen/Qwen3-8B")
    assert other.to_dict() == {**plain.to_dict(), "model": {**plain.to_dict()["model"], "name": "Qwen/Qwen3-8B"}}


def test_the_named_model_has_its_own_fields_too() -> None:
    assert list(parse_study(VARIED.replace("model: nano", "model: tiny")).tasks) == ["needles"]
    study = parse_study(VARIED.replace("model: nano", "model: {name: nano, dtype: float32}"), model="tiny")
    assert (study.model.name, study.model.dtype) == ("tiny", "float32")


def test_a_slip_in_what_is_said_for_a_model_is_found_when_another_runs() -> None:
    assert refused(VARIED.replace("k: [1]", "k: [x]")) == (
        "my.yaml, line 17: k[0] is 'x'; it must be a list of counts (10), fractions (0.1) and {threshold: x}."
    )
    told = refused(SMALL + "for_model: [tiny]\n")
    assert told == (
        "my.yaml, line 15: for_model lays fields over the study for some models; write for_model: {nano: {k: [5]}}."
    )


def test_overrides_come_last_and_are_named() -> None:
    study = parse_study(SMALL, overrides={"engine.kind": "ray", "k": [3], "tasks.needles.options.facts": 7})
    assert study.engine.kind == "ray" and study.k[0].count == 3 and study.tasks["needles"].options == {"facts": 7}
    assert refused(SMALL, overrides={"engine.kind": "rai"}) == (
        "my.yaml, given as engine.kind: engine.kind is 'rai'; it must be one of local, ray. Did you mean 'ray'?"
    )


def test_paths_start_at_the_study_file(tmp_path: Path) -> None:
    TrialSet([Trial(id="a", tokens=[1, 2], answer="x", split="test")], name="own").save(tmp_path / "own.jsonl")
    (tmp_path / "heads.json").write_text('{"0-0": 1.0}')
    text = changed("  recall: {dataset: nano.recall, role: control}", "  own: {file: own.jsonl, role: control}")
    text = text.replace("{heads: L1H0 L0H0}", "{file: heads.json}")
    (tmp_path / "mine.yaml").write_text(text)
    study = load_study(tmp_path / "mine.yaml")
    assert study.name == "mine" and study.store == "runs/mine"
    assert study.tasks["own"].file == str(tmp_path / "own.jsonl") and study.tasks["own"].tested == "test"
    assert make_trials(study, "own", None)[0].id == "a"
    assert study.rankings["mine"].scored is None
    (tmp_path / "heads.json").unlink()
    with pytest.raises(InvalidInput, match=r"mine\.yaml, line 10: rankings\.mine\.file is 'heads\.json', and there is"):
        load_study(tmp_path / "mine.yaml")


def test_several_files_of_one_option(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    text = changed("nano.retrieval", "babilong").replace("{facts: 4}", "{source: [a.txt, b.txt]}")
    study = parse_study(text, folder=tmp_path)
    assert study.tasks["needles"].options["source"] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "calibration: 0.5",
            "calibration: 1.5",
            "line 5: tasks.needles.calibration is 1.5; it must be a share between 0 and 1, such as 0.5, or null.",
        ),
        (
            "calibration: 0.5",
            "calibration: '0.5'",
            "line 5: tasks.needles.calibration is '0.5'; it must be a share between 0 and 1, such as 0.5, or null.",
        ),
        (
            "kind: mean",
            "kind: meen",
            "line 13: interventions[0].kind is 'meen'; it must be one of zero, mean, mean_positional, resample, bias, "
            "prune (patch needs a partner for each prompt, so it is for Python). Did you mean 'mean'?",
        ),
        (
            "{method: locos}",
            "{methud: locos}",
            "line 9: rankings.locos has no field 'methud'. Did you mean 'method'? Its fields: by, file, heads, method, "
            "options, trials.",
        ),
        ("k: [1, 2]", "k: [1, 2.5]", "line 11: k[1] is 2.5; it must be a fraction between 0 and 1."),
        ("k: [1, 2]", "k: [-1]", "line 11: k[0] is -1; it must be a number of heads from 0 (0 is always run)."),
        (
            "k: [1, 2]",
            "k: [true]",
            "line 11: k[0] is True; it must be a list of counts (10), fractions (0.1) and {threshold: x}.",
        ),
        (
            "k: [1, 2]",
            "k: []",
            "line 11: k is []; it must be a list of counts (10), fractions (0.1) and {threshold: x}.",
        ),
        (
            "k: [1, 2]",
            "k: [0]",
            "line 11: k holds 0 alone, the run without ablation; give numbers of heads, such as [5, 10].",
        ),
        (
            "k: [1, 2]",
            "k: [{threshold: 0.1}]",
            "line 11: k[0] is a threshold, and the ranking 'mine' is a list without scores; name the rankings it is "
            "for: {threshold: x, rankings: [...]}.",
        ),
        (
            "reference: needles.calibration",
            "reference: needle.calibration",
            "line 13: reference is 'needle.calibration', and there is no task 'needle'. Did you mean 'needles'? Tasks: "
            "needles, recall.",
        ),
        (
            "reference: needles.calibration",
            "reference: needles.calib",
            "line 13: reference is 'needles.calib'; after the dot comes calibration or test. Did you mean "
            "'calibration'? Without it, all trials are meant.",
        ),
        (
            "reference: needles.calibration",
            "reference: recall.calibration",
            "line 13: reference is 'recall.calibration', but the task 'recall' has no splits: its calibration: is "
            "null; give it a share, such as 0.5.",
        ),
        (
            ", reference: needles.calibration",
            "",
            "line 13: interventions[0]: mean needs a reference, trials to take it from: reference: TASK.calibration.",
        ),
        (
            "{method: locos}",
            "{method: locos, trials: needles.test}",
            "line 9: trials is 'needles.test', but heads are tested on some of these trials; rank them on "
            "needles.calibration, and leave the task's tested: at 'test'.",
        ),
        (
            "{method: locos}",
            "{method: locos, heads: L0H0}",
            "line 9: rankings.locos: a ranking takes one of method:, heads: or file:, and method and heads "
            "stands here.",
        ),
        (
            "L1H0 L0H0",
            "L1H0 L1H0",
            "line 10: rankings.mine: heads: L1H0 stands twice in a head set; name every head once.",
        ),
        ("  mine:", "  random:", "line 10: a ranking cannot be called 'random'; that names the random control."),
        (
            "  mine:",
            "  locos bottom:",
            "line 10: a ranking cannot be called 'locos bottom'; that names a control of 'locos'.",
        ),
        (
            "  - zero",
            "  - {kind: mean, reference: needles.test}",
            "line 14: another intervention is called 'mean' already; give this one a name: of its own.",
        ),
        (
            "  - zero",
            "  - {kind: zero, seeds: [1, 2]}",
            "line 14: interventions[1]: seeds is [1, 2], but nothing is random in zero; leave it out.",
        ),
        (
            "  - zero",
            "  - {kind: prune, site: q}",
            "line 14: interventions[1]: site is 'q', where prune cannot act; it acts at weights.",
        ),
        (
            "  - zero",
            "  - {kind: bias, keys: needle}",
            "line 14: interventions[1]: bias needs strength: strength: -2.0.",
        ),
        (
            "  - zero",
            "  - {kind: zero, reference: needles}",
            "line 14: interventions[1]: reference has no meaning for zero; leave it out.",
        ),
        (
            "dataset: nano.recall, role",
            "dataset: nano.recall, calibration: 0.5, role",
            "line 7: tasks.recall: calibration is given, but nano.recall marks no split; leave it out.",
        ),
        (
            "{facts: 4}",
            "{facts: 4, seed: 3}",
            "line 6: tasks.needles: options.seed is a field of the task itself: write seed: beside options, not "
            "under it.",
        ),
        (
            "    dataset: nano.retrieval\n",
            "    role: target\n",
            "line 3: tasks.needles: a task takes dataset: or file:, and neither stands here; give one of them.",
        ),
        (
            "    dataset: nano.retrieval\n",
            "    dataset: nano.retrieval\n    role: control\n",
            "line 2: every task is a control; leave role: out of the one the heads should matter for.",
        ),
        (
            "  recall:",
            "  re.call:",
            "line 7: a task is called 're.call'; use letters, digits, spaces, - _ + and brackets.",
        ),
        (
            "k: [1, 2]",
            "k: [1, 2]\ncontrols: {bottom: [mine]}",
            "line 12: controls.bottom names 'mine', which has no scores for it.",
        ),
        (
            "k: [1, 2]",
            "k: [1, 2]\ncontrols: {random: {at: [3]}}",
            "line 12: controls.random.at has 3, which is not in k: [1, 2].",
        ),
        (
            "k: [1, 2]",
            "k: [1, 2]\ncontrols: {random: {tested: [loco]}}",
            "line 12: controls.random.tested names 'loco', which is no ranking. Did you mean 'locos'? Rankings: locos, "
            "mine.",
        ),
        (
            "k: [1, 2]",
            "k: [1, 2]\nengine: {kind: local, workers: 4}",
            "line 12: engine: workers is an option of the engine ray, and this is local.",
        ),
        ("k: [1, 2]", "k: [1, 2]\nsides: [kept, kept]", "line 12: sides is ['kept', 'kept']; name each once."),
        ("k: [1, 2]", "k: [1, 2]\nsides: keep", "line 12: sides is 'keep'; it must be a list of ablated, kept. Did you "
         "mean 'kept'?"),
        ("k: [1, 2]", "k: [1, 2]\nk: [3]", "line 12: the key 'k' stands already in line 11; write it once."),
        ("k: [1, 2]", "k: [1, 2]\non: 3", "line 12: the key 'on' is no text; put it in quotes."),
        ("k: [1, 2]", "k: &a [*a]", "line 11: this alias refers to itself; write the value out."),
        (
            "k: [1, 2]",
            "k: !!set {1}",
            "line 11: the tag 'tag:yaml.org,2002:set' has no meaning in a study; leave it out.",
        ),
        ("k: [1, 2]", "k: [1, 2]\nseed: 2026-13-45", "line 12: '2026-13-45' cannot be read; put text in quotes."),
    ],
)  # fmt: skip
def test_errors_name_the_line_and_what_is_right(old: str, new: str, told: str) -> None:
    assert refused(changed(old, new)) == f"my.yaml, {told}"


def test_missing_fields_and_several_problems_at_once() -> None:
    told = refused("model: nano\ntasks: {needles: {dataset: needels}}\nengine: rey\n")
    assert told.splitlines() == [
        "my.yaml has 5 problems:",
        "  line 1: rankings is missing; give a mapping of rankings. Rankings by name.",
        "  line 1: k is missing; give a list of counts (10), fractions (0.1) and {threshold: x}. How many heads.",
        "  line 1: interventions is missing; give a list of interventions. What is done to the heads.",
        f"  line 2: tasks.needles.dataset is 'needels'; it must be one of {', '.join(sorted(study_module.DATASETS))}. "
        "Did you mean 'needles'?",
        "  line 3: engine is 'rey'; it must be one of local, ray. Did you mean 'ray'?",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "my.yaml is empty; a study needs tasks, rankings, k and interventions."),
        ("- 1\n", "my.yaml, line 1: a study is a mapping, such as 'name: my-study'."),
        ("a: 1\n---\nb: 2\n", "my.yaml, line 2: this is not YAML: expected a single document in the stream, but found "
         "another document."),
        ("a: 1\nb: [1\n", "my.yaml, line 3: this is not YAML: while parsing a flow sequence, expected ',' or ']', but "
         "got '<stream end>'."),
        ("a: *b\n", "my.yaml, line 1: this is not YAML: found undefined alias 'b'."),
        ("a: 1\n? [1]\n: 2\n", "my.yaml, line 2: the key 'a list or mapping' is no text; put it in quotes."),
        ("a: !!python/object/apply:os.getcwd []\n", "my.yaml, line 1: the tag "
         "'tag:yaml.org,2002:python/object/apply:os.getcwd' has no meaning in a study; leave it out."),
    ],
)  # fmt: skip
def test_what_is_no_study(text: str, told: str) -> None:
    assert refused(text) == told


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the study file .*none\.yaml does not exist; give the path of a YAML file"):
        load_study(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="is a folder; give the path of a YAML file"):
        load_study(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff")
    with pytest.raises(InvalidInput, match=r"bytes\.yaml is no text in UTF-8 \(byte 7\); a study file is YAML"):
        load_study(tmp_path / "bytes.yaml")


def test_merge_keys_and_aliases_keep_their_lines() -> None:
    recall = "  recall: {dataset: nano.recall, role: control}"
    text = changed(recall, recall.replace("{", "&c {") + "\n  sums: {<<: *c, dataset: nano.arithmetic}")
    study = parse_study(text)
    assert (study.tasks["sums"].dataset, study.tasks["sums"].role) == ("nano.arithmetic", "control")
    assert refused(text.replace("role: control", "role: contrl")).count("line 7: tasks.") == 2


# -- what may be named -------------------------------------------------------------------------------


def test_the_shipped_names_are_those_that_there_are() -> None:
    known = vocabulary()
    assert sorted(known.datasets) == sorted(study_module.DATASETS)
    shipped = Vocabulary.shipped()
    assert set(shipped.methods) == set(study_module.METHODS) <= set(known.methods)
    assert {m for m in known.methods if m not in study_module.METHODS} <= _registered_by_tests()
    by_measure: dict[str, list[str]] = {}
    for metric in METRICS.values():
        by_measure.setdefault(metric.measure, []).append(metric.name)
    assert {kind: list(names) for kind, names in study_module.METRICS.items()} == by_measure


def _registered_by_tests() -> set[str]:
    from mechheads.methods import get_method, method_names

    return {name for name in method_names() if not get_method(name).builtin}


def test_options_are_checked_where_they_are_known() -> None:
    text = changed("{facts: 4}", "{fact: 4}").replace("{method: locos}", "{method: locos, options: {unembd: raw}}")
    assert parse_study(text).tasks["needles"].options == {"fact": 4}
    told = refused(text, vocabulary=vocabulary()).splitlines()
    assert told[1] == (
        "  line 6: nano.retrieval has no option 'fact'. Did you mean 'facts'? Its options: n, literal, facts, "
        "context_length."
    )
    assert told[2].startswith(
        "  line 9: locos has no option 'unembd'. Did you mean 'unembed'? Its options: unembed, lens,"
    )
    text = changed("nano.retrieval", "needles").replace("{facts: 4}", "{n: 4}")
    assert refused(text, vocabulary=vocabulary()) == (
        "my.yaml, line 3: tasks.needles lacks options.kind, which needles cannot do without."
    )


def test_metrics_are_those_of_the_measure() -> None:
    text = changed("    calibration: 0.5\n", "    calibration: 0.5\n    metrics: [correct, perplexty]\n")
    assert "Did you mean 'perplexity'? Metrics: correct, exact_match," in refused(text)
    text = text.replace("perplexty", "perplexity").replace("    metrics", "    measure: answer\n    metrics")
    assert refused(text) == (
        "my.yaml, line 7: tasks.needles.metrics names 'perplexity'. Metrics of 'answer': correct, exact_match, "
        "rouge1_recall, rougeL_f, f1, answer_logprob, logit_diff."
    )


def test_every_dataset_takes_its_seed_and_its_split() -> None:
    for name, function in dataset_functions().items():
        taken = inspect.signature(function).parameters
        assert "seed" in taken, name
        assert ({"split", "calibration"} & set(taken) == set()) == (name in study_module.UNSPLIT), name


def test_every_site_of_the_table_can_be_written() -> None:
    for kind, sites in SITES.items():
        for site in sites:
            more = {"mean": "reference: needles", "bias": "strength: 1.0, keys: [0]"}
            more |= dict.fromkeys(("mean_positional", "resample"), "reference: needles")
            text = changed("  - zero", f"  - {{kind: {kind}, site: {site}, name: x, {more.get(kind, 'seeds: 0')}}}")
            assert parse_study(text).interventions[1].site == site


def test_explain_lists_every_field_with_its_meaning() -> None:
    text = explain()
    seen = {info.label for info in fields()}
    assert {"model.name", "tasks.*.calibration", "k[].threshold", "interventions[].kind", "controls.random.draws",
            "engine.retries", "heads_per_block", "for_model"} <= seen  # fmt: skip
    assert len(seen) == len(fields())

    def count(part: Any) -> int:
        inner = [p for f in part.model_fields.values() for p in parts(f.annotation)]
        return len(part.model_fields) + sum(map(count, inner))

    def parts(annotation: Any) -> list[Any]:
        if isinstance(annotation, type) and issubclass(annotation, Part):
            return [annotation]
        return [p for a in typing.get_args(annotation) for p in parts(a)]

    assert len(seen) == count(Study) + 1  # for_model is laid over before the study is made
    for info in fields():
        assert info.about.endswith(".") and info.expected, info.label
        assert f"{info.label}: {info.expected}; " in text
    assert "  tasks.*.max_new_tokens: a whole number from 1; default 20\n      Longest answer, tokens." in text
    assert "store: a path; default runs/NAME" in text and "rankings: a mapping of rankings; (required)" in text


def test_references() -> None:
    assert Reference.parse("a.test") == Reference("a", "test") and Reference.parse("a") == Reference("a")
    with pytest.raises(InvalidInput, match=r"'a\.all' names no trials; write TASK, TASK\.calibration or TASK\.test\."):
        Reference.parse("a.all")
    assert dataclasses.is_dataclass(Reference)


# -- trials of a study -------------------------------------------------------------------------------

PLAIN = """\
model: some
seed: 5
tasks:
  needles: {dataset: needles, calibration: 0.25, options: {kind: passkey, n: 8, context_length: 120}}
  recall: {dataset: recall, role: control, seed: 7, options: {n: 3}}
rankings: {mine: {heads: L0H0}}
k: 1
interventions: zero
"""


def test_trials_of_a_study() -> None:
    study, model = parse_study(PLAIN), Words()
    made = {task: make_trials(study, task, model) for task in study.tasks}
    assert [len(made["needles"].split(s)) for s in ("calibration", "test")] == [2, 6]
    assert made["recall"].splits == []
    assert (made["needles"].options["seed"], made["recall"].options["seed"]) == (5, 7)
    tested = measured_trials(study, made)
    assert [(name, len(trials)) for name, trials in tested.items()] == [("needles", 6), ("recall", 3)]
    assert pick(made, "needles.calibration").hash == made["needles"].split("calibration").hash
    assert pick(made, "recall").hash == made["recall"].hash
    with pytest.raises(UnknownName, match="unknown task of the study 'needle'"):
        pick(made, "needle")
    with pytest.raises(UnknownName, match="unknown task of the study 'x'"):
        make_trials(study, "x", model)


# -- shipped studies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "smollm2", "Qwen/Qwen3-8B", "nano"])
@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_studies_are_sound(path: Path, model: str | None) -> None:
    study = load_study(path, model=model, vocabulary=vocabulary())
    assert study.model.name == (model or "smollm2")
    assert parse_study(study.resolved(), vocabulary=vocabulary()).to_dict() == study.to_dict()


def test_the_locos_protocol() -> None:
    study = load_study(STUDIES / "locos.yaml")
    assert list(study.rankings) == ["locos", "attention_spatial", "dla", "wu", "contrastive", "qrhead"]
    assert [size.count for size in study.k] == [1, 5, 10, 20, 50, 100]
    assert [i.kind for i in study.interventions] == ["mean"] and study.controls.bottom == ("locos",)
    assert {name: task.role for name, task in study.tasks.items()} == {
        "needles": "target", "recall": "control", "arithmetic": "control",
    }  # fmt: skip
    assert load_study(STUDIES / "locos.yaml", model="Qwen/Qwen3-8B").to_dict() == {
        **study.to_dict(), "model": {**study.to_dict()["model"], "name": "Qwen/Qwen3-8B"},
    }  # fmt: skip
    nano = load_study(STUDIES / "locos.yaml", model="nano")
    assert {task.dataset for task in nano.tasks.values()} == {"nano.retrieval", "nano.recall", "nano.arithmetic"}
    assert len(nano.rankings) == 6
    assert len(list(STUDIES.glob("*.yaml"))) == 2


def test_the_examples_of_the_document() -> None:
    text = (STUDIES.parent / "docs" / "studies.md").read_text(encoding="utf-8")
    whole, variant = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    study = parse_study(whole, vocabulary=vocabulary())
    assert [i.label for i in study.interventions] == ["mean", "zero"] and study.controls.bottom == ("locos",)
    assert [s.count for s in parse_study(whole + variant, vocabulary=vocabulary()).k] == [1, 2, 5]


def test_an_unknown_field_of_the_study_itself_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"a study has no field .modle.*Did you mean .model"):
        parse_study("modle: nano\n")
