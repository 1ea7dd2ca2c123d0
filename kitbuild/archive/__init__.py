"""Step 5: the archived run manifest: make its directory, read, verify, list, pack, unpack.

Imports recipe, lock and store, never the guest that writes it: the two meet in files.
"""

from kitbuild.archive.kit import Kit, read_kit
from kitbuild.archive.models import Exit, Manifest, Metrics, exact_float
from kitbuild.archive.pack import pack, unpack
from kitbuild.archive.read import Archive, check, read, verify
from kitbuild.archive.repeats import keep_repeats, kept_repeats
from kitbuild.archive.runs import Summary, claim_run_dir, list_runs, new_run_dir, run_name, show
from kitbuild.archive.source import KitTar

__all__ = [
    "Archive",
    "Exit",
    "Kit",
    "KitTar",
    "Manifest",
    "Metrics",
    "Summary",
    "check",
    "claim_run_dir",
    "exact_float",
    "keep_repeats",
    "kept_repeats",
    "list_runs",
    "new_run_dir",
    "pack",
    "read",
    "read_kit",
    "run_name",
    "show",
    "unpack",
    "verify",
]
