"""Latent and sparse attention: what a cached token takes, and what decoding reads and takes, by form, runner and peer.

    python benchmarks/latent.py [--quick] [--only torch|native|sparse] [--threads N] [--json OUT]

A random model of four layers (quick: two) with the attention of DeepSeek-V2-Lite (16 heads, a latent of 512 and a shared key of 64)
and next to nothing beside it decodes one token over a full cache: with W_UK folded into the query, and with keys and values made of
every latent, both in turn in one process, on the torch runner. Then one layer with the 128 heads of DeepSeek-V3.2, its indexer (64 heads, 2,048
keys chosen) against all keys ("torch"). Then the native runner ("native"): the same attention against the torch runner, and random weights in the shape that recipe
`mla` makes of SmolLM2-135M, int4, against transformers and against SmolLM2's own attention on the native runner, which caches twice as much;
two threads, or with --threads 1 one and its processor time, for machines that do other things besides. Last ("sparse") what recipe
`sparse-attention` makes of that, with 64, 512 and 2,048 chosen keys, against the same latents without an indexer; its goals: twice the
tokens at a context of 32,768, and no fewer at 2,048. Caches of the native runner hold drawn numbers: memory that nothing was written to
reads as one page.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from figures import Figure, arguments, in_turn, report

ATTENTION: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, intermediate_size=256, vocab_size=512, max_position_embeddings=65536, rms_norm_eps=1e-6,
    norm_topk_prob=True, index_n_heads=64, index_head_dim=128, index_topk=2048, rope_theta=10000.0)  # fmt: skip


SMOL: dict[str, Any] = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, vocab_size=49152, tie_word_embeddings=True,
    max_position_embeddings=65536, rms_norm_eps=1e-5, rope_theta=100000.0)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "latents": dict(SMOL, model_type="deepseek_v3", num_key_value_heads=9, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64,
                    qk_rope_head_dim=64, v_head_dim=64, attention_bias=True, first_k_dense_replace=30, norm_topk_prob=True),
    "sparse": dict(SMOL, model_type="deepseek_v32", num_key_value_heads=9, q_lora_rank=576, kv_lora_rank=128, qk_nope_head_dim=64,
                   qk_rope_head_dim=64, v_head_dim=64, attention_bias=True, first_k_dense_replace=30, norm_topk_prob=True,
                   index_n_heads=4, index_head_dim=96),
    "three heads": dict(SMOL, model_type="llama", num_key_value_heads=3, head_dim=64),
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=2, help="of the native runner and its peers; 1: processor time is measured")
    parser.add_argument("--only", choices=("torch", "native", "sparse"))
    given = parser.parse_args()
    rounds = 5 if given.quick else 9
    figures = []
    if given.only in (None, "torch"):
        figures += on_torch(given, rounds)
    if given.only in (None, "native"):
        figures += native(given.quick, rounds, given.threads)
    if given.only in (None, "sparse"):
        figures += sparse(given.quick, rounds, given.threads)
    report(figures, given.json)


def on_torch(given: Any, rounds: int) -> list[Figure]:
    layers, figures = 2 if given.quick else 4, bytes_per_token()
    for context in (512, 2048) if given.quick else (512, 2048, 8192):
        run, steps = made("deepseek_v3", layers), {}
        for name, materializes in (("absorbed", False), ("materialized", True)):
            steps[name] = step_of(run, context, materializes)
        times = in_turn(steps, rounds)
        figures.append(Figure(name=f"decode at context {context}", ours=1 / times["absorbed"], peer=1 / times["materialized"],
                              peer_name="keys and values made", goal=2.0 if context >= 2048 else None, unit="tokens/s"))
    for context in (8192,) if given.quick else (8192, 32768):
        wide = dict(num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536)
        sparse, dense = made("deepseek_v32", 1, **wide), made("deepseek_v3", 1, **wide)
        times = in_turn({"sparse": step_of(sparse, context, False), "dense": step_of(dense, context, False)}, rounds)
        read = [read_of(run, context) for run in (sparse, dense)]
        figures.append(Figure(name=f"indexer, context {context}", ours=1 / times["sparse"], peer=1 / times["dense"],
                              peer_name="all keys", unit="tokens/s",
                              note=f"cache read in a step: {read[0] / 1e6:.2f} MB against {read[1] / 1e6:.2f} MB in float32"))  # fmt: skip
    return figures


def clock_of(threads: int) -> Any:
    return partial(in_turn, clock=time.process_time if threads == 1 else time.perf_counter)


def native(quick: bool, rounds: int, threads: int) -> list[Figure]:
    import torch

    from karui.inference.models.native import NativeRunner

    figures = []
    torch.set_num_threads(threads)
    turns = clock_of(threads)
    ours, torch_runner = made("deepseek_v3", 2, partial(NativeRunner, threads=threads)), made("deepseek_v3", 2)
    for context in (2048,) if quick else (512, 2048, 8192):
        times = turns({"native": step_of(ours, context), "torch": step_of(torch_runner, context, False)}, rounds)
        figures.append(Figure(name=f"native, V2-Lite's attention, context {context}", ours=1 / times["native"], peer=1 / times["torch"],
                              peer_name="torch runner", goal=1.0, unit="tokens/s"))  # fmt: skip
    runners = {name: coded(KINDS[name], threads) for name in ("latents", "three heads")}
    contexts = (8, 2048, 8192) if quick else (8, 2048, 8192, 32768)
    for context, kv in [(c, "float16") for c in contexts] + [(c, "int8") for c in contexts[2:]]:
        times = turns({name: step_of(run, context, kv_dtype=kv) for name, run in runners.items()}, rounds)
        read = [run.kv_bytes_per_token(kv) * context for run in runners.values()]
        figures.append(Figure(name=f"native, SmolLM2's shape, int4, {kv} cache, context {context}", ours=1 / times["latents"], unit="tokens/s",
                              peer=1 / times["three heads"], peer_name="three key heads", goal=1.0 if context >= 8192 else None,
                              note=f"cache read in a step: {read[0] / 1e6:.1f} MB against {read[1] / 1e6:.1f} MB"))  # fmt: skip
    steps = {name: step_of(run, 512, kv_dtype="float16", rows=512) for name, run in runners.items()}
    peer = peer_steps(512)
    times = turns({**steps, "transformers": peer["prefill"]}, rounds)
    for name, who in (("three heads", "three key heads"), ("transformers", "transformers, fp32")):
        figures.append(Figure(name="native, SmolLM2's shape, prefill of 512", ours=512 / times["latents"], peer=512 / times[name],
                              peer_name=who, unit="tokens/s", goal=1.0 if "transformers" in who else None))  # fmt: skip
    times = turns({"ours": step_of(runners["latents"], 512, kv_dtype="float16"), "peer": peer["decode"]}, rounds)
    figures.append(Figure(name="native, SmolLM2's shape, decode at 512", ours=1 / times["ours"], peer=1 / times["peer"],
                          peer_name="transformers, fp32", unit="tokens/s", goal=3.0))  # fmt: skip
    return figures


def sparse(quick: bool, rounds: int, threads: int) -> list[Figure]:
    tops = (64,) if quick else (64, 512, 2048)
    turns, figures = clock_of(threads), []
    runners = {"dense": coded(KINDS["latents"], threads), **{f"{top} keys": coded(dict(KINDS["sparse"], index_topk=top), threads) for top in tops}}
    contexts = (2048, 8192) if quick else (2048, 8192, 32768, 65536)
    for context, kv in [(c, "float16") for c in contexts] + [(c, "int8") for c in contexts[1:3]]:
        times = turns({name: step_of(run, context, kv_dtype=kv) for name, run in runners.items()}, rounds)
        for name, top in zip(list(runners)[1:], tops, strict=True):
            goal = 2.0 if context == 32768 and top <= 512 else 1.0 if context == 2048 and top < 2048 else None
            figures.append(Figure(name=f"{name}, {kv} cache, context {context}", ours=1 / times[name], peer=1 / times["dense"], peer_name="all keys",
                                  unit="tokens/s", goal=goal))  # fmt: skip
    return figures


def coded(shape: dict[str, Any], threads: int) -> Any:
    """Random weights on the native runner: int4 in groups of 32, embedding in int8, indexers in bf16, as exports leave them."""
    import torch

    from karui.configs.quantspec import QuantSpec
    from karui.inference.models.config import from_hf
    from karui.inference.models.native import NativeRunner
    from karui.inference.models.weights import expected_shapes
    from karui.kernels.quantize import quantize

    torch.manual_seed(0)
    config = from_hf(shape)
    four, eight = QuantSpec.parse("w4g32"), QuantSpec.parse("w8")
    return NativeRunner(config, {
        name: torch.ones(size) if len(size) == 1 else (torch.randn(size) * size[-1] ** -0.5).bfloat16() if ".indexer." in name
        else quantize(torch.randn(size) * size[-1] ** -0.5, four if ".layers." in name else eight)
        for name, size in expected_shapes(config).items()}, threads=threads)  # fmt: skip


def peer_steps(context: int) -> dict[str, Any]:
    """transformers over the latents' shape: a prefill of so many tokens, and a step of one behind them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(KINDS["latents"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape)).eval()
    ids = torch.randint(0, 49152, (1, context + 1))

    def prefill() -> Any:
        with torch.inference_mode():
            return model(ids[:, :context], logits_to_keep=1).past_key_values

    held = prefill()

    def decode() -> None:
        with torch.inference_mode():
            model(ids[:, context:], past_key_values=held)
            held.crop(-1)

    return {"prefill": prefill, "decode": decode}


