"""The CLI's voice: progress and notes on stderr, results on stdout. Only `cli` uses it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.progress import Progress as Bars

    from kitbuild.errors import KitbuildError


LOG_SECONDS = 60.0  # between two lines of one activity in a log


class Terminal:
    """Draws on a terminal; elsewhere only results, warnings and errors appear (notes and a line a minute if `verbose`)."""

    def __init__(self, *, verbose: bool, json_output: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.json_output = json_output
        self._draws = sys.stderr.isatty()
        self._notes = verbose or (self._draws and not json_output)
        self._clock = clock
        self._logged = 0
        self._bars: Bars | None = None
        self._detail: Callable[[str], None] = lambda _text: None

    def note(self, message: str) -> None:
        """A decision or a fact, one line."""
        if not self._notes:
            return
        if self._bars is not None:
            self._bars.console.print(message, markup=False, highlight=False)
        else:
            sys.stderr.write(f"{message}\n")

    def detail(self, text: str) -> None:
        """What the running activity is at."""
        self._detail(text)

    @contextlib.contextmanager
    def activity(self, title: str, *, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
        """A bar while it runs; activities inside one another share the display."""
        if not self._draws:
            with self._log(title, total=total, unit=unit) as advance:
                yield advance
            return
        with self._display() as bars:
            task = bars.add_task(title, total=total, unit=unit, detail="")
            outer, self._detail = self._detail, lambda text: bars.update(task, detail=text)
            try:
                yield lambda amount: bars.update(task, advance=amount)
            finally:
                self._detail = outer
                bars.remove_task(task)

    @contextlib.contextmanager
    def _log(self, title: str, *, total: float | None, unit: str) -> Iterator[Callable[[float], None]]:
        """In a log: a line when the outermost activity begins, then one a minute of each that goes on."""
        if not self._logged:
            self.note(f"{title} …")
        line = _Line(title=title, total=total, unit=unit, note=self.note, clock=self._clock)
        outer, self._detail = self._detail, line.detail
        self._logged += 1
        try:
            yield line.advance
        finally:
            self._logged -= 1
            self._detail = outer

    @contextlib.contextmanager
    def _display(self) -> Iterator[Bars]:
        if self._bars is not None:
            yield self._bars
            return
        from rich.console import Console  # noqa: PLC0415 - a tenth of a second that `check` need not pay
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
        from rich.table import Column  # noqa: PLC0415

        # One line on any width: what is long is cut, never wrapped.
        cut = Column(no_wrap=True, overflow="ellipsis")
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=cut),
            BarColumn(bar_width=16),
            _Amount(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            self._bars = bars
            try:
                yield bars
            finally:
                self._bars = None

    def result(self, command: str, fields: Mapping[str, Any], text: str) -> None:
        """The one thing that goes to stdout."""
        if self.json_output:
            _to_stdout(json.dumps({"schema": f"kitbuild.{command}/1", **fields}, sort_keys=True))
        elif text:
            _to_stdout(text.rstrip("\n"))

    def error(self, error: KitbuildError) -> None:
        """A fact, its problems, a hint; on stdout as one object with `--json`."""
        if self.json_output:
            _to_stdout(json.dumps(error.as_json(), sort_keys=True))
            return
        lines = [f"error: {error.message}", *(str(problem) for problem in error.problems)]
        if error.hint:
            lines.append(f"hint: {error.hint}")
        sys.stderr.write("\n".join(lines) + "\n")

    def interrupted(self, exit_code: int) -> None:
        """Ctrl-C: nothing failed, nothing was done."""
        message = "interrupted; nothing was left half-written"
        if self.json_output:
            fields = {"code": "interrupted", "exit_code": exit_code, "message": message, "hint": None, "problems": []}
            _to_stdout(json.dumps({"schema": "kitbuild.error/1", **fields}, sort_keys=True))
        else:
            sys.stderr.write(f"\n{message}\n")


def _to_stdout(text: str) -> None:
    """Whoever reads may stop (`| head`): what was done and how it ended stays the same."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end: https://docs.python.org/3/library/signal.html#note-on-sigpipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Line:
    """How far an activity is, told once a minute."""

    def __init__(
        self, *, title: str, total: float | None, unit: str, note: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._note, self._clock = note, clock
        self._completed, self._text, self._told = 0.0, "", clock()

    def advance(self, amount: float) -> None:
        """More of it is done."""
        self._completed += amount
        self._tell()

    def detail(self, text: str) -> None:
        """What it is at."""
        self._text = text
        self._tell()

    def _tell(self) -> None:
        if self._clock() - self._told < LOG_SECONDS:
            return
        self._told = self._clock()
        parts = [_amount(self._completed, self._total, self._unit), self._text]
        self._note(f"{self._title}: {' · '.join(part for part in parts if part)}")


def _amount(completed: float, total: float | None, unit: str) -> str:
    """`12/40 files`, `1.2 GB/2.8 GB`; nothing where the detail says it."""
    from rich.filesize import decimal  # noqa: PLC0415 - a tenth of a second that `check` need not pay

    if not unit:
        return ""
    show = decimal if unit == "bytes" else (lambda number: f"{number:,}")
    of = f"/{show(int(total))}" if total else ""
    return f"{show(int(completed))}{of}" + ("" if unit == "bytes" else f" {unit}")


def _Amount(**column: Any) -> Any:  # noqa: N802 - stands where rich expects a column class
    from rich.progress import ProgressColumn, Task  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    class Amount(ProgressColumn):
        """How much of it is done."""

        def render(self, task: Task) -> Text:
            return Text(_amount(task.completed, task.total, str(task.fields["unit"])))

    return Amount(**column)
