"""Parameters of vLLM's OpenAI-compatible server that this one lacks: known, so that a client hears why.

Each row is the name, the reason in words that follow the name, and the values that ask for nothing else than what
happens here anyway; those are tolerated, for clients send their defaults along.
"""

from __future__ import annotations

from typing import Any

Row = tuple[Any, ...]

_NO_BEAMS = "is not implemented: tokens are sampled, there is no beam search"
_NO_CUTS = "is not implemented: a prompt that is too long is refused and never cut"
_NO_MEDIA = "is not implemented: the models served here read text"
_OWN_HANDOVER = "is not implemented: workers hand KV over among themselves"

OF_BOTH: tuple[Row, ...] = (
    ("use_beam_search", _NO_BEAMS, False),
    ("length_penalty", _NO_BEAMS, 1.0),
    ("watermarking", "is not implemented: answers carry no mark", False),
    ("include_stop_str_in_output", "is not implemented: the text ends before the stop string", False),
    (
        "spaces_between_special_tokens",
        "is not implemented: special tokens are joined as the tokenizer joins them",
        True,
    ),
    ("truncate_prompt_tokens", _NO_CUTS),
    ("truncation_side", _NO_CUTS),
    ("logprob_token_ids", "is not implemented: the likeliest tokens are reported"),
    ("allowed_token_ids", "is not implemented: use logit_bias"),
    ("structured_outputs", "is not implemented: answers are free text"),
    ("request_id", "is not implemented: the server names its requests, see the header X-Request-Id"),
    ("session_id", "is not implemented: requests have nothing in common but the prefix cache"),
    ("return_tokens_as_token_ids", "is not implemented: tokens are reported as text", False),
    ("routed_experts_prompt_start", "is not implemented: the choice of experts is not reported", 0),
    ("return_token_offsets", "is not implemented: the places of the prompt's tokens are not reported", False),
    ("return_mm_kwargs", _NO_MEDIA, True),
    ("cache_salt", "is not implemented: all requests share one prefix cache"),
    ("kv_transfer_params", _OWN_HANDOVER),
    ("ec_transfer_params", _OWN_HANDOVER),
    ("vllm_xargs", "is not implemented: there are no extensions that would read it"),
    ("repetition_detection", "is not implemented: use repetition_penalty or stop"),
    ("thinking_token_budget", "is not implemented: thinking is not controlled", -1),
    ("stream_interval", "is not implemented: tokens are sent as they come", 1),
)
OF_COMPLETIONS: tuple[Row, ...] = (
    ("prompt_embeds", "is not implemented: a prompt is text or token ids"),
    ("add_special_tokens", "is not implemented: a text gets those of its tokenizer; send token ids for others", True),
)
OF_CHATS: tuple[Row, ...] = (
    ("add_special_tokens", "is not implemented: a chat gets those of its template", False),
    ("include_reasoning", "is not implemented: reasoning is not told apart from the answer", True),
    ("echo", "is not implemented: the conversation is not repeated", False),
    ("documents", "is not implemented: put them into the messages", []),
    ("chat_template", "is not implemented: the model's own template is used"),
    ("media_io_kwargs", _NO_MEDIA, {}),
    ("mm_processor_kwargs", _NO_MEDIA, {}),
    ("return_prompt_text", "is not implemented: the rendered prompt is not repeated", False),
)
