"""Tiny random models for the engine's tests: a transformers model, its config and its weights under karui's names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from karui.inference.models.config import ModelConfig, from_hf

SIZES: dict[str, Any] = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
                             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)


def tiny(kind: str, seed: int = 0, **changes: Any) -> tuple[Any, ModelConfig, dict[str, torch.Tensor]]:
    """A randomly initialised transformers model in eval mode and what `TorchRunner` needs of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    hf = AutoConfig.for_model(kind, **{**SIZES, "head_dim": 8, **changes})
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():  # norms and biases start as ones and zeros and would hide mistakes
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if "norm" in name else 0.0))
    config = from_hf(hf.to_dict())
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    if config.tied:
        weights.pop("lm_head.weight", None)
    return model, config, weights


def preempting(engine: Any, every: int = 3) -> Any:
    """The engine, which preempts its last sequence in every third step."""
    schedule, steps = engine.scheduler.schedule, itertools.count(1)

    def preempted() -> Any:
        if next(steps) % every == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        return schedule()

    engine.scheduler.schedule = preempted
    return engine


def assert_bits_do_not_depend_on_the_way(runner, kv_dtype: str, requests: list[Any], blocks: int | None) -> tuple[Any, Any, Any]:
    """Alone, over a warm cache, batched, in small chunks, and preempted where memory holds `blocks` blocks of 4 (None: by hand): equal to
    the last bit of every logprob. Returns (what an engine says to requests, an engine with further options, what was said)."""
    from karui.inference.engine import Engine

    def said(engine, requests):
        return [[(c.token_ids, c.logprobs) for c in o.completions] for o in engine.generate(requests)]

    def make(**options):
        return Engine(runner, kv_dtype=kv_dtype, block_size=4, **{"memory": "1MB", **options})

    engine = make()
    alone = [said(engine, [r])[0] for r in requests]
    assert [said(engine, [r])[0] for r in requests] == alone and engine.stats.num_cached_prompt_tokens > 0
    assert said(make(), requests) == alone
    assert said(make(max_tokens_per_step=7, max_sequences=2), requests) == alone
    engine = preempting(make()) if blocks is None else make(memory=runner.kv_bytes_per_token(kv_dtype) * 4 * blocks)
    assert said(engine, requests) == alone and engine.stats.num_preemptions > 0
    return said, make, alone



@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
