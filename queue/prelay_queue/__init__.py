"""The protocol: jobs, events, the state table, keys, scripts and clients. No torch, no HTTP."""

#: Of Prelay as a whole; the same as in pyproject.toml (a test compares them).
__version__ = "0.1.0"
