"""The foundation below the steps: every byte that enters is verified here. Imports only errors and progress."""

from kitbuild.store.blobs import Store, sha256_file
from kitbuild.store.bundle import read_bundle, write_bundle
from kitbuild.store.download import Download, fetch
from kitbuild.store.gc import Freed, gc, verify

__all__ = ["Download", "Freed", "Store", "fetch", "gc", "read_bundle", "sha256_file", "verify", "write_bundle"]
