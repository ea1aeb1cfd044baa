"""The `prelay` command, and the supervisor behind `prelay serve`."""

#: The same as in pyproject.toml (a test compares them).
__version__ = "0.1.0"
