"""Hybrids on the torch runner: what a sequence takes, what decoding takes as a context grows, and prefill by chunked recurrences.

    python benchmarks/hybrid.py [--quick] [--json OUT]

Bytes: a sequence's state and keys in bfloat16 (recurrent states in fp32) at a context, against the same model with attention in
every layer; the shapes are LFM2-1.2B's, Qwen3-Next-80B-A3B's and Granite-4.0-H-Small's. Times: random models of eight layers, 512
wide; the hybrid has attention in every fourth layer, the peer in all. Prefill: the chunked delta rule and state space against the
same recurrences row by row. Prefix cache: a prompt that is repeated, with its state kept and without.
"""

from __future__ import annotations

import time
from typing import Any

from figures import Figure, arguments, in_turn, report

SHAPES: dict[str, dict[str, Any]] = {
    "LFM2-1.2B": dict(
        model_type="lfm2", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=65536,
        intermediate_size=12288, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14], max_position_embeddings=128000),
    "Qwen3-Next-80B-A3B": dict(
        model_type="qwen3_next", hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, vocab_size=151936, intermediate_size=5632, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, max_position_embeddings=262144),
    "Granite-4.0-H-Small": dict(
        model_type="granitemoehybrid", hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=100352, shared_intermediate_size=1536, mamba_expand=2, mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1,
        mamba_d_state=128, mamba_d_conv=4, max_position_embeddings=131072,
        layer_types=["full_attention" if i in (5, 15, 25, 35) else "linear_attention" for i in range(40)]),
}  # fmt: skip
SMALL: dict[str, Any] = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=64,
                             intermediate_size=256, vocab_size=512, max_position_embeddings=65536)
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "conv", "conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "qwen3_next": dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
                       linear_conv_kernel_dim=4),
    "bamba": dict(attn_layer_indices=[3, 7], mamba_expand=2, mamba_n_heads=16, mamba_d_head=64, mamba_n_groups=1,
                  mamba_d_state=64, mamba_d_conv=4),
}  # fmt: skip


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    rounds = 3 if given.quick else 7
    figures = [*bytes_of_a_sequence(), *recurrences(256 if given.quick else 512, rounds)]
    attention = made("llama", {})
    for kind, changes in KINDS.items():
        hybrid = made(kind, changes)
        for context in (512, 8192) if given.quick else (512, 8192, 32768):
            times = in_turn({"hybrid": decode(hybrid, context), "attention": decode(attention, context)}, rounds, lambda step: step.prepared())
            figures.append(Figure(name=f"{kind}: decode at context {context}", ours=1 / times["hybrid"], peer=1 / times["attention"],
                                  peer_name="attention in every layer", goal=1.0 if context > 4096 else None, unit="tokens/s"))
        if kind != "lfm2":
            figures.append(prefill(hybrid, kind, rounds, 512 if given.quick else 2048))
        figures.append(prefix(hybrid, kind, 512 if given.quick else 2048))
    report(figures, given.json)


def bytes_of_a_sequence() -> list[Figure]:
    import torch

    from karui.inference.cache import kv
    from karui.inference.cache.states import page_bytes
    from karui.inference.models.config import from_hf

    found = []
    for name, shape in SHAPES.items():
        config = from_hf(shape)
        assert config.recurrent is not None
        state = page_bytes(config.recurrent, torch.bfloat16, torch.float32)
        token, peer = (kv.bytes_per_token(n, config.num_kv_heads, config.head_dim, "bfloat16")
                       for n in (config.num_kv_layers, config.num_layers))  # fmt: skip
        for context in (1024, 32768):
            found.append(Figure(
                name=f"{name}, context {context}", ours=(state + context * token) / 1e6, peer=context * peer / 1e6,
                peer_name="attention in every layer", better="lower", goal=1.0 if context > 4096 else None, unit="MB",
                note=f"state {state / 1e6:.2f} MB, {token} bytes/token against {peer}; even at {state / (peer - token):.0f} tokens"))  # fmt: skip
    return found


