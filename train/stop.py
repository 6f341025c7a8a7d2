# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""SIGTERM and Ctrl-C as a polite request, answered at the next safe point."""

import signal
import threading


class StopRequest:
    """While active, SIGTERM and the first Ctrl-C only set a flag. A second Ctrl-C interrupts at
    once.

    The loop asks the flag between steps, so it does not matter whether the signal came during
    compilation, an evaluation or a save. Outside the main thread, where Python cannot install
    handlers, signals keep their meaning.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    name: str | None
    """Name of the signal that came first, None so far."""

    def __init__(self):
        self.name = None
        self._previous = {}

    def __bool__(self) -> bool:
        return self.name is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._handle) for s in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, _frame) -> None:
        if number == signal.SIGINT and self.name is not None:
            raise KeyboardInterrupt
        self.name = self.name or ("Ctrl-C" if number == signal.SIGINT else "SIGTERM")