def bytes_per_token() -> list[Figure]:
    """Of DeepSeek-V3's 61 layers in 16 bits, against the same heads without latents, and against 8 key heads of 128 each."""
    from karui.inference.cache import kv
    from karui.inference.models import latent
    from karui.inference.models.config import from_hf

    config = from_hf({**ATTENTION, "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128})
    ours, found = latent.bytes_per_token(config, "bfloat16"), []
    for name, heads, width in (("128 heads, keys of 192 and values of 128", 128, 160), ("8 key heads of 128", 8, 128)):
        peer = kv.bytes_per_token(61, heads, width, "bfloat16")
        found.append(Figure(name="cache of DeepSeek-V3 in 16 bits", ours=ours, peer=peer, peer_name=name, goal=1.0, better="lower",
                            unit="bytes/token", note=f"peer: {name}"))  # fmt: skip
    return found


def made(kind: str, layers: int, runner: Any = None, **changes: Any) -> Any:
    import torch

    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from karui.inference.models.weights import expected_shapes

    config = from_hf({**ATTENTION, "model_type": kind, "num_hidden_layers": layers, **changes})
    torch.manual_seed(0)
    return (runner or TorchRunner)(config, {name: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
                                for name, shape in expected_shapes(config).items()})  # fmt: skip


def step_of(run: Any, context: int, materializes: bool | None = None, kv_dtype: str = "float32", rows: int = 1) -> Any:
    """A step of the last `rows` of `context` tokens; of the torch runner over random latents, in the form asked for."""
    import torch

    from karui.inference.batch import StepBatch
    from karui.inference.models import latent

    blocks = -(-context // 16)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    at = torch.arange(context - rows, context, dtype=torch.int32)
    batch = StepBatch(torch.full((rows,), 7, dtype=torch.int32), at, at, ints(0, rows), ints(context),
                      torch.arange(blocks, dtype=torch.int32)[None], ints(rows - 1))  # fmt: skip

    def step() -> None:
        run.forward(batch)

    def formed() -> None:
        latent._materializes, kept = (lambda *_: materializes), latent._materializes
        try:
            step()
        finally:
            latent._materializes = kept

    run.allocate(blocks, 16, kv_dtype)
    if materializes is None:
        drawn = None
        for first in range(0, context, 1024):
            slots = torch.arange(first, min(first + 1024, context))
            data, scale = run.read_slots(slots)
            drawn = torch.randn(data.shape) if drawn is None else drawn * 1.001
            run.write_slots(slots, drawn[:, :, :len(slots)].to(data.dtype), scale)
        return step
    for cells in (run._kv._cells, run._kv._index):
        cells.tensors[0].normal_()
    return formed


def read_of(run: Any, context: int) -> int:
    from karui.inference.models import latent

    return latent.bytes_read(run.config, "float32", context)


if __name__ == "__main__":
    main()
