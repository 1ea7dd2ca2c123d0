"""Tests of kitbuild: they mirror the package; `hub` holds the test Hub."""
