"""A progress bar with an estimate of the time left; silent where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress_bar(what: str, total: int, *, show: bool | None = None) -> Iterator[Advance]:
    """A bar on standard error.

    Args:
        what: What is counted.
        total: How much there is.
        show: True or False; None shows it on a terminal or in Jupyter only.

    Yields:
        A function that advances the bar by n.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter) if show is None else not show:
        yield lambda n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)
