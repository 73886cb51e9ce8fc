"""`karui`: thin verbs over the library. Everything heavy is imported inside the verb that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from karui import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="karui: train a language model to be light, then run it.",
)

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. --set optim.lr=1e-4.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the result to this file as JSON.")]
Runner = Annotated[str, typer.Option(help="auto, native (C++, CPU), triton (GPU) or torch.")]
Device = Annotated[str, typer.Option(help="Where the engine runs: auto (a GPU where there is one), cpu, cuda, cuda:1.")]
KvDtype = Annotated[str | None, typer.Option(help="Format of the KV cache: float16, int8, fp8, kivi4, ...")]
Memory = Annotated[str | None, typer.Option(help="Bytes for the KV cache, e.g. 2GiB.")]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together; default: as many as memory holds.")]
WeightMemory = Annotated[
    str | None, typer.Option(help="Bytes for the weights, e.g. 4GiB; layers beyond are read in every step.")
]
Speculate = Annotated[str | None, typer.Option(help="Lossless speculation, e.g. ngram:5.")]
Beside = Annotated[Path | None, typer.Option(help="A peft LoRA folder, such as a run's final/, applied beside the model.")]


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"karui {__version__}")
        raise typer.Exit


@app.command()
def models(as_json: Json = None) -> None:
    """List the models karui knows by name, and which are on this machine."""
    from karui.catalogue import entries

    rows = entries()
    columns = ["name", "parameters", "fp32", "licence", "here", "source"]
    cells = [
        [
            r["name"],
            f"{r['parameters'] / 1e6:.0f} M",
            f"{r['fp32_bytes'] / 1e6:.0f} MB",
            r["licence"],
            "yes" if r["cached"] else "no",
            r["source"],
        ]
        for r in rows
    ]
    _table(columns, cells)
    _write_json(as_json, rows)


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None) -> None:
    """List the shipped recipes, or print one to copy and change."""
    from karui.configs.recipe import find_recipe, shipped_recipes

    if name:
        typer.echo(find_recipe(name).read_text(encoding="utf-8").rstrip())
        return
    for key, path in shipped_recipes().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{key:<16} {first.lstrip('# ')}")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    overrides: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and what would happen; train nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Run a recipe: fine-tune, export, check, compare. The same as `accelerate launch -m karui.trainers.run RECIPE`."""
    from karui.trainers.pipeline import run_pipeline

    if run_pipeline(recipe, overrides or (), dry_run=dry_run, resume=resume).run.interrupted:
        raise typer.Exit(130)


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    over: Annotated[
        list[str], typer.Option("--over", metavar="KEY=A,B", help="Values of a key, e.g. --over optim.lr=1e-4,3e-4; repeatable.")
    ],
    overrides: Set = None,
    as_json: Json = None,
) -> None:
    """Train every combination, rank them by held-out loss, and plot. A sweep that was stopped goes on from where it was."""
    from dataclasses import asdict

    from karui.trainers.sweep import parse_over
    from karui.trainers.sweep import sweep as run_sweep

    trials = run_sweep(recipe, parse_over(over), overrides or (), notify=typer.echo)
    keys = list(trials[0].values)
    _table(["rank", "loss", *keys, "folder"],
           [[str(i), "failed" if t.loss is None else f"{t.loss:.4f}", *(str(t.values[k]) for k in keys), t.folder]
            for i, t in enumerate(trials, 1)])  # fmt: skip
    _write_json(as_json, [asdict(t) for t in trials])


