"""recipe → lock → cells: each a lock of its own, run like any other, in a fresh process."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitbuild import archive as archives
from kitbuild import recipe as recipes
from kitbuild.bench import Cell, Grid, Row, Tuning, as_csv, bench_rows, grid, measured, recipe_for, table
from kitbuild.bench.cells import ROWS
from kitbuild.bench.figures import latency, memory, page
from kitbuild.bench.rows import failed
from kitbuild.bench.tune import changes
from kitbuild.errors import KitbuildError, RecipeError, RunError, StoppedError, UsageError, VerificationError
from kitbuild.flow.context import Context, Result
from kitbuild.flow.locking import ensure_lock, model_config
from kitbuild.flow.running import RunOptions, fetch_for, train
from kitbuild.lock.models import LockedDataset, LockedFile, LockedTree
from kitbuild.lock.vary import vary
from kitbuild.store.blobs import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kitbuild.lock.models import Lock
    from kitbuild.recipe import LoadedRecipe
    from kitbuild.run.follow import Stop


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Where, how, and how long."""

    run: RunOptions
    steps: int
    repeats: int
    rows: str

    def __post_init__(self) -> None:
        for name, least in (("steps", 2), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name} {getattr(self, name)} is too few", hint=f"{least} or more")
        if self.rows not in ROWS:
            raise UsageError(f"--rows {self.rows} is not known", hint=f"one of {', '.join(ROWS)}")


def switch(option: str, word: str | None) -> tuple[bool, ...]:
    """`on`, `off` or `both` as the values of an axis; none where it was not given."""
    known: dict[str | None, tuple[bool, ...]] = {None: (), "on": (True,), "off": (False,), "both": (False, True)}
    if word not in known:
        raise UsageError(f"{option} {word} is not known", hint="on, off or both")
    return known[word]


class Bench:
    """Measures cells of one lock; what was measured before, with the same lock and options, is not measured again."""

    def __init__(self, context: Context, loaded: LoadedRecipe, lock: Lock, options: BenchOptions, stop: Stop) -> None:
        self.context, self.loaded, self.lock, self.options, self.stop = context, loaded, lock, options, stop
        self.out = options.run.out.absolute()
        self.log = self.out / "rows.jsonl"
        self.key = f"{lock.content_sha256[:16]} steps {options.steps} repeats {options.repeats} rows {options.rows}"
        self.done = self._read()
        self.device: Mapping[str, Any] = {}

    def _read(self) -> dict[str, Row]:
        known = {item.name for item in fields(Row)}
        found = {}
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            try:
                held = json.loads(line)
            except ValueError:
                continue  # The last line of a run that was killed.
            if isinstance(held, dict) and held.pop("key", None) == self.key and set(held) == known:
                found[held["cell"]] = Row(**held)
        return found

    def measure(self, cell: Cell) -> Row:
        """One row, from as many fresh runs as `repeats` says."""
        if cell.name in self.done:
            return self.done[cell.name]
        self.context.progress.note(f"bench: {cell.name}")
        row = self._measure(cell)
        self.out.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+b") as file:
            torn = file.tell() > 0 and not self.log.read_bytes().endswith(b"\n")
            file.write(
                (b"\n" if torn else b"")
                + (json.dumps({"key": self.key, **row.as_json()}, sort_keys=True) + "\n").encode()
            )
        self.done[cell.name] = row
        return row

    def _measure(self, cell: Cell) -> Row:
        # Beside the rows, not in the system's temporary directory: that may be small.
        self.out.mkdir(parents=True, exist_ok=True)
        runs = Path(tempfile.mkdtemp(dir=self.out, prefix=".runs-"))
        try:
            lock, content = self._lock(cell)
            where = RunOptions(
                out=runs, engine=self.options.run.engine, python=self.options.run.python, resume=None, measure=True
            )
            held = []
            for _ in range(self.options.repeats):
                told = train(self.context, lock, content, where, stop=self.stop)
                held.append(archives.read(Path(str(told.fields["run_dir"]))))
            self.device = held[0].manifest.device.model_dump() if held[0].manifest.device else {}
            return measured(cell, held)
        except (StoppedError, VerificationError):
            raise
        except RecipeError as error:
            return failed(cell, state="refused", detail=_words(error))
        except RunError as error:
            memory = "out of memory" in error.message or "memory limit" in error.message
            return failed(cell, state="out of memory" if memory else "failed", detail=_words(error))
        finally:
            shutil.rmtree(runs, ignore_errors=True)

    def _lock(self, cell: Cell) -> tuple[Lock, bytes]:
        recipe, content = recipe_for(self.loaded.recipe, cell, steps=self.options.steps)
        count = max(recipe.batch.global_ * self.options.steps, 64)
        rows = bench_rows(count=count, max_length=cell.max_length, kind=self.options.rows, seed=recipe.seed)
        sha256 = self.context.store.add_bytes(rows)
        file = LockedFile(path="bench.jsonl", size=len(rows), sha256=sha256)
        data = LockedDataset(
            tree=LockedTree(path="bench.jsonl", files=(file,)),
            format="json", config=None, split="train", data_files=("bench.jsonl",),
        )  # fmt: skip
        return vary(self.lock, recipe, content=content, datasets=(data,)), content


