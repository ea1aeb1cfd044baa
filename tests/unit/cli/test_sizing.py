"""How many blocks and threads a worker gets when nobody says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prelay.errors import BadUsage, ModelUnavailable, TooSmall
from prelay.geometry import Geometry, check_folder, read_geometry
from prelay.host import Host, this_host
from prelay.settings import load
from prelay.sizing import NULL_BLOCKS, Sizes, sizes

GIB = 1 << 30
#: 2 layers × 2 heads × 16 numbers: 256 bytes a token in float32, 4 KiB a block of 16.
SMALL = Geometry(layers=2, kv_heads=1, head_dim=16, context_len=1024)
CONTEXT_BLOCKS = 1024 // 16


def host(memory: int = 16 * GIB, shm: int = 8 * GIB, cores: int = 8, has_bf16: bool = False) -> Host:
    return Host(memory, memory, shm, cores, has_bf16)


def sized(settings: dict[str, str], where: Host, geometry: Geometry | None = SMALL) -> Sizes:
    return sizes(load(settings, None), geometry, where)


def test_with_much_memory_the_pools_hold_what_can_be_used() -> None:
    found = sized({}, host())
    assert found.kv_blocks == load({}, None).running * CONTEXT_BLOCKS
    assert found.prefill_kv_blocks == 2 * CONTEXT_BLOCKS


def test_a_decode_pool_takes_a_quarter_of_the_memory_shared_among_its_workers() -> None:
    block = SMALL.token_bytes(4) * 16
    assert sized({}, host(memory=4000 * block)).kv_blocks == 1000
    assert sized({"decode": "2"}, host(memory=4000 * block)).kv_blocks == 500
    assert sized({"dtype": "bfloat16"}, host(memory=4000 * block)).kv_blocks == 2000
    assert sized({}, host(memory=4000 * block, has_bf16=True)).kv_blocks == 2000


def test_a_pool_holds_at_least_one_full_context() -> None:
    block = SMALL.token_bytes(4) * 16
    found = sized({}, host(memory=160 * block, shm=90 * block))
    assert (found.kv_blocks, found.prefill_kv_blocks) == (CONTEXT_BLOCKS, CONTEXT_BLOCKS)


def test_memory_for_less_than_one_context_is_refused_with_the_size_needed_and_what_fits() -> None:
    block = SMALL.token_bytes(4) * 16
    with pytest.raises(TooSmall, match=r"2 full context.s. of 1024 tokens need 512 KiB of memory.*--max-model-len 640"):
        sized({}, host(memory=100 * block))
    found = sized({"max_model_len": "640"}, host(memory=100 * block))
    assert (found.kv_blocks, found.prefill_kv_blocks) == (40, 40)


def test_a_small_shm_is_refused_with_the_size_needed() -> None:
    with pytest.raises(TooSmall, match=r"need 256 KiB of /dev/shm.*115 KiB .*--shm-size.*--max-model-len 448"):
        sized({}, host(shm=128 * 1024))
    with pytest.raises(TooSmall, match=r"--prefill-kv-blocks 1000 needs 4 MiB of /dev/shm"):
        sized({"prefill_kv_blocks": "1000"}, host(shm=1 << 20))


def test_sequences_longer_than_the_models_context_are_refused_before_any_worker_is_started() -> None:
    assert sized({"max_model_len": "1024"}, host()).prefill_kv_blocks == 2 * CONTEXT_BLOCKS
    with pytest.raises(BadUsage, match=r"^--max-model-len must be at most the model's 1024, not 1025$"):
        sized({"max_model_len": "1025"}, host())


def test_what_was_asked_for_is_taken_as_it_is() -> None:
    found = sized({"kv_blocks": "5", "prefill_kv_blocks": "6", "threads": "7"}, host())
    assert found == Sizes(5, 6, 7)


def test_a_role_that_does_not_run_gets_no_pool_and_asks_for_no_memory() -> None:
    found = sized({"unified": "1"}, host(shm=0))
    assert found.prefill_kv_blocks == 0
    assert found.kv_blocks > 0


def test_workers_share_the_cores_and_have_one_at_least() -> None:
    torch = {"kernels": "torch"}
    assert sized(torch, host(cores=8)).threads == 4
    assert sized(torch | {"unified": "3"}, host(cores=8)).threads == 2
    assert sized(torch | {"decode": "9"}, host(cores=2)).threads == 1
    assert sized({}, replace(host(cores=8), has_kernels=False)).threads == 4


def test_workers_with_native_kernels_have_all_cores_each() -> None:
    assert sized({}, host(cores=8)).threads == 8
    assert sized({"kernels": "native"}, replace(host(cores=2), has_kernels=False)).threads == 2


def test_the_null_model_costs_nothing() -> None:
    assert sized({}, host(memory=1, shm=0), geometry=None) == Sizes(NULL_BLOCKS, NULL_BLOCKS, 4)


def test_this_machine_has_memory_and_cores() -> None:
    here = this_host()
    assert 0 < here.memory_free <= here.memory
    assert here.cores >= 1


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_the_geometry_is_read_from_the_configuration_also_a_nested_one(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 128,
    }
    assert read_geometry(write(tmp_path, config)) == Geometry(3, 2, 8, 128)
    assert read_geometry(write(tmp_path, {"text_config": config})) == Geometry(3, 2, 8, 128)
    assert read_geometry(write(tmp_path, config | {"head_dim": 16})).head_dim == 16
    assert Geometry(3, 2, 8, 128).token_bytes(2) == 192


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"num_attention_heads": 0}', '{"num_attention_heads": "x"}'])
def test_a_broken_configuration_is_one_line(tmp_path: Path, config: str) -> None:
    with pytest.raises(ModelUnavailable) as refused:
        read_geometry(write(tmp_path, config))
    assert "config.json" in str(refused.value)
    assert "\n" not in str(refused.value)


SHAPE = {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64, "max_position_embeddings": 128}


def test_a_key_that_is_missing_from_the_configuration_is_named(tmp_path: Path) -> None:
    for name in SHAPE:
        folder = write(tmp_path, {key: value for key, value in SHAPE.items() if key != name})
        with pytest.raises(ModelUnavailable, match=rf"config\.json has no {name}: a positive whole number is needed$"):
            read_geometry(folder)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("hidden_size", None, "null"),
        ("num_hidden_layers", True, "true"),
        ("head_dim", "x", '"x"'),
        ("num_key_value_heads", -1, "-1"),
    ],
)
def test_a_bad_number_is_shown_as_the_file_has_it(tmp_path: Path, name: str, value: object, shown: str) -> None:
    with pytest.raises(ModelUnavailable, match=f"{name} must be a positive whole number, not {shown}$"):
        read_geometry(write(tmp_path, SHAPE | {name: value}))


def test_a_key_that_says_as_usual_with_null_is_as_usual(tmp_path: Path) -> None:
    folder = write(tmp_path, SHAPE | {"num_key_value_heads": None, "head_dim": None})
    assert read_geometry(folder) == Geometry(3, 8, 8, 128)


def test_a_folder_without_its_files_is_refused_by_the_missing_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"has no config\.json"):
        check_folder(tmp_path, with_weights=False)
    write(tmp_path, {})
    with pytest.raises(ModelUnavailable, match=r"has no tokenizer\.json"):
        check_folder(tmp_path, with_weights=False)
    (tmp_path / "tokenizer.json").touch()
    check_folder(tmp_path, with_weights=False)
    with pytest.raises(ModelUnavailable, match=r"no \*\.safetensors"):
        check_folder(tmp_path, with_weights=True)
