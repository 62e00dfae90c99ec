"""One module a subcommand; each returns what `__main__` prints."""
