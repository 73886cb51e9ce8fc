"""`final/` of a run that trained whole weights: an ordinary model folder, and beside it what was trained on a grid.

quantized.safetensors holds codes and scales by state-dict name, as `karui.kernels.qtensor.flatten` lays them out; the model's own
file then holds the values they stand for. An export writes the codes as they are: nothing is quantized twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from karui.configs.errors import CorruptError
from karui.kernels.qtensor import QTensor, flatten, unflatten

QUANTIZED = "quantized.safetensors"


def save_converted(model: Any, quantized: Mapping[str, QTensor], folder: Path) -> None:
    """Write a transformers model whose weights named in `quantized` are replaced by what their codes stand for."""
    import torch
    from safetensors.torch import save_file

    own = model.state_dict()
    assert not (unknown := set(quantized) - set(own)), unknown
    with torch.no_grad():
        for name, value in quantized.items():
            own[name].copy_(value.dequantize())
    model.save_pretrained(str(folder), safe_serialization=True)
    if quantized:
        tensors, specs = flatten(quantized)
        save_file(tensors, str(folder / QUANTIZED), {"specs": specs})


def load_converted(folder: Path) -> dict[str, QTensor]:
    """The codes beside a trained model, by state-dict name; empty when it was not trained on a grid.

    Raises:
        CorruptError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / QUANTIZED
    if not path.is_file():
        return {}
    try:
        with safe_open(str(path), "pt") as file:
            values = unflatten({k: file.get_tensor(k) for k in file.keys()}, (file.metadata() or {})["specs"])  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read: {error}. Export from the run's checkpoint, or train again.") from error
    return {k: v for k, v in values.items() if isinstance(v, QTensor)}
