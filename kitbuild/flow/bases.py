"""Finished bases: made rarely, shared by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitbuild.base.bootstrap import bootstrap
from kitbuild.base.build import build
from kitbuild.base.share import push_base, write_base
from kitbuild.base.targets import dockerfile_path, load_target
from kitbuild.flow.context import Context, Result

if TYPE_CHECKING:
    from pathlib import Path

    from kitbuild.base.models import LockedBase


def base_bootstrap(context: Context, target: str, *, push: str | None, output: Path | None) -> Result:
    """The CPU base from Debian packages, pushed or written where that is asked for."""
    base = bootstrap(target, store=context.store, progress=context.progress, environ=context.environ)
    return _shared(context, base, push=push, output=output)


def base_build(context: Context, target: str, *, upstream: str | None, push: str | None, output: Path | None) -> Result:
    """A base from Dockerfile.TARGET, pushed or written where that is asked for."""
    dockerfile_path(load_target(target))  # a wrong name is told before an engine is asked for
    client = context.client()
    base = build(target, upstream=upstream, client=client, store=context.store, progress=context.progress)
    return _shared(context, base, push=push, output=output)


def _shared(context: Context, base: LockedBase, *, push: str | None, output: Path | None) -> Result:
    lines = []
    if push is not None:
        pushed = push_base(base, push, store=context.store, environ=context.environ, progress=context.progress)
        lines.append(f"pushed to {pushed}")
    if output is not None:
        write_base(base, output, store=context.store, progress=context.progress)
        lines.append(f"written to {output}")
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
