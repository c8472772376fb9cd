"""The fields of a study: frozen models with their defaults, and what cannot stand together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.study_nodes import Problem

BASELINE, RANDOM = "none", "random"
BOTTOM, NEAREST_ZERO = "{} bottom", "{} nearest zero"
SITES: Mapping[str, tuple[str, ...]] = {
    "zero": ("z", "q", "attn_scores", "pattern"),
    "mean": ("z", "q"),
    "mean_positional": ("z", "q"),
    "resample": ("z", "q"),
    "bias": ("attn_scores",),
    "prune": ("weights",),
}
NEED_REFERENCE = ("mean", "mean_positional", "resample")
UNSPLIT = ("nano.recall", "nano.arithmetic")  # data sets that mark no calibration trials
SPLITS = ("calibration", "test")
NAME = re.compile(r"[^\W_][\w \-+()]*")
_SITES = ", ".join(f"{kind}: {' '.join(sites)}" for kind, sites in SITES.items())
_OWN_OPTIONS = {"seed": "seed", "split": "calibration", "calibration": "calibration"}

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
Options = dict[Text, Any]


def several(value: Any) -> Any:
    """A single value as a tuple of one; None stays, to be refused."""
    return value if value is None or isinstance(value, (tuple, list)) else (value,)


def alone(field: str) -> Any:
    """A value alone stands for a mapping with this field: ``model: nano`` is ``model: {name: nano}``."""
    return BeforeValidator(lambda value: {field: value} if isinstance(value, (str, int, float)) else value)


def described(
    default: Any, about: str, expected: str, *, allowed: tuple[str, ...] = (), shown: str = "", **bounds: Any
) -> Any:
    """A field with its default (``shown`` says it where it is worked out), meaning, and what it may be."""
    extra: dict[str, Any] = {"expected": expected, "allowed": list(allowed), "shown": shown}
    return Field(default, description=about, json_schema_extra=extra, **bounds)


class Part(BaseModel):
    """A mapping of a study: unknown fields are refused, and it cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together; paths start here."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Part:
        found = list(self.problems())
        if found:
            raise PydanticCustomError(
                "study", "{text}", {"problems": found, "text": " ".join(p.message for p in found)}
            )
        return self


class ModelPart(Part):
    """Which model, and how it is loaded."""

    name: Text = described(..., "Model: 'nano', 'smollm2', a hub id or a folder.", "text", min_length=1)
    revision: Text | None = described(None, "Hub revision.", "text, or null for the newest")
    dtype: Literal["float32", "bfloat16", "float16"] | None = described(
        None, "Weight type; null: as stored.", "one of float32, bfloat16, float16, or null",
        allowed=("float32", "bfloat16", "float16"),
    )  # fmt: skip
    device: Text | None = described(
        None, "Where to put it; null: TransformerLens' choice.", "text such as cuda, or null"
    )
    n_devices: Int | None = described(None, "Accelerators to spread it over.", "a whole number from 1, or null", ge=1)


class TaskPart(Part):
    """Trials, and how they are measured."""

    dataset: Text | None = described(
        None, "Function that makes the trials, of mh.datasets, or of mh.nano with 'nano.' before it.",
        "the name of a data set function, such as needles, prontoqa or nano.retrieval",
    )  # fmt: skip
    file: Text | None = described(
        None, "Trials that TrialSet.save wrote, instead of a data set.", "the path of a trial file"
    )
    options: Options = described({}, "Options of the data set function.", "a mapping of options")
    seed: Int | None = described(None, "Seed of the trials; null: the study's.", "a whole number from 0, or null", ge=0)
    calibration: Float | None = described(
        None, "Share of the trials set apart to choose heads on; null: none, so all trials are tested.",
        "a share between 0 and 1, such as 0.5, or null", gt=0, lt=1,
    )  # fmt: skip
    tested: Literal["test", "all"] | None = described(
        None, "Trials that are tested; null: 'test' where there are calibration trials or a file, else 'all'.",
        "one of test, all, or null", allowed=("test", "all"),
    )  # fmt: skip
    role: Literal["target", "control"] = described(
        "target", "What the heads should matter for (target), or should not (control).", "one of target, control",
        allowed=("target", "control"),
    )  # fmt: skip
    measure: Literal["answer", "choice", "text"] | None = described(
        None, "Generate and judge, compare candidates, or perplexity; null: told from the trials.",
        "one of answer, choice, text, or null", allowed=("answer", "choice", "text"),
    )  # fmt: skip
    metrics: Annotated[tuple[Text, ...] | None, BeforeValidator(several)] = described(
        None, "Metrics; null: all of the measure.", "a list of metrics, or null", min_length=1
    )
    max_new_tokens: Int = described(20, "Longest answer, tokens.", "a whole number from 1", ge=1)
    stop_at_newline: Bool = described(True, "End an answer before a line break.", "true or false")
    foil: Text | None = described(None, "Wrong answer of logit_diff, where trials name none.", "text, or null")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("tested") is None:
            split = data.get("calibration") is not None or data.get("file") is not None
            return {**data, "tested": "test" if split else "all"}
        return data

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        if (self.dataset is None) == (self.file is None):
            got = "both stand here" if self.file else "neither stands here"
            yield Problem((), f"a task takes dataset: or file:, and {got}; give one of them.")
        if self.file is not None:
            for name, value in (("options", self.options or None), ("calibration", self.calibration)):
                if value is not None:
                    yield Problem((name,), f"{name} is given, but a file holds finished trials; leave it out.")
        elif self.calibration is None and self.tested == "test":
            yield Problem(
                ("tested",), "tested is 'test', but calibration is null, so there is no split; give calibration: 0.5."
            )
        if self.dataset in UNSPLIT and self.calibration is not None:
            yield Problem(("calibration",), f"calibration is given, but {self.dataset} marks no split; leave it out.")
        for name in self.options:
            if name in _OWN_OPTIONS:
                yield Problem(
                    ("options", name), f"options.{name} is a field of the task itself: write {_OWN_OPTIONS[name]}: "
                    "beside options, not under it."
                )  # fmt: skip


class RankingPart(Part):
    """Where a ranking of heads comes from: a scoring method, a list, or a file."""

    method: Text | None = described(None, "Scoring method that ranks the heads.", "the name of a scoring method")
    trials: Text | None = described(
        None, "Trials to score on; null: the calibration trials of the first target that has some.",
        "TASK.calibration, such as needles.calibration",
    )  # fmt: skip
    options: Options = described({}, "Options of the method, and of scoring (pooling, ...).", "a mapping of options")
    by: Literal["accuracy", "auroc"] = described(
        "accuracy", "What ranks heads under the method qk.", "one of accuracy, auroc", allowed=("accuracy", "auroc")
    )
    heads: Annotated[tuple[Any, ...] | None, BeforeValidator(lambda v: v.split() if isinstance(v, str) else v)] = (
        described(None, "Heads, best first, instead of a method.", "heads such as 'L1H2 L0H3'")
    )
    file: Text | None = described(None, "Head file, instead of a method (docs/methods.md).", "the path of a head file")

    @property
    def scored(self) -> bool | None:
        """Whether it has scores; None if only the file can tell."""
        return None if self.file is not None else self.heads is None

    @property
    def head_set(self) -> HeadSet:
        """The heads of ``heads``."""
        return HeadSet(self.heads or ())

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        given = [name for name in ("method", "heads", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) if given else "none of them"
            yield Problem((), f"a ranking takes one of method:, heads: or file:, and {got} stands here.")
        if self.method is None:
            for name in ("trials", "options"):
                if getattr(self, name):
                    yield Problem((name,), f"{name} belongs to a method, and none is named; leave it out.")
        if self.by != "accuracy" and self.method != "qk":
            yield Problem(("by",), f"by is {self.by!r}, which is for the method qk alone; leave it out.")
        if self.heads is not None:
            try:
                if not len(self.head_set):
                    yield Problem(("heads",), "heads is empty; name heads, best first, such as 'L1H2 L0H3'.")
            except InvalidInput as error:
                yield Problem(("heads",), f"heads: {error}")


class SizePart(Part):
    """How many heads: a count, a share of all heads, or all that score above a threshold."""

    count: Int | None = described(None, "So many heads.", "a number of heads from 0 (0 is always run)", ge=0)
    fraction: Float | None = described(
        None, "A share of all heads, rounded, at least one.", "a fraction between 0 and 1", gt=0, lt=1
    )
    threshold: Float | None = described(None, "All heads that score above this.", "a number")
    rankings: Annotated[tuple[Text, ...] | None, BeforeValidator(several)] = described(
        None, "Rankings the threshold is for; null: all.", "a list of rankings, or null", min_length=1
    )

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        given = [name for name in ("count", "fraction", "threshold") if getattr(self, name) is not None]
        if len(given) != 1:
            yield Problem((), "a size is one of a count (10), a fraction (0.1) and {threshold: x}.")
        if self.rankings is not None and self.threshold is None:
            yield Problem(("rankings",), "rankings goes with a threshold alone; leave it out.")

    def short(self) -> Any:
        """As one writes it."""
        if self.threshold is None:
            return self.fraction if self.count is None else self.count
        return {"threshold": self.threshold, **({} if self.rankings is None else {"rankings": list(self.rankings)})}


def as_size(value: Any) -> Any:
    """A whole number as a count, another as a fraction."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return {"count": value} if isinstance(value, int) else {"fraction": value}


class InterventionPart(Part):
    """What is done to the heads."""

    kind: Literal["zero", "mean", "mean_positional", "resample", "bias", "prune"] = described(
        ..., "What stands in place of the activation (docs/sweeps.md).",
        f"one of {', '.join(SITES)} (patch needs a partner for each prompt, so it is for Python)", allowed=tuple(SITES),
    )  # fmt: skip
    name: Text | None = described(
        None, "What results call it; null: its kind, and its site where that is not the usual one.", "text, or null"
    )
    site: Literal["z", "q", "attn_scores", "pattern", "weights"] = described(
        "z", f"Where. {_SITES}. The first of each is its default.", "one of z, q, attn_scores, pattern, weights",
        shown="the kind's first", allowed=("z", "q", "attn_scores", "pattern", "weights"),
    )  # fmt: skip
    reference: Text | None = described(
        None, "Trials that mean, mean_positional and resample draw on.", "TASK.calibration, such as needles.calibration"
    )
    n_reference: Int | None = described(
        None, "Only so many of them, from the first; null: all.", "a whole number from 1, or null", ge=1
    )
    positions: Literal["all", "prompt", "answer"] | tuple[Int, ...] = described(
        "all", "Query positions: all, prompt, answer (from the last prompt token on), or indices (negative: from the "
        "prompt's end).", "one of all, prompt, answer, or a list of positions", allowed=("all", "prompt", "answer"),
    )  # fmt: skip
    strength: Float | None = described(None, "What bias adds to the scores, before the softmax.", "a number")
    keys: Text | tuple[Int, ...] | None = described(
        None, "Keys that bias acts on: the name of a span, or positions.", "a span such as needle, or positions"
    )
    seeds: Annotated[tuple[Int, ...], BeforeValidator(several)] = described(
        (0,), "Seeds of resample; each is a draw.", "a list of whole numbers from 0", min_length=1
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("site") is None:
            return {**data, "site": SITES.get(str(data.get("kind")), ("z",))[0]}
        return data

    @property
    def label(self) -> str:
        """What results call it."""
        if self.name is not None:
            return self.name
        return self.kind if self.site == SITES[self.kind][0] else f"{self.kind} at {self.site}"

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        sites = SITES[self.kind]
        if self.site not in sites:
            yield Problem(("site",), f"site is {self.site!r}, where {self.kind} cannot act; it acts at {_or(sites)}.")
        if self.kind in NEED_REFERENCE and self.reference is None:
            yield Problem((), f"{self.kind} needs a reference, trials to take it from: reference: TASK.calibration.")
        unused = [] if self.kind in NEED_REFERENCE else ["reference", "n_reference"]
        unused += [] if self.kind == "bias" else ["strength", "keys"]
        for name in unused:
            if getattr(self, name) is not None:
                yield Problem((name,), f"{name} has no meaning for {self.kind}; leave it out.")
        for name in ("strength", "keys") if self.kind == "bias" else ():
            if getattr(self, name) in (None, ()):
                yield Problem((), f"bias needs {name}: " + ("keys: needle." if name == "keys" else "strength: -2.0."))
        if self.positions == ():
            yield Problem(("positions",), "positions is empty, so nothing would be done; name some, or all.")
        if self.kind == "prune" and self.positions != "all":
            yield Problem(("positions",), "prune acts on weights, so on every position; leave positions out.")
        if min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            yield Problem(("seeds",), f"seeds is {list(self.seeds)}; give different whole numbers from 0.")
        if self.kind != "resample" and self.seeds != (0,):
            yield Problem(
                ("seeds",), f"seeds is {list(self.seeds)}, but nothing is random in {self.kind}; leave it out."
            )
        if self.name is not None and not NAME.fullmatch(self.name):
            yield Problem(("name",), f"name is {self.name!r}; use letters, digits, spaces, - _ + and brackets.")


class RandomPart(Part):
    """Random heads in place of the tested ones."""

    draws: Int = described(7, "Independent draws for each k.", "a whole number from 1", ge=1)
    exclude_tested: Bool = described(True, "Never draw a head that is tested at the largest k.", "true or false")
    tested: Annotated[tuple[Text, ...] | None, BeforeValidator(several)] = described(
        None, "Rankings whose heads count as tested; null: all. Fewer leave more heads to draw from.",
        "a list of rankings, or null", min_length=1,
    )  # fmt: skip
    match_layers: Bool = described(
        False, "As many heads in each layer as the first ranking has there.", "true or false"
    )
    seed: Int | None = described(None, "Seed of the draws; null: the study's.", "a whole number from 0, or null", ge=0)
    at: Annotated[tuple[Int, ...] | None, BeforeValidator(several)] = described(
        None, "The k to draw at; null: all.", "a list of k, or null", min_length=1
    )


def _switch(value: Any) -> Any:
    """``random: false`` is none, ``true`` the defaults, a number so many draws."""
    if isinstance(value, bool):
        return {} if value else None
    return {"draws": value} if isinstance(value, int) else value


class ControlsPart(Part):
    """Head sets that should not matter, or differently."""

    random: Annotated[RandomPart | None, BeforeValidator(_switch)] = described(
        RandomPart(), "Random heads; false: none.", "a mapping, a number of draws, or false"
    )
    bottom: Bool | tuple[Text, ...] = described(
        False, "The k lowest scores too (most negative first): of all rankings with scores, or of those named.",
        "true, false, or a list of rankings",
    )  # fmt: skip
    nearest_zero: Bool | tuple[Text, ...] = described(
        False, "The k scores nearest to zero too: likewise.", "true, false, or a list of rankings"
    )


class EnginePart(Part):
    """What runs the cells."""

    kind: Literal["local", "ray"] = described(
        "local", "In this process and others of this machine, or on Ray.", "one of local, ray", allowed=("local", "ray")
    )
    processes: Int = described(1, "Processes (local); 1: this one.", "a whole number from 1", ge=1)
    threads: Int | None = described(
        None, "Threads of each process or worker; null: as torch does.", "a whole number from 1, or null", ge=1
    )
    workers: Int = described(2, "Workers, each with a model of its own (ray).", "a whole number from 1", ge=1)
    address: Text | None = described(None, "Ray cluster; null: started here (ray).", "text such as auto, or null")
    num_gpus: Float = described(0.0, "Accelerators of each worker (ray).", "a number from 0", ge=0)
    retries: Int = described(2, "How often a lost worker's block is tried again (ray).", "a whole number from 0", ge=0)

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        other = {"local": ("workers", "address", "num_gpus", "retries"), "ray": ("processes",)}[self.kind]
        for name in other:
            if getattr(self, name) != type(self).model_fields[name].default:
                kind = "ray" if self.kind == "local" else "local"
                yield Problem((name,), f"{name} is an option of the engine {kind}, and this is {self.kind}.")


class BatchPart(Part):
    """How much runs together; changes speed and memory, not results beyond rounding."""

    rows: Int = described(64, "Most rows (a prompt under a head set) at once; halved when memory runs out.",
                       "a whole number from 1", ge=1)  # fmt: skip
    memory_gb: Float | None = described(
        None, "Most memory for keys and values of a batch, GB; null: what is there.", "a number above 0, or null", gt=0
    )


def _or(names: Any) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
