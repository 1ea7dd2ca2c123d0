"""Step 2: a recipe turned into what cannot move."""
