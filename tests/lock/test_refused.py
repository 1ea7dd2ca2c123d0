"""Every error-level advisory refuses a recipe that meets it, at `check` and at `lock`, before anything is downloaded."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from kitbuild.errors import RecipeError, ResolveError
from kitbuild.flow import locking
from kitbuild.flow.context import Context
from kitbuild.lock.advisories import load_advisories
from kitbuild.progress import Silent
from kitbuild.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

QWEN = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 4}
FLCE = {"fused_linear_cross_entropy": True}
CPU = {"cuda": "cpu"}


def model(**config: Any) -> dict[str, Any]:
    return {"config": {**QWEN, **config}, "tokenizer": {"path": "tok"}}


def packages(**versions: str) -> dict[str, Any]:
    return {"image": {"cuda": "12.9", "packages": {name.replace("_", "-"): value for name, value in versions.items()}}}


# What meets each of them, and under which key it is told: the advisory's own, or the recipe's where a rule is earlier.
CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "KIT-2026-001": (
        None,
        {"kernels": {"attention": "kernels-community/flash-attn2@v3"}, "model": model(num_key_value_heads=2)},
    ),
    "KIT-2026-002": (None, {"liger": FLCE, **packages(trl="1.15.0")}),
    "KIT-2026-003": (None, packages(kernels="0.17.1")),
    "KIT-2026-004": (None, packages(kernels="0.18.0")),
    "KIT-2026-005": ("liger", {"liger": FLCE, "image": CPU}),
    "KIT-2026-006": ("launch.strategy", {"launch": {"strategy": "fsdp"}, "image": CPU}),
    "KIT-2026-007": ("kernels.attention", {"kernels": {"attention": "flash_attention_2"}}),
    "KIT-2026-008": ("kernels.attention", {"kernels": {"attention": "flash_attention_3"}}),
    "KIT-2026-009": ("kernels.attention", {"kernels": {"attention": "flash_attention_4"}}),
    "KIT-2026-012": (None, packages(transformers="5.14.0", huggingface_hub="1.9.0")),
    "KIT-2026-013": (None, packages(transformers="5.17.0", huggingface_hub="1.33.0")),
    "KIT-2026-014": (None, packages(transformers="5.19.0", kernels="0.16.2")),
    "KIT-2026-015": (None, packages(transformers="5.23.0")),
    "KIT-2026-016": (None, packages(transformers="5.17.0", kernels="0.16.2")),
    "KIT-2026-017": (None, packages(huggingface_hub="1.30.0")),
    "KIT-2026-019": (None, packages(transformers="4.56.1")),
    "KIT-2026-020": (None, packages(datasets="4.6.0")),
    "KIT-2026-021": ("train.loss_type", {"liger": {"rope": True}, "train": {"loss_type": "chunked_nll"}}),
    "KIT-2026-024": (None, {"model": model(quantization_config={"quant_method": "mxfp4"})}),
    "KIT-2026-025": (None, {"model": model(experts_implementation="sonicmoe")}),
    "KIT-2026-026": (None, {"model": model(model_type="rwkv")}),
    "KIT-2026-028": (
        "launch.deepspeed.overlap_comm",
        {"launch": {"strategy": "deepspeed", "deepspeed": {"overlap_comm": True}}},
    ),
    "KIT-2026-029": (None, {"image": {"cuda": "12.9", "gpu_archs": ["9.0", "6.1"]}}),
}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """A machine whose every way out is closed: whoever asked for something would get exit 4 or 5."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KITBUILD_HOME": str(tmp_path / "store"),
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple",
        "UV_NO_CONFIG": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "DOCKER_HOST": "tcp://127.0.0.1:1",
    }
    return Context(environ=environ, store=Store.open(environ), progress=Silent())


def write(folder: Path, changes: dict[str, Any]) -> Path:
    (folder / "tok").mkdir()
    (folder / "tok" / "tokenizer.json").write_text("{}")
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    fields = {
        "kitbuild": 1,
        "name": "recipe",
        "model": model(),
        "dataset": {"path": "rows.jsonl"},
        "image": {"cuda": "12.9"},
        "batch": {"global": 1, "micro": 1},
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(fields))
    return path


def test_there_is_a_case_for_each() -> None:
    """A new error-level advisory needs a recipe that meets it."""
    assert set(CASES) == {item.id for item in load_advisories() if item.severity == "error"}


def check(context: Context, path: Path) -> None:
    locking.check(path, context.environ)


def lock(context: Context, path: Path) -> None:
    locking.lock(context, path, only_check=False, update=frozenset(), upgrade=False, diff=None)


@pytest.mark.parametrize("verb", [check, lock])
@pytest.mark.parametrize("number", sorted(CASES))
def test_refused(number: str, verb: Callable[[Context, Path], None], tmp_path: Path, context: Context) -> None:
    """Exit 2 under its id or the recipe's key, with what to do instead; nothing was asked for, nothing is written."""
    key, changes = CASES[number]
    path = write(tmp_path, changes)
    with pytest.raises(RecipeError) as caught:
        verb(context, path)
    assert caught.value.exit_code == 2
    problems = [problem for problem in caught.value.problems if problem.key == (key or number)]
    assert len(problems) == 1, [str(problem) for problem in caught.value.problems]
    assert problems[0].hint
    assert not path.with_suffix(".lock.json").exists()


def test_the_recipe_without_them_is_fine(tmp_path: Path, context: Context) -> None:
    """What the cases change is right before: `check` takes it."""
    assert locking.check(write(tmp_path, {}), context.environ).fields["advisories"] == []


def test_a_model_on_disk(tmp_path: Path, context: Context) -> None:
    """`check` reads a local model's own config.json."""
    path = write(tmp_path, {"model": {"path": "m"}, "kernels": {"attention": "kernels-community/flash-attn2@v3"}})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({**QWEN, "num_key_value_heads": 1}))
    with pytest.raises(RecipeError) as caught:
        locking.check(path, context.environ)
    assert [problem.key for problem in caught.value.problems] == ["KIT-2026-001"]


def test_the_way_out_is_closed(tmp_path: Path, context: Context) -> None:
    """The same machine and a recipe that meets no advisory: resolving fails, so that the refusals above came before."""
    path = write(tmp_path, {"model": {"repo": "org/model"}})
    with pytest.raises(ResolveError, match=r"^the Hub cannot be reached, model org/model was not resolved$"):
        lock(context, path)