def recurrences(rows: int, rounds: int) -> list[Figure]:
    """One layer's recurrence alone, in the shapes of Qwen3-Next and Granite-4.0-H-Small: chunked against row by row."""
    import torch

    from karui.inference.models.recurrent import delta_net, mamba2

    def unit(*shape: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(1, rows, *shape), dim=-1)

    def step(rule: Any, given: tuple[torch.Tensor, ...]) -> Any:
        def run_it() -> None:
            rule(*given)

        return run_it

    delta = (unit(32, 128), unit(32, 128), unit(32, 128), -torch.rand(1, rows, 32), torch.rand(1, rows, 32), torch.zeros(1, 32, 128, 128))
    state = (unit(128, 64), -torch.rand(1, rows, 128), unit(128, 128), unit(128, 128), torch.zeros(1, 128, 64, 128))
    found = []
    for name, module, given in (("delta rule", delta_net, delta), ("Mamba-2", mamba2, state)):
        times = in_turn({"chunked": step(module.chunked, given), "rows": step(module.recur, given)}, rounds)
        found.append(Figure(name=f"{name}: {rows} rows of one layer", ours=rows / times["chunked"], peer=rows / times["rows"],
                            peer_name="row by row", goal=1.0, unit="rows/s"))  # fmt: skip
    return found


def made(kind: str, changes: dict[str, Any]) -> Any:
    import torch

    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from karui.inference.models.weights import expected_shapes

    config = from_hf({**SMALL, "model_type": kind, **changes})
    torch.manual_seed(0)
    return TorchRunner(config, {name: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.rand(shape)
                                for name, shape in expected_shapes(config).items()})  # fmt: skip


def batch_of(run: Any, rows: int, context: int) -> Any:
    """The last `rows` tokens of a context."""
    import torch

    from karui.inference.batch import StepBatch

    def ints(*values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    at = torch.arange(context - rows, context, dtype=torch.int32)
    states = None if run.config.recurrent is None else ints([0, rows, 1, 2])
    return StepBatch(at % 500, at, at, ints(0, rows), ints(context), torch.arange(-(-context // 16), dtype=torch.int32)[None],
                     ints(rows - 1), states=states)  # fmt: skip


def ready(run: Any, context: int) -> None:
    run.allocate(-(-context // 16), 16, "float32")
    run._kv.data.normal_()
    if run.config.recurrent is not None:
        run.allocate_states(2)


def decode(run: Any, context: int) -> Any:
    batch = batch_of(run, 1, context)

    def step() -> None:
        run.forward(batch)

    def prepared() -> None:
        ready(run, context)

    step.prepared = prepared  # type: ignore[attr-defined]
    return step


def prefill(run: Any, kind: str, rounds: int, rows: int) -> Figure:
    from karui.inference.models.recurrent import delta_net, mamba2

    module: Any = delta_net if kind == "qwen3_next" else mamba2
    batch, chunked = batch_of(run, rows, rows), module.chunked

    def step(rule: Any) -> Any:
        def run_it() -> None:
            module.chunked = rule
            try:
                run.forward(batch)
            finally:
                module.chunked = chunked

        run_it.prepared = lambda: ready(run, rows)  # type: ignore[attr-defined]
        return run_it

    times = in_turn({"chunked": step(chunked), "rows": step(module.recur)}, rounds, lambda step: step.prepared())
    return Figure(name=f"{kind}: prefill of {rows}", ours=rows / times["chunked"], peer=rows / times["rows"], peer_name="row by row",
                  goal=1.0, unit="tokens/s")  # fmt: skip


def prefix(run: Any, kind: str, length: int) -> Figure:
    """Seconds to the first token of a prompt that has been seen, against one that has not."""
    from karui.inference.engine import Engine
    from karui.inference.requests import SamplingParams

    engine = Engine(run, memory="512MB", kv_dtype="float32", max_context=length + 16)
    one = SamplingParams(max_tokens=1)
    engine.generate([[9] * 40], one)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        output = engine.generate([[t % 500 for t in range(length)]], one)[0]
        seconds.append(time.perf_counter() - begin)
    return Figure(name=f"{kind}: first token of a repeated prompt of {length}", ours=1 / seconds[1], peer=1 / seconds[0],
                  peer_name="the first time", goal=1.0, unit="prompts/s", note=f"{output.num_cached_tokens} tokens found")  # fmt: skip


if __name__ == "__main__":
    main()
