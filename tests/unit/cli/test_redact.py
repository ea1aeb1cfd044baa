"""URLs in messages have no secrets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelay.redact import has_secret, redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://queue:6379/0", "redis://queue:6379/0"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
        ("redis://:hush@queue:6379/0", "redis://***@queue:6379/0"),
        ("rediss://user:hush@queue/1?ssl_cert_reqs=none", "rediss://***@queue/1?ssl_cert_reqs=none"),
        ("redis://:p@ss@queue/0", "redis://***@queue/0"),
        ("unix:///run/redis.sock?password=hush&db=1", "unix:///run/redis.sock?password=***&db=1"),
        ("unix://:hush@/run/redis.sock", "unix://***@/run/redis.sock"),
        ("redis://queue/0?password=hu@sh", "redis://queue/0?password=***"),
    ],
)
def test_user_and_password_are_hidden_and_the_rest_is_kept(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert has_secret(url) == (url != shown)


@given(st.text(st.characters(codec="ascii", exclude_characters="\n\r\t"), min_size=1))
def test_no_password_gets_through_whatever_it_holds(password: str) -> None:
    secret = f"~{password}~"
    assert secret not in redact(f"redis://:{secret}@queue:6379/0")
    assert secret not in redact(f"redis://queue:6379/0?password={secret.replace('&', '').replace('#', '')}")
