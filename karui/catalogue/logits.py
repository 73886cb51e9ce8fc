"""What makes logits of a transformers model's last hidden states: logits = c tanh(s * hidden @ weight.T / c).

The scale s (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`) is taken into the hidden states at once; the
soft cap c (Gemma 2, arXiv 2408.00118) goes to whoever makes logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from karui.configs.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def logit_scale(config: Any) -> float:
    """The factor on logits of a transformers configuration; 1 for most models.

    Raises:
        UnsupportedError: `logit_scale` of a model type whose convention is not known.
    """
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    factor = getattr(config, "logit_scale", None)
    if factor in (None, 1, 1.0):
        return 1.0
    if not str(config.model_type).startswith("cohere"):
        raise UnsupportedError(f"model type {config.model_type}: logit_scale is not supported in training.")
    return float(factor)


def logit_softcap(config: Any) -> float | None:
    """The soft cap of a transformers configuration's logits, None without one."""
    return getattr(config, "final_logit_softcapping", None) or None


def scaled(hidden: torch.Tensor, config: Any) -> torch.Tensor:
    """Hidden states times the logits' scale, so that `scaled(hidden) @ weight.T` are the logits before their cap."""
    factor = logit_scale(config)
    return hidden if factor == 1.0 else hidden * factor


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """c tanh(logits / c), or the logits where there is no cap."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap
