"""Study files: what a sweep does, as YAML, checked before anything runs.

What is wrong with a file is said together, each with file, line, field, value and what would be right. Every
default is listed by ``explain()`` and written out by ``Study.resolved()``. The format by example: docs/studies.md.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from mechheads.errors import InvalidInput
from mechheads.study_fields import SPLITS, UNSPLIT, Part
from mechheads.study_model import Study
from mechheads.study_nodes import Document, Problem, dotted, near, parse

__all__ = ["UNSPLIT", "FieldInfo", "Reference", "Study", "Vocabulary", "explain", "fields", "load_study", "parse_study"]

FOR_MODEL = "for_model"
# What a study file can name; tests hold these against the functions and the registry, which need torch.
DATASETS = (
    "arithmetic", "babilong", "calculations", "completions", "documents", "folio", "multi_logieval", "musique",
    "needles", "niah", "nolima", "pararule_plus", "popqa", "prontoqa", "prontoqa_ood", "proofwriter", "recall",
    "relations", "ruler", "text_windows", "nano.arithmetic", "nano.recall", "nano.retrieval",
)  # fmt: skip
METHODS = (
    "attention_spatial", "attribution_patching", "contrastive", "cri", "dla", "duplicate_token", "headkv", "induction",
    "locos", "ov_copying", "ov_norm", "ov_token_copying", "previous_token", "qk", "qk_matching", "qk_norm", "qrhead",
    "wu",
)  # fmt: skip
METRICS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "answer": ("correct", "exact_match", "rouge1_recall", "rougeL_f", "f1", "answer_logprob", "logit_diff"),
        "choice": ("choice_accuracy", "label_probability"),
        "text": ("nll", "perplexity"),
    }
)
# Options of data sets that name files or folders; relative ones start at the study file.
_PATHS = ("path", "path_or_records", "source", "haystack")


@dataclass(frozen=True)
class Vocabulary:
    """What a study may name.

    Attributes:
        datasets: Options of each data set function, without model, seed and split; None: not checked.
        methods: Options of each scoring method; None: not checked.
        required: Options that a data set cannot do without.
    """

    datasets: Mapping[str, tuple[str, ...] | None]
    methods: Mapping[str, tuple[str, ...] | None]
    required: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def shipped(cls) -> Vocabulary:
        """The names alone, which is all that can be known without torch."""
        return cls(dict.fromkeys(DATASETS), dict.fromkeys(METHODS))


@dataclass(frozen=True)
class Reference:
    """Trials of a task: all of them, or those of a split.

    Attributes:
        task: Name of the task.
        split: ``"calibration"``, ``"test"``, or None for all.
    """

    task: str
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read ``"needles.calibration"`` or ``"needles"``.

        Raises:
            InvalidInput: If another word stands after the dot.
        """
        task, dot, split = text.partition(".")
        if dot and split not in SPLITS:
            raise InvalidInput(f"{text!r} names no trials; write TASK, TASK.calibration or TASK.test.")
        return cls(task, split or None)


@dataclass(frozen=True)
class FieldInfo:
    """One field of a study file.

    Attributes:
        path: Where it stands; ``*`` is a name of one's own, ``[]`` an entry of a list.
        default: Its default as one would write it, or ``"(required)"``.
        expected: What it may be.
        allowed: Its allowed values, where they are few.
        about: What it means.
    """

    path: tuple[str, ...]
    default: str
    expected: str
    allowed: tuple[str, ...]
    about: str

    @property
    def label(self) -> str:
        """Its path as text: ``tasks.*.calibration``, ``interventions[].kind``."""
        return ".".join(self.path).replace(".[]", "[]")


