"""The headline command, whole: an engine, a registry, a test Hub and a package index of this machine's own."""
