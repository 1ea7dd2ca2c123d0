"""Step 3."""