def load_study(
    path: str | Path,
    *,
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
) -> Study:
    """Read and check a study file.

    Args:
        path: The file.
        model: Model to use instead of the file's. What the file says ``for_model`` of this name is laid over it.
        overrides: Further values by dotted field, such as ``{"engine.kind": "ray"}``; they come last.
        vocabulary: Data sets and methods that may be named, with their options where these are to be checked; those
            that are shipped, by name alone, if None.

    Returns:
        The study, with names, paths and the defaults that depend on others filled in.

    Raises:
        InvalidInput: If the file cannot be read or is no study; the message names every problem with its line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is no text in UTF-8 (byte {error.start}); a study file is YAML.") from error
    except OSError as error:
        reason = "is a folder" if path.is_dir() else "cannot be read" if path.exists() else "does not exist"
        raise InvalidInput(f"the study file {path} {reason}; give the path of a YAML file.") from error
    return parse_study(
        text, source=str(path), name=path.stem, folder=path.parent, model=model, overrides=overrides,
        vocabulary=vocabulary,
    )  # fmt: skip


def parse_study(
    text: str,
    *,
    source: str = "study",
    name: str = "study",
    folder: str | Path = ".",
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
) -> Study:
    """A study from YAML text; see ``load_study``.

    Args:
        text: YAML.
        source: What messages call it.
        name: The study's name if it gives none.
        folder: Where relative paths start.
        model: As for ``load_study``.
        overrides: Likewise.
        vocabulary: Likewise.

    Raises:
        InvalidInput: As ``load_study``.
    """
    whole = parse(text, source)
    variants = whole.node((FOR_MODEL,))
    given = whole.value((FOR_MODEL,)) or {}
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping) for v in given.values()):
        problem = f"{FOR_MODEL} lays fields over the study for some models; write {FOR_MODEL}: {{nano: {{k: [5]}}}}."
        whole.refuse([Problem((FOR_MODEL,), problem)])
    plain = whole.without(FOR_MODEL)
    known = vocabulary or Vocabulary.shipped()
    # Every variant is checked, so that a slip in one is found before it is used.
    for other in given:
        _one(plain, whole, other, {}, name, Path(folder), known)
    chosen = model if model is not None else _named(plain)
    if variants is None and model is None and not overrides:
        return _one(plain, whole, None, {}, name, Path(folder), known)
    return _one(plain, whole, chosen, overrides or {}, name, Path(folder), known)


def _named(document: Document) -> str | None:
    """The model a document names, if it names one."""
    value = document.value(("model",))
    value = value.get("name") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _one(
    plain: Document,
    whole: Document,
    model: str | None,
    overrides: Mapping[str, Any],
    name: str,
    folder: Path,
    known: Vocabulary,
) -> Study:
    """The study of one model."""
    document = plain
    if model is not None:
        variant = whole.node((FOR_MODEL, model))
        if variant is not None:
            document = document.over(variant)
        if _named(document) != model:
            mapping = isinstance(document.value(("model",)), Mapping)
            document = document.with_value("model.name" if mapping else "model", model)
    for key, value in overrides.items():
        document = document.with_value(key, value)
    data = document.data()
    data.setdefault("name", name)
    data.setdefault("store", f"runs/{data['name']}")
    unknown = list(_unknown_names(data, known))
    try:
        study = Study.model_validate(data)
    except ValidationError as error:
        errors = error.errors()
        within = {tuple(one["loc"][:n]) for one in errors for n in range(len(one["loc"]))}
        # A list whose entries are all refused is said to be too short as well.
        own = [one for one in errors if one["type"] != "too_short" or tuple(one["loc"]) not in within]
        document.refuse([*(p for one in own for p in _told(one, document)), *unknown])
        raise  # cannot be reached while every error is told
    document.refuse([*unknown, *_paths_missing(study, folder)])
    return _with_paths(study, folder)


def _told(error: Any, document: Document) -> Iterator[Problem]:
    """An error of a model as problems of the file."""
    path = tuple(error["loc"])
    found = error.get("ctx", {}).get("problems")
    if found:
        for problem in found:
            at = document.known((*path, *problem.path))
            here = dotted(document.known(path))
            # A part's own words begin with the field; where the part stands comes before them.
            yield Problem(at, f"{here}: {problem.message}" if here else problem.message)
        return
    if error["type"] == "missing":
        info = _info(path)
        yield Problem(path, f"{dotted(path)} is missing; give {info.expected}. {info.about}")
    elif error["type"] == "extra_forbidden":
        inside = document.known(path[:-1])
        names = sorted({f.path[-1] for f in fields() if f.path[:-1] == _pattern(path[:-1])} - {"*", "[]"})
        yield Problem(
            path, f"{dotted(inside) or 'a study'} has no field {path[-1]!r}.{near(path[-1], names)} "
            f"Its fields: {', '.join(names)}."
        )  # fmt: skip
    else:
        info = _info(path)
        at = document.known(path)
        value = document.value(at)
        yield Problem(at, f"{dotted(at)} is {_shown(value)}; it must be {info.expected}.{near(value, info.allowed)}")


def _shown(value: Any) -> str:
    """A value as it was written, cut short."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unknown_names(data: Mapping[str, Any], known: Vocabulary) -> Iterator[Problem]:
    """Data sets, methods and metrics that there are not, and options they do not have."""
    for name, task in _parts(data, "tasks"):
        at = ("tasks", name)
        if isinstance(task.get("dataset"), str):
            options = task.get("options") or {}
            yield from _unknown((*at, "dataset"), task["dataset"], known.datasets, options)
            for option in known.required.get(task["dataset"], ()):
                if option not in options:
                    yield Problem(
                        at, f"tasks.{name} lacks options.{option}, which {task['dataset']} cannot do without."
                    )
        measure = task.get("measure")
        allowed = [m for kind, names in METRICS.items() if measure in (None, kind) for m in names]
        given = task.get("metrics")
        for metric in [given] if isinstance(given, str) else given or ():
            if isinstance(metric, str) and metric not in allowed:
                yield Problem(
                    (*at, "metrics"), f"tasks.{name}.metrics names {metric!r}.{near(metric, allowed)} "
                    f"Metrics{'' if measure is None else f' of {measure!r}'}: {', '.join(allowed)}."
                )  # fmt: skip
    for name, ranking in _parts(data, "rankings"):
        if isinstance(ranking.get("method"), str):
            options = ranking.get("options") or {}
            yield from _unknown(("rankings", name, "method"), ranking["method"], known.methods, options)


