"""A benchmark's driving, its training played: cells that fail are rows, what is there is not measured again."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.bench import Grid
from kitbuild.errors import RecipeError, RunError, StoppedError, UsageError
from kitbuild.flow import benching
from kitbuild.flow.benching import BenchOptions
from kitbuild.flow.context import Context, Result
from kitbuild.flow.running import RunOptions
from kitbuild.progress import Silent
from kitbuild.recipe import read
from kitbuild.run.follow import Stop
from tests.archive.factory import Run, metrics_line
from tests.image.kit import make_lock, new_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from kitbuild.lock.models import Lock

KEYS = json.loads((Path(benching.__file__).parents[1] / "recipe/train_keys.json").read_text())["train"]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(environ={}, store=new_store(tmp_path / "store"), progress=Silent())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    shutil.copytree(RECIPES / "data", tmp_path / "data")
    return Path(shutil.copy(RECIPES / "tiny-cpu.yaml", tmp_path / "tiny.yaml"))


@pytest.fixture
def asked(context: Context, monkeypatch: pytest.MonkeyPatch) -> list[Lock]:
    """What was trained, by its lock; eager runs out of memory, flex is refused, a length of 8 ends the bench."""
    locks: list[Lock] = []

    def ensure(_context: Context, loaded: Any) -> Lock:
        lock = make_lock(context.store, name=loaded.recipe.name, recipe_sha256=loaded.sha256)
        declared = {"trl.SFTConfig": {name: item.get("default") for name, item in KEYS.items()}}
        return lock.model_copy(update={"defaults": lock.defaults.model_copy(update={"declared": declared})})

    def train(_context: Context, lock: Lock, content: bytes, options: RunOptions, *, stop: Stop) -> Result:
        assert isinstance(stop, Stop)
        assert json.loads(content)["name"] == lock.name
        assert options.measure
        locks.append(lock)
        match lock.recipe["kernels"]["attention"]:
            case "eager":
                raise RunError("out of memory: 3 GiB")
            case "flex_attention":
                raise RecipeError("determinism: strict cannot be kept")
        if lock.recipe["train"]["max_length"] == 8:
            raise StoppedError("stopped")
        body = json.loads(lock.to_bytes())
        del body["content_sha256"]
        run = Run(lock=body, steps=[metrics_line(step) for step in range(1, 7)])
        place = options.out / f"run-{len(locks)}"
        run.write(place)
        manifest = json.loads((place / "manifest.json").read_bytes())
        manifest["results"]["measured"] = {
            "matmul_flops_per_second": 1e12,
            "peak_allocated_bytes": 5,
            "peak_reserved_bytes": 6,
        }
        (place / "manifest.json").write_text(json.dumps(manifest))
        return Result(fields={"run_dir": str(place)}, lines=())

    monkeypatch.setattr(benching, "ensure_lock", ensure)
    monkeypatch.setattr(benching, "fetch_for", lambda *_: None)
    monkeypatch.setattr(benching, "train", train)
    return locks


def options(out: Path, **changed: Any) -> BenchOptions:
    where = RunOptions(out=out, engine="local", python=None, resume=None)
    return BenchOptions(**{"run": where, "steps": 6, "repeats": 2, "rows": "full", **changed})


@pytest.fixture
def bench(context: Context, recipe: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def call(wanted: Grid, **changed: Any) -> dict[str, Any]:
        made = benching.bench(context, recipe, wanted, options(tmp_path / "out", **changed), stop=Stop())
        return dict(made.fields)

    return call


def test_rows_of_every_state(bench: Callable[..., dict[str, Any]], asked: list[Lock], tmp_path: Path) -> None:
    """A cell out of memory or refused is a row beside the others, with its reason; runs are not kept."""
    rows = bench(Grid(attention=("sdpa", "eager", "flex_attention")))["rows"]
    assert [row["state"] for row in rows] == ["ok", "out of memory", "refused"]
    assert rows[0]["deterministic"] is True
    assert rows[0]["step_seconds"] == 0.5
    assert rows[0]["tokens_per_second"] == 256
    assert "3 GiB" in rows[1]["detail"]
    assert len(asked) == 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html", "latency.svg", "memory.svg", "rows.csv", "rows.json", "rows.jsonl",
    ]  # fmt: skip
    assert len(list(csv.DictReader((tmp_path / "out/rows.csv").read_text().splitlines()))) == 3
    assert json.loads((tmp_path / "out/rows.json").read_text())["rows"] == rows


def test_goes_on_where_it_ended(bench: Callable[..., dict[str, Any]], asked: list[Lock], tmp_path: Path) -> None:
    """A bench that was stopped measures only what is missing; other options measure anew; a torn line is not taken."""
    with pytest.raises(StoppedError):
        bench(Grid(lengths=(32, 8)))
    assert len(asked) == 3
    with (tmp_path / "out/rows.jsonl").open("a") as file:
        file.write('{"key": "')
    bench(Grid(lengths=(32, 64)))
    assert [lock.recipe["train"]["max_length"] for lock in asked[3:]] == [64, 64]
    bench(Grid(lengths=(32, 64)))
    assert len(asked) == 5
    bench(Grid(lengths=(32,)), steps=7)
    assert len(asked) == 7


def test_cells_lock_only_settings(bench: Callable[..., dict[str, Any]], asked: list[Lock], recipe: Path) -> None:
    """Same wheels, base and model; its own rows, arguments and digest."""
    bench(Grid(lengths=(32, 64), micro=(4,)), repeats=1)
    one, two = asked
    assert (one.wheels, one.base, one.model) == (two.wheels, two.base, two.model)
    assert one.defaults.arguments["max_length"].value == 32
    assert one.defaults.arguments["per_device_train_batch_size"].value == 4
    assert one.evaluate is None
    assert one.datasets[0].data_files == ("bench.jsonl",)
    assert one.content_sha256 != two.content_sha256
    assert read(recipe).recipe.evaluate is not None


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"steps": 1}, "--steps 1"), ({"repeats": 0}, "--repeats 0"), ({"rows": "some"}, "--rows some")],
)
def test_bad_options(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    """Exit 2 that names the option."""
    with pytest.raises(UsageError, match=words):
        options(tmp_path, **changed)
    with pytest.raises(UsageError, match="--packing maybe"):
        benching.switch("--packing", "maybe")


def test_tune_writes_the_recipe(context: Context, recipe: Path, asked: list[Lock], tmp_path: Path) -> None:
    """`--apply` writes what was found; without it the file stays."""
    before = recipe.read_bytes()
    wanted = Grid(attention=("sdpa",), liger=("off",))
    told = benching.tune(context, recipe, wanted, options(tmp_path / "out"), apply=False, stop=Stop())
    assert told.fields["best"]["attention"] == "sdpa"
    assert told.fields["applied"] is False
    assert recipe.read_bytes() == before
    assert len(asked) > 4
    assert any("checkpointing and micro batch" in line for line in told.lines)
