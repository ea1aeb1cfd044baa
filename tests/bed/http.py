"""Plain HTTP for tests. httpx's own functions load the system's certificates for each call, which takes longer
than most of the requests here.
"""

from __future__ import annotations

from typing import Any

import httpx


def get(url: str, **options: Any) -> httpx.Response:
    return request("GET", url, **options)


def post(url: str, **options: Any) -> httpx.Response:
    return request("POST", url, **options)


def request(method: str, url: str, *, timeout: float = 30, **options: Any) -> httpx.Response:
    with httpx.Client(verify=False, timeout=timeout) as client:
        return client.request(method, url, **options)


def client_of(url: str) -> httpx.AsyncClient:
    """For many requests to one server, all at the same time: none waits for the connection of another."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, verify=False, timeout=90, limits=limits)
