"""kitbuild: reproducible training. recipe → lock → image → run → archive → compare."""

__version__ = "0.1.0"
