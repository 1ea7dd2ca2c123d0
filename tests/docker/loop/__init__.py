"""The whole loop through the command line, on a real engine, with the tiny recipes."""
