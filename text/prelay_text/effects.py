"""What each parameter that is implemented does, in a sentence or two: for docs/openai-compatibility.md, whose tables
`scripts/compatibility.py` writes, and for the OpenAPI page.
"""

from __future__ import annotations

from collections.abc import Mapping

from .parameters import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_METADATA,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MIN_BIAS,
    SERVICE_TIERS,
    Parameter,
    Route,
)
from .request import COMPLETION_TOKENS

_TIERS = ", ".join(f"{tier} is {priority}" for tier, priority in SERVICE_TIERS.items() if priority is not None)
_ENTRIES, _KEY_CHARS, _VALUE_CHARS = MAX_METADATA

_EFFECTS: Mapping[str, str] = {
    "model": "The name under which the server serves its model; another one is a 404.",
    "prompt": "Text, the ids that it becomes, or a list of either: then choice i belongs to prompt i // n.",
    "messages": "Roles system, developer, user and assistant; contents are text, or lists of text parts, which are "
    "joined by line breaks.",
    "max_tokens": f"The answer's tokens at most. Absent or null: {COMPLETION_TOKENS}, or fewer if no more fit into the "
    "context and the workers' memory. 0, with echo only: the prompt alone.",
    "max_completion_tokens": "The newer name of max_tokens; both with different values are refused.",
    "n": "Answers to each prompt, each with a seed of its own. All prompts' answers together are limited, too.",
    "best_of": "As many answers are computed for each prompt, and the n with the highest mean log-probability "
    "given. Not with stream, unless it equals n.",
    "echo": "The prompt stands before the answer, with logprobs also those of its tokens, of which the first is null.",
    "temperature": "0 takes the likeliest token, 1 samples what the model says, more flattens it.",
    "top_p": "Only the likeliest tokens that together have this probability.",
    "top_k": "Only so many of the likeliest tokens; 0 and -1 are all.",
    "seed": "The same seed and request give the same answer. Absent: drawn anew.",
    "stop": f"The text ends before the first of these strings, of {MAX_STOP_CHARS} characters at most. The name of a "
    "special token matches that token.",
    "stop_token_ids": f"The answer ends at such a token, which is not part of the text. Up to {MAX_STOP_TOKEN_IDS}.",
    "ignore_eos": "The model's end tokens do not end the answer.",
    "min_tokens": "Before so many tokens neither an end token nor a stop string ends the answer.",
    "min_p": "Only tokens at least this times as likely as the likeliest.",
    "repetition_penalty": "Logits of tokens in prompt or answer are divided by it (multiplied where negative).",
    "presence_penalty": "Taken from the logits of tokens that the answer has.",
    "frequency_penalty": "The same, times how often the answer has them.",
    "logit_bias": f"From {MIN_BIAS} to {MAX_BIAS}, added to the logits of tokens, by id; up to {MAX_BIASES} tokens.",
    "bad_words": f"Words, of {MAX_STOP_CHARS} characters at most, whose tokens do not come, neither those that they "
    "have at the beginning of a text nor those after a space.",
    "logprobs": "With each token its log-probability and those of so many likeliest ones, as the model has them "
    "before temperature and penalties.",
    "top_logprobs": "How many of the likeliest tokens stand beside each; with logprobs only.",
    "prompt_logprobs": "The log-probabilities of the prompt's tokens and of so many likeliest ones, in vLLM's field "
    "prompt_logprobs. Not with stream.",
    "priority": "The class of the request: urgent ones pass and evict batch, which goes on later.",
    "deadline_ms": "The request ends with an error (504, code deadline_exceeded) unless it is complete after so many "
    "milliseconds. The header X-Deadline-Ms says the same.",
    "service_tier": f"OpenAI's name of the class: {_TIERS}; auto and default leave it normal.",
    "stream": "Server-sent events instead of one answer.",
    "stream_options": "include_usage: one more chunk at the end has the usage. continuous_usage_stats, with it: every "
    "chunk has the usage so far. include_obfuscation is refused, unless it is false.",
    "skip_special_tokens": "Whether special tokens are left out of the text.",
    "return_token_ids": "The ids beside the text, where vLLM has them: prompt_token_ids and token_ids.",
    "add_generation_prompt": "Whether the template begins the assistant's message. Absent: unless "
    "continue_final_message.",
    "continue_final_message": "The answer goes on from the last message.",
    "chat_template_kwargs": "Given to the model's chat template, such as enable_thinking.",
    "user": f"Up to {MAX_NAME_CHARS} characters; changes nothing.",
    "metadata": f"Up to {_ENTRIES} entries, keys of {_KEY_CHARS} and values of {_VALUE_CHARS} characters; changes "
    "nothing.",
}
_OF_CHATS: Mapping[str, str] = {
    "max_tokens": "The answer's tokens at most. Absent or null: as many as fit into the context and the workers' "
    "memory.",
    "logprobs": "With each token its log-probability, as the model has it before temperature and penalties.",
    "n": "Answers, each with a seed of its own.",
}


def effect_of(row: Parameter, route: Route) -> str:
    """What an implemented parameter does in requests of one route. Raise KeyError where nobody has written it down."""
    if route is Route.CHAT and row.name in _OF_CHATS:
        return _OF_CHATS[row.name]
    return _EFFECTS[row.name]
