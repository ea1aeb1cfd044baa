"""What loading a model takes at its peak, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from prelay_engine.memory import drop_file_pages

#: Prints the peak of resident memory, in KiB, before and after a load. The import of a class is no part of a model.
MEASURE = """
import resource, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from prelay_engine.config import EngineConfig
from prelay_engine.loading import load
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
model = load(EngineConfig(model=Path(sys.argv[1]), dtype=sys.argv[2]))
print(before, peak())
"""


def model_of(folder: Path, dtype: torch.dtype) -> int:
    """Write a model of about 200 MB in float32 in two shards; the bytes of its weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "llama", vocab_size=400, num_hidden_layers=6, max_position_embeddings=128, pad_token_id=0, **sizes
    )
    net = AutoModelForCausalLM.from_config(config).to(dtype)
    nbytes: int = sum(weight.nbytes for weight in net.parameters())
    net.save_pretrained(folder, max_shard_size=nbytes // 2 + (8 << 20))
    assert len(list(folder.glob("*.safetensors"))) == 2
    return nbytes


def growth(folder: Path, dtype: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), dtype], capture_output=True, text=True, check=True, timeout=300
    )
    before, after = done.stdout.split()
    return (int(after) - int(before)) * 1024


@pytest.mark.slow
def test_a_model_in_two_shards_is_loaded_within_1_3_times_its_weights(tmp_path: Path) -> None:
    nbytes = model_of(tmp_path, torch.float32)
    assert growth(tmp_path, "float32") < 1.3 * nbytes + (24 << 20)


@pytest.mark.slow
def test_weights_of_another_type_are_converted_within_those_and_the_file(tmp_path: Path) -> None:
    nbytes = model_of(tmp_path, torch.bfloat16)
    assert growth(tmp_path, "float32") < 1.3 * (2 * nbytes) + nbytes


def test_pages_of_a_weights_file_go_and_come_back_and_what_was_written_stays(tmp_path: Path) -> None:
    clean, written = tmp_path / "clean.safetensors", tmp_path / "written.safetensors"
    for path in (clean, written):
        path.write_bytes(b"\x01" * (4 << 20))
    first = torch.from_file(str(clean), shared=False, size=4 << 20, dtype=torch.uint8)
    second = torch.from_file(str(written), shared=False, size=4 << 20, dtype=torch.uint8)
    second[5] = 9
    assert int(first.sum()) == 4 << 20
    assert resident(clean) > 3 << 20
    drop_file_pages()
    assert resident(clean) == 0
    assert (int(first.sum()), int(second[5])) == (4 << 20, 9)


def resident(path: Path) -> int:
    """Bytes of a file that are mapped and present in this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    found = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    return sum(int(line.split()[1]) * 1024 for line in found)
