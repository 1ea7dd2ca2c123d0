"""Step 4: start the locked image (or the same files without an engine) and follow it."""
