"""The guest: pure parts in the host's environment, training parts with the python that KITBUILD_TRAIN_PYTHON names."""
