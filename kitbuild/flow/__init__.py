"""The whole flow: recipe → lock → image → run → archive → compare, each a function of the one before.

The right end of the package: it composes the steps, and only the CLI imports it.
"""

from kitbuild.flow.archives import (
    archive_list,
    archive_pack,
    archive_show,
    archive_unpack,
    archive_verify,
    compare,
)
from kitbuild.flow.bases import base_bootstrap, base_build
from kitbuild.flow.building import fetch, image
from kitbuild.flow.context import Context
from kitbuild.flow.locking import check, lock
from kitbuild.flow.running import RunOptions, reproduce, run
from kitbuild.flow.upkeep import doctor, stack, store_gc, store_verify

__all__ = [
    "Context",
    "RunOptions",
    "archive_list",
    "archive_pack",
    "archive_show",
    "archive_unpack",
    "archive_verify",
    "base_bootstrap",
    "base_build",
    "check",
    "compare",
    "doctor",
    "fetch",
    "image",
    "lock",
    "reproduce",
    "run",
    "stack",
    "store_gc",
    "store_verify",
]