def _parts(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The mappings under a field, as far as they are mappings."""
    inner = data.get(name)
    for key, value in inner.items() if isinstance(inner, Mapping) else ():
        if isinstance(value, Mapping):
            yield key, value


def _unknown(
    path: tuple[str, ...], name: str, known: Mapping[str, tuple[str, ...] | None], options: Mapping[str, Any]
) -> Iterator[Problem]:
    if name not in known:
        yield Problem(
            path, f"{dotted(path)} is {name!r}; it must be one of {', '.join(sorted(known))}.{near(name, known)}"
        )
        return
    allowed = known[name]
    for option in options if isinstance(options, Mapping) else ():
        if allowed is not None and option not in allowed:
            yield Problem(
                (*path[:-1], "options", option), f"{name} has no option {option!r}.{near(option, allowed)} "
                f"Its options: {', '.join(allowed) or '(none)'}."
            )  # fmt: skip


def _files(study: Study) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Every path that a study names, with its place."""
    for name, task in study.tasks.items():
        if task.file is not None:
            yield ("tasks", name, "file"), task.file
        for option in _PATHS:
            value = task.options.get(option)
            for i, one in enumerate(value if isinstance(value, tuple) else [value]):
                if isinstance(one, str):
                    yield ("tasks", name, "options", option, *([i] if isinstance(value, tuple) else [])), one
    for name, ranking in study.rankings.items():
        if ranking.file is not None:
            yield ("rankings", name, "file"), ranking.file


def _paths_missing(study: Study, folder: Path) -> Iterator[Problem]:
    for path, value in _files(study):
        if not (folder / value).exists():
            yield Problem(
                path, f"{dotted(path)} is {value!r}, and there is no such file; relative paths start at the study's "
                "folder."
            )  # fmt: skip


def _with_paths(study: Study, folder: Path) -> Study:
    """The study with its relative paths started at its folder."""
    found = list(_files(study))
    if not found:
        return study
    data = study.model_dump()
    for path, value in found:
        inner: Any = data
        for part in path[:-1]:
            if isinstance(inner[part], tuple):
                inner[part] = list(inner[part])
            inner = inner[part]
        inner[path[-1]] = str(folder / value)
    return Study.model_validate(data)


# -- the fields, for people ----------------------------------------------------------------------


@functools.cache
def fields() -> tuple[FieldInfo, ...]:
    """Every field of a study file, in order."""
    own = FieldInfo(
        (FOR_MODEL,), "{}", "a mapping from model names to fields", (),
        "Fields laid over the study when it runs on that model: mappings key by key, null takes out, else replaces.",
    )  # fmt: skip
    return (*_fields_of(Study, ()), own)


def explain(width: int = 110) -> str:
    """Every field with its default, what it may be, and what it means, as text."""
    lines = []
    for info in fields():
        depth = sum(part not in ("*", "[]") for part in info.path) - 1
        default = info.default if info.default == "(required)" else f"default {info.default}"
        indent = "  " * depth
        lines.append(f"{indent}{info.label}: {info.expected}; {default}" if info.expected else f"{indent}{info.label}")
        lines += textwrap.wrap(info.about, width, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    ")
    return "\n".join(lines)


def _fields_of(part: type[Part], above: tuple[str, ...]) -> Iterator[FieldInfo]:
    for name, info in part.model_fields.items():
        extra: Any = info.json_schema_extra or {}
        path = (*above, name)
        yield FieldInfo(
            path, extra.get("shown") or _default(info.default), extra.get("expected", ""),
            tuple(extra.get("allowed", ())), info.description or "",
        )  # fmt: skip
        for steps, inner in _parts_in(info.annotation):
            yield from _fields_of(inner, (*path, *steps))


def _parts_in(annotation: Any) -> Iterator[tuple[tuple[str, ...], type[Part]]]:
    """The parts that an annotation holds, and the steps to them."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield (), annotation
        return
    step = {dict: ("*",), tuple: ("[]",)}.get(get_origin(annotation), ())
    for inner in get_args(annotation):
        for steps, part in _parts_in(inner):
            yield (*step, *steps), part


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "(required)"
    if isinstance(value, Part):
        return "as below"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _pattern(path: Sequence[str | int]) -> tuple[str, ...]:
    """The path of the field that a place belongs to: names of one's own as ``*``, entries as ``[]``."""
    known = {f.path[:n] for f in fields() for n in range(len(f.path) + 1)}
    here: tuple[str, ...] = ()
    for part in path:
        steps = ((*here, step) for step in (str(part), "[]" if isinstance(part, int) else "*"))
        step = next((s for s in steps if s in known), None)
        if step is None:
            break
        here = step
    return here


def _info(path: Sequence[str | int]) -> FieldInfo:
    """What is known of the field a place belongs to."""
    by_path = {f.path: f for f in fields()}
    here = _pattern(path)
    while here and here not in by_path:
        here = here[:-1]
    return by_path[here]
