"""Phase 6: what is looked at when training begins and everything is in place, before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from kitbuild.guest import determinism, usage

if TYPE_CHECKING:
    from collections import Counter

    from kitbuild.guest.config import Config


class Begin(transformers.TrainerCallback):  # type: ignore[misc]
    """Workers of the data loader have seeds; Liger is patched in by now, as the recipe says, and is counted."""

    def __init__(self, config: Config, calls: Counter[str]) -> None:
        self.config, self.calls = config, calls
        self.patched: list[str] | None = None

    def on_train_begin(self, *_arguments: Any, model: Any, train_dataloader: Any, **_named: Any) -> None:
        """Refuse what cannot be as the recipe says."""
        determinism.check_workers(self.config, train_dataloader)
        options = self.config.recipe.get("liger")
        if options:
            self.patched = usage.count_liger(model, options, self.calls)
