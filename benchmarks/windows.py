"""Bytes of keys and values that a sequence holds where layers have a window, and where the engine keeps all keys.

    python benchmarks/windows.py [--quick] [--json OUT]

The engine's scheduler over models' shapes, without their weights: a prompt of all but 64 tokens of the context in chunks of 512, then
64 tokens one by one; the most bytes that are held in a step, and those at the end. No times. Then the native runner with the layers of
Gemma 3 1B over a narrow residual stream, random weights: what its process grows by while it reads such a prompt and answers.
"""

from __future__ import annotations

from typing import Any

import torch
from figures import Figure, arguments, report

SHAPES: dict[str, dict[str, Any]] = {
    "every layer, window 512 (Mistral 7B's shape)": dict(
        model_type="mistral", num_hidden_layers=32, num_key_value_heads=8, head_dim=128, sliding_window=512),
    "every layer, window 4,096 (Mistral 7B v0.1)": dict(
        model_type="mistral", num_hidden_layers=32, num_key_value_heads=8, head_dim=128, sliding_window=4096),
    "every second layer, window 4,096 (Gemma 2 2B)": dict(
        model_type="gemma2", num_hidden_layers=26, num_key_value_heads=4, head_dim=256, sliding_window=4096,
        query_pre_attn_scalar=256),
    "22 of 26 layers, window 512 (Gemma 3 1B)": dict(
        model_type="gemma3_text", num_hidden_layers=26, num_key_value_heads=1, head_dim=256, sliding_window=512,
        query_pre_attn_scalar=256),
    "every second layer, window 128 (gpt-oss 20B)": dict(
        model_type="gpt_oss", num_hidden_layers=24, num_key_value_heads=8, head_dim=64, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4),
}  # fmt: skip


SMALL: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, vocab_size=512, num_attention_heads=8)


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    figures = []
    for name, shape in SHAPES.items():
        for context in (8192,) if given.quick else (8192, 32768):
            (most, end), (all_most, all_end) = held(shape, context, True), held(shape, context, False)
            for what, ours, peer in (("most", most, all_most), ("at the end", end, all_end)):
                figures.append(Figure(name=f"{name}: {what}, context {context}", ours=ours, peer=peer, peer_name="all keys kept",
                                      goal=1.0, better="lower", unit="bytes"))  # fmt: skip
    context = 4096 if given.quick else 16384
    ours, peer = (grown(context, windows) for windows in (True, False))
    figures.append(Figure(name=f"native runner, Gemma 3 1B's layers, context {context}", ours=ours, peer=peer, peer_name="all keys kept",
                          goal=0.5, better="lower", unit="bytes resident"))  # fmt: skip
    report(figures, given.json)


def grown(context: int, windows: bool) -> int:
    """Bytes that this process grows by; its work buffers are there before."""
    import psutil

    from karui.inference.cache.groups import one_group
    from karui.inference.engine import Engine
    from karui.inference.models.config import from_hf
    from karui.inference.models.native import NativeRunner
    from karui.inference.models.weights import expected_shapes
    from karui.inference.requests import Request, SamplingParams

    torch.manual_seed(0)
    shape = SHAPES["22 of 26 layers, window 512 (Gemma 3 1B)"]
    config = from_hf(SMALL | dict(max_position_embeddings=context) | shape)
    weights = {name: torch.randn(size) * size[-1] ** -0.5 if len(size) > 1 else torch.zeros(size)
               for name, size in expected_shapes(config).items()}  # fmt: skip
    runner = NativeRunner(config, weights, threads=2)
    if not windows:
        runner.kv_groups = lambda kv_dtype: one_group(config.num_layers)

    def answer(length: int) -> None:
        engine = Engine(runner, kv_dtype="float16", memory="64GiB", max_sequences=1, max_context=length)
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        engine.generate(Request(prompt=[i % 500 for i in range(length - 64)], params=params))

    answer(1024)
    runner.allocate(1, 16, "float16")
    before = psutil.Process().memory_info().rss
    answer(context)
    return psutil.Process().memory_info().rss - before


def held(shape: dict[str, Any], context: int, windows: bool) -> tuple[int, int]:
    """(most bytes, bytes at the end) that one sequence holds."""
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams

    runner = Keys(shape, context, windows)
    engine = Engine(runner, kv_dtype="float16", memory="64GiB", max_sequences=1)
    block = engine.pool.block_size * runner.kv_bytes_per_token("float16") * engine.groups.size // runner.config.num_layers
    runner.look = lambda: (engine.pool.num_blocks - engine.pool.num_free) * block
    engine.generate(Request(prompt=[i % 500 for i in range(context - 64)], params=SamplingParams(max_tokens=64)))
    return max(runner.held), runner.held[-1]


class Keys:
    """A runner with a model's shape that computes nothing."""

    def __init__(self, shape: dict[str, Any], context: int, windows: bool) -> None:
        from karui.inference.cache.groups import groups_of, one_group
        from karui.inference.models.config import from_hf

        self.config = from_hf(SMALL | dict(max_position_embeddings=context) | shape)
        found = groups_of(self.config.sliding_window, context) if windows else one_group(self.config.num_layers)
        self.kv_groups = lambda kv_dtype: found
        self.held: list[int] = []
        self.look: Any = None

    def allocate(self, *sizes: Any, **groups: Any) -> None:
        pass

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        from karui.inference.cache.kv import bytes_per_token

        return bytes_per_token(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, kv_dtype)

    def weight_bytes(self) -> int:
        return 0

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        pass

    def forward(self, batch: Any) -> Any:
        from karui.inference.batch import StepOutput

        self.held.append(self.look())
        return StepOutput(torch.zeros(len(batch.logit_rows), self.config.vocab_size))


if __name__ == "__main__":
    main()
