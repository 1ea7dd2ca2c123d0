"""Step 1: `train` and `lora` against the trainers' own declarations, with no network and no torch.

`train_keys.json` holds what the tested set declares (made by `trainers.py`). Where a recipe brings another version
of a trainer, its keys are checked when locking, against that wheel.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from kitbuild.recipe.owned import LORA_OWNED, LORA_RENAMED, TRAIN_OWNED, TRAIN_RENAMED
from kitbuild.recipe.scalars import look_alike
from kitbuild.recipe.words import Words, closest, fits, not_a_choice, wrong_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kitbuild.recipe.strict_yaml import Document, Path


@dataclass(frozen=True, kw_only=True)
class Range:
    """Bounds of a number; `above` and `below` are outside the range."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

    def words(self) -> str:
        """The range in words."""
        parts = (("at least", self.least), ("more than", self.above), ("less than", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in parts if bound is not None)

    def holds(self, value: float) -> bool:
        """Whether the value is inside."""
        return not (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.below is not None and value >= self.below)
        )


_SHARE = Range(least=0, below=1)
TRAIN_RANGES = {
    "learning_rate": Range(above=0),
    "num_train_epochs": Range(above=0),
    "max_length": Range(least=1),
    "weight_decay": Range(least=0),
    "adam_beta1": _SHARE,
    "adam_beta2": _SHARE,
    "adam_epsilon": Range(above=0),
    "max_grad_norm": Range(least=0),
    "label_smoothing_factor": _SHARE,
    "warmup_steps": Range(least=0),
    "logging_steps": Range(above=0),
    "save_steps": Range(above=0),
    "save_total_limit": Range(least=1),
    "dataloader_num_workers": Range(least=0),
    "dataloader_prefetch_factor": Range(least=1),
    "ddp_timeout": Range(least=1),
    "ddp_bucket_cap_mb": Range(least=1),
    "pad_to_multiple_of": Range(least=1),
    "neftune_noise_alpha": Range(above=0),
    "torch_empty_cache_steps": Range(least=1),
    "router_aux_loss_coef": Range(least=0),
}
LORA_RANGES = {
    "r": Range(least=1),
    "lora_alpha": Range(least=1),
    "lora_dropout": _SHARE,
    "qalora_group_size": Range(least=1),
}
# What the source says in prose and in help texts only.
_MORE_CHOICES = {
    "loss_type": ("nll", "dft", "chunked_nll"),
    "packing_strategy": ("bfd", "bfd_split", "wrapped"),
    "truncation_mode": ("keep_start",),
    "train_sampling_strategy": ("random", "sequential", "group_by_length", "batch_rebalance"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """What the tested set declares."""

    packages: Mapping[str, str]
    train: Mapping[str, Mapping[str, Any]]
    lora: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """`train` or `lora`: what is declared, refused, renamed and bounded."""

    name: str
    made_of: str
    packages: tuple[str, ...]
    owned: Mapping[str, str]
    renamed: Mapping[str, str]
    ranges: Mapping[str, Range]


TRAIN = Section(
    name="train",
    made_of="SFTConfig",
    packages=("trl", "transformers"),
    owned=TRAIN_OWNED,
    renamed=TRAIN_RENAMED,
    ranges=TRAIN_RANGES,
)
LORA = Section(
    name="lora",
    made_of="LoraConfig",
    packages=("peft",),
    owned=LORA_OWNED,
    renamed=LORA_RENAMED,
    ranges=LORA_RANGES,
)


@cache
def table() -> Table:
    """The committed table of the tested set."""
    text = files("kitbuild.recipe").joinpath("train_keys.json").read_text(encoding="utf-8")
    return Table(**json.loads(text))


def kinds(field: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds that a recipe may write."""
    declared = tuple(field["kinds"])
    if "dict" in declared:  # a string would be JSON, or the path of a file that nobody locks
        return tuple(kind for kind in declared if kind != "str")
    return declared


def choices(key: str, field: Mapping[str, Any]) -> tuple[str, ...]:
    """The words that a key takes; none where any will do."""
    return tuple(field.get("choices", ())) or _MORE_CHOICES.get(key, ())


def check(
    section: Section, values: Mapping[str, Any], known: Table, document: Document, *, other_versions: bool = False
) -> Iterator[tuple[Path, Words]]:
    """Every problem of a section's keys and values; with `other_versions`, unknown keys wait for the lock."""
    declared: Mapping[str, Mapping[str, Any]] = getattr(known, section.name)
    for key, value in values.items():
        path = (section.name, key)
        place = document.values.get(path)
        if other_versions and key not in declared and key not in section.owned:
            continue
        words = _check_key(section, key, declared, known) or _check_value(
            section, key, value, place.plain if place else None, declared[key]
        )
        if words:
            yield path, words
        elif isinstance(value, dict | tuple):
            yield from look_alikes(path, value, document)


def look_alikes(path: Path, value: Any, document: Document) -> Iterator[tuple[Path, Words]]:
    """Strings in an untyped value that another YAML reader takes for something else."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
    for key, part in parts:
        yield from look_alikes((*path, key), part, document)
    place = document.values.get(path)
    if isinstance(value, str) and place and place.plain is not None:
        alike = look_alike(place.plain)
        if alike:
            quoted = f'"{place.plain}" in quotes'
            yield path, (alike[0], f"{alike[1]}, or {quoted}" if alike[1] else f"write {quoted}")


def _check_key(section: Section, key: str, declared: Mapping[str, Any], known: Table) -> Words | None:
    if key in section.owned:
        return "a recipe does not take this key", section.owned[key]
    if key in declared:
        return None
    versions = " and ".join(f"{name} {known.packages[name]}" for name in section.packages)
    taken = [name for name in declared if name not in section.owned]
    meant = section.renamed.get(key) or closest(key, taken)
    return (
        f"{section.made_of} of {versions} has no such key",
        f"did you mean {meant}?" if meant else "docs/recipe.md lists the keys",
    )


def _check_value(section: Section, key: str, value: Any, plain: str | None, field: Mapping[str, Any]) -> Words | None:
    wanted, allowed = kinds(field), choices(key, field)
    if not fits(value, wanted):
        if allowed and "bool" not in wanted and plain is not None:
            return not_a_choice(value, plain, allowed)
        return wrong_kind(value, plain, wanted)
    if isinstance(value, str) and allowed and value not in allowed and not _is_open(value, allowed):
        return not_a_choice(value, plain, allowed)
    if key in section.ranges and value is not None and not section.ranges[key].holds(value):
        return f"{plain or value} is out of range: {section.ranges[key].words()} is needed", None
    if key == "max_steps" and value != -1 and value < 1:
        return f"{value} is out of range: at least 1 is needed, or -1 for whole epochs", None
    return None


def _is_open(value: str, allowed: tuple[str, ...]) -> bool:
    """Whether a choice such as `pissa_niter_[number of iters]` covers the value."""
    heads = [choice.partition("[")[0] for choice in allowed if "[" in choice]
    return any(value.startswith(head) and value.removeprefix(head).isdecimal() for head in heads)
