"""The finished base: Python and compilers, no training package; only ever referred to by digest."""
