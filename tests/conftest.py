"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# An example's time is the machine's, and it is often busy: https://hypothesis.readthedocs.io/en/latest/reference/api.html
settings.register_profile("kitbuild", deadline=None)
settings.load_profile("kitbuild")
