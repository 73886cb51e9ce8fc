"""The parity gate: a bundle on disk, run by the engine, against the model that training prepared.

The prepared model is built again in the training stack: transformers' own forward over weights that were merged, put on
their grids and dequantized here. The bundle is read by the engine's reference runner in fp32. Both see the same codes, so
their logprobs differ by rounding in fp32 alone, and the bound is that tight. The native runner's int8 activations trade
exactness for speed; how far they move the logprobs is measured and stored beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.manifest import Manifest
from karui.configs.quantspec import QuantSpec

if TYPE_CHECKING:
    import torch

    from karui.kernels.qtensor import QTensor

BOUND = 2e-3
"""Largest difference of a token's logprob (natural log) that fp32 rounding may cause."""
INT8_BOUND = 0.1
"""The same where activations are rounded to 8 bits per token: a difference in the last bit of fp32 can move a code by one. A
model that such moves change more (ternary weights) may differ by `INT8_FACTOR` times what it changes when its embeddings move by
`SHAKE`."""
INT8_FACTOR, SHAKE = 4.0, 1e-6
NATIVE_BOUND = 0.5
"""Largest mean difference that int8 activations may cause before they count as broken rather than as coarse."""

LONGEST = 1024
"""Tokens of the text that both sides read, at most."""
PROBE = (
    "The river rose in the night, and by morning the lower field was a lake. Anna counted 17 sheep on the hill and "
    "wrote the number down; the day before there had been 21.\n\ndef area(width, height):\n    return width * height\n\n"
    "Water boils at 100 degrees Celsius at sea level. In 1889 the tower was opened to the public, 300 metres high."
)


def bound_for(specs: Iterable[QuantSpec]) -> float:
    """The bound of a bundle with weights on these grids."""
    return INT8_BOUND if any(spec.activation_bits == 8 for spec in specs) else BOUND


def make_gate(tokenizer_dir: Path, prepared: Callable[[Manifest], Any], bound: float = BOUND) -> Callable[[Path], dict[str, Any]]:
    """A `Parity` for the bundle writer.

    Args:
        tokenizer_dir: the model's folder.
        prepared: builds the prepared model, given the bundle's manifest: `merged_model` or `quantized_model` below.
        bound: largest difference of a token's logprob.

    Returns figures {"max_abs_dlogprob", "bound", "tokens", "native_mean_abs_dlogprob", ...}.
    The gate raises `KaruiError` when the bound is not met.
    """

    def gate(bundle: Path) -> dict[str, Any]:
        from karui.catalogue import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_dir)
        ids = past_window(list(tokenizer(PROBE, add_special_tokens=False)["input_ids"]), bundle)
        model = prepared(Manifest.read(bundle))
        wanted = model_logprobs(model, ids)
        exact = engine_logprobs(bundle, ids, runner="torch")
        figures: dict[str, Any] = {"max_abs_dlogprob": _largest(wanted, exact), "bound": bound, "tokens": len(wanted)}
        if figures["max_abs_dlogprob"] > bound >= INT8_BOUND:
            figures["bound"] = max(bound, INT8_FACTOR * _largest(wanted, model_logprobs(model, ids, shake=SHAKE)))
        if not figures["max_abs_dlogprob"] <= figures["bound"]:
            raise KaruiError(
                f"parity: the engine's logprobs differ from the prepared model's by up to {figures['max_abs_dlogprob']:.3g} over "
                f"{len(wanted)} tokens, bound {figures['bound']:.3g}; the bundle was not written. This is a bug in karui: please "
                f"report it."
            )
        fast = engine_logprobs(bundle, ids, runner="auto")
        mean = sum(abs(a - b) for a, b in zip(wanted, fast)) / len(wanted)
        figures |= {"native_mean_abs_dlogprob": mean, "native_max_abs_dlogprob": _largest(wanted, fast)}
        if not mean <= NATIVE_BOUND:
            raise KaruiError(
                f"parity: with the native runner the mean logprob difference is {mean:.3g}, bound {NATIVE_BOUND:g}; the "
                "bundle was not written. Int8 activations do not suit this model; export with --spec none or a wider grid."
            )
        return figures

    return gate


