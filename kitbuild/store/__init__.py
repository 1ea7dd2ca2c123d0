"""The foundation below the steps: every byte that enters is verified here. Imports only errors and progress.

`download`, `bundle` and `gc` are imported by name: `Store` alone needs no network library.
"""

from kitbuild.store.blobs import Store, sha256_file

__all__ = ["Store", "sha256_file"]
