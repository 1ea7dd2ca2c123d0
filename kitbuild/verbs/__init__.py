"""Groups of verbs: `kitbuild archive …`, `base …`, `image …`, `render …`, `store …`; `cli` puts them together."""
