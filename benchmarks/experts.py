"""A mixture of experts on the CPU: it decodes at the rate of what a token reads, not of what the model holds.

    python benchmarks/experts.py [--quick] [--json OUT]

Random weights in the shapes of a Qwen3 mixture, 32 experts of which a token takes 4 (0.67 B parameters, 0.1 B of them a token; quick: half
the layers), int4 in groups of 32, against a dense Qwen3 with as many parameters in the same engine, against transformers in fp32 on the same
weights, and against the bandwidth of the machine, measured in the same run.
"""

from __future__ import annotations

from typing import Any

from figures import Figure, arguments, best, report, seconds, transformers_decode

COMMON: dict[str, Any] = dict(vocab_size=16384, hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64,
                              max_position_embeddings=4096, tie_word_embeddings=True)  # fmt: skip
MIXTURE: dict[str, Any] = dict(moe_intermediate_size=512, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True, intermediate_size=3072)
DENSE: dict[str, Any] = dict(intermediate_size=32 * 512)


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    layers = 6 if given.quick else 12
    from karui.inference.evaluate.bench import load_of
    from karui.inference.evaluate.machine import decode_limit, measure_machine

    bandwidth = measure_machine(2).bandwidth_bytes_per_s
    model, mixture = made("qwen3_moe", layers, MIXTURE)
    rates = {name: best(lambda n=n, new=new: decode(mixture, n, new), 3) for name, n, new in (("one", 1, 64), ("many", 16, 32))}
    prefill = best(lambda: 512 / seconds(lambda: generate(mixture, 1, 1, 512)), 3)
    peer = transformers_decode(model, 8 if given.quick else 16)
    del model
    _, dense = made("qwen3", layers, DENSE)
    load, weights = load_of(mixture), mixture.runner.weight_bytes() / 1e6
    limit = decode_limit(bandwidth, 1, load.read_bytes(1), load.kv_bytes(32))
    figures = [
        Figure(name="decode, one stream", ours=rates["one"], peer=limit, peer_name="the machine's bandwidth", unit="tokens/s", goal=0.5,
               note=f"a token reads {load.read_bytes(1) / 1e6:.0f} of {weights:.0f} MB"),
        Figure(name="decode, one stream", ours=rates["one"], peer=peer, peer_name="transformers, fp32", unit="tokens/s", goal=10),
        Figure(name="decode, one stream", ours=rates["one"], peer=best(lambda: decode(dense, 1, 32), 3),
               peer_name="dense, as many parameters", unit="tokens/s", goal=2,
               note=f"the dense model reads {dense.runner.weight_bytes() / 1e6:.0f} MB"),
        Figure(name="decode, 16 streams", ours=rates["many"], peer=best(lambda: decode(dense, 16, 16), 2), peer_name="dense", unit="tokens/s"),
        Figure(name="prefill of 512", ours=prefill, peer=best(lambda: 512 / seconds(lambda: generate(dense, 1, 1, 512)), 2), peer_name="dense",
               unit="tokens/s"),
    ]  # fmt: skip
    report(figures, given.json, bandwidth=bandwidth)


def made(kind: str, layers: int, changes: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' model, and karui's engine on its weights in int4."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from karui.configs.quantspec import QuantSpec
    from karui.inference.engine import Engine
    from karui.inference.models.config import from_hf
    from karui.inference.models.native import NativeRunner
    from karui.inference.models.weights import canonical
    from karui.kernels.quantize import quantize

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, **COMMON, **changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    four, eight = QuantSpec.parse("w4g32"), QuantSpec.parse("w8")
    weights = {n: w for n, w in canonical(model.state_dict()).items() if n != "lm_head.weight"}
    coded = {n: quantize(w, eight if "embed" in n else four) if w.ndim == 2 and ".gate." not in n else w for n, w in weights.items()}
    return model, Engine(NativeRunner(from_hf(config.to_dict()), coded, threads=2), kv_dtype="float16", max_context=1024, max_sequences=16)


def generate(engine: Any, count: int, new: int, prompt: int) -> None:
    import torch

    from karui.inference.requests import SamplingParams

    ids = torch.randint(0, COMMON["vocab_size"], (count, prompt)).tolist()
    engine.generate(ids, SamplingParams(max_tokens=new, ignore_eos=True))


def decode(engine: Any, count: int, new: int) -> float:
    """Tokens/s of `count` streams behind prompts of 8 tokens."""
    return count * new / seconds(lambda: generate(engine, count, new, 8))


if __name__ == "__main__":
    main()
