"""YAML with places: a document as nodes, so that what is wrong with a value can be said with its line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from mechheads.errors import InvalidInput

Path = tuple[str | int, ...]
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:omap")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one value.

    Attributes:
        path: Keys and places that lead to it.
        message: What it is, what it must be, what to do.
    """

    path: Path
    message: str


class Document:
    """A YAML document whose top is a mapping.

    Attributes:
        source: Where it came from, for messages.
        root: Its nodes, with aliases and merge keys resolved.
    """

    def __init__(self, root: yaml.MappingNode, source: str):
        self.root = root
        self.source = source

    def data(self) -> dict[str, Any]:
        """The document as dicts, tuples and scalars."""
        return _value(self.root, self.source)

    def known(self, path: Path) -> Path:
        """The longest beginning of a path that the document has."""
        node: yaml.Node | None = self.root
        for i, part in enumerate(path):
            node = None if node is None else _child(node, part)
            if node is None:
                return path[:i]
        return path

    def value(self, path: Path) -> Any:
        """What stands at a path that the document has."""
        node: yaml.Node | None = self.root
        for part in path:
            node = None if node is None else _child(node, part)
        return None if node is None else _value(node, self.source)

    def place(self, path: Path) -> tuple[int, str]:
        """Line (from 1; 0 for a value that was given from outside) and wording of a path's place."""
        path = self.known(path)
        node: yaml.Node = self.root
        mark = self.root.start_mark
        for part in path:
            pair = _pair(node, part)
            mark = pair[0].start_mark
            node = pair[1]
        return (mark.line + 1, f"line {mark.line + 1}") if mark.name == self.source else (0, mark.name)

    def over(self, other: yaml.Node) -> Document:
        """The same with another mapping laid over it: mappings key by key, null takes out, all else replaces."""
        return Document(_laid_over(self.root, other), self.source)

    def without(self, key: str) -> Document:
        """The same without a key of the top."""
        pairs = [(k, v) for k, v in self.root.value if k.value != key]
        return Document(_mapping(pairs, self.root), self.source)

    def node(self, path: Path) -> yaml.Node | None:
        """The node at a path, or None."""
        node: yaml.Node | None = self.root
        for part in path:
            node = None if node is None else _child(node, part)
        return node

    def with_value(self, dotted: str, value: Any) -> Document:
        """The same with one value given from outside, such as ``("engine.kind", "ray")``."""
        name = f"given as {dotted}"
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        node = _composed(yaml.safe_dump(_plain(nested)), name)
        if node is None:
            raise InvalidInput(f"{name}: it is empty.")
        return self.over(_resolved(node, name, ()))

    def refuse(self, problems: Iterable[Problem]) -> None:
        """Raise InvalidInput with all problems in the order of their lines, if there are any."""
        found: dict[tuple[int, str], None] = {}
        for problem in problems:
            line, where = self.place(problem.path)
            found.setdefault((line, f"{where}: {problem.message}"))
        lines = [text for _, text in sorted(found, key=lambda item: item[0])]
        if len(lines) == 1:
            raise InvalidInput(f"{self.source}, {lines[0]}")
        if lines:
            raise InvalidInput("\n  ".join([f"{self.source} has {len(lines)} problems:", *lines]))


def parse(text: str, source: str) -> Document:
    """Read a document.

    Args:
        text: YAML.
        source: What to call it in messages.

    Raises:
        InvalidInput: Naming source and line, if it is no YAML, no mapping, has a key twice, a key that is no text, an
            alias to itself, or a tag.
    """
    node = _composed(text, source)
    if node is None:
        raise InvalidInput(f"{source} is empty; a study needs tasks, rankings, k and interventions.")
    if not isinstance(node, yaml.MappingNode):
        raise InvalidInput(
            f"{source}, line {node.start_mark.line + 1}: a study is a mapping, such as 'name: my-study'."
        )
    return Document(_resolved(node, source, ()), source)


