"""The queue between the hub's reader and one relay."""

from __future__ import annotations

from prelay_api.relay import Relay
from prelay_api.subscription import MAX_WAITING, Subscription
from prelay_queue.events import PreemptedEvent, TokensEvent


def subscription() -> Subscription:
    return Subscription("job/0", Relay(max_tokens=10))


async def test_events_come_in_order_and_once() -> None:
    heard = subscription()
    for seq in range(3):
        heard.put(TokensEvent("job/0", 1, seq, (seq,)))
    events, reread = await heard.wait()
    assert [event.seq for event in events if isinstance(event, TokensEvent)] == [0, 1, 2]
    assert not reread
    heard.want_log()
    assert await heard.wait() == ([], True)


async def test_too_many_events_are_replaced_by_a_look_at_the_log() -> None:
    heard = subscription()
    for seq in range(MAX_WAITING + 1):
        heard.put(TokensEvent("job/0", 1, seq, (seq,)))
    events, reread = await heard.wait()
    assert reread
    assert len(events) < MAX_WAITING


def test_a_relay_that_is_behind_or_waits_for_nothing_is_found_out() -> None:
    heard = subscription()
    heard.relay.on_event(TokensEvent("job/0", 1, 0, (7,)))
    assert heard.knows("decode", 1, 1)
    assert not heard.knows("decode", 1, 2)
    assert not heard.knows("decode", 2, 1)
    assert not heard.knows("preempted", 1, 1)
    assert not heard.knows("done", 1, 1)
    heard.relay.on_event(PreemptedEvent("job/0", 1, "pressure"))
    assert not heard.knows("preempted", 1, 1)  # its requeue went astray
