"""A Hub of our own: git repositories behind the Hugging Face Hub's HTTP API, for the real clients."""
