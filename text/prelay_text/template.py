"""The chat template of a model: messages in, the prompt's text out.

Templates come with models and are code of a stranger: they run in jinja2's immutable sandbox, with
the names that templates written for transformers expect and no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import RequestError

#: What a template is given under these names is the server's choice.
RESERVED_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception"}
)

#: What a template says of its refusal, which may repeat the messages, is told up to here.
MAX_ERROR_CHARS = 500

#: Stands behind the message that an answer is to go on from, to find its end in the prompt: no text holds it,
#: and no template changes it.
_END_MARK = "\ue000end\ue001of\ue000message\ue001"


class _Generation(Extension):
    """Accepts `{% generation %}` blocks, which mark assistant text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    `source` None means the model has no template; then, and when the source does not compile, `render`
    raises RequestError and completions go on being served.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(special_tokens or {})
        #: Where the tokens are that a prompt may have of the template: its source, and the tokens that it is given.
        self.written = "" if source is None else "\n".join((source, *self._tokens.values()))
        self._knows_developer = source is not None and "developer" in source
        self._template: jinja2.Template | None = None
        self._missing = "this model has no chat template; use /v1/completions"
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateError as error:
                self._missing = f"this model's chat template does not compile: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Whatever the template raises is the request's fault: RequestError, 400.

        `arguments` are for the template (chat_template_kwargs); they come before the model's own special tokens.
        """
        if self._template is None:
            raise RequestError(self._missing, param="messages", code="no_chat_template")
        try:
            return self._template.render(
                {
                    **self._tokens,
                    **(arguments or {}),
                    "messages": [self._message(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "tools": None,
                    "documents": None,
                }
            )
        except Exception as error:  # a template may raise anything; a 500 would blame the server
            message = f"messages: the model's chat template refuses them: {str(error)[:MAX_ERROR_CHARS]}"
            raise RequestError(message, param="messages", code="chat_template_error") from None

    def render_open(self, messages: Sequence[Mapping[str, str]], arguments: Mapping[str, Any] | None = None) -> str:
        """The prompt's text up to the end of the last message's content, for an answer that goes on with it."""
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]
        text, found, _ = self.render(marked, False, arguments).rpartition(_END_MARK)
        if not found:
            message = "continue_final_message: the model's chat template does not show the last message as it is"
            raise RequestError(message, param="continue_final_message", code="chat_template_error")
        return text.replace(_END_MARK, "")

    def _message(self, message: Mapping[str, str]) -> dict[str, str]:
        # Templates older than the role "developer" know it as "system".
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes for HTML, which a model would read as part of the text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def text_of(content: str | Iterable[Mapping[str, Any]]) -> str:
    """The text of a message's content: the string, or its text parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join(str(part["text"]) for part in content)
