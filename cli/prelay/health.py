"""Is a process ready? For health checks of containers: `python -m prelay.health http://127.0.0.1:8000/health/ready`.

Imports next to nothing, since it is run every few seconds beside what it asks. Exit code 0: yes, 1: no.
"""

from __future__ import annotations

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

#: A process that has not answered by then is not ready, seconds.
PATIENCE_S = 4.0


def ask(url: str) -> tuple[bool, str]:
    """Return whether the answer is a 200, and what was said."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return False, f"the URL must be http://HOST:PORT/PATH, not {url!r}"
    connection = HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", parts.path or "/")
        reply = connection.getresponse()
        return reply.status == 200, reply.read(2000).decode("utf-8", "replace")
    except (OSError, HTTPException, ValueError) as error:
        return False, f"{url}: {error or type(error).__name__}"
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m prelay.health URL", file=sys.stderr)
        return 2
    ready, said = ask(arguments[0])
    print(said)
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
