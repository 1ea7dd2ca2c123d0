"""The one error family. Below every step: imports nothing of kitbuild.

A message is a fact; a hint says what to do next. The exit code lives on the class (see
docs/exit-codes.md); `cli.main` catches `KitbuildError` once, prints it and exits with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, located as well as is known (line and column count from 1)."""

    message: str
    hint: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        text = ": ".join(part for part in (place, self.key, self.message) if part)
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def as_json(self) -> dict[str, object]:
        """The fields of `kitbuild.error/1` problems."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "message": self.message,
            "hint": self.hint,
        }


class KitbuildError(Exception):
    """Something a user can cause or mend. Raise a child; only `cli.main` exits.

    `details` are further JSON fields, such as the `run_dir` of a run that failed.
    """

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "unexpected"

    def __init__(self, message: str, *, hint: str | None = None, problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = tuple(problems)
        self.details: dict[str, object] = {}

    def as_json(self) -> dict[str, object]:
        """The object that `--json` prints on failure."""
        return {
            "schema": "kitbuild.error/1",
            "code": self.code,
            "exit_code": self.exit_code,
            "message": self.message,
            "hint": self.hint,
            "problems": [problem.as_json() for problem in self.problems],
            **self.details,
        }


class UsageError(KitbuildError):
    """A wrong call: a flag, a path, a name."""

    exit_code = 2
    code = "usage"


class RecipeError(KitbuildError):
    """A recipe that cannot be used: syntax, types, ranges, a strict refusal, an error-level advisory."""

    exit_code = 2
    code = "recipe"


class LockError(KitbuildError):
    """The lock is missing, stale, of an unsupported version or of another kitbuild."""

    exit_code = 3
    code = "lock"


class ResolveError(KitbuildError):
    """Something could not be resolved or fetched: network, missing, no variant, untrusted publisher."""

    exit_code = 4
    code = "resolve"


class ImageError(KitbuildError):
    """The image could not be assembled or loaded, or no engine answers."""

    exit_code = 5
    code = "image"


class RunError(KitbuildError):
    """The run failed: no engine, preflight, self-test, out of memory, crash."""

    exit_code = 6
    code = "run"


class VerificationError(KitbuildError):
    """A byte is not the locked one: digest, signature, tampered archive."""

    exit_code = 7
    code = "verification"


class DifferentError(KitbuildError):
    """Two runs differ in a value."""

    exit_code = 8
    code = "different"


class NotComparableError(KitbuildError):
    """Two runs cannot be compared."""

    exit_code = 9
    code = "not_comparable"


class StoppedError(KitbuildError):
    """Stopped on request; a checkpoint is saved and the run can be resumed."""

    exit_code = 10
    code = "stopped"


class InterruptedRunError(KitbuildError):
    """A run that was being stopped, ended at once by a second request."""

    exit_code = 130
    code = "interrupted"
