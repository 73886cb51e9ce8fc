"""EVA (arXiv 2410.07170): A starts as the principal directions of what a layer sees, B as zero.

peft's incremental SVD does the work. With rho above 1 ranks move to the layers whose directions explain more of their input's
variance (section 3.2); a layer may lose its adapter to others. The ranks are then in the adapter's config, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from karui.adapters.files import quiet


@torch.no_grad()
def start_from_activations(model: Any, batches: Sequence[Any], forward: Callable[[Any, Any], Any], *, rho: float = 1.0) -> None:
    """Set A of every LoRA layer from the activations of `batches`, each run by `forward(model, batch)`.

    Args:
        model: a peft LoRA model whose B is zero, so that what the layers see is what the base alone makes.
        rho: see above; 1 keeps every layer's rank.
    """
    from peft import EvaConfig, initialize_lora_eva_weights

    config = model.peft_config["default"]
    config.init_lora_weights, config.eva_config = "eva", EvaConfig(rho=rho)
    with quiet():
        initialize_lora_eva_weights(
            model, list(batches), forward_fn=forward, prepare_model_inputs_fn=None,
            prepare_layer_inputs_fn=_rows, show_progress_bar=False)
    config.init_lora_weights, config.eva_config = True, None  # done; whoever loads the file must not do it again


def _rows(layer_input: Any, model_input: Any, layer_name: str) -> torch.Tensor:
    x: torch.Tensor = layer_input[0] if isinstance(layer_input, (tuple, list)) else layer_input
    return x.reshape(-1, x.shape[-1])
