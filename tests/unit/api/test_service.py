"""What open requests are told when a process stops."""

from __future__ import annotations

from typing import Any, cast

import pytest

from prelay_api.outcome import CLOSING
from prelay_api.service import Service
from prelay_api.session import Session


class _Session:
    def __init__(self, linger_s: float) -> None:
        self.linger_s = linger_s
        self.told: list[Any] = []

    def hand_on(self) -> None:
        self.told.append("elsewhere")

    def abort(self, why: object) -> None:
        self.told.append(why)


@pytest.mark.parametrize(("linger_s", "told"), [(30.0, "elsewhere"), (0.0, CLOSING)])
def test_a_client_that_comes_back_is_sent_elsewhere_and_any_other_hears_an_error(linger_s: float, told: object) -> None:
    session = _Session(linger_s)
    Service.tell_one(cast(Service, None), cast(Session, session))
    assert session.told == [told]
