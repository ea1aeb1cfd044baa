"""The tokenizer of one model folder: text to ids, and what each id stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson
import tokenizers
from tokenizers import AddedToken

from .decoding import Piece, parse_decoder
from .errors import ModelFilesError, RequestError
from .folder import ModelFolder
from .segments import Segments, marks_of
from .template import ChatTemplate

#: A model_max_length above this many tokens is the "unknown" of some configurations.
_MAX_CONTEXT = 100_000_000


class Tokenizer:
    """Text to ids and back, over the `tokenizers` library.

    Nothing that shows is changed after construction, so several threads and tasks may share one: what is cached
    is what would be computed again.

    `vocab_size` counts the rows of the model's embedding: ids at or above it would crash a worker.
    `context_len` is in tokens. `special_ids` are skipped in output; `eos_ids` are among them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        context_len: int,
        vocab_size: int | None = None,
        eos_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        # A length limit or padding stored in the file would change ids silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.context_len = context_len
        self.vocab_size = vocab_size or backend.get_vocab_size()
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.template = template or ChatTemplate(None)
        _mark_special(backend, [token for i in self.eos_ids if (token := backend.id_to_token(i)) is not None])
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # The decoder's pickling state is its part of tokenizer.json; writing out the whole takes 0.3 s.
        self.decoding = parse_decoder(backend.decoder and orjson.loads(backend.decoder.__getstate__()))
        self._pieces: dict[int, Piece | None] = {}
        marks = marks_of(backend, self.template.written)
        self._segments = Segments(marks, self.encode) if marks else None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a Hugging Face model folder. Raise ModelFilesError, one line, when it cannot be used."""
        files = ModelFolder.read(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelFilesError(f"{folder}/tokenizer.json: cannot be read: {error}") from None
        _mark_special(backend, files.special_tokens())
        named = files.named_tokens()
        eos = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
        return cls(
            backend,
            context_len=_context_len(files),
            vocab_size=files.number("vocab_size"),
            eos_ids=[*files.eos_ids(), *([] if eos is None else [eos])],
            template=ChatTemplate(files.chat_template, named),
        )

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of the text; special tokens written out in it count as such.

        With `add_special_tokens` the post-processor of tokenizer.json adds what it adds (BOS for most
        Llamas, nothing for the demo model), exactly as transformers does: right for the prompt of
        a completion, wrong for a rendered chat, whose template already wrote its BOS.
        """
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeError, TypeError):
            raise RequestError("the text holds half of a surrogate pair, which is no character") from None

    def encode_chat(self, text: str) -> list[int]:
        """What `encode` gives, for a text from the chat template: of a long chat only what is new costs time."""
        return self.encode(text) if self._segments is None else self._segments.ids(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the whole. For a growing text use Detokenizer, which ends at the same text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling ("Ġthe", "▁the"), None for an id it does not know."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds in the middle of a text; none for an unknown id."""
        piece = self.piece(token_id)
        if isinstance(piece, str):
            return self.decoding.settle(piece, False).encode()
        return bytes([piece]) if isinstance(piece, int) else piece or b""

    def piece(self, token_id: int, first: bool = False) -> Piece | None:
        """What the token gives to the decoder; None for an id that the vocabulary does not know."""
        if first:
            token = self._backend.id_to_token(token_id)
            return None if token is None else self.decoding.piece(token, True)
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._backend.id_to_token(token_id)
            piece = None if token is None else self.decoding.piece(token, False)
            self._pieces[token_id] = piece
            return piece

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, context_len={self.context_len}, eos_ids={self.eos_ids})"


def _mark_special(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Make tokens special that only the configuration names so, as transformers does at load.

    Tokens that the vocabulary lacks are left out: they would get ids beyond the model's embedding.
    """
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for content in contents:
        old = added.get(content)
        if backend.token_to_id(content) is None or (old is not None and old.special):
            continue
        flags = {} if old is None else {"lstrip": old.lstrip, "rstrip": old.rstrip, "single_word": old.single_word}
        backend.add_special_tokens([AddedToken(content, normalized=False, special=True, **flags)])


def _context_len(files: ModelFolder) -> int:
    found = files.number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    if found is None:
        found = files.tokenizer.get("model_max_length")
    if not isinstance(found, int) or not 0 < found < _MAX_CONTEXT:
        raise ModelFilesError(f"{files.path}/config.json: max_position_embeddings is missing")
    return found
