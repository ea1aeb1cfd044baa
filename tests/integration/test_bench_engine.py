"""`prelay bench engine` on models of a few kilobytes, and random models of a wanted size."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from prelay.bench.randommodel import size_of, write
from prelay.bench.rawloop import RawLoop, measure_load
from prelay_engine import engine as engine_module
from prelay_engine import model as model_module
from prelay_engine.config import EngineConfig
from prelay_engine.errors import EngineError
from tests.bed.bench import finish, leftovers, report, start
from tests.bed.processes import until
from tests.bed.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a user has one."""
    torch.manual_seed(0)
    folder = make_tokenizer(tmp_path_factory.mktemp("tiny"))
    config = LlamaConfig(
        vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_it_reports_steps_sampling_prompts_and_loading(tiny: Path, tmp_path: Path) -> None:
    args = ("--batch", "1,3", "--steps", "4", "--prompt", "20", "--prefill", "16,40,9999", "--runs", "1")
    found = report("engine", "--model", str(tiny), "--threads", "1", "--dtype", "float32", *args, TMPDIR=str(tmp_path))
    kinds = ["greedy", "seeded", "penalties + logprobs"]
    assert [(row["batch"], row["sampling"]) for row in found["decode"]] == [(b, k) for b in (1, 3) for k in kinds]
    for row in found["decode"]:
        assert row["steps"] == 4
        assert row["context"] == [20, 20 + 1 + 3 * (4 + 4)]
        assert 0 < row["sampler_share"] < 1
        assert 0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"]
        assert row["sampler_ms"]["p50"] < row["step_ms"]["p99"]
    assert [row["tokens"] for row in found["prefill"]] == [16, 40]  # longer ones do not fit this model
    (load,) = found["loads"]
    assert load["peak_loading_bytes"] >= load["rss_before_bytes"] > 0
    assert load["files_bytes"] > load["weights_bytes"] > 0
    engine = found["engine"]
    assert (engine["dtype"], engine["threads"], engine["exact"]) == ("float32", 1, True)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_ends_the_measuring_process_and_reports_what_it_said(tiny: Path, tmp_path: Path) -> None:
    args = ("--threads", "1", "--batch", "1", "--steps", "50", "--prefill", "16", "--runs", "1000000")
    process = start("engine", "--model", str(tiny), *args, "--json", "-", TMPDIR=str(tmp_path))
    mine = psutil.Process(process.pid)

    def measuring() -> list[psutil.Process]:
        assert process.poll() is None, process.communicate()
        found = mine.children(recursive=True)
        return [child for child in found if "prelay.bench.child" in child.cmdline() and child.cpu_times().user > 1]

    children = until(measuring, 60)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process, 20)
    assert code == 130, err
    assert json.loads(out)["interrupted"]
    assert "Traceback" not in err
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert leftovers(tmp_path) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_one_line(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code, _, err = finish(start("engine", "--model", str(folder)))
    assert code == 1
    assert "prelay: cannot load" in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def loop(tiny: Path) -> RawLoop:
    config = EngineConfig(tiny, dtype="float32")
    return RawLoop(measure_load(config)[0], config)


def test_the_timer_stands_around_the_engine_s_own_sampler_and_goes_away(
    loop: RawLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    plain = vars(model_module)["sample"]

    def spy(logits: torch.Tensor, draws: Any, kernels: Any) -> Any:
        seen.append((len(draws), {draw.sampling.temperature for draw in draws}))
        return plain(logits, draws, kernels)

    reported: list[int] = []
    plain_logprobs = vars(engine_module)["logprobs_of"]

    def spy_logprobs(row: Any, token: int, count: int, kernels: Any) -> Any:
        reported.append(count)
        return plain_logprobs(row, token, count, kernels)

    monkeypatch.setitem(vars(model_module), "sample", spy)
    monkeypatch.setitem(vars(engine_module), "logprobs_of", spy_logprobs)
    loop.decode(3, 10, 2, lambda _: None)
    assert (vars(model_module)["sample"], vars(engine_module)["logprobs_of"]) == (spy, spy_logprobs)
    assert reported == [5] * 18  # of one step in three
    assert [count for count, _ in seen[-18:]] == [3] * 18
    assert [kinds for _, kinds in seen[-3:]] == [{0}, {0.8}, {0.8}]


def test_what_does_not_fit_the_model_is_refused_and_not_measured_short(loop: RawLoop) -> None:
    with pytest.raises(EngineError, match="takes 526 positions, and the model has 512"):
        loop.decode(1, 500, 4, lambda _: None)


@pytest.mark.parametrize("nbytes", [50_000_000, 100_000_000, 400_000_000, 10**9, 4 * 10**9, 16 * 10**9])
def test_a_random_model_has_about_the_size_that_was_asked_for(nbytes: int) -> None:
    size = size_of(nbytes)
    assert size.nbytes() == pytest.approx(nbytes, rel=0.05)
    assert 1.5 < size.intermediate / size.hidden < 5


def test_a_random_model_in_several_files_is_loaded_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelay.bench.randommodel._SHARD", 16_000_000)
    size = write(tmp_path / "random", 45_000_000)
    files = sorted(path.name for path in (tmp_path / "random").glob("*.safetensors"))
    assert len(files) > 1
    config = EngineConfig(tmp_path / "random", dtype="float32")
    model, found = measure_load(config, cold=True)
    assert found["weights_bytes"] == 2 * size.nbytes()  # bfloat16 on disk, float32 here
    assert found["files_bytes"] == pytest.approx(size.nbytes(), rel=0.01)
    assert found["page_cache"] == "cold"
    assert RawLoop(model, config).prefill(8, 1)["tokens_per_s"] > 0
