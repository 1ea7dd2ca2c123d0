"""The whole flow: recipe → lock → image → run → archive → compare, each a function of the one before.

The right end of the package: it composes the steps, and only the CLI imports it. `locking`, `building`,
`running` and `archives` are the steps; `bases` and `upkeep` look after what they stand on.
"""