def _words(error: KitbuildError) -> str:
    return "; ".join([error.message, *(problem.message for problem in error.problems)])[:300]


def bench(context: Context, path: Path, wanted: Grid, options: BenchOptions, *, stop: Stop) -> Result:
    """`kitbuild bench`: every cell of the grid; rows.jsonl, rows.json, rows.csv, figures and a page in OUT."""
    made = _start(context, path, options, stop)
    cells = grid(made.loaded.recipe, wanted)
    with context.progress.activity("bench", total=len(cells), unit="cells") as advance:
        rows = []
        for cell in cells:
            rows.append(made.measure(cell))
            advance(1)
    files = _write(made, rows)
    return Result(
        fields={"rows": [row.as_json() for row in rows], "out": str(made.out), "device": dict(made.device)},
        lines=(*table(rows), f"figures, rows: {files}"),
    )


def tune(context: Context, path: Path, wanted: Grid, options: BenchOptions, *, apply: bool, stop: Stop) -> Result:
    """`kitbuild bench --tune`: the fastest for the recipe's global batch, and what to change for it."""
    made = _start(context, path, options, stop)
    recipe = made.loaded.recipe
    first = made.measure(grid(recipe, Grid())[0])
    search = Tuning(
        recipe=recipe,
        measure=made.measure,
        attention=wanted.attention or _attention(recipe.kernels.attention, made.lock),
        liger=wanted.liger or _liger(made.lock),
        config=model_config(made.loaded, made.lock, context.environ),
        memory=made.device.get("memory_bytes") if made.lock.target != "cpu" else None,
    )
    best = search.search()
    files = _write(made, search.rows)
    change = changes(recipe, best)
    if apply and change:
        recipes.edit(path, change)
    lines = [*table(search.rows), "", *search.reasons]
    words = [f"  {key}: {json.dumps(value)}" for key, value in change.items()]
    lines += (
        [f"{'written to' if apply else 'change in'} {path}:", *words] if change else [f"{path} is the fastest already"]
    )
    return Result(
        fields={
            "rows": [row.as_json() for row in search.rows], "out": str(made.out), "best": best.as_json(),
            "changes": change, "applied": bool(apply and change), "reasons": search.reasons, "first": first.as_json(),
        },
        lines=(*lines, f"figures, rows: {files}"),
    )  # fmt: skip


def _start(context: Context, path: Path, options: BenchOptions, stop: Stop) -> Bench:
    loaded = recipes.read(path)
    lock = ensure_lock(context, loaded)
    fetch_for(context, lock, loaded, options.run)
    return Bench(context, loaded, lock, options, stop)


def _attention(own: str, lock: Lock) -> tuple[str, ...]:
    names = {wheel.name for wheel in lock.wheels}
    found = ["sdpa", *(["flash_attention_4"] if "flash-attn-4" in names else [])]
    return tuple(dict.fromkeys([own, *found]))


def _liger(lock: Lock) -> tuple[str, ...]:
    return ("off", "all") if any(wheel.name == "liger-kernel" for wheel in lock.wheels) else ("off",)


def _write(made: Bench, rows: list[Row]) -> Path:
    title = f"{made.loaded.recipe.name} on {made.device.get('name') or 'this machine'}"
    document = {
        "title": title,
        "device": dict(made.device),
        "lock_sha256": made.lock.sha256,
        "rows": [row.as_json() for row in rows],
    }
    texts = {
        "rows.json": json.dumps(document, indent=1, sort_keys=True) + "\n",
        "rows.csv": as_csv(rows),
        "latency.svg": latency(rows),
        "memory.svg": memory(rows),
        "index.html": page(rows, title),
    }
    for name, text in texts.items():
        write_atomically(made.out / name, text.encode())
    return made.out
