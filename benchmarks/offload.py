"""A model whose weights do not fit: layers in a file, read while others are computed, against the disk's own rate.

    python benchmarks/offload.py [--quick] [--json OUT] [--folder DIR]

A llama of random int4 weights (groups of 32; quick: 0.27 GB, else 0.7 GB) decodes with a falling `weight_memory`, each in a process of its
own. A step can be no faster than its spilled bytes at the disk's rate, measured in the same run by direct reads of as many bytes at a time;
the ratio is to that ceiling, or to the rate with all weights in memory where that is lower.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from figures import Figure, arguments, report

SHARES = (1.0, 0.75, 0.5, 0.25)
SIZES = {True: (1024, 2816, 24), False: (2048, 5632, 16)}  # hidden, FFN, layers
NEW = {True: 12, False: 24}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file of the layers lies")
    given = parser.parse_args()
    rows = [child(share, given.quick, given.folder) for share in SHARES]
    disk = disk_rate(Path(given.folder), rows[-1]["layer"])
    whole, figures = rows[0], []
    figures.append(Figure(name="direct reads of the disk", ours=disk / 1e9, unit="GB/s"))
    figures.append(Figure(name="decode, all in memory", ours=whole["alone"], unit="tokens/s", note=f"{whole['weights'] / 1e6:.0f} MB of weights"))
    for share, row in zip(SHARES[1:], rows[1:]):
        note = f"{row['spilled'] / 1e6:.0f} MB read in every step, {row['memory'] / 1e6:.0f} MB of anonymous memory (all in memory: {whole['memory'] / 1e6:.0f})"
        for name, key, rate in (("decode", "alone", 1), ("16 requests", "many", 16)):
            ceiling = min(rate * disk / row["spilled"], whole[key])
            figures.append(Figure(name=f"{name}, {share:.0%} in memory", ours=row[key], peer=ceiling, peer_name="the disk's rate", goal=0.8,
                                  unit="tokens/s", note=note if key == "alone" else ""))
        if row["tokens"] != whole["tokens"]:
            raise SystemExit("layers from the file changed the tokens: that is a bug")
    report(figures, given.json, rows=rows)


def child(share: float, quick: bool, folder: str) -> dict[str, Any]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import offload; offload.measure({share}, {quick}, {folder!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(share: float, quick: bool, folder: str) -> None:
    from karui.inference.engine import Engine
    from karui.inference.models.native import NativeRunner
    from karui.inference.models.weights import expected_shapes
    from karui.inference.requests import SamplingParams

    config, weights = random_llama(quick)
    linears = sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name.endswith("proj.weight"))
    limit = None if share == 1 else int(share * linears * (0.5 + 2 / 32)) + 40_000_000
    runner = NativeRunner(config, weights, threads=2, weight_memory=limit, offload_to=folder)
    engine = Engine(runner, memory="200MB", max_context=256, max_sequences=16, kv_dtype="int8")
    params, found = SamplingParams(max_tokens=NEW[quick], ignore_eos=True), {}
    engine.generate([[1, 2, 3]], params)
    for key, count in (("alone", 1), ("many", 16)):
        prompts = [[5 + i, 6, 7 + i] for i in range(count)]
        best = 0.0
        for _ in range(3):
            begin = time.perf_counter()
            outputs = engine.generate(prompts, params)
            best = max(best, sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begin))
        found[key] = best
    status = Path("/proc/self/status").read_text()
    memory = int(status.split("RssAnon:")[1].split()[0]) * 1024
    layers = [layer.spilled_bytes for layer in runner._held[3]]
    print(json.dumps({**found, "weights": runner.weight_bytes(), "spilled": runner.spilled_bytes, "memory": memory, "layer": max(*layers, 1 << 20),
                      "tokens": [o.token_ids for o in outputs]}))  # fmt: skip


def random_llama(quick: bool) -> tuple[Any, Mapping[str, Any]]:
    import torch

    from karui.configs.quantspec import QuantSpec
    from karui.inference.models.config import from_hf
    from karui.inference.models.weights import expected_shapes
    from karui.kernels.quantize import quantize

    hidden, ffn, layers = SIZES[quick]
    config = from_hf({"model_type": "llama", "vocab_size": 8192, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
                      "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 256, "max_position_embeddings": 2048, "tie_word_embeddings": True})  # fmt: skip
    shapes, spec = expected_shapes(config), QuantSpec.parse("w4g32")

    class Weights(Mapping[str, Any]):
        """Made when asked for, so that nothing but the runner holds them."""

        def __getitem__(self, name: str) -> Any:
            torch.manual_seed(list(shapes).index(name))
            shape = shapes[name]
            return torch.ones(shape) if len(shape) == 1 else quantize(torch.randn(shape) * shape[-1] ** -0.5, spec)

        def __iter__(self) -> Iterator[str]:
            return iter(shapes)

        def __len__(self) -> int:
            return len(shapes)

    return config, Weights()


def disk_rate(folder: Path, size: int) -> float:
    """Bytes per second of direct reads of `size` at a time, round and round a file of 400 MB."""
    size = size // 4096 * 4096
    count = max(2, 400_000_000 // size)
    handle, path = tempfile.mkstemp(dir=folder)
    try:
        for _ in range(count):
            os.write(handle, os.urandom(1 << 20) * (size >> 20) + bytes(size % (1 << 20)))
        os.fsync(handle)
        reader = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        memory = mmap.mmap(-1, size)
        best = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            for i in range(count):
                os.preadv(reader, [memory], i * size)
            best = max(best, count * size / (time.perf_counter() - begin))
        os.close(reader)
        return best
    finally:
        os.close(handle)
        os.unlink(path)


if __name__ == "__main__":
    main()
