"""The command line of `prelay bench`. What a command needs it imports when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..examples import examples

bench_app = typer.Typer(
    help="Measure: a running server under load, the pipeline without a model, the engine without a queue.",
    no_args_is_help=True,
)

_LOAD, _LENGTHS, _TARGETS, _OUTPUT = "Load", "Prompts and answers", "Targets", "Output"
_LENGTH_FORMS = "a number, uniform:64-512, or lognormal:MEDIAN,SIGMA\\[,MAX]"


def _option(words: str, metavar: str = "", panel: str = "Options", flag: str = "", **more: Any) -> Any:
    names = [flag] if flag else []
    return typer.Option(*names, help=words, metavar=metavar or None, rich_help_panel=panel, **more)


Json = Annotated[str | None, _option("Write everything as JSON; - is stdout, alone.", "FILE", _OUTPUT)]
Plot = Annotated[str | None, _option("Draw it.", "FILE.svg", _OUTPUT)]
Note = Annotated[list[str] | None, _option("Add this to the report; may be repeated.", "NAME=VALUE", _OUTPUT)]


@bench_app.command(
    epilog=examples(
        "prelay bench serve",
        "prelay bench serve --concurrency 1,8,32 --input-len 128 --output-len 64 --json closed.json --plot closed.svg",
        "prelay bench serve --rate 1,2,4 --duration 60 --input-len lognormal:200,0.8,1000 --output-len uniform:32-128",
        "prelay bench serve --find-goodput --slo ttft=500,tpot=50",
        "prelay bench serve --url http://other:8080 --dataset prompts.jsonl --no-ignore-eos --note server=another",
    )
)
def serve(
    url: Annotated[str, _option("Where the server is.", "URL")] = "http://127.0.0.1:8000",
    model: Annotated[str, _option("The model to ask for; the first one served if absent.", "NAME")] = "",
    api_key: Annotated[str | None, _option("Key of a server that wants one.", "KEY", envvar="PRELAY_API_KEY")] = None,
    concurrency: Annotated[
        str,
        _option(
            "Closed loop: so many requests at a time, one level for each number. \\[default: 1,8,32]", "N,N", _LOAD
        ),
    ] = "",
    rate: Annotated[str, _option("Open loop: requests a second, one level for each number.", "R,R", _LOAD)] = "",
    burstiness: Annotated[
        float, _option("Of an open loop: 1 is Poisson, less comes in bursts, more is more even.", "X", _LOAD, min=0.01)
    ] = 1.0,
    requests: Annotated[
        int | None,
        _option("Requests of a level. \\[default: 32, of a closed loop at least 4 per N]", "N", _LOAD, min=1),
    ] = None,
    duration: Annotated[
        float | None, _option("Send new requests for so long instead; those under way end.", "SECONDS", _LOAD, min=0.1)
    ] = None,
    warmup: Annotated[int, _option("Requests before, which do not count.", "N", _LOAD, min=0)] = 4,
    timeout: Annotated[float, _option("An answer that takes longer failed.", "SECONDS", _LOAD, min=0.1)] = 600.0,
    input_len: Annotated[str, _option(f"Prompt tokens: {_LENGTH_FORMS}.", "LENGTH", _LENGTHS)] = "128",
    output_len: Annotated[str, _option("Answer tokens, in the same ways.", "LENGTH", _LENGTHS)] = "64",
    dataset: Annotated[
        str | None,
        _option('Lines of {"prompt": text or token ids, "output_len": tokens} instead.', "FILE.jsonl", _LENGTHS),
    ] = None,
    shared_prefix: Annotated[
        int, _option("The first N prompt tokens are the same in all prompts.", "N", _LENGTHS, min=0)
    ] = 0,
    ids: Annotated[
        str, _option("Random prompts are made of these ids.", "LOW-HIGH", _LENGTHS, "--token-ids")
    ] = "100-30000",
    ignore_eos: Annotated[
        bool, _option("Answers have the length asked for; OpenAI's own API does not know it.", panel=_LENGTHS)
    ] = True,
    temperature: Annotated[float, _option("0 is greedy.", "T", _LENGTHS, min=0, max=2)] = 0.0,
    seed: Annotated[int, _option("Of prompts, lengths and arrivals.", "N", _LENGTHS, min=0)] = 0,
    slo: Annotated[
        str | None, _option("Milliseconds that a request must keep together.", "ttft=500,tpot=50", _TARGETS)
    ] = None,
    find_goodput: Annotated[
        bool,
        _option("Look for the highest rate at which 90 % of the requests meet --slo.", "", _TARGETS, "--find-goodput"),
    ] = False,
    json: Json = None,
    plot: Plot = None,
    note: Note = None,
) -> None:
    """Send load to a running server and report latencies, rates and failures.

    Prelay's or any other with OpenAI's streamed /v1/completions. Ctrl-C reports what was measured so far.
    """
    from ..apikeys import client_headers
    from . import parse, workload
    from .client import Manner
    from .figures import parse_slo
    from .lengths import parse_lengths
    from .output import Wanted
    from .serve import Plan, run

    words = {name: value for name, value in locals().items() if isinstance(value, str | int | float)}
    words.pop("api_key", None)
    output = parse_lengths(output_len, "--output-len")
    plan = Plan(
        url=url.rstrip("/").removesuffix("/v1"),
        manner=Manner(model, temperature, ignore_eos, timeout),
        workload=workload.chosen(dataset, parse_lengths(input_len, "--input-len"), output, shared_prefix, seed, ids),
        concurrency=parse.counts(concurrency or ("" if rate or find_goodput else "1,8,32"), "--concurrency"),
        rates=parse.numbers(rate, "--rate"),
        burstiness=burstiness,
        count=requests,
        duration_s=duration,
        warmup=warmup,
        slo=parse_slo(slo) if slo else None,
        find_goodput=find_goodput,
        seed=seed,
        words=words,
        headers=client_headers(api_key),
    )
    raise typer.Exit(run(plan, Wanted(json, plot), note or ()))


@bench_app.command(
    epilog=examples(
        "prelay bench pipeline",
        "prelay bench pipeline --streams 1,8,64,256 --tokens 512 --json pipeline.json --plot pipeline.svg",
        "prelay bench pipeline --model ./my-model --step-ms 20",
    )
)
def pipeline(
    streams: Annotated[str, _option("Requests at a time, one level for each number.", "N,N", _LOAD)] = "64",
    tokens: Annotated[int, _option("Tokens of each answer.", "N", _LOAD, min=1, max=100_000)] = 512,
    prompt: Annotated[int, _option("Tokens of each prompt.", "N", _LOAD, min=1, max=30_000)] = 128,
    runs: Annotated[int, _option("Rounds of each level; the median counts.", "N", _LOAD, min=1)] = 3,
    hold: Annotated[float, _option("Go on for so long, to be profiled.", "SECONDS", _LOAD, min=0)] = 0.0,
    step_ms: Annotated[float, _option("What a step of the null model takes.", "MS", _LOAD, min=0, max=60_000)] = 0.0,
    model: Annotated[
        str | None,
        _option("Use the tokenizer of this model, not one whose ids are words.", "FOLDER", "Prompts and answers"),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    note: Note = None,
) -> None:
    """Measure what everything but the model costs: API, queue, workers and streams, with a fake model.

    Starts a service of its own (prefill and decode workers, a private server) and stops it. Reports tokens a second,
    the CPU time of each process per token, and what a live request takes in Redis.
    """
    from pathlib import Path

    from . import parse
    from .output import Wanted
    from .pipeline import Plan, run

    words = {name: value for name, value in locals().items() if isinstance(value, str | int | float)}
    folder = Path(model).absolute() if model else None
    plan = Plan(parse.counts(streams, "--streams"), tokens, prompt, runs, step_ms, hold, folder, words)
    raise typer.Exit(run(plan, Wanted(json, plot), note or ()))


@bench_app.command(
    epilog=examples(
        "prelay bench engine",
        "prelay bench engine --model ./my-model --batch 1,8,32 --threads 2 --json engine.json --plot engine.svg",
        "prelay bench engine --random-model 1GB",
    )
)
def engine(
    model: Annotated[
        str | None, _option("A Hugging Face folder, a .gguf file, or a hub id. \\[default: the demo model]", "MODEL")
    ] = None,
    dtype: Annotated[str, _option("auto, float32 or bfloat16.", "TYPE")] = "auto",
    kernels: Annotated[str, _option("auto, native or torch.", "KIND")] = "auto",
    quantization: Annotated[str, _option("none or w8a8.", "KIND")] = "none",
    threads: Annotated[int | None, _option("Threads of it. \\[default: all cores]", "N", min=1, max=1024)] = None,
    batch: Annotated[str, _option("Sequences decoded at a time, one level for each number.", "N,N", _LOAD)] = "1,8,32",
    prompt: Annotated[int, _option("Tokens of their prompts.", "N", _LOAD, min=1)] = 128,
    steps: Annotated[int, _option("Steps of each batch and way of sampling.", "N", _LOAD, min=1)] = 64,
    prefill: Annotated[str, _option("Lengths of the prompts that are timed.", "N,N", _LOAD)] = "128,512,1024",
    prefill_chunk: Annotated[int, _option("Prompt tokens computed in one step.", "TOKENS", _LOAD, min=1)] = 256,
    runs: Annotated[int, _option("Prompts of each length; the median counts.", "N", _LOAD, min=1)] = 3,
    random_model: Annotated[
        str | None, _option("Load a random model of this size too (1GB, on disk, in bfloat16).", "SIZE", "Loading")
    ] = None,
    cold: Annotated[
        bool, _option("Weights are read from the disk, not from the page cache.", "", "Loading", "--cold")
    ] = False,
    json: Json = None,
    plot: Plot = None,
    note: Note = None,
) -> None:
    """Measure the engine alone: decode steps, the sampler's share, prefill, loading and memory. No queue, no HTTP."""
    import os

    from ..model import resolve_with_progress
    from . import parse
    from .engine import Plan, run
    from .output import Wanted

    words = {name: value for name, value in locals().items() if isinstance(value, str | int | float)}
    plan = Plan(
        model=resolve_with_progress(model),
        dtype=dtype,
        kernels=kernels,
        quantization=quantization,
        threads=threads or len(os.sched_getaffinity(0)),
        batches=parse.counts(batch, "--batch"),
        prompt=prompt,
        steps=steps,
        prefills=parse.counts(prefill, "--prefill"),
        runs=runs,
        prefill_chunk=prefill_chunk,
        cold=cold,
        random_bytes=parse.size(random_model, "--random-model") if random_model else None,
        words=words,
    )
    raise typer.Exit(run(plan, Wanted(json, plot), note or ()))
