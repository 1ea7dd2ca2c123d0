"""Inside the image: verify → preflight → selftest → determinism → launch → train → record.

Speaks to the host through files in the run directory only; imports nothing of the host but `kitbuild.errors`.
"""