def dotted(path: Sequence[str | int]) -> str:
    """``tasks.needles.options`` and ``interventions[0].kind``."""
    out = ""
    for part in path:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return out


def near(value: Any, allowed: Iterable[str]) -> str:
    """``" Did you mean 'mean'?"``, or nothing."""
    found = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(f) for f in found)}?" if found else ""


def _composed(text: str, source: str) -> yaml.Node | None:
    """The nodes of a text, with the source in their marks."""
    try:
        loader = yaml.SafeLoader(text)
        loader.name = source
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        why = ", ".join(part for part in (error.context, error.problem) if part)
        raise InvalidInput(f"{source}{line}: this is not YAML: {why}.") from error
    except yaml.YAMLError as error:
        raise InvalidInput(f"{source}: this is not YAML: {' '.join(str(error).split())}.") from error


def _resolved(node: yaml.Node, source: str, above: tuple[int, ...]) -> Any:
    """A copy without merge keys; refuses keys that stand twice, and what a study has no use for."""
    line = f"{source}, line {node.start_mark.line + 1}"
    if id(node) in above:
        raise InvalidInput(f"{line}: this alias refers to itself; write the value out.")
    inside = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        return node
    if node.tag not in _PLAIN:
        raise InvalidInput(f"{line}: the tag {node.tag!r} has no meaning in a study; leave it out.")
    if isinstance(node, yaml.SequenceNode):
        items = [_resolved(item, source, inside) for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        at = f"{source}, line {key.start_mark.line + 1}"
        if key.tag == _MERGE:
            for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                part = _resolved(part, source, inside)
                if not isinstance(part, yaml.MappingNode):
                    raise InvalidInput(f"{at}: '<<' takes an alias of a mapping, such as '<<: *name'.")
                for pair in part.value:
                    merged.setdefault(pair[0].value, pair)
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise InvalidInput(f"{at}: the key {shown!r} is no text; put it in quotes.")
        if key.value in own:
            first = own[key.value][0].start_mark.line + 1
            raise InvalidInput(f"{at}: the key {key.value!r} stands already in line {first}; write it once.")
        own[key.value] = (key, _resolved(value, source, inside))
    return _mapping([*(merged | own).values()], node)


def _mapping(pairs: list[tuple[yaml.Node, yaml.Node]], like: yaml.Node) -> yaml.MappingNode:
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, like.start_mark, like.end_mark)


def _laid_over(below: yaml.Node, above: yaml.Node) -> Any:
    """Two nodes as one."""
    if not (isinstance(below, yaml.MappingNode) and isinstance(above, yaml.MappingNode)):
        return above
    pairs = {key.value: (key, value) for key, value in below.value}
    for key, value in above.value:
        if value.tag == _NULL:
            pairs.pop(key.value, None)
        elif key.value in pairs and isinstance(pairs[key.value][1], yaml.MappingNode):
            first, old = pairs[key.value]
            whole = isinstance(value, yaml.MappingNode)
            pairs[key.value] = (first if whole else key, _laid_over(old, value))
        else:
            pairs[key.value] = (key, value)
    return _mapping([*pairs.values()], below)


def _value(node: yaml.Node, source: str) -> Any:
    """What a node stands for; lists as tuples."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value, source) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return tuple(_value(item, source) for item in node.value)
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node)
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidInput(
            f"{source}, line {node.start_mark.line + 1}: {node.value!r} cannot be read; put text in quotes."
        ) from error
    finally:
        loader.dispose()


def _pair(node: yaml.Node, part: str | int) -> tuple[yaml.Node, yaml.Node]:
    """The node that marks a child's place, and the child."""
    if isinstance(node, yaml.MappingNode):
        return next((key, value) for key, value in node.value if key.value == part)
    return (node.value[part], node.value[part])


def _child(node: yaml.Node, part: str | int) -> yaml.Node | None:
    """The child under a key or at a place, or None."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    inside = isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
    return node.value[part] if inside else None


def _plain(value: Any) -> Any:
    """Tuples as lists, for writing."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
