"""The queue in memory: the contract of the scripts in plain Python, for tests without a server and to compare with.

data.py     what is remembered
rules.py    what all scripts share
scripts.py  each script
queue.py    MemoryQueue and AsyncMemoryQueue, in the place of SyncQueue and AsyncQueue
"""

from .queue import AsyncMemoryQueue, MemoryQueue, server_ms

__all__ = ["AsyncMemoryQueue", "MemoryQueue", "server_ms"]
