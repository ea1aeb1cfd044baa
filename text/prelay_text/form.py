"""How one answer is shown: what an API process must know to render it, whichever process took the request.

It is written beside the job at submit, and stays as long as the answer does; workers do not read it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

from prelay_queue.errors import BadMessageError

from .assembler import Assembler
from .detokenizer import continues_text
from .echo import Echo
from .render import Renderer
from .reports import Reporter
from .request import ChatRequest, CompletionRequest
from .resolve import JobPart
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One choice of one request.

    `n` of the `candidates` of each prompt are shown. `reported` and `prompt_logprobs` count the likeliest tokens told
    of each token, None: not even its own. `prompt_only`: the answer itself is not shown. `prompt_ids` are empty where
    nothing is told of them; `prompt_tokens` counts them in any case. The rest is what the text follows from, with the
    ids: `stop_token_ids` has all ids that end it.
    """

    renderer: Renderer
    index: int
    n: int
    candidates: int
    prompt_tokens: int
    continues: bool
    prompt_ids: tuple[int, ...] = ()
    reported: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    echo: Echo | None = None
    deadline_ms: int | None = None  # that the request was given, for what is told when it has passed

    @property
    def job(self) -> str:
        """The id of the job that makes this choice."""
        return f"{self.renderer.id}/{self.index}"

    def assembler(self, tokenizer: Tokenizer) -> Assembler:
        """What makes the text of this choice from its ids."""
        return Assembler(
            tokenizer,
            self.stop,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            continues=self.continues,
            skip_special_tokens=self.skip_special_tokens,
        )

    def reporter(self, tokenizer: Tokenizer) -> Reporter | None:
        """What reports on its tokens, if the client wants that."""
        if self.reported is None:
            return None
        return Reporter(
            tokenizer,
            continues=self.continues,
            skip_special_tokens=self.skip_special_tokens,
            start=len(self.echo.text) if self.echo else 0,
        )

    def encode(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def decode(cls, raw: str) -> Form:
        """Raise BadMessageError when `raw` is no form."""
        try:
            data: dict[str, Any] = orjson.loads(raw)
            for name in ("prompt_ids", "stop", "stop_token_ids"):
                data[name] = tuple(data[name])
            echo = data["echo"]
            if echo is not None:
                data["echo"] = Echo(tuple(echo["ids"]), echo["text"], tuple(echo["offsets"]))
            data["renderer"] = Renderer(**data["renderer"])
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise BadMessageError(raw.encode(), str(error)) from None


def form_of(request: CompletionRequest | ChatRequest, part: JobPart, renderer: Renderer, tokenizer: Tokenizer) -> Form:
    """The form of the choice that `part` is."""
    sampling = part.sampling
    # Where special tokens are shown, the one that ends the answer is not: it is an end, like a stop token.
    ends = () if sampling.skip_special_tokens or sampling.ignore_eos else tokenizer.eos_ids
    told = renderer.token_ids or request.prompt_logprobs is not None
    return Form(
        renderer=renderer,
        index=part.choice,
        n=request.n,
        candidates=request.candidates,
        prompt_tokens=len(part.prompt_ids),
        continues=continues_text(part.prompt_ids, tokenizer),
        prompt_ids=part.prompt_ids if told else (),
        reported=request.reported,
        prompt_logprobs=request.prompt_logprobs,
        prompt_only=request.prompt_only,
        stop=sampling.stop,
        stop_token_ids=(*sampling.stop_token_ids, *ends),
        min_tokens=sampling.min_tokens,
        skip_special_tokens=sampling.skip_special_tokens,
        echo=part.echo,
        deadline_ms=request.deadline_ms,
    )
