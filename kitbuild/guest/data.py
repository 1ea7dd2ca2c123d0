"""The locked rows, in the order that the seed gives, and the digest of each batch as it is made."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError

if TYPE_CHECKING:
    from kitbuild.guest.config import Config, Dataset

KEY = "kit_record"
HASHED = ("input_ids", "labels", "position_ids", "attention_mask")
MESSAGES = ("messages", "conversations", "prompt", "completion")
COLUMNS = ({"messages"}, {"prompt", "completion"}, {"conversations"}, {"text"})


def load(config: Config, dataset: Dataset) -> Any:
    """One dataset from its mounted files; nothing is looked up by name."""
    import datasets

    folder = config.places.inputs / dataset.folder
    files = [str(folder / name) for name in dataset.data_files]
    try:
        held = datasets.load_dataset(
            dataset.format, data_files=files, split="train", cache_dir=str(config.places.scratch / "datasets")
        )
    except StopIteration:
        held = ()
    except datasets.exceptions.DatasetGenerationError as error:
        names = ", ".join(dataset.data_files[:3])
        raise RunError(
            f"{names} cannot be read as {dataset.format}: {_reason(error)}", hint="correct the file, then lock again"
        ) from error
    if len(held) == 0:
        raise RunError(f"{dataset.folder} has no rows", hint="look at the split that the recipe names")
    _refuse_empty(held, dataset.folder, nulls=bool(config.train.get("assistant_only_loss")))
    return held


def _reason(error: BaseException) -> str:
    """The first line of what a library's own error hides."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse_empty(rows: Any, name: str, *, nulls: bool) -> None:
    """A conversation without a message fails in a library, without saying where; with `nulls`, one that is not there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for column, values in _conversations(rows):
        lengths = pc.fill_null(pc.list_value_length(values), 0 if nulls else 1)
        index = pc.index(lengths, pa.scalar(0, lengths.type)).as_py()
        if index >= 0:
            raise RunError(
                f"{name}: row {index + 1} has no {column}", hint="correct or remove that row, then lock again"
            )


def _conversations(rows: Any) -> list[tuple[str, Any]]:
    """The columns that are lists of messages, as Arrow has them."""
    import pyarrow as pa

    columns = [(name, rows.data.column(name)) for name in MESSAGES if name in rows.column_names]
    return [(name, values) for name, values in columns if pa.types.is_list(values.type)]


def conversational(rows: Any) -> bool:
    """Whether a chat template is needed to make text of a row."""
    return bool(_conversations(rows))


def training_rows(config: Config) -> Any:
    """All training data as one dataset: concatenated, or mixed by weight in an order that follows from the seed."""
    import datasets

    parts = [load(config, item) for item in config.datasets]
    if len(parts) == 1:
        return parts[0]
    common = set.intersection(*(set(part.column_names) for part in parts))
    kept = next((sorted(wanted) for wanted in COLUMNS if wanted <= common), None)
    if kept is None:
        raise RunError(
            "the datasets have no common columns to train on",
            hint="give all of them messages, or prompt and completion",
        )
    parts = [part.select_columns(kept) for part in parts]
    weights = [item.weight for item in config.datasets]
    if all(weight is None for weight in weights):
        return datasets.concatenate_datasets(parts)
    given = [1.0 if weight is None else weight for weight in weights]
    shares = [weight / sum(given) for weight in given]
    return datasets.interleave_datasets(
        parts, probabilities=shares, seed=config.seed, stopping_strategy="all_exhausted"
    )


class Recorded:
    """A collator whose batches carry their own digest and token count, taken on the CPU where they are made."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Collate, then sign."""
        batch: dict[str, Any] = self.collator(rows)
        mask = batch.get("attention_mask")
        tokens = int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        batch[KEY] = digest(batch) + tokens.to_bytes(8, "little")
        return batch


def digest(batch: dict[str, Any]) -> bytes:
    """sha256 of ids, labels, positions, mask, and their shapes."""
    found = hashlib.sha256()
    for name in HASHED:
        tensor = batch.get(name)
        if tensor is not None:
            found.update(f"{name} {tuple(tensor.shape)} int64\n".encode())
            found.update(tensor.long().contiguous().numpy().tobytes())
    return found.digest()
