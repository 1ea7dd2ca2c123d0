"""The finished base: Python and compilers, no training package; only ever referred to by digest.

`find` and `ensure` bring one into the store; `bootstrap` and `build` make one; `push_base` and `write_base` share it.
"""

from kitbuild.base.bootstrap import bootstrap
from kitbuild.base.build import build
from kitbuild.base.find import ensure, find
from kitbuild.base.models import LockedBase, SystemPackage, Upstream
from kitbuild.base.share import push_base, read_base, write_base
from kitbuild.base.targets import Target, load_target, target_names

__all__ = [
    "LockedBase",
    "SystemPackage",
    "Target",
    "Upstream",
    "bootstrap",
    "build",
    "ensure",
    "find",
    "load_target",
    "push_base",
    "read_base",
    "target_names",
    "write_base",
]
