"""An outage, and a process that was paused, both begin the count again."""

from __future__ import annotations

from prelay_api.contact import Contact
from tests.bed.clock import Clock


def talk(contact: Contact, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        contact.ok()
        clock.now += 1


def test_contact_counts_from_the_first_answer() -> None:
    clock = Clock()
    contact = Contact(clock=clock)
    assert contact.held_ms == 0
    talk(contact, clock, 5)
    assert contact.held_ms == 5_000


def test_an_answer_that_did_not_come_begins_the_count_again() -> None:
    clock = Clock()
    contact = Contact(clock=clock)
    talk(contact, clock, 20)
    contact.lost()
    assert contact.held_ms == 0
    talk(contact, clock, 2)
    assert contact.held_ms == 2_000


def test_a_pause_of_the_process_begins_the_count_again() -> None:
    clock = Clock()
    contact = Contact(clock=clock)
    talk(contact, clock, 20)
    clock.now += 10
    assert contact.held_ms == 0
    talk(contact, clock, 3)
    assert contact.held_ms == 3_000


def test_the_clock_of_redis_goes_on_from_what_it_told() -> None:
    clock = Clock()
    contact = Contact(clock=clock)
    assert contact.server_ms is None
    contact.at_server(7_000)
    clock.now += 2.5
    assert contact.server_ms == 9_500
