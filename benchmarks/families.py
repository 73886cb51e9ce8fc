"""Decoding of model families on the native runner: int4 against transformers in fp32 and against the torch runner.

    python benchmarks/families.py [--quick] [--json OUT]

Random weights in the shapes of a family's small member, cut to a few layers, int4 in groups of 32 (BitNet: ternary), embedding and head in
int8, two threads. A share is of what the machine's bandwidth, measured in the same run, allows for the bytes that a token reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from figures import Figure, arguments, best, report, seconds, transformers_decode

COMMON: dict[str, Any] = dict(vocab_size=32000, max_position_embeddings=4096, num_hidden_layers=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3 1B": ("gemma3_text", dict(hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1, head_dim=256,
                                       sliding_window=512)),
    "Gemma 2 2B": ("gemma2", dict(hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4, head_dim=256)),
    "Phi-4 mini": ("phi3", dict(hidden_size=3072, intermediate_size=8192, num_attention_heads=24, num_key_value_heads=8, num_hidden_layers=4,
                                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75))),
    "OLMo 2 1B": ("olmo2", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=16)),
    "Granite 3 2B": ("granite", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
                                     embedding_multiplier=12.0, attention_multiplier=1 / 64, residual_multiplier=0.22, logits_scaling=8.0)),
    "BitNet b1.58 2B": ("bitnet", dict(hidden_size=2560, intermediate_size=6912, num_attention_heads=20, num_key_value_heads=5,
                                       hidden_act="relu2")),
}  # fmt: skip


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    from karui.inference.evaluate.bench import load_of
    from karui.inference.evaluate.machine import decode_limit, measure_machine
    from karui.inference.models.decoder import TorchRunner
    from karui.inference.models.native import NativeRunner

    bandwidth, figures = measure_machine(2).bandwidth_bytes_per_s, []
    for name in list(FAMILIES)[: 2 if given.quick else None]:
        model, config, weights = made(*FAMILIES[name])
        engine = engine_of(NativeRunner(config, weights, threads=2), "float16")
        ours, load = best(partial(decode, engine, 32), 3), load_of(engine)
        limit = decode_limit(bandwidth, 1, load.read_bytes(1), load.kv_bytes(24))
        slow = engine_of(TorchRunner(config, weights), "float32")
        figures += [
            Figure(name=name, ours=ours, peer=limit, peer_name="the machine's bandwidth", unit="tokens/s", goal=0.5,
                   note=f"{load.weight_bytes / 1e6:.0f} MB"),
            Figure(name=name, ours=ours, peer=transformers_decode(model, 8), peer_name="transformers, fp32", unit="tokens/s", goal=3),
            Figure(name=name, ours=ours, peer=best(partial(decode, slow, 4), 0), peer_name="torch runner", unit="tokens/s", goal=3),
        ]  # fmt: skip
        del model, weights, engine, slow
    report(figures, given.json, bandwidth=bandwidth)


def made(kind: str, changes: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """transformers' model, karui's config, and its weights on their grids."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from karui.configs.quantspec import QuantSpec
    from karui.inference.models.config import from_hf
    from karui.kernels.quantize import quantize

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    grid, eight = QuantSpec.parse("w1.58a8" if kind == "bitnet" else "w4g32"), QuantSpec.parse("w8")
    weights = {n: w for n, w in model.state_dict().items() if not (config.tie_word_embeddings and n == "lm_head.weight")}
    coded = {n: quantize(w, grid if ".layers." in n else eight) if w.ndim == 2 else w for n, w in weights.items()}
    return model, from_hf(config.to_dict()), coded


def engine_of(runner: Any, kv_dtype: str) -> Any:
    from karui.inference.engine import Engine

    return Engine(runner, kv_dtype=kv_dtype, max_context=256, max_sequences=2)


def decode(engine: Any, new: int) -> float:
    """Tokens/s of one stream behind a prompt of 8 tokens."""
    from karui.inference.requests import SamplingParams

    return new / seconds(lambda: engine.generate([list(range(5, 13))], SamplingParams(max_tokens=new, ignore_eos=True)))


if __name__ == "__main__":
    main()
