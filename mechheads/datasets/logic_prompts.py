"""Templates of logic prompts, and the trial a question becomes in one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from string import Formatter, ascii_uppercase
from typing import Any

import yaml

from mechheads.datasets.logic_questions import RESERVED, THREE, YES_NO, LogicQuestion
from mechheads.errors import InvalidInput, UnknownName
from mechheads.provenance import json_ready
from mechheads.trials import Encoder, Span, Trial

_VERDICTS = frozenset((*THREE, *YES_NO))
_DEFAULT_WORDS = {word: word for word in (*THREE, *YES_NO)}


@dataclass(frozen=True)
class LogicTemplate:
    r"""Text around a question's premises, statement and candidates.

    Attributes:
        name: For the trial's metadata.
        text: Prompt with ``{context}`` and ``{statement}`` once each, and ``{options}`` once where ``letters``; braces
            that are meant as such are doubled. Without premises the context is empty and white space before what
            follows is dropped, so nothing but it should precede the statement's own words.
        three: The prompt where the candidates are true, false and unknown; None is ``text``.
        question: The prompt where they are yes and no, and the statement is a question; None is ``text``.
        prefix: Stands before each candidate, so that ``prompt + candidate`` is running text.
        words: Wording of each verdict. A verdict without a wording is refused; options other than the five verdicts are
            taken as they are.
        chat: Put the prompt through the model's chat template.
        letters: List the candidates in the prompt as ``A) True B) False``; the trial's candidates are the letters, and
            ``spans["candidates"]`` are the listed options, letter included.

    Raises:
        InvalidInput: Naming the template and what is wrong with it.
    """

    name: str
    text: str
    three: str | None = None
    question: str | None = None
    prefix: str = " "
    words: Mapping[str, str] = field(default_factory=lambda: dict(_DEFAULT_WORDS))
    chat: bool = False
    letters: bool = False

    def __post_init__(self) -> None:
        me = f"logic template {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise InvalidInput(f"{me}: the name must be text.")
        for name in ("chat", "letters"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{me}: {name} is {getattr(self, name)!r}; give true or false.")
        if not isinstance(self.prefix, str) or not isinstance(self.words, Mapping):
            raise InvalidInput(f"{me}: prefix must be text and words a mapping of verdicts to wordings.")
        # YAML reads a bare `true:` or `yes:` as a boolean.
        if wrong := [k for k, v in self.words.items() if not isinstance(k, str) or not isinstance(v, str) or not v]:
            raise InvalidInput(f"{me}: words has {wrong[0]!r}; verdicts and wordings are texts (in YAML, quote them).")
        if len(set(self.words.values())) < len(self.words):
            raise InvalidInput(f"{me}: words gives two verdicts the same wording: {dict(self.words)}.")
        object.__setattr__(self, "words", dict(self.words))
        for name in ("text", "three", "question"):
            value = getattr(self, name)
            if value is not None or name == "text":
                self._pieces(value, name)

    def _pieces(self, layout: Any, name: str) -> list[tuple[str, str | None]]:
        """Literal text and the placeholder after it, in order."""
        me = f"logic template {self.name!r}, {name!r}"
        wanted = ["context", "statement", *(["options"] if self.letters else [])]
        if not isinstance(layout, str):
            raise InvalidInput(f"{me} is {layout!r}; it must be text with {_braced(wanted)}.")
        try:
            parsed = [(text, placeholder) for text, placeholder, _, _ in Formatter().parse(layout)]
        except ValueError as error:
            raise InvalidInput(f"{me} cannot be read: {error}.") from error
        names = [placeholder for _, placeholder in parsed if placeholder is not None]
        if sorted(names) != sorted(wanted):
            raise InvalidInput(f"{me} has the placeholders {_braced(names)}; it needs {_braced(wanted)}, each once.")
        return parsed

    def worded(self, question: LogicQuestion) -> tuple[str, ...]:
        """The wording of each of the question's candidates, without the prefix.

        Raises:
            InvalidInput: If a verdict has no wording here.
        """
        lacking = [c for c in question.candidates if c in _VERDICTS and c not in self.words]
        if lacking:
            raise InvalidInput(
                f"template {self.name!r} has no wording for the candidate {lacking[0]!r} of question "
                f"{question.id!r}; use another template, or give one whose words name it."
            )
        return tuple(self.words.get(c, c) for c in question.candidates)

    def fill(self, question: LogicQuestion) -> Prompt:
        """The prompt of a question, with the characters of what stands in it."""
        worded = self.worded(question)
        if len(worded) > len(ascii_uppercase) and self.letters:
            raise InvalidInput(f"question {question.id!r} has {len(worded)} candidates; letters reach to 26.")
        listed = [f"{letter}) {word}" for letter, word in zip(ascii_uppercase, worded, strict=False)]
        candidates = tuple(question.candidates)
        name = {THREE: "three", YES_NO: "question"}.get(candidates, "text")
        layout = getattr(self, name) or self.text
        values = {
            "context": " ".join(question.premises), "statement": question.statement, "options": " ".join(listed),
        }  # fmt: skip
        out, at = "", dict.fromkeys(values, 0)
        for text, placeholder in self._pieces(layout, name):
            out = out + text if out else text.lstrip()  # without premises nothing stands before
            if placeholder is not None:
                at[placeholder] = len(out)
                out += values[placeholder]
        if self.chat:
            out = out.rstrip()  # chat templates strip it, and the prompt could not be found
        options, start = [], at["options"]
        for option in listed if self.letters else []:
            options.append((start, start + len(option)))
            start += len(option) + 1
        shown = tuple(ascii_uppercase[: len(worded)]) if self.letters else worded
        stands = (at["statement"], at["statement"] + len(question.statement))
        return Prompt(out, stands, tuple(options), tuple(self.prefix + text for text in shown))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, as ``template=`` takes it."""
        return json_ready(asdict(self), where=f"template {self.name!r}")


