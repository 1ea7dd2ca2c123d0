"""Step 3: lock to image. `assemble` makes it, `load` gives it to an engine, `materialise` to a directory."""

from kitbuild.image.assemble import assemble, default_tag, write_oci
from kitbuild.image.compilers import HostCompiler, base_compiler
from kitbuild.image.engine import connect
from kitbuild.image.inspect import verify_image
from kitbuild.image.kernels import kernel_files
from kitbuild.image.load import load, load_base
from kitbuild.image.local import materialise
from kitbuild.image.models import Base, Image, Layer, Loaded

__all__ = [
    "Base",
    "HostCompiler",
    "Image",
    "Layer",
    "Loaded",
    "assemble",
    "base_compiler",
    "connect",
    "default_tag",
    "kernel_files",
    "load",
    "load_base",
    "materialise",
    "verify_image",
    "write_oci",
]
