"""Ctrl-C and SIGTERM: the first lets the block in hand finish, the second drops it."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While in force, the first signal sets ``asked``; the second raises KeyboardInterrupt where the program is.

    Outside the main thread nothing can be caught, and nothing is changed. A signal that is ignored (``nohup``) stays
    ignored. The handlers found at the start are put back at the end.

    Attributes:
        asked: Whether a signal came.
        dropped: Whether a second one came.
    """

    def __init__(self) -> None:
        self.asked = False
        self.dropped = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {number: found for number, found in handlers.items() if found is not signal.SIG_IGN}
        self.install()
        return self

    def install(self) -> None:
        """Put the handlers in force, again where something else (Ray) has put its own."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: it was set outside Python, and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.dropped = True
            raise KeyboardInterrupt
        self.asked = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        print(f"{name}: the block in hand is finished and kept; once more drops it.", file=sys.stderr, flush=True)
