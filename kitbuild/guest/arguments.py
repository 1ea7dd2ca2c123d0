"""The trainer's arguments: from the lock, and after the library's own resolution compared with it again."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from trl import SFTConfig

from kitbuild.errors import VerificationError

if TYPE_CHECKING:
    from kitbuild.guest.config import Config


def given(config: Config) -> dict[str, Any]:
    """SFTConfig's arguments: what the lock decided, and where checkpoints go here."""
    locked = config.raw["defaults"]["arguments"]
    chosen = {name: item["value"] for name, item in locked.items() if item["origin"] != "library"}
    if not config.locked:
        known = {item.name for item in dataclasses.fields(SFTConfig)}
        chosen = {name: value for name, value in chosen.items() if name in known}
    return {**chosen, "output_dir": str(config.places.checkpoints)}


def check(config: Config, args: SFTConfig) -> None:
    """What the lock decided against what is in force after the library's own resolution (exit 7)."""
    allowed, wrong = set(config.raw["defaults"]["device_dependent"]), []
    for name, item in config.raw["defaults"]["arguments"].items():
        wanted, found = item["value"], plain(getattr(args, name, item["value"]))
        scalar = isinstance(wanted, bool | int | float | str) and isinstance(found, type(wanted))
        if scalar and item["origin"] != "library" and name not in allowed and wanted != found:
            wrong.append(f"{name} is {found!r}, the lock says {wanted!r}")
    if wrong:
        raise VerificationError(f"arguments in force are not the locked ones: {'; '.join(wrong)}", hint="lock again")


def check_defaults(config: Config) -> None:
    """The declared defaults in force against the lock's (exit 7): another library would train otherwise."""
    declared = config.raw["defaults"]["declared"].get("trl.SFTConfig")
    if not declared or not config.locked:
        return
    allowed = set(config.raw["defaults"]["device_dependent"])
    wrong = []
    for item in dataclasses.fields(SFTConfig):
        if item.name not in declared or item.name in allowed or item.default is dataclasses.MISSING:
            continue
        here, there = plain(item.default), declared[item.name]
        # Where the lock holds source text, the value is not a literal and cannot be compared.
        if here != there and not (isinstance(there, str) and not isinstance(item.default, str)):
            wrong.append(f"{item.name} defaults to {here!r}, the lock says {there!r}")
    if wrong:
        raise VerificationError(
            f"the trainer's defaults are not the locked ones: {'; '.join(wrong)}", hint="build the image again"
        )


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Enum):
        return plain(value.value)
    return json.loads(json.dumps(value, default=str))


def resolved(args: SFTConfig) -> dict[str, Any]:
    """Every argument in force, less this machine's places."""
    held = plain(args.to_dict())
    return {
        name: value for name, value in sorted(held.items()) if name not in ("output_dir", "logging_dir", "run_name")
    }
