"""Servers for fault tests: real processes are killed here, and every token is checked."""

from tests.bed.servers import any_server, own_server, shared_server

__all__ = ["any_server", "own_server", "shared_server"]
