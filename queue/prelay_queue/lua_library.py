"""What a Lua script needs of the libraries that all scripts share.

Redis runs the whole text of a script at each call: a function that is made for nothing costs as much as a command.
"""

from __future__ import annotations

import re

_COMMENT = re.compile(r"--.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: Where a definition of a library begins; it goes on to the next one.
_BEGIN = re.compile(r"^(?=local )", re.MULTILINE)


def needed(library: str, body: str) -> str:
    """The definitions of `library` that `body` uses, directly or not, in their order and without comments."""
    wanted, kept = _words(body), []
    for definition in reversed(_BEGIN.split(_COMMENT.sub("", library))):
        head = re.split(r"[=(]", definition, maxsplit=1)[0]
        if wanted & (_words(head) - {"local", "function"}):
            wanted |= _words(definition)
            kept.append(definition.rstrip())
    return "\n".join(reversed(kept))


def _words(text: str) -> set[str]:
    return set(_WORD.findall(_COMMENT.sub("", text)))
