"""Finished bases: made rarely, shared by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.base import bases, registry
from kitbuild.base.bootstrap import bootstrap
from kitbuild.base.build import build
from kitbuild.base.oci import write_archive
from kitbuild.flow.context import Context, Result

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.base.models import LockedBase


def base_bootstrap(context: Context, target: str) -> Result:
    """The CPU base from Debian packages."""
    base = bootstrap(target, store=context.store, progress=context.progress, environ=context.environ)
    return _told(base, [])


def base_build(context: Context, target: str, *, upstream: str | None, push: str | None, output: Path | None) -> Result:
    """A base from Dockerfile.TARGET, pushed or written where that is asked for."""
    base = build(
        target,
        upstream=upstream,
        client=context.client(),
        store=context.store,
        progress=context.progress,
    )
    layers = bases.layers(context.store, base)
    config, manifest = bases.config(context.store, base), bases.manifest(context.store, base)
    lines = []
    if push is not None:
        registry.push(push, manifest, config, layers, environ=context.environ, progress=context.progress)
        lines.append(f"pushed to {push}")
    if output is not None:
        write_archive(output, config=config, manifest=manifest, layers=layers, tag=base.name)
        lines.append(f"written to {output}")
    return _told(base, lines)


def _told(base: LockedBase, lines: list[str]) -> Result:
    fields: dict[str, Any] = {
        "name": base.name,
        "manifest_digest": base.manifest_digest,
        "config_digest": base.config_digest,
        "python": base.python,
        "glibc": base.glibc,
        "cuda": base.cuda,
        "packages": len(base.packages),
    }
    about = f"Python {base.python}, glibc {base.glibc}, {len(base.packages)} packages"
    return Result(fields=fields, lines=(f"{base.name}@{base.manifest_digest} ({about})", *lines))
