from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from prelay_text.errors import RequestError
from prelay_text.template import ChatTemplate
from prelay_text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]


def test_messages_become_the_prompt_that_the_model_was_trained_on() -> None:
    template = ChatTemplate(CHATML, {"eos_token": "</s>"})
    assert template.render(HELLO) == "<|user|>hi</s><|assistant|>"
    assert template.render(HELLO, add_generation_prompt=False) == "<|user|>hi</s>"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<&>"}]'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "é<&>"),
        ("{% if tools %}t{% endif %}{{ documents is none }}", "True"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ bos_token }}.", "."),
    ],
    ids=["blocks trimmed", "break", "tojson", "tojson indent", "generation", "no tools", "namespace", "no bos"],
)
def test_templates_find_what_they_expect_of_transformers(source: str, text: str) -> None:
    assert ChatTemplate(source).render([{"role": "user", "content": "é<&>"}]) == text


def test_the_date_is_todays() -> None:
    before = datetime.now().astimezone().year
    assert int(ChatTemplate("{{ strftime_now('%Y') }}").render(HELLO)) >= before


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
    ids=["raised", "index", "type", "zero", "undefined", "sandbox", "immutable", "recursion"],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses") as caught:
        ChatTemplate(source).render(HELLO)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_the_words_of_a_template_reach_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(HELLO)


def test_a_model_without_template_serves_completions_only() -> None:
    template = ChatTemplate(None)
    with pytest.raises(RequestError, match="no chat template; use /v1/completions") as caught:
        template.render(HELLO)
    assert caught.value.status == 400


def test_a_template_that_does_not_compile_is_reported_and_completions_go_on() -> None:
    with pytest.raises(RequestError, match="does not compile"):
        ChatTemplate("{% for %}").render(HELLO)


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}").render(message) == "system"
    assert ChatTemplate("{{ messages[0].role }}{# developer #}").render(message) == "developer"


@pytest.mark.parametrize(
    "entry",
    ["from config", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from config"}]],
)
def test_the_template_file_goes_before_the_configurations_entry(
    model_folder: Callable[..., Path], entry: object
) -> None:
    folder = model_folder(tokenizer_config={"chat_template": entry})
    assert Tokenizer.load(folder).template.render(HELLO) == "from config"
    (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
    assert Tokenizer.load(folder).template.render(HELLO) == "from file"


@pytest.mark.model
def test_the_demo_models_template_is_chatml_with_its_system_message(demo_model: Path) -> None:
    text = Tokenizer.load(demo_model).template.render(HELLO)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi, I  "}]


def test_the_prompt_may_end_with_the_last_message_to_the_letter() -> None:
    """Blanks at its end stay, though the template cuts them; what earlier messages say does not matter."""
    open_prompt = ChatTemplate(TRIMMING).render_open(TURNS)
    assert open_prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhi, I  "
    assert ChatTemplate(TRIMMING).render_open([TURNS[0], {"role": "assistant", "content": ""}]).endswith("assistant\n")


def test_a_template_that_does_not_show_the_last_message_cannot_go_on_with_it() -> None:
    with pytest.raises(RequestError, match="continue_final_message: the model's chat template does not show") as caught:
        ChatTemplate("{{ messages[0].content }}").render_open(TURNS)
    assert caught.value.param == "continue_final_message"


def test_what_a_template_says_of_messages_is_cut() -> None:
    template = ChatTemplate("{{ raise_exception('no: ' + messages[0].content) }}")
    with pytest.raises(RequestError, match="refuses them: no: xxx") as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("name", ["self", "args", "kwargs", "context", "vars"])
def test_an_argument_may_have_any_name_that_a_template_can_read(name: str) -> None:
    assert ChatTemplate("{{ messages|length }}").render(TURNS, arguments={name: 7}) == str(len(TURNS))


def test_arguments_reach_the_template_and_no_message_is_begun_unless_asked_for() -> None:
    template = ChatTemplate("{{ thinking }}{{ bos_token }}{{ add_generation_prompt }}", {"bos_token": "<s>"})
    assert template.render(TURNS, False, {"thinking": "on"}) == "on<s>False"
    assert template.render(TURNS, arguments={"bos_token": "mine"}) == "mineTrue"