@dataclass(frozen=True)
class Prompt:
    """A filled template.

    Attributes:
        text: The prompt, up to where a candidate goes on.
        statement: Half-open characters of the statement.
        options: Half-open characters of each listed option; empty if none are listed.
        candidates: Texts with their prefix.
    """

    text: str
    statement: tuple[int, int]
    options: tuple[tuple[int, int], ...]
    candidates: tuple[str, ...]


def _braced(names: Sequence[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in names) or "(none)"


@functools.cache
def _shipped() -> dict[str, LogicTemplate]:
    text = resources.files("mechheads.datasets").joinpath("logic_templates.yaml").read_text(encoding="utf-8")
    return {name: LogicTemplate(name=name, **parts) for name, parts in yaml.safe_load(text).items()}


def template_names() -> tuple[str, ...]:
    """Names of the shipped templates."""
    return tuple(_shipped())


TemplateSource = str | Path | LogicTemplate | Mapping[str, Any] | None


def logic_template(chosen: TemplateSource = None, *, model: Any = None) -> LogicTemplate:
    """A template by name, from a YAML file or a mapping of its parts, or the model's default.

    Args:
        chosen: Name of a shipped template, a path ending in ``.yaml`` or ``.yml``, a mapping with ``text`` and any
            other attribute of ``LogicTemplate``, or one itself. None is ``nano`` for nano and nano-logic, ``chat``
            for a model with a chat template, else ``base``.
        model: Whose default is wanted.

    Raises:
        UnknownName: If no shipped template has that name.
        InvalidInput: If the file or mapping is no template.
    """
    if chosen is None:
        if getattr(getattr(model, "spec", None), "name", None) in ("nano", "nano-logic"):
            return _shipped()["nano"]
        return _shipped()["chat" if getattr(model, "has_chat_template", False) else "base"]
    if isinstance(chosen, LogicTemplate):
        return chosen
    if isinstance(chosen, Mapping):
        return _own(chosen, "own")
    if not isinstance(chosen, (str, Path)):
        raise InvalidInput(
            f"template={chosen!r}: give a shipped template's name, a YAML path or a mapping of its parts."
        )
    if Path(chosen).suffix.lower() in (".yaml", ".yml"):
        return _from_yaml(Path(chosen))
    if chosen not in _shipped():
        raise UnknownName("logic template", chosen, _shipped(), hint="Or give a YAML path or a mapping.")
    return _shipped()[str(chosen)]


def _from_yaml(path: Path) -> LogicTemplate:
    try:
        parts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"the logic template {path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(parts, Mapping):
        raise InvalidInput(f"the logic template {path} is no mapping; it needs at least 'text'.")
    return _own(parts, path.stem)


def _own(parts: Mapping[str, Any], name: str) -> LogicTemplate:
    known = {f.name for f in fields(LogicTemplate)}
    if unknown := sorted(map(str, set(parts) - known)):
        raise InvalidInput(f"a logic template has no {unknown}; its parts are {sorted(known)}.")
    if "text" not in parts:
        raise InvalidInput(f"the logic template has only {sorted(parts)}; it needs 'text'.")
    return LogicTemplate(**{"name": name, **parts})


# -- trials ---------------------------------------------------------------------------------------------------

_OF_QUESTION = ("dataset", "group", "rule", "depth", "distractors", "statement", "premises", "proof")


def make_trial(
    model: Encoder,
    question: LogicQuestion,
    template: LogicTemplate,
    *,
    split: str | None = None,
    wording: str = "plain",
    **more: Any,
) -> Trial:
    """The trial of a question in a template.

    Its spans are ``statement`` and, where the template lists them, ``candidates``; its metadata the question's, with
    ``template`` (name), ``layout`` (the template itself), ``wording``, ``verdicts`` (the question's candidates).

    Raises:
        InvalidInput: If the prompt with its longest candidate does not fit the model, naming the question, or the model
            is none (its name, say).
    """
    if isinstance(model, str) or not isinstance(model, Encoder):
        raise InvalidInput(
            f"model is {model!r}, a {type(model).__name__}; trials need its tokenizer, so load it first: "
            "mh.load('nano-logic')."
        )
    prompt = template.fill(question)
    encoding = model.encode(prompt.text, chat=template.chat)
    base = encoding.text.find(prompt.text)
    if base < 0:
        raise InvalidInput(
            f"question {question.id!r}: the chat template changes the prompt, so that the statement cannot be found in "
            "it; use a template without chat."
        )
    spans: dict[str, Any] = {"statement": _span(encoding, base, prompt.statement, "statement")}
    if prompt.options:
        spans["candidates"] = [_span(encoding, base, option, "option") for option in prompt.options]
    limit = getattr(getattr(model, "spec", None), "n_ctx", None)
    room = max(len(model.encode(text).tokens) for text in prompt.candidates)
    if limit is not None and len(encoding.tokens) + room > limit:
        raise InvalidInput(
            f"question {question.id!r} takes {len(encoding.tokens)} tokens and its candidates up to {room} more, over "
            f"the model's limit of {limit}; leave it out, or use a model with a longer context."
        )
    meta = {
        **question.meta,
        **{name: getattr(question, name) for name in _OF_QUESTION},
        "verdicts": list(question.candidates),
        "template": template.name,
        "layout": template.to_dict(),
        "wording": wording,
        **more,
    }
    return Trial(
        id=question.id,
        tokens=encoding.tokens,
        spans=spans,
        candidates=prompt.candidates,
        label=question.label,
        split=split,
        meta=meta,
    )


def _span(encoding: Any, base: int, characters: tuple[int, int], what: str) -> Span:
    return encoding.span_of(base + characters[0], base + characters[1], what=what)


def question_of(trial: Trial) -> LogicQuestion:
    """The question a logic trial was made of.

    Raises:
        InvalidInput: If the trial was not made by this package's logic data sets.
    """
    if missing := [k for k in (*_OF_QUESTION, "verdicts", "layout") if k not in trial.meta]:
        raise InvalidInput(
            f"trial {trial.id!r} is no logic trial: its meta lacks {missing[0]!r}. Make trials with build_trials or a "
            "logic data set."
        )
    return LogicQuestion(
        id=trial.id,
        candidates=trial.meta["verdicts"],
        label=-1 if trial.label is None else trial.label,
        meta={k: v for k, v in trial.meta.items() if k not in RESERVED},
        **{name: trial.meta[name] for name in _OF_QUESTION},
    )


def template_of(trial: Trial) -> LogicTemplate:
    """The template a logic trial was made in."""
    question_of(trial)  # says so if it is none
    return LogicTemplate(**trial.meta["layout"])
