"""The finished base: Python and compilers, no training package; only ever referred to by digest.

`find` brings one into the store; `bootstrap` and `build` make one; `share` gives one to others. Nothing is imported
here, so that the models, which locks are made of, load without a client for engines or registries.
"""
