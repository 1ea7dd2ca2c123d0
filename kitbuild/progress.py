"""How a step says what it is doing. Beside the steps: they take a `Progress`; only the CLI draws one.

A step announces an activity with a total in some unit and advances it; the CLI draws bars on a terminal
and writes a line a minute into a log with `-v`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Progress(Protocol):
    """Where a step reports to."""

    def note(self, message: str) -> None:
        """A decision or a fact, one line."""

    def detail(self, text: str) -> None:
        """What the running activity is at, in place of the last detail."""

    def activity(
        self, title: str, *, total: float | None, unit: str
    ) -> contextlib.AbstractContextManager[Callable[[float], None]]:
        """Something that takes time; call what it yields with each advance. `unit`: bytes, files; empty where details say it."""


class Silent:
    """Reports to nobody."""

    def note(self, message: str) -> None:
        """Drop the message."""

    def detail(self, text: str) -> None:
        """Drop the text."""

    @contextlib.contextmanager
    def activity(self, title: str, *, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:  # noqa: ARG002 - the protocol's names
        """Drop the advance."""
        yield lambda _amount: None
