from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prelay_text.errors import ModelFilesError, RequestError
from prelay_text.fingerprint import fingerprint
from prelay_text.tokenizer import Tokenizer

Folder = Callable[..., Path]


def test_a_folder_tells_its_limits_and_ends(model_folder: Folder) -> None:
    tokenizer = Tokenizer.load(model_folder())
    assert tokenizer.context_len == 64
    assert tokenizer.vocab_size == 422
    assert tokenizer.eos_ids == (tokenizer.token_id("</s>"),)
    assert {tokenizer.token_id(token) for token in ("<s>", "</s>", "<|end|>")} <= tokenizer.special_ids


def test_numbers_of_a_nested_text_config_are_found(model_folder: Folder) -> None:
    config = {"text_config": {"vocab_size": 500, "max_position_embeddings": 77, "eos_token_id": [2, 3]}}
    tokenizer = Tokenizer.load(model_folder(config=config, generation_config=None))
    assert (tokenizer.vocab_size, tokenizer.context_len, tokenizer.eos_ids) == (500, 77, (2, 3))


def test_the_tokenizers_own_end_token_counts_beside_the_configured_ones(model_folder: Folder) -> None:
    folder = model_folder(generation_config={"eos_token_id": 3}, tokenizer_config={"eos_token": {"content": "</s>"}})
    assert Tokenizer.load(folder).eos_ids == (2, 3)


def test_a_text_prompt_gets_the_start_token_where_the_tokenizer_adds_one(model_folder: Folder) -> None:
    tokenizer = Tokenizer.load(model_folder(bos=True))
    plain = tokenizer.encode("the dog")
    assert tokenizer.encode("the dog", add_special_tokens=True) == [tokenizer.token_id("<s>"), *plain]


def test_special_tokens_written_out_in_a_text_count_as_such(byte_level: Tokenizer) -> None:
    assert byte_level.encode("<|end|>") == [byte_level.token_id("<|end|>")]


def test_a_token_that_only_the_configuration_calls_special_is_skipped(model_folder: Folder) -> None:
    folder = model_folder(tokenizer_config={"eos_token": "</s>", "extra_special_tokens": ["Ġq", "not in it"]})
    tokenizer = Tokenizer.load(folder)
    ids = [*tokenizer.encode("dog"), tokenizer.token_id("Ġq") or 0]
    assert tokenizer.decode(ids) == "dog"
    assert tokenizer.token_id("not in it") is None


def test_a_length_limit_in_the_file_does_not_cut_prompts(model_folder: Folder) -> None:
    folder = model_folder()
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer.load(folder).encode("the dog and the dog")) > 2


def test_half_a_surrogate_pair_is_the_requests_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level.encode("a\ud800")


def test_the_bytes_of_the_tokens_make_up_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the 日本語 dog")
    text = tokenizer.decode(ids)
    together = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert together.lstrip(" ") == text.lstrip(" ")
    assert tokenizer.token_bytes(tokenizer.vocab_size + 9) == b""
    assert tokenizer.token(tokenizer.vocab_size + 9) is None


async def test_many_tasks_and_threads_may_share_one_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"the dog {index} 日本語" for index in range(64)]
    answers = await asyncio.gather(*(asyncio.to_thread(byte_level.encode, text) for text in texts))
    assert [byte_level.decode(ids) for ids in answers] == texts


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json: cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("["), "config.json: cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json: is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "max_position_embeddings is missing"),
    ],
    ids=["no tokenizer", "bad tokenizer", "no config", "bad config", "config a list", "no context"],
)
def test_a_broken_folder_is_one_clear_line(
    model_folder: Folder, broken: Callable[[Path], object], message: str
) -> None:
    folder = model_folder()
    broken(folder)
    with pytest.raises(ModelFilesError, match=message) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no such model folder"):
        Tokenizer.load(tmp_path / "none")


def test_two_processes_compute_one_fingerprint(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "model.safetensors").write_bytes(b"12345")
    here = fingerprint(folder)
    code = "import sys, pathlib, prelay_text.fingerprint as f; print(f.fingerprint(pathlib.Path(sys.argv[1])))"
    there = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here
    assert len(here) == 16


@pytest.mark.parametrize(
    ("file", "content"),
    [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"123456"), ("b.gguf", b"")],
)
def test_a_change_of_the_model_changes_the_fingerprint(model_folder: Folder, file: str, content: bytes) -> None:
    folder = model_folder()
    (folder / "model.safetensors").write_bytes(b"12345")
    before = fingerprint(folder)
    (folder / "notes.txt").write_text("no part of the model")
    assert fingerprint(folder) == before
    (folder / file).write_bytes(content)
    assert fingerprint(folder) != before


def test_a_fingerprint_needs_the_folders_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        fingerprint(tmp_path)


def test_the_package_brings_no_torch_and_no_driver() -> None:
    code = (
        "import sys, prelay_text.assembler, prelay_text.validate, prelay_text.resolve, prelay_text.render;"
        "print([name for name in ('torch', 'transformers', 'redis', 'fastapi', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.model
def test_the_demo_models_folder_loads(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    assert (tokenizer.vocab_size, tokenizer.context_len, tokenizer.eos_ids) == (49152, 8192, (2,))
    text = "Grüße, 日本語 😀 12345"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True)) == text
