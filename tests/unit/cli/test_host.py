"""What the machine has, and what of it is taken."""

from __future__ import annotations

import socket

import pytest

from prelay.errors import PortTaken
from prelay.host import check_port, size
from prelay.readiness import base_url


def test_a_port_that_is_listened_on_is_refused_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortTaken, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            check_port("127.0.0.1", port)
        with pytest.raises(PortTaken, match="already in use"):
            check_port("0.0.0.0", port)
    check_port("127.0.0.1", port)


def test_a_host_that_is_none_of_ours_is_one_line() -> None:
    with pytest.raises(PortTaken, match="not an address of this machine"):
        check_port("no such host", 8000)
    with pytest.raises(PortTaken, match=r"cannot listen on 192\.0\.2\.1"):
        check_port("192.0.2.1", 8000)


def test_sizes_read_as_people_write_them() -> None:
    assert [size(n) for n in (0, 1023, 64 << 20, 5 << 30)] == ["0 B", "1023 B", "64 MiB", "5.0 GiB"]


def test_a_client_on_this_machine_reaches_every_kind_of_address() -> None:
    assert base_url("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert base_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert base_url("::", 1) == "http://[::1]:1"
    assert base_url("example.org", 1) == "http://example.org:1"
