"""Step 6: what differs in where and on what two runs ran: threads, device, driver, variables, flags, base, engine. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kitbuild.compare.items import as_text, cause, tables
from kitbuild.compare.models import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kitbuild.archive.models import Manifest

_PLACE_VARIABLES = ("DIR", "_HOME", "_CACHE")
# How much there is of it, which decides no number by itself.
_CAPACITY = frozenset({"memory_bytes", "cpu.cores"})
# Set from the number of threads, which is told.
_THREAD_VARIABLES = frozenset({"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
_TOLD_FLAGS = frozenset({"torch.num_threads", "torch.cpu_capability"})
# What says most about a device comes first; the rest by name.
_DEVICE = ("name", "compute_capability", "sm_count", "mig", "cpu.isa", "cpu.vendor", "cpu.family", "cpu.model_name")


def machine(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """What computed, and what was set there."""
    devices = [m.device.model_dump() for m in (left, right)]
    threads = [device.pop("threads") for device in devices]
    if threads[0] != threads[1]:
        yield cause("threads", "threads", *threads)
    found = sorted(tables("device", *devices, what="device {}"), key=_device_place)
    for item in found:
        yield replace(item, kind="capacity") if item.name in _CAPACITY else item
    if left.driver != right.driver:
        yield cause("driver", "driver", left.driver, right.driver)
    told = _THREAD_VARIABLES if threads[0] != threads[1] else frozenset()
    variables = [
        {k: v for k, v in m.environment.variables.items() if not k.endswith(_PLACE_VARIABLES) and k not in told}
        for m in (left, right)
    ]
    yield from tables("variable", *variables)
    yield from tables("setting", *(_in_force(m) for m in (left, right)), what="setting {}")
    builds = [{key: value for key, value in m.build.items() if key != "config"} for m in (left, right)]
    yield from tables("build", *builds, what="build {}")
    if left.build.get("config") != right.build.get("config"):
        text = "the library's build configuration differs"
        configs = [as_text(m.build.get("config")) for m in (left, right)]
        yield Cause(kind="build", name="config", left=configs[0], right=configs[1], text=text)


def _resumed(manifest: Manifest) -> str:
    steps = ", ".join(str(step) for step in manifest.resumed)
    return f"after step {steps}" if steps else "never"


def _in_force(manifest: Manifest) -> dict[str, Any]:
    """Library flags and compiled code as the guest found them; threads and instructions are told by themselves."""
    flags = manifest.determinism.get("settings")
    table = {name: value for name, value in flags.items() if name not in _TOLD_FLAGS} if isinstance(flags, dict) else {}
    if compiled := manifest.determinism.get("compiled_before"):
        table["compiled_before"] = compiled
    return table


def _device_place(item: Cause) -> tuple[int, str]:
    return (_DEVICE.index(item.name) if item.name in _DEVICE else len(_DEVICE), item.name)


def image(left: Manifest, right: Manifest) -> Iterator[Cause]:
    """What it ran in."""
    one, two = left.lock.base, right.lock.base
    if one.manifest_digest != two.manifest_digest:
        bases = [f"{base.name}@{base.manifest_digest[7:19]}…" for base in (one, two)]
        yield cause("base", "base", *bases)
    yield from tables("base", *({"python": base.python, "glibc": base.glibc} for base in (one, two)))
    packages = [{package.name: package.version for package in base.packages} for base in (one, two)]
    yield from tables("base", *packages, what="system package {}")
    makers = [m.lock.kitbuild.model_dump() for m in (left, right)]
    yield from tables("kitbuild", *makers, what="kitbuild {}")
    if left.engine != right.engine:
        yield cause("engine", "engine", left.engine, right.engine)
    if left.resumed != right.resumed:
        yield cause("resume", "resumed", *(_resumed(m) for m in (left, right)))
    if left.environment.locked != right.environment.locked:
        yield cause("environment", "locked", left.environment.locked, right.environment.locked, "environment locked")
    if left.content_sha256 == right.content_sha256:
        for field in ("config_digest", "content_sha256"):
            ours, theirs = (getattr(m.image, field) for m in (left, right))
            if ours != theirs and left.engine == right.engine:
                yield cause("image", field, ours, theirs, f"image {field}")
    yield from tables("hardening", left.environment.hardening, right.environment.hardening, what="hardening {}")
