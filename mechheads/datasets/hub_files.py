"""Data sets on the Hugging Face hub: naming one, and fetching it with libraries that are needed only here."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mechheads.errors import InvalidInput

PREFIX = "hub:"
_NAME = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/]+))?(?:/(?P<file>.+))?")


@dataclass(frozen=True)
class Hub:
    """What to fetch from a data set repository of the hub; made by ``hub`` or from a text ``hub:owner/name``.

    Attributes:
        repo: ``owner/name`` of the data set.
        file: Path of a file in it (ending in ``/``: a folder), or None for the rows of ``split``.
        revision: Branch, tag or commit; None is the hub's default branch, which can change.
        split: Split whose rows are read where no file is named.
        subset: Configuration of the data set the split belongs to.
    """

    repo: str
    file: str | None = None
    revision: str | None = None
    split: str | None = None
    subset: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        part = f"/{self.file}" if self.file else "".join(f" {x}" for x in (self.subset, self.split) if x)
        return f"{PREFIX}{self.repo}{at}{part}"

    def with_defaults(self, *, file: str | None = None, split: str | None = None) -> Hub:
        """The same, with a default file, or else a default split, where neither a file nor a split is named."""
        if self.file or self.split:
            return self
        return Hub(self.repo, file, self.revision, None if file else split, self.subset)

    def fetch(self) -> Path:
        """Download the file or folder and give its local path (the hub library's own cache).

        Raises:
            InvalidInput: If no file is named, ``huggingface_hub`` is not installed, or the download fails.
        """
        if not self.file:
            raise InvalidInput(
                f"{self} names no file; write '{PREFIX}{self.repo}/path/in/the/repository', or give "
                "hub(..., file=...) or hub(..., split=...)."
            )
        library = _library("huggingface_hub", self)
        where: dict[str, Any] = {"repo_id": self.repo, "repo_type": "dataset", "revision": self.revision}
        try:
            if self.file.endswith("/"):
                root = library.snapshot_download(allow_patterns=[f"{self.file}*"], **where)
                return Path(root) / self.file
            return Path(library.hf_hub_download(filename=self.file, **where))
        except Exception as error:  # whatever the library or its network stack raises means the same to the reader
            raise self._failed(error) from error

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the split.

        Raises:
            InvalidInput: If no split is named, ``datasets`` is not installed, or the download fails.
        """
        if not self.split:
            raise InvalidInput(
                f"{self} names neither a file nor a split; give hub(..., file=...) or hub(..., split=...)."
            )
        library = _library("datasets", self)
        try:
            rows = library.load_dataset(self.repo, self.subset, split=self.split, revision=self.revision)
            return [dict(row) for row in rows]
        except Exception as error:  # as above
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> InvalidInput:
        said = (str(error).strip() or "no message").splitlines()[0]
        return InvalidInput(
            f"{self} could not be fetched ({type(error).__name__}: {said}). Check the repository, file, split and "
            f"revision, and that this machine reaches the hub; or download it elsewhere from "
            f"https://huggingface.co/datasets/{self.repo} and give the path of the file."
        )


def hub(
    repo: str,
    *,
    file: str | None = None,
    revision: str | None = None,
    split: str | None = None,
    subset: str | None = None,
) -> Hub:
    """Name a data set of the Hugging Face hub, to give where a path is taken.

    A text does the same for files: ``"hub:owner/name/path/in/repository"``, with ``@revision`` after the name.

    Args:
        repo: ``owner/name``.
        file: A file in the repository, or a folder if it ends in ``/``.
        revision: Branch, tag or commit. Name a commit where results must be reproducible.
        split: A split, whose rows are read with the ``datasets`` library; instead of ``file``.
        subset: The configuration the split belongs to.

    Raises:
        InvalidInput: If the name is empty, or both a file and a split are given.
    """
    if not isinstance(repo, str) or not repo.strip("/ ") or repo.startswith(PREFIX):
        raise InvalidInput(f"hub repository {repo!r}: give 'owner/name', such as 'amodaresi/NoLiMa'.")
    if file and split:
        raise InvalidInput(f"file={file!r} and split={split!r}: give one of the two.")
    return Hub(repo, file, revision, split, subset)


def parse(text: str) -> Hub:
    """Read ``hub:owner/name[@revision][/file]``.

    Raises:
        InvalidInput: If it is not of that form.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise InvalidInput(
            f"{text!r}: write 'hub:owner/name', 'hub:owner/name/file' or 'hub:owner/name@revision/file'."
        )
    return Hub(**match.groupdict())


def is_hub(path: Any) -> bool:
    """Whether this names a data set of the hub rather than a path."""
    return isinstance(path, Hub) or (isinstance(path, str) and path.startswith(PREFIX))


def of(path: Any) -> Hub:
    """A ``Hub`` from a ``Hub`` or a text."""
    return path if isinstance(path, Hub) else parse(path)


def _library(name: str, wanted: Hub) -> ModuleType:
    """An optional library, or an error that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidInput(
            f"reading {wanted} needs the Python package {name}, which is not installed: `pip install {name}`; "
            f"or download the file from https://huggingface.co/datasets/{wanted.repo} and give its path."
        ) from error
