"""What an API process is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from prelay_queue.settings import QueueSettings


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """One API process. `keep` is what a preempt keeps: the tokens delivered to the client, or all emitted ones."""

    queue: QueueSettings
    model: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keep: str = "delivered"
    shutdown_grace_s: int = 10
    #: Other API processes of this user may listen on the same port.
    share_port: bool = False
    #: How long open requests go on after a signal to stop before they are told, seconds.
    drain_s: float = 0.0
    max_body_bytes: int = 8 * 1024 * 1024
    #: Silence on a stream after which a comment is sent, seconds: proxies give up after as little as 5.
    keep_alive_s: float = 4.0
    #: A client that takes nothing for so long is cut off, seconds.
    stall_s: float = 60.0
    #: How long a job is kept for a client that vanished and said that it will come back, seconds.
    linger_s: float = 30.0
    #: Time in which a request has to arrive, from its first byte to the last of its body, seconds.
    body_timeout_s: float = 60.0
    #: Who may ask; empty: everybody.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    #: Where uploaded files and batches are kept, the same folder for all processes of the fleet; None: batches are off.
    files_dir: Path | None = None
    #: A plain Redis for the jobs that run batches; empty: the queue's.
    jobs_url: str = ""
    #: How large an uploaded file may be, in bytes and in lines, and how long its longest line.
    max_file_bytes: int = 2 * 1024**3
    max_file_lines: int = 1_000_000
    max_line_bytes: int = 1024**2
