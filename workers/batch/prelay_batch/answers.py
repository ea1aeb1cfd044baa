"""Lines of the output file, from the tokens of their jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prelay_text.batch_line import answer_line
from prelay_text.form import form_of
from prelay_text.render import Usage
from prelay_text.tokenizer import Tokenizer
from prelay_text.whole import Answer, renderer_of, whole_body

from .life import Line


class Answers:
    """Renders the lines of one batch as the server renders the answers to the same requests."""

    def __init__(self, batch_id: str, tokenizer: Tokenizer, model: str, system_fingerprint: str) -> None:
        self.batch_id = batch_id
        self._tokenizer = tokenizer
        self._model = model
        self._system_fingerprint = system_fingerprint

    def line(self, line: Line, answers: Sequence[Answer]) -> tuple[bytes, Usage]:
        """The output line, and what it says of its tokens. Raise BadMessageError when a note in the log is none."""
        request_id = line.request_id(self.batch_id)
        renderer = renderer_of(
            line.request,
            id=request_id,
            created=int(time.time()),
            model=self._model,
            system_fingerprint=self._system_fingerprint,
        )
        forms = [form_of(line.request, part, renderer, self._tokenizer) for part in line.parts]
        body, usage = whole_body(self._tokenizer, forms, answers)
        return answer_line(self.batch_id, line.number, line.custom_id, request_id, body), usage
