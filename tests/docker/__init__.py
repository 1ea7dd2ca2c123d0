"""The whole flow through the command line, on a real engine."""
