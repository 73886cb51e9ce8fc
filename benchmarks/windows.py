"""Bytes of keys and values that a sequence holds where layers have a window, and where the engine keeps all keys.

    python benchmarks/windows.py [--quick] [--json OUT]

The engine's scheduler over models' shapes, without their weights: a prompt of all but 64 tokens of the context in chunks of 512, then
64 tokens one by one; the most bytes that are held in a step, and those at the end. No times.
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


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    figures = []
    for name, shape in SHAPES.items():
        for context in (8192,) if given.quick else (8192, 32768):
            (most, end), (all_most, all_end) = held(shape, context, True), held(shape, context, False)
            for what, ours, peer in (("most", most, all_most), ("at the end", end, all_end)):
                figures.append(Figure(name=f"{name}: {what}, context {context}", ours=ours, peer=peer, peer_name="all keys kept",
                                      goal=1.0, better="lower", unit="bytes"))  # fmt: skip
    report(figures, given.json)


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

        self.config = from_hf(dict(hidden_size=64, intermediate_size=64, vocab_size=512, num_attention_heads=8,
                                   max_position_embeddings=context) | shape)  # fmt: skip
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
