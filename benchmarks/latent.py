"""Latent and sparse attention on the torch runner: what a cached token takes, and what decoding reads and takes, by form.

    python benchmarks/latent.py [--quick] [--json OUT]

A random model of four layers (quick: two) with the attention of DeepSeek-V2-Lite (16 heads, a latent of 512 and a shared key of 64)
and next to nothing beside it decodes one token over a full cache: with W_UK folded into the query, and with keys and values made of
every latent, both in turn in one process. Then one layer with the 128 heads of DeepSeek-V3.2, its indexer (64 heads, 2,048 keys chosen)
against all keys.
"""

from __future__ import annotations

from typing import Any

from figures import Figure, arguments, in_turn, report

ATTENTION: dict[str, Any] = dict(
    hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, intermediate_size=256, vocab_size=512, max_position_embeddings=65536, rms_norm_eps=1e-6,
    norm_topk_prob=True, index_n_heads=64, index_head_dim=128, index_topk=2048, rope_theta=10000.0)  # fmt: skip


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    layers, rounds = (2, 5) if given.quick else (4, 9)
    figures = bytes_per_token()
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
    report(figures, given.json)


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


def made(kind: str, layers: int, **changes: Any) -> Any:
    import torch

    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from karui.inference.models.weights import expected_shapes

    config = from_hf({**ATTENTION, "model_type": kind, "num_hidden_layers": layers, **changes})
    torch.manual_seed(0)
    return TorchRunner(config, {name: torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
                                for name, shape in expected_shapes(config).items()})  # fmt: skip


def step_of(run: Any, context: int, materializes: bool) -> Any:
    """A decoding step behind `context` - 1 random latents."""
    import torch

    from karui.inference.batch import StepBatch
    from karui.inference.models import latent

    blocks = -(-context // 16)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    batch = StepBatch(ints(7), ints(context - 1), ints(context - 1), ints(0, 1), ints(context), torch.arange(blocks, dtype=torch.int32)[None],
                      ints(0))  # fmt: skip

    def step() -> None:
        latent._materializes, kept = (lambda *_: materializes), latent._materializes
        try:
            run.forward(batch)
        finally:
            latent._materializes = kept

    run.allocate(blocks, 16, "float32")
    for cells in (run._kv._cells, run._kv._index):
        cells.tensors[0].normal_()
    return step


def read_of(run: Any, context: int) -> int:
    from karui.inference.models import latent

    return latent.bytes_read(run.config, "float32", context)


if __name__ == "__main__":
    main()
