"""Phase 3: each locked kernel, forward and backward in the model's own shape, against fp32 within a stated tolerance.

Runs in a worker. Takes no random number from the global generators: training's start is the same with and without.
What was found is kept under the digest of everything it depends on (`Selftest.key`), in /cache and in the run's logs:
a resumed run, or one whose cache was kept, does not test the same kernel on the same device again.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from kitbuild.errors import RunError
from kitbuild.guest import manifest, record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kitbuild.guest.config import Config, Kernel

# Largest difference over the largest reference value. docs/determinism.md says why these: rounding of a right kernel
# stays a quarter of it or less, and a wrong head, mask or scale is off by a tenth and more.
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
# A race shows only sometimes, and on a GPU only where several blocks meet.
REPEATS = {"cpu": 3, "cuda": 8}
KEPT = "logs/selftest.json"
ADVICE = "pin another version of the kernel, or another kernel, and lock again"


class Selftest:
    """What is tested in this process, and what came of it."""

    def __init__(self, config: Config, shape: dict[str, int]) -> None:
        self.config, self.shape = config, shape
        self.device = "cuda" if config.cuda else "cpu"
        self.checks: list[dict[str, Any]] = []
        self.known: dict[str, Any] | None = None
        self.begun = time.perf_counter()

    @property
    def dtype(self) -> Any:
        """The type in which the model computes."""
        import torch

        return getattr(torch, self.config.recipe["model"]["dtype"])

    def key(self) -> str:
        """Digest of what decides the outcome: kernels, shape, settings, device and libraries."""
        config, device = self.config, manifest.device(self.config)
        for name in ("count", "memory_bytes"):
            device.pop(name)
        facts = {
            "kernels": config.raw["kernels"],
            "guest": config.raw["kitbuild"]["guest_sha256"],
            "recipe": {name: config.recipe.get(name) for name in ("model", "kernels", "train", "determinism")},
            "model": config.raw["model"]["weights"],
            "shape": self.shape,
            "device": device,
            "driver": manifest.driver(),
            "build": manifest.build(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def recall(self) -> bool:
        """Whether the same was tested before: in this cache, or by the run that is resumed."""
        key = self.key()
        for path in self._kept(key):
            try:
                held = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue
            if held.get("key") == key:
                self.known = {**held, "recalled": True}
                return True
        return False

    def _kept(self, key: str) -> list[Path]:
        places = self.config.places
        return [places.cache / "selftest" / f"{key}.json", *([places.out / KEPT] if self.config.resume else [])]

    def result(self) -> dict[str, Any]:
        """All checks, kept for the next run."""
        if self.known is None:
            seconds = time.perf_counter() - self.begun
            self.known = {"key": self.key(), "checks": self.checks, "seconds": round(seconds, 3), "recalled": False}
            record.write_json(self._kept(self.known["key"])[0], self.known)
        return self.known

    def compare(
        self, kernel: Kernel, name: str, run: Callable[[], Sequence[Any]], expected: Sequence[Any], names: Sequence[str]
    ) -> None:
        """Raise where a value or a gradient is not the reference's, or not the same each time."""
        allowed = TOLERANCE[self.config.recipe["model"]["dtype"]]
        found = self.attempt(kernel, name, run)
        worst = {}
        for what, left, right in zip(names, found, expected, strict=True):
            scale = right.abs().max().item() or 1.0
            worst[what] = (left.float() - right).abs().max().item() / scale
            if not worst[what] <= allowed:
                text = (
                    f"kernel {kernel} is wrong in {name}: {what} is off by {worst[what]:.1e}, {allowed:.0e} is allowed"
                )
                raise RunError(text, hint=ADVICE)
        repeats = REPEATS[self.device] if self.config.strict else 0
        for _ in range(repeats):
            self._same(kernel, name, found, self.attempt(kernel, name, run), names)
        self.passed(kernel, name, error=worst, allowed=allowed, repeats=repeats)

    def attempt(self, kernel: Kernel, name: str, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """What a kernel gives; that it fails is told with its name."""
        try:
            return run()
        except RunError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunError(f"kernel {kernel} fails in {name}: {reason}", hint=ADVICE) from error

    def _same(self, kernel: Kernel, name: str, one: Sequence[Any], two: Sequence[Any], names: Sequence[str]) -> None:
        import torch

        for what, left, right in zip(names, one, two, strict=True):
            if not torch.equal(left, right):
                text = f"kernel {kernel} is not deterministic in {name}: {what} differs between two calls"
                raise RunError(text, hint=f"{ADVICE}; or determinism: record")

    def passed(self, kernel: Kernel, name: str, **facts: Any) -> None:
        """Note a check that held."""
        self.checks.append({"kernel": str(kernel), "check": name, **facts})
