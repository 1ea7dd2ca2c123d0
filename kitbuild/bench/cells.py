"""The cells of a benchmark: a recipe in other settings, on rows of a stated length. Pure."""

from __future__ import annotations

import itertools
import json
import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kitbuild.errors import UsageError
from kitbuild.recipe.models import Liger, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

BUILT_IN = ("eager", "sdpa", "flex_attention")
LIGER_OPTIONS = tuple(Liger.model_fields)
# What most decoders have; geglu and layer_norm belong to others, cross_entropy is in the fused loss.
LIGER_ALL = {"rope": True, "swiglu": True, "rms_norm": True, "fused_linear_cross_entropy": True}
# Keys of `train` that name columns, ends or habits of the recipe's own data and run.
LEFT_OUT = frozenset({
    "num_train_epochs", "save_steps", "save_total_limit", "assistant_only_loss", "completion_only_loss", "max_steps",
    "warmup_steps", "warmup_ratio", "dataset_text_field", "eval_steps",
})  # fmt: skip
ROWS = ("full", "varied")
MEDIAN = 4  # varied rows: their median is a quarter of the longest


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train. `liger` is `off`, `all`, the recipe's own (`recipe`) or one option's name."""

    attention: str
    liger: str
    max_length: int
    checkpointing: bool
    packing: bool
    micro: int

    @property
    def name(self) -> str:
        """Short, unique, fit for a directory."""
        attention = self.attention.rpartition("/")[2].replace("@", "-").replace(":", "-")
        parts = [attention, f"liger-{self.liger}", str(self.max_length), f"micro{self.micro}"]
        parts += ["checkpointed"] if self.checkpointing else []
        parts += ["packed"] if self.packing else []
        return "-".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return {
            "attention": self.attention, "liger": self.liger, "max_length": self.max_length,
            "checkpointing": self.checkpointing, "packing": self.packing, "micro": self.micro,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to cross; an empty axis is the recipe's own value alone."""

    attention: tuple[str, ...] = ()
    liger: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    checkpointing: tuple[bool, ...] = ()
    packing: tuple[bool, ...] = ()
    micro: tuple[int, ...] = ()


def own(recipe: Recipe) -> Cell:
    """The recipe as it is."""
    train = recipe.train
    return Cell(
        attention=recipe.kernels.attention,
        liger="recipe" if recipe.liger else "off",
        max_length=int(train.get("max_length") or 1024),
        checkpointing=bool(train.get("gradient_checkpointing", True)),
        packing=bool(train.get("packing", False)),
        micro=recipe.batch.micro,
    )


def grid(recipe: Recipe, wanted: Grid) -> tuple[Cell, ...]:
    """Every cell of the cross product, the recipe's own value where an axis is empty."""
    known = {"off", "all", "recipe", *LIGER_OPTIONS}
    if unknown := sorted(set(wanted.liger) - known):
        raise UsageError(f"--liger {unknown[0]} is not known", hint=f"one of {', '.join(sorted(known))}")
    alone = own(recipe)
    for value in wanted.micro:
        if recipe.batch.global_ % (value * recipe.launch.world_size):
            raise UsageError(
                f"--micro {value} does not divide batch.global {recipe.batch.global_} over {recipe.launch.world_size} processes",
                hint="take a divisor",
            )
    axes = (
        wanted.attention or (alone.attention,),
        wanted.liger or (alone.liger,),
        wanted.lengths or (alone.max_length,),
        wanted.checkpointing or (alone.checkpointing,),
        wanted.packing or (alone.packing,),
        wanted.micro or (alone.micro,),
    )
    return tuple(
        Cell(attention=one, liger=two, max_length=three, checkpointing=four, packing=five, micro=six)
        for one, two, three, four, five, six in itertools.product(*axes)
    )


def recipe_for(recipe: Recipe, cell: Cell, *, steps: int) -> tuple[Recipe, bytes]:
    """The cell as a recipe of its own, with its file's bytes: `steps` optimizer steps, nothing evaluated or tracked."""
    fields = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    train = {key: value for key, value in fields.get("train", {}).items() if key not in LEFT_OUT}
    train |= {
        "max_length": cell.max_length, "packing": cell.packing, "gradient_checkpointing": cell.checkpointing,
        "max_steps": steps, "lr_scheduler_type": "constant",
    }  # fmt: skip
    fields |= {
        "name": f"{recipe.name}-bench"[:60],
        "train": train,
        "dataset": {"path": "bench.jsonl"},
        "evaluate": None,
        "track": [],
        "kernels": {**fields.get("kernels", {}), "attention": cell.attention},
        "liger": _liger(fields.get("liger"), cell.liger),
        "batch": {"global": recipe.batch.global_, "micro": cell.micro},
    }
    made = Recipe.model_validate_json(json.dumps(fields))
    return made, (json.dumps(fields, indent=1, sort_keys=True) + "\n").encode()


def _liger(given: Any, name: str) -> Any:
    match name:
        case "off":
            return False
        case "all":
            return LIGER_ALL
        case "recipe":
            return given or False
        case _:
            return {name: True}


def bench_rows(*, count: int, max_length: int, kind: str, seed: int) -> bytes:
    """JSON lines of text: each row has `max_length` tokens or more (`full`), or a varying share of that (`varied`).

    A letter and a space: one token or more in every tokenizer, so a full row is cut to exactly `max_length`.
    """
    chance = random.Random(seed)  # noqa: S311 - text, not a secret
    lengths: Sequence[int] = [max_length] * count
    if kind == "varied":
        lengths = [
            min(max_length, max(8, int(max_length / MEDIAN * chance.lognormvariate(0, 0.9)))) for _ in range(count)
        ]
    lines = []
    for length in lengths:
        text = " ".join(chance.choice(string.ascii_lowercase) for _ in range(length + 2 if kind == "full" else length))
        lines.append(json.dumps({"text": text}))
    return ("\n".join(lines) + "\n").encode()
