"""What OpenAI's API and its kin have and this server has not: the reason stands in the 404."""

from __future__ import annotations

_TEXT = "the models served here read and write text"
_STATELESS = "nothing is kept between requests; send the whole conversation to /v1/chat/completions"

#: The beginning of a path, to what is told in place of an answer.
UNSERVED = {
    "/v1/embeddings": "embeddings are not served: the models served here continue text",
    "/v1/responses": f"the Responses API is not served: {_STATELESS}",
    "/v1/conversations": f"conversations are not served: {_STATELESS}",
    "/v1/audio": f"audio is not served: {_TEXT}",
    "/v1/images": f"images are not served: {_TEXT}",
    "/v1/videos": f"videos are not served: {_TEXT}",
    "/v1/realtime": "realtime sessions are not served: ask /v1/chat/completions with stream true",
    "/v1/moderations": "moderations are not served: this server judges no content",
    "/v1/fine_tuning": "fine-tuning is not served: this server trains nothing",
    "/v1/fine-tunes": "fine-tuning is not served: this server trains nothing",
    "/v1/assistants": f"assistants are not served: {_STATELESS}",
    "/v1/threads": f"threads are not served: {_STATELESS}",
    "/v1/vector_stores": "vector stores are not served: this server stores and searches nothing",
    "/v1/containers": "containers are not served: this server calls no tools",
    "/v1/evals": "evaluations are not served: this server grades nothing",
    "/v1/uploads": "uploads in parts are not served: send the whole file to /v1/files",
    "/v1/organization": "organizations are not served: there are no accounts, only API keys",
    "/v1/engines": "engines are not served: OpenAI replaced them by /v1/models",
    "/v1/edits": "edits are not served: OpenAI replaced them by chats",
    "/v1/messages": "Anthropic's Messages API is not served: ask /v1/chat/completions",
    "/v1/complete": "Anthropic's Text Completions API is not served: ask /v1/completions",
    "/v1/rerank": "reranking is not served: the models served here continue text",
    "/v2/rerank": "reranking is not served: the models served here continue text",
    "/rerank": "reranking is not served: the models served here continue text",
    "/v1/score": "scoring is not served: ask /v1/completions for prompt_logprobs",
    "/score": "scoring is not served: ask /v1/completions for prompt_logprobs",
    "/pooling": "pooling is not served: the models served here continue text",
    "/classify": "classification is not served: the models served here continue text",
    "/invocations": "this path is not served: ask /v1/completions or /v1/chat/completions",
    "/api/generate": "Ollama's API is not served: ask /v1/completions",
    "/api/chat": "Ollama's API is not served: ask /v1/chat/completions",
    "/v1beta": "Google's API is not served: ask /v1/chat/completions",
}


def reason(path: str) -> str | None:
    """Why this path is not served, if it is one that others serve."""
    for begin, why in UNSERVED.items():
        if path == begin or path.startswith((f"{begin}/", f"{begin}:")):
            return why
    return None
