"""What a script takes along of the libraries."""

from __future__ import annotations

import re

import pytest

from prelay_queue.lua_library import needed
from prelay_queue.scripts import NAMES, source

LIBRARY = """-- About all.
local P = KEYS[1]
local LEAST, MOST = 1, 2

-- Uses of `second` in a comment do not count.
local function first(id) return P .. id end
local function second(id)
  if id then
    return first(id) + MOST
  end
end
local third = {}
"""


def names(text: str) -> list[str]:
    return re.findall(r"^local (?:function )?(\w+)", text, re.MULTILINE)


def test_what_a_script_uses_comes_along_with_what_that_uses_in_the_order_of_the_library() -> None:
    assert names(needed(LIBRARY, "return second(1)")) == ["P", "LEAST", "first", "second"]
    assert names(needed(LIBRARY, "-- second\nreturn first(1)")) == ["P", "first"]
    assert needed(LIBRARY, "return 1") == ""


def test_definitions_are_whole() -> None:
    assert needed(LIBRARY, "third[1] = LEAST") == "local LEAST, MOST = 1, 2\nlocal third = {}"
    assert needed(LIBRARY, "second()").endswith("return first(id) + MOST\n  end\nend")


@pytest.mark.parametrize("name", NAMES)
def test_no_script_makes_a_function_that_it_does_not_use(name: str) -> None:
    text = re.sub(r"--.*", "", source(name))
    unused = [each for each in re.findall(r"^local function (\w+)", text, re.MULTILINE) if text.count(each) < 2]
    assert unused == []
