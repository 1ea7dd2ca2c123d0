"""Faults that a test asks the Hub for: what a network and a server do on a bad day."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["429", "500", "503", "truncate", "corrupt", "slow", "hang", "reset"]
BODY_KINDS: tuple[Kind, ...] = ("truncate", "corrupt")


@dataclass(kw_only=True)
class Fault:
    """One rule. `times` counts down; None is for ever. `hits` counts how often it struck."""

    path: re.Pattern[str]
    kind: Kind
    times: int | None
    method: str | None
    retry_after_seconds: float | None
    seconds: float
    hits: int = 0


@dataclass
class Faults:
    """The rules in force, in the order they were added; the first that fits strikes."""

    rules: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        path_regex: str,
        *,
        kind: Kind,
        times: int | None = 1,
        method: str | None = None,
        retry_after_seconds: float | None = None,
        seconds: float = 0.2,
    ) -> Fault:
        """Strike requests whose unquoted path and query hold `path_regex` (`method` narrows it).

        - `429`, `500`, `503`: that status; `Retry-After` only when `retry_after_seconds` is given.
        - `truncate`: the full Content-Length, half of the body, then the end of the connection.
        - `corrupt`: the right length, one byte wrong. Both strike only answers to GET that have a body.
        - `slow`: an answer after `seconds`. `hang`: headers, then nothing until the Hub stops.
        - `reset`: the connection is reset before any answer.
        """
        rule = Fault(
            path=re.compile(path_regex),
            kind=kind,
            times=times,
            method=method,
            retry_after_seconds=retry_after_seconds,
            seconds=seconds,
        )
        self.rules.append(rule)
        return rule

    def clear(self) -> None:
        """No faults from here on."""
        self.rules.clear()

    def take(self, *, method: str, path: str, has_body: bool) -> Fault | None:
        """The fault that strikes this request, counted."""
        with self._lock:
            for rule in self.rules:
                if rule.times == 0 or (rule.method and rule.method != method) or not rule.path.search(path):
                    continue
                if rule.kind in BODY_KINDS and not (has_body and method == "GET"):
                    continue
                rule.hits += 1
                if rule.times is not None:
                    rule.times -= 1
                return rule
        return None