@app.command()
def doctor() -> None:
    """Check this installation: packages, device, compiler, memory, cache, tracking, and one real training step."""
    from karui.trainers.doctor import report

    raise typer.Exit(report(typer.echo))


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    gpu: Annotated[str, typer.Option(help="A100, L40S, H100, H200, B200, RTX 4090 or RTX 5090; it need not be there.")],
    overrides: Set = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    per_node: Annotated[int, typer.Option("--per-node", help="GPUs of a machine.")] = 8,
    method: Annotated[str | None, typer.Option(help="Plan this low precision in place of the recipe's, e.g. nvfp4.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per micro-batch; default: the recipe's.")] = None,
    as_json: Json = None,
) -> None:
    """Memory per rank for every way of spreading a run over GPUs; and of low precision, per layer, what it does there."""
    from karui.configs.recipe import Recipe
    from karui.trainers import precision_plan, rank_plan
    from karui.trainers.estimate import outline

    read = Recipe.load(recipe, overrides or ())
    model = outline(read)
    ranks = rank_plan.plan_ranks(read, gpu, nodes=nodes, per_node=per_node, tokens=tokens, model=model)
    found = {"ranks": rank_plan.as_json(ranks)}
    if method is not None or precision_plan.has_low_precision(read):
        layers = precision_plan.plan_recipe(read, gpu, tokens=tokens, method=method, model=model)
        _table(list(precision_plan.COLUMNS), precision_plan.rows(layers))
        for line in precision_plan.lines(layers):
            typer.echo(line)
        found |= precision_plan.as_json(layers)
    typer.echo(rank_plan.title(ranks))
    _table(list(rank_plan.COLUMNS), rank_plan.rows(ranks))
    _write_json(as_json, found)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the bundle goes; must not exist.")],
    spec: Annotated[str, typer.Option(help="Grid of the block linears, e.g. w4g32, w8, w1.58, none.")] = "w4g32",
    embedding: Annotated[str, typer.Option(help="Grid of the embedding and the output head.")] = "w8",
    method: Annotated[str, typer.Option(help="How the codes are found: `karui quantize --list`.")] = "rtn",
    samples: Annotated[int, typer.Option(min=1, help="Calibration rows, cut from the run's training samples.")] = 32,
    length: Annotated[int, typer.Option(min=8, help="Tokens per calibration row.")] = 256,
    merge: Annotated[str, typer.Option(help="Base an adapter is merged into: auto (measured), trained, original.")] = "auto",
) -> None:
    """Merge a run's adapter, quantize, write a bundle, and put it in place only after the parity gate."""
    from karui.trainers.calibrated import Calibration
    from karui.trainers.pipeline import export_run

    how = Calibration(method=method, samples=samples, length=length)
    export_run(run, spec=spec, embedding=embedding, output=output, how=how, merge=merge)  # type: ignore[arg-type]


