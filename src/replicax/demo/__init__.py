"""What `replicax demo` shows: a few acts, each a module with a function `play`."""
