"""Tiny random models, calibration rows, and a quantizer for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from karui.qat.run import quantize_loaded
from karui.qat.types import Options, QuantizedModel

SIZES: dict[str, Any] = dict(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def tiny(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A randomly initialised causal LM in eval mode whose norms and inputs are uneven, as real ones are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.15 + (torch.exp(torch.randn_like(p)) if "norm" in name else 0.0))
    return model


def rows(samples: int = 8, length: int = 32, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (samples, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, method: str, spec: str = "w4g16", data: torch.Tensor | None = None, **named: Any) -> QuantizedModel:
    return quantize_loaded(model, model.config.to_dict(), method, spec, rows() if data is None else data, Options(**named))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