@app.command()
def convert(
    bundle: Annotated[Path, typer.Argument(help="A bundle or a model folder.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File (gguf) or folder to write.")],
    to: Annotated[str, typer.Option(help="gguf (llama.cpp), compressed-tensors (vLLM, transformers) or bitnet (transformers).")],
) -> None:
    """Write a bundle in another project's format. Codes and scales go over as they are; what has no place there is refused."""
    import importlib

    from karui.configs.errors import KaruiError, nearest
    from karui.inference.bundle import open_model

    formats = {"gguf": "gguf", "compressed-tensors": "compressed_tensors", "bitnet": "hf_bitnet"}
    if to not in formats:
        raise KaruiError(f"--to {to!r} is not a format karui writes; formats: {', '.join(formats)}.{nearest(to, formats)}")
    written = importlib.import_module(f"karui.inference.bundle.{formats[to]}").write(open_model(bundle), output)
    typer.echo(f"{written}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A bundle, a model folder, or a catalogue name.")],
    prompt: Annotated[str, typer.Argument(help="What to answer; `-` reads standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    seed: Annotated[int, typer.Option()] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    adapter: Beside = None,
    speculate: Speculate = None,
    runner: Runner = "auto",
    device: Device = "auto",
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    max_context: MaxContext = None,
    weight_memory: WeightMemory = None,
) -> None:
    """Answer one prompt, streaming."""
    from karui.trainers.talk import answer

    text = (sys.stdin.read() if sys.stdin else "") if prompt == "-" else prompt  # None: closed
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    answer(model, text, sampling, raw=raw, adapter=adapter, runner=runner, speculate=speculate,
           **_engine(device, kv_dtype, memory, max_context, weight_memory))


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A bundle, a model folder, or a catalogue name.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens at most per turn.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    adapter: Beside = None,
    speculate: Speculate = None,
    runner: Runner = "auto",
    device: Device = "auto",
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    max_context: MaxContext = None,
    weight_memory: WeightMemory = None,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it."""
    from karui.trainers.talk import conversation

    conversation(model, {"max_tokens": max_tokens, "temperature": temperature}, system=system, adapter=adapter,
                 runner=runner, speculate=speculate, **_engine(device, kv_dtype, memory, max_context, weight_memory))


@app.command("eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Bundles, model folders or catalogue names; compared in one table.")],
    text: Annotated[Path | None, typer.Option(help="Text file for perplexity.")] = None,
    windows: Annotated[int | None, typer.Option(help="Only so many windows, of 1024 tokens or the context.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out samples: a file or a shipped sample, e.g. gsm8k-sample-test.")
    ] = None,
    speed: Annotated[bool, typer.Option(help="Measure prefill and decode tokens/s.")] = True,
    runner: Runner = "auto",
    device: Device = "auto",
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    max_context: MaxContext = None,
    weight_memory: WeightMemory = None,
    as_json: Json = None,
) -> None:
    """Perplexity, held-out loss, size on disk, tokens/s and memory of one or more models, in one table."""
    from karui.trainers.compare import compare

    reports = compare(models, text=text, windows=windows, data=data, speed=speed, runner=runner,
                      engine=_engine(device, kv_dtype, memory, max_context, weight_memory))
    _write_json(as_json, [report.to_dict() for report in reports])


@app.command()
def quantize(
    model: Annotated[str | None, typer.Argument(help="A model folder or a catalogue name.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where the bundle goes; must not exist.")] = None,
    method: Annotated[str, typer.Option(help="See --list.")] = "gptq",
    spec: Annotated[str, typer.Option(help="Grid of the block linears, e.g. w4g64.")] = "w4g64",
    embedding: Annotated[str, typer.Option(help="Grid of the embedding and the output head.")] = "w8",
    calibration: Annotated[Path | None, typer.Option(help="Text file to calibrate on.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 64,
    length: Annotated[int, typer.Option(min=8, help="Tokens per calibration sample.")] = 512,
    work: Annotated[Path | None, typer.Option(help="Folder for finished blocks: a killed run goes on from it.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method, e.g. --set damp=0.05.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Linears that stay in high precision, e.g. '*.0.mlp.*'.")] = None,
    budget: Annotated[str | None, typer.Option(help="Mixed precision: bits per weight (2.6) or bytes (40MB).")] = None,
    grids: Annotated[str, typer.Option(help="Grids that --budget chooses from.")] = "w2g64,w3g64,w4g64",
    device: Annotated[str, typer.Option(help="Where to calibrate: cpu, cuda, or auto, a GPU where there is one.")] = "auto",
    listing: Annotated[bool, typer.Option("--list", help="List the methods with paper and cost.")] = False,
) -> None:
    """Put a model on a grid and write a bundle that passed the parity gate; some methods train it there, see --list."""
    if listing or model is None:
        from karui.qat.methods import METHODS, TRAINED

        rows = [[m.name, m.paper, m.cost, "yes" if m.calibrates else "no"] for m in METHODS.values()]
        _table(["method", "paper", "cost", "needs data"], rows + [[m.name, m.paper, m.cost, "yes"] for m in TRAINED.values()])
        return
    if output is None:
        raise typer.BadParameter("say where the bundle goes, e.g. -o model-w4", param_hint="--output")
    from karui.trainers.quantize import quantize_to_bundle

    quantize_to_bundle(
        model,
        output,
        method=method,
        spec=spec,
        embedding=embedding,
        calibration=calibration,
        samples=samples,
        length=length,
        work=work,
        settings=_settings(settings or []),
        skip=skip or (),
        budget=budget,
        grids=tuple(g.strip() for g in grids.split(",") if g.strip()),
        device=device,
    )


@app.command("kv-levels")
def kv_levels(
    model: Annotated[str, typer.Argument(help="A bundle or a model folder.")],
    calibration: Annotated[Path, typer.Option(help="Text file like what will be served.")],
    kv_dtype: Annotated[str, typer.Option("--format", help="kvquant4, kvquant3 or kvquant2.")] = "kvquant3",
    samples: Annotated[int, typer.Option(min=1, help="Calibration samples.")] = 16,
    length: Annotated[int, typer.Option(min=8, help="Tokens per calibration sample.")] = 512,
) -> None:
    """Fit the levels of a KVQuant cache to a model and put them beside its weights, for --kv-dtype."""
    from karui.trainers.kv_levels import make_levels

    typer.echo(f"{make_levels(model, kv_dtype=kv_dtype, calibration=calibration, samples=samples, length=length)}")


@app.command()
def bench(
    model: Annotated[str, typer.Argument(help="A bundle, a model folder, or a catalogue name.")],
    speculate: Annotated[str, typer.Option(help="Speculation to compare with plain decoding; none: plain only.")] = "ngram:5",
    concurrency: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    new_tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 64,
    text: Annotated[Path | None, typer.Option(help="Text to cut prompts from.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG plot here.")] = None,
    runner: Runner = "auto",
    device: Device = "auto",
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    max_context: MaxContext = None,
    weight_memory: WeightMemory = None,
    as_json: Json = None,
) -> None:
    """Latency and throughput against this machine's measured limits, with advice on what would move them."""
    from rich.console import Console

    from karui.configs.errors import KaruiError
    from karui.inference.evaluate import bench as measure

    try:
        levels = [int(part) for part in concurrency.split(",")]
    except ValueError:
        raise KaruiError(f"--concurrency {concurrency!r}: expected counts separated by commas, e.g. 1,4,16.") from None
    result = measure.run_bench(
        model,
        speculate=None if speculate == "none" else speculate,
        concurrencies=levels,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        text=text,
        runner=runner,
        **_engine(device, kv_dtype, memory, max_context, weight_memory),
    )
    console = Console(highlight=False)
    console.print(measure.table(result))
    for line in result.advice:
        console.print(f"  {line}")
    if plot is not None:
        measure.plot(result, plot)
    if as_json is not None:
        measure.write_json(result, as_json)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A bundle, a model folder, or a catalogue name.")],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name clients ask for; default: the folder's.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="A peft LoRA served under a name of its own; repeatable."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="KARUI_API_KEY", help="What clients must send as a bearer token.")
    ] = None,
    speculate: Speculate = None,
    runner: Runner = "auto",
    max_sequences: Annotated[int, typer.Option(help="Requests running at once; more wait.")] = 64,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that running requests get to end after SIGTERM or Ctrl-C.")] = 30,
    parallel: Annotated[str | None, typer.Option(help="tensor or pipeline: over the ranks of torchrun.")] = None,
    device: Device = "auto",
    kv_dtype: KvDtype = None,
    memory: Memory = None,
    max_context: MaxContext = None,
    weight_memory: WeightMemory = None,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP interface, with a chat page at /."""
    from karui.inference.server.run import serve_model

    given = _engine(device, kv_dtype, memory, max_context, weight_memory) | ({} if parallel is None else {"parallel": parallel})
    adapters = dict(_pair(item, "--adapter", "maths=runs/lora/final") for item in adapter or ())
    serve_model(model, name=name, host=host, port=port, api_key=api_key, adapters=adapters, speculation=speculate, runner=runner,
                max_sequences=max_sequences, drain_s=drain, **given)


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the run goes.")] = Path("runs/demo"),
) -> None:
    """The whole path on a real model: fetch, fine-tune on a 4-bit base, export, parity gate, compare, answer."""
    from karui.trainers.demo import run_demo

    run_demo(output)


def _engine(device: str, kv_dtype: str | None, memory: str | None, max_context: int | None,
            weight_memory: str | None) -> dict[str, Any]:
    """The options of `Engine.load` that were given."""
    found = {"device": device, "kv_dtype": kv_dtype, "memory": memory, "max_context": max_context, "weight_memory": weight_memory}
    return {name: value for name, value in found.items() if value is not None}


def _settings(items: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs, values read as YAML (numbers, true, words)."""
    import yaml

    return {key: yaml.safe_load(value) for key, value in (_pair(item, "--set", "damp=0.05") for item in items)}


def _pair(item: str, option: str, example: str) -> tuple[str, str]:
    """Both sides of the first equals sign."""
    key, _, value = item.partition("=")
    if not key.strip() or not value:
        raise typer.BadParameter(f"{item!r}: expected KEY=VALUE, e.g. {example}", param_hint=option)
    return key.strip(), value


def _table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Console entry: a user's mistake prints its message and exits with 2, without a traceback."""
    import logging
    import warnings

    from karui.configs.errors import KaruiError

    warnings.filterwarnings("ignore", category=FutureWarning)  # of libraries below, about one another
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what a model says need not be in the terminal's alphabet
    try:
        app()
    except KaruiError as error:
        typer.secho(f"karui: {error}", fg="red", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
