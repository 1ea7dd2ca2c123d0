"""What holds for every test."""

from __future__ import annotations

import signal

from hypothesis import settings

# How long an example takes follows from what else runs on the machine.
settings.register_profile("kitbuild", deadline=None)
settings.load_profile("kitbuild")
# A job that a shell put into the background inherits "ignore", and so would every process that a test starts:
# https://docs.python.org/3/library/signal.html
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
