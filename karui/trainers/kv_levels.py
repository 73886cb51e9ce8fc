"""`karui kv-levels`: the levels that the kvquant caches need, made from a bundle's own weights and put beside them."""

from __future__ import annotations

from pathlib import Path

from karui.configs.errors import KaruiError, UnsupportedError, nearest


def make_levels(name: str, *, kv_dtype: str, calibration: Path, samples: int = 16, length: int = 512) -> Path:
    """Calibrate on the first `samples` x `length` tokens of a text and write `<folder>/<kv_dtype>.safetensors`; returns its path.

    Args:
        name: a bundle, a model folder or a catalogue name; quantized weights count as what they stand for.

    Raises:
        KaruiError: another format, too little text, a model without k_proj and v_proj.
        UnsupportedError: keys that are not those of k_proj turned alike in all layers.
    """
    from karui.inference.bundle.reader import open_model
    from karui.inference.loading import find
    from karui.inference.models.config import from_hf
    from karui.inference.models.weights import canonical
    from karui.inference.speculative.target import TargetIdentity
    from karui.kernels.kvquant import BITS, file_of
    from karui.kernels.qtensor import QTensor
    from karui.qat.kvquant import calibrate
    from karui.trainers.parity import quantized_model
    from karui.trainers.quantize import rows_of_text

    if kv_dtype not in BITS:
        raise KaruiError(f"--format {kv_dtype!r} needs no levels; those that do: {', '.join(BITS)}.{nearest(kv_dtype, BITS)}")
    opened = open_model(find(name))
    if differ := from_hf(opened.config).keys_differ:
        raise UnsupportedError(f"{name}: keys {differ}; levels are of keys as k_proj makes them, all rotated alike.")
    rows = rows_of_text(opened.tokenizer_path, calibration, samples, length)
    weights = canonical(opened.weights())
    dense = {key: w.dequantize() if isinstance(w, QTensor) else w.float() for key, w in weights.items()}
    model = quantized_model(opened.config, dense)
    levels = calibrate(model, rows, BITS[kv_dtype], target=TargetIdentity.of(opened, None).weights)
    path = opened.path / file_of(kv_dtype)
    levels.save(path)
    return path
