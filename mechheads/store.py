"""A folder of results named by the hash of what made them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import OutputNotWritable, ResultFileError
from mechheads.provenance import content_hash
from mechheads.scores import HeadScores

_Result = TypeVar("_Result", HeadScores, CandidateScores)


class Store:
    """Results on disk, found again by what they are results of.

    The key is a hash over the model (weights included), the method and its options, and the trials; anything
    that could change the numbers is in it. Files are written whole or not at all.

    Args:
        path: Folder; made if it is not there.

    Raises:
        OutputNotWritable: If the folder cannot be made or written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):  # better now than after the computation
                raise PermissionError("no permission to write")
        except OSError as error:
            raise OutputNotWritable(
                f"the store {str(self.path)!r} cannot be made or written: {error}. Choose a folder you may write to."
            ) from error

    def file(self, key: Mapping[str, Any]) -> Path:
        """Where the result of a key lies, whether it is there or not."""
        return self.path / f"{key.get('method', 'result')}-{content_hash(key)}.parquet"

    def get_scores(self, key: Mapping[str, Any]) -> HeadScores | None:
        """The stored scores of a key, or None.

        Raises:
            ResultFileError: If the file is there but damaged; delete it to compute it again.
        """
        return self._get(key, HeadScores)

    def put_scores(self, key: Mapping[str, Any], scores: HeadScores) -> Path:
        """Store scores under a key."""
        return scores.save(self.file(key))

    def get_candidates(self, key: Mapping[str, Any]) -> CandidateScores | None:
        """The stored candidate scores of a key, or None; see ``get_scores``."""
        return self._get(key, CandidateScores)

    def put_candidates(self, key: Mapping[str, Any], scores: CandidateScores) -> Path:
        """Store candidate scores under a key."""
        return scores.save(self.file(key))

    def _get(self, key: Mapping[str, Any], kind: type[_Result]) -> _Result | None:
        file = self.file(key)
        try:
            return kind.load(file) if file.exists() else None
        except ResultFileError as error:
            raise ResultFileError(f"{error} It lies in the store: delete it, and it is computed again.") from error
