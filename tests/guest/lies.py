"""What libraries do silently, provoked: each makes a worker run another strategy than the one asked for.

`zygote.py` calls one of these in the guest's process, before its workers are forked.
"""

from __future__ import annotations

import functools
from typing import Any


def alone() -> None:
    """Accelerate's own way with DeepSpeed on a CPU: no back end, so each process is the only one."""
    import accelerate  # noqa: PLC0415

    class Alone(accelerate.PartialState):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**{**given, "backend": None})

    accelerate.PartialState = Alone


def fsdp_on_a_cpu() -> None:
    """FSDP that nobody refuses before it is tried."""
    from kitbuild.guest import preflight  # noqa: PLC0415

    preflight._device = lambda config, environ: iter(())  # noqa: ARG005


def unwrapped() -> None:
    """Ranks that train models of their own."""
    import accelerate  # noqa: PLC0415

    prepare = accelerate.Accelerator.prepare_model
    accelerate.Accelerator.prepare_model = functools.partialmethod(prepare, evaluation_mode=True)


def lower_stage() -> None:
    """ZeRO-3 by the lock, ZeRO-1 in what DeepSpeed is given."""
    from kitbuild.guest import arguments  # noqa: PLC0415

    given = arguments.given

    def lower(config: Any) -> dict[str, Any]:
        held = given(config)
        zero = {**held["deepspeed"]["zero_optimization"], "stage": 1}
        return {**held, "deepspeed": {**held["deepspeed"], "zero_optimization": zero}}

    arguments.given = lower
