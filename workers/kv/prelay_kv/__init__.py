"""Segments and transports: KV blocks in memory that other processes of the host can map. No Redis, no HTTP.

`layout`, `segment` and `ref` describe, `sweep` tidies up: they import no torch. `shm` makes a pool, `importer` reads a
peer's; `cuda` does both on a GPU.
"""
