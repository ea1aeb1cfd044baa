"""The ids of a rendered chat, segment by segment, so that what was said before need not be tokenised again.

The tokenizer cuts a text at its added tokens before it does anything else, and what it makes of a piece depends on the
piece alone, and on whether it is the very beginning. So a chat is cut in front of the template's own special tokens
(`<|im_start|>`, …), and each segment begins with one: its ids are the same here, alone and in the whole text. Where a
tokenizer has a part of which that is not known, there are no segments, and a text is encoded as one.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken

#: Memory for segments and their ids, bytes: about a million tokens.
CAPACITY = 16 * 1024 * 1024
#: What an entry takes beside its text and ids, bytes.
_OVERHEAD = 200

#: Parts of tokenizer.json that treat each piece by itself. (Metaspace with the scheme "first" asks whether a piece is
#: the beginning of the text, which only the first segment is: the others begin with a special token, here as there.)
_NORMALIZERS = frozenset(
    ("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend",
     "Replace", "Sequence", "Strip", "StripAccents")
)  # fmt: skip
_PRE_TOKENIZERS = frozenset(
    ("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace", "Punctuation",
     "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit")
)  # fmt: skip
#: And those that, told to add no special tokens, change no ids.
_POST_PROCESSORS = frozenset(("BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"))
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))


class Segments:
    """Encodes texts cut in front of `marks`, and remembers the segments seen last. Threads may share one."""

    def __init__(self, marks: tuple[str, ...], encode: Callable[[str], list[int]], capacity: int = CAPACITY) -> None:
        self._marks = re.compile("|".join(map(re.escape, marks)))
        self._encode = encode
        self._capacity = capacity
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()
        self.size = 0  # bytes of what is remembered, about

    def __repr__(self) -> str:
        return f"Segments({len(self._known)} of {self.size} bytes)"

    def ids(self, text: str) -> list[int]:
        """What `encode` gives for the whole text. Raise what it raises."""
        found: list[int] = []
        # One after the other: several at once go to the library's threads, which wait for the cores that workers use.
        for segment in self._cut(text):
            found.extend(self._ids_of(segment))
        return found

    def _cut(self, text: str) -> Iterator[str]:
        begin = 0
        for mark in self._marks.finditer(text):
            if mark.start() > begin:
                yield text[begin : mark.start()]
            begin = mark.start()
        yield text[begin:]

    def _ids_of(self, segment: str) -> array[int]:
        with self._lock:
            known = self._known.get(segment)
            if known is not None:
                self._known.move_to_end(segment)
                return known
        ids = array("I", self._encode(segment))
        self._remember(segment, ids)
        return ids

    def _remember(self, segment: str, ids: array[int]) -> None:
        if (cost := _cost(segment, ids)) > self._capacity // 8:  # one long text does not push out everything
            return
        with self._lock:
            if segment in self._known:  # by another thread
                return
            self._known[segment] = ids
            self.size += cost
            while self.size > self._capacity:
                self.size -= _cost(*self._known.popitem(last=False))


def _cost(segment: str, ids: array[int]) -> int:
    """Bytes, about."""
    return sys.getsizeof(segment) + sys.getsizeof(ids) + _OVERHEAD


def marks_of(backend: tokenizers.Tokenizer, written: str) -> tuple[str, ...]:
    """The tokens in front of which a text may be cut, of those in `written`; none where it may not be cut at all."""
    added = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized]
    # Such tokens look at what stands before them, which may be another segment.
    if any(token.lstrip or token.single_word for token in added) or not _is_piecewise(backend):
        return ()
    return tuple(sorted(token.content for token in added if token.content in written and _is_mark(token, added)))


def _is_mark(token: AddedToken, added: list[AddedToken]) -> bool:
    """Whether each occurrence of the token is the beginning of a match.

    Matches are found from left to right, the longest first: only one that began before could cover it. And
    a token before it may take in blanks that follow it, so it must not begin with one.
    """
    content = token.content
    if not token.special or not content or content[0].isspace():
        return False
    rests = (other.content[at:] for other in added for at in range(1, len(other.content)))
    return not any(rest.startswith(content) or content.startswith(rest) for rest in rests)


def _is_piecewise(backend: tokenizers.Tokenizer) -> bool:
    """Whether all parts of the tokenizer are known to treat each piece by itself."""
    if type(backend.model).__name__ not in _MODELS or getattr(backend.model, "dropout", None):
        return False
    if backend.encode_special_tokens:  # then special tokens are text like any other
        return False
    return (
        _types(backend.normalizer) <= _NORMALIZERS
        and _types(backend.pre_tokenizer) <= _PRE_TOKENIZERS
        and _types(backend.post_processor) <= _POST_PROCESSORS
        and _keeps_sequence(_described(backend.post_processor))
    )


def _described(part: Any) -> Mapping[str, Any]:
    """A part as tokenizer.json has it, which is its pickling state. One written in Python has none."""
    if part is None:
        return {}
    try:
        found = orjson.loads(part.__getstate__())
    except Exception:  # the library raises bare Exception
        return {"type": "unknown"}
    return found if isinstance(found, dict) else {"type": "unknown"}


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A part and, of a sequence, its steps."""
    yield part
    for name in ("normalizers", "pretokenizers", "processors"):
        for step in part.get(name) or ():
            yield from _steps(step)


def _types(part: Any) -> set[str]:
    return {str(step["type"]) for step in _steps(_described(part)) if step}


def _keeps_sequence(processor: Mapping[str, Any]) -> bool:
    """Whether a template, without its special tokens, is the text once."""
    singles = [step.get("single") or () for step in _steps(processor) if step.get("type") == "TemplateProcessing"]
    return all(sum("Sequence" in part for part in single) == 1 for single in singles)
