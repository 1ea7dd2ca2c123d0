"""The foundation below the steps: every byte that enters is verified here. Imports only errors."""

from kitbuild.store.blobs import Store, sha256_file

__all__ = ["Store", "sha256_file"]
