"""What a user of litellm would do, in a process of its own: `python -m tests.conformance.litellm_calls URL`.

Prints JSON: what each call gave, by its name. litellm takes seconds to import and changes what it finds on the way (log
handlers, warnings), so the tests do not import it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # the other one is fetched from the network

import litellm

from tests.bed.tokenizer import chat, words

PROMPT, TOKENS = [11, 12], 30


class Calls:
    """Each public method is one thing that is done; what it returns is reported under its name."""

    def __init__(self, url: str) -> None:
        server = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": TOKENS, "num_retries": 0}
        self._chat: dict[str, Any] = {"model": "openai/null", "messages": chat(PROMPT), **server}
        self._text: dict[str, Any] = {"model": "text-completion-openai/null", "prompt": words(PROMPT), **server}

    def completion(self) -> Any:
        return litellm.completion(**self._chat, n=2).model_dump()

    def streamed_completion(self) -> Any:
        options = {"include_usage": True}
        return [chunk.model_dump() for chunk in litellm.completion(**self._chat, stream=True, stream_options=options)]

    def gathered_stream(self) -> Any:
        chunks = list(litellm.completion(**self._chat, stream=True))
        return litellm.stream_chunk_builder(chunks, messages=self._chat["messages"]).choices[0].message.content

    def acompletions(self) -> Any:
        async def ask(n: int) -> Any:
            answer = await litellm.acompletion(**{**self._chat, "messages": chat([n])})
            stream = await litellm.acompletion(**{**self._chat, "messages": chat([n])}, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return answer.choices[0].message.content, "".join(pieces)

        async def ask_all() -> Any:
            return await asyncio.gather(*map(ask, range(8)))

        return asyncio.run(ask_all())

    def text_completion(self) -> Any:
        return litellm.text_completion(**self._text).model_dump()

    def parameters(self) -> Any:
        """OpenAI's by name, others beside them."""
        more = {"temperature": 0.5, "seed": 3, "logprobs": True, "top_logprobs": 1, "stop": [" t0"], "user": "x"}
        extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
        return litellm.completion(**self._chat, **more, **extra).model_dump()

    def errors(self) -> Any:
        def error_of(**changes: Any) -> Any:
            try:
                litellm.completion(**{**self._chat, **changes})
            except Exception as error:
                return type(error).__name__, getattr(error, "status_code", None), str(error)
            return None

        return {
            "value": error_of(temperature=3),
            "model": error_of(model="openai/other"),
            "context": error_of(max_tokens=10**6),
            "tools": error_of(tools=[{"type": "function", "function": {"name": "f"}}]),
            "streamed": error_of(temperature=3, stream=True),
        }


def main() -> None:
    litellm.suppress_debug_info = True
    calls = Calls(sys.argv[1])
    work: dict[str, Callable[[], Any]] = {
        name: getattr(calls, name) for name in vars(Calls) if not name.startswith("_")
    }
    json.dump({name: do() for name, do in work.items()}, sys.stdout)


if __name__ == "__main__":
    main()