def past_window(ids: list[int], bundle: Path) -> list[int]:
    """The tokens, repeated to twice the sliding window of layers that have one, or to `LONGEST`; not for a window beyond that."""
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    wanted = min(2 * window, LONGEST, config.get("max_position_embeddings", LONGEST + 1) - 1)
    return (ids * -(-wanted // len(ids)))[:wanted] if wanted > max(window, len(ids)) else ids


def merged_model(
    source: Path, manifest: Manifest | None, *, adapter: Path | None, base_spec: QuantSpec | None,
    quantized: Mapping[str, QTensor | torch.Tensor] | None = None, batches: bool = False,
) -> Any:  # fmt: skip
    """Transformers' fp32 model of `source`, its adapter merged and its weights on the manifest's grids, dequantized.

    Weights in `quantized` are the values of those codes. Without a manifest the merged weights stay as they are. Attention is
    transformers' plainest, for `batches` the one that is fast.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    from karui.catalogue.helpers import load_causal_lm, take_batches
    from karui.inference.bundle.merge import base_weight, load_adapter
    from karui.kernels.qtensor import QTensor
    from karui.kernels.quantize import quantize
    from karui.qat.activations import attach
    from karui.qat.experts import unfuse

    transformers_logging.disable_progress_bar()
    model = load_causal_lm(source, dtype=torch.float32, attn_implementation="eager").eval()
    if batches:
        take_batches(model)
    unfuse(model)
    lora = load_adapter(adapter) if adapter is not None else None
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            w = parameter.data
            given = (quantized or {}).get(name)
            if given is not None:
                parameter.data.copy_(given.dequantize() if isinstance(given, QTensor) else given)
                continue
            if w.ndim == 2 and ".layers." in name:
                w = base_weight(name, w, base_spec, lora)
            if lora is not None and lora.changes(name):
                w = lora.apply(name, w)
            record = manifest.tensors.get(name) if manifest is not None else None
            if record is not None and record.spec != "none":
                w = quantize(w, QuantSpec.parse(record.spec), name=name).dequantize()
            parameter.data.copy_(w)
    if manifest is not None:
        eights = [n for n, r in manifest.tensors.items() if QuantSpec.parse(r.spec).activation_bits == 8]
        attach(model, dict.fromkeys(eights))
    return model


def quantized_model(config: dict[str, Any], dense: Mapping[str, torch.Tensor], eights: Sequence[str] = ()) -> Any:
    """Transformers' fp32 model of a parsed config.json with the given weights, under its names or karui's; every parameter must
    be among them or tied.

    The inputs of the linears named in `eights` are quantized to 8 bits per token, as the engine does for specs that end in a8.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from karui.inference.models.config import special_floats
    from karui.inference.models.weights import canonical_name
    from karui.qat.activations import attach
    from karui.qat.experts import unfuse

    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**special_floats(config)), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    ).eval()
    unfuse(model)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            parameter.data.copy_(dense[name if name in dense else canonical_name(name)])
        for name, buffer in model.named_buffers():  # what routers of DeepSeek add to their scores is no parameter
            if (held := name if name in dense else canonical_name(name)) in dense:
                buffer.copy_(dense[held])
    attach(model, dict.fromkeys(eights))
    return model


def model_logprobs(model: Any, ids: Sequence[int], shake: float = 0.0) -> list[float]:
    """Logprobs of ids[1:] under a transformers model; every value of the embeddings moved by up to the share `shake`."""
    import torch

    from karui.trainers.sparse import FirstOfEquals

    with torch.inference_mode(), FirstOfEquals():
        rows = model.get_input_embeddings()(torch.tensor([list(ids)]))
        moved = 1 + shake * (2 * torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)) - 1)
        logits = model(inputs_embeds=rows * moved, use_cache=False).logits[0, :-1].float()
    return (-torch.nn.functional.cross_entropy(logits, torch.tensor(list(ids[1:])), reduction="none")).tolist()


def engine_logprobs(bundle: Path, ids: Sequence[int], *, runner: str) -> list[float]:
    """Logprobs of ids[1:] under the engine."""
    from karui.inference.engine import Engine

    return (
        Engine.load(bundle, device="cpu", runner=runner, kv_dtype="float32", max_context=len(ids) + 1, max_sequences=1)
        .score([list(ids)])[0]
        .tolist()
    )


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    assert len(a) == len(b), "one logprob per token after the first"
    return max(abs(x - y) for x, y in zip(a, b))
