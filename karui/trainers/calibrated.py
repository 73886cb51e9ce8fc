"""An export whose codes are found by a method of `karui.qat`, calibrated on what the run was trained on.

    merged W16 (base as trained + adapter)  --method, rows of the run's own samples-->  codes
    checked: the merged model gives the logprobs of base and adapter run apart (peft), so a wrong merge goes no further
    reported: KL(merged || quantized) per token on the run's held-out samples: what the grid costs, apart from what was learnt
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import Recipe
from karui.trainers.parity import BOUND, PROBE, merged_model, model_logprobs

if TYPE_CHECKING:
    import torch

    from karui.qat.types import QuantizedModel

LOSS_TOKENS = 4096  # of held-out samples; 1,024 chose the worse merge in the demo
KL_TOKENS = 1024  # their logits in fp32 are held at one moment: 200 MB at a vocabulary of 49,152


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How an export finds its codes: method of `karui.qat.methods`, and `samples` rows of `length` tokens for those that need
    them."""

    method: str = "rtn"
    samples: int = 32
    length: int = 256


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """`model` holds the codes; `kl` is in nats per token over `kl_tokens` tokens; `merge_difference` the largest logprob
    difference between the merged and the unmerged model, None without an adapter."""

    model: QuantizedModel
    kl: float
    kl_tokens: int
    merge_difference: float | None

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        measured = {"kl_to_merged": self.kl, "kl_tokens": self.kl_tokens, "merge_difference": self.merge_difference}
        return {**self.model.facts, **measured}

    def lines(self) -> list[str]:
        """What happened, for the terminal."""
        tokens = self.model.facts["calibration_tokens"]
        on = f"on {tokens:,} tokens of the run's own samples" if tokens else "without data"
        out = [f"{self.model.facts['method']} {on} in {self.model.facts['seconds']:.0f} s: KL to the merged model {self.kl:.4f} "
               f"nats per token over {self.kl_tokens} held-out tokens"]  # fmt: skip
        if self.merge_difference is not None:
            out.append(f"merge: logprobs differ from base and adapter run apart by up to {self.merge_difference:.1e}")
        fallen = [r for r in self.model.report if r.fallback]
        return out + [f"{r.name}: {r.fallback}" for r in fallen]


def calibrate(
    recipe: Recipe, source: Path, spec: QuantSpec, how: Calibration, *, adapter: Path | None = None, base: QuantSpec | None = None
) -> Calibrated:
    """Merge, calibrate, quantize.

    Args:
        source: the model folder the adapter was trained on, or the trained model itself; experts in MXFP4 keep their codes.
        base: the grid of the base's linears during training.

    Raises:
        KaruiError: what the method refuses, too few tokens in the run's samples, a merge that is not the trained model.
        UnsupportedError: a method that changes more than a bundle of this run can hold.
    """
    from karui.catalogue import load_tokenizer
    from karui.inference.bundle.export import open_source
    from karui.qat.methods import check_zeros, method
    from karui.qat.run import quantize_loaded
    from karui.qat.types import Options
    from karui.trainers.data import load_samples

    chosen = method(how.method)
    if chosen.name == "rotation":
        raise UnsupportedError("rotation unties and rewrites the whole model; export with gptq, awq or autoround instead.")
    for step in recipe.prepare:
        if getattr(step, "sparsity", None) is not None:
            check_zeros(chosen.name, spec, step.method)
    tokenizer = load_tokenizer(source)
    rows = rows_of(load_samples(recipe.data, tokenizer, "train"), how) if chosen.calibrates else None
    probe = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    model = merged_model(source, None, adapter=adapter, base_spec=base, batches=True)
    difference = None
    if adapter is not None:
        apart = model_logprobs(unmerged_model(source, adapter, base), probe)
        difference = max(abs(a - b) for a, b in zip(apart, model_logprobs(model, probe)))
        if not difference <= BOUND:
            raise KaruiError(
                f"parity: the merged model's logprobs differ from base and adapter run apart by up to {difference:.3g}, bound "
                f"{BOUND:g}; the bundle was not written. This is a bug in karui: please report it."
            )
    judged = held_out_sequences(recipe, source)
    before = logprobs_of(model, judged)
    opened = open_source(source)
    coded = any(opened.spec(name).format != "none" for name in opened.names)
    found = quantize_loaded(model, opened.config, how.method, spec, rows, Options(skip=("*.experts.*",) if coded else ()))
    kl = kl_per_token(before, logprobs_of(model, judged))
    return Calibrated(model=found, kl=kl, kl_tokens=sum(len(ids) for ids in judged), merge_difference=difference)


def rows_of(samples: Any, how: Calibration) -> torch.Tensor:
    """Calibration rows [how.samples, how.length] int64: the run's training samples one after another, in their order.

    Fewer samples than asked for are taken when the run has no more tokens; none at all is an error.
    """
    import torch

    ids: list[int] = []
    for sample in samples:
        ids += sample.ids.tolist()
        if len(ids) >= how.samples * how.length:
            break
    count = min(how.samples, len(ids) // how.length)
    if count == 0:
        raise KaruiError(
            f"the run's training samples hold {len(ids)} tokens, fewer than one calibration row of {how.length}; "
            "take method rtn, which needs none, or a shorter length."
        )
    return torch.tensor(ids[: count * how.length]).view(count, how.length)


def unmerged_model(source: Path, adapter: Path, base: QuantSpec | None) -> Any:
    """Base (its linears on the grid `base`) and adapter side by side, as peft reads them: what was trained, by another way than
    the merge."""
    import torch
    from peft import PeftModel

    from karui.adapters.files import quiet, taken_out
    from karui.catalogue import load_causal_lm

    model = load_causal_lm(source, dtype=torch.float32).eval()
    put_on_grid(model, base, taken_out(adapter))
    with quiet():
        return PeftModel.from_pretrained(model, str(adapter)).eval()


def put_on_grid(
    model: Any, base: QuantSpec | None, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight
) -> None:
    """Every linear of the blocks replaced by its value on the grid, in place, as QLoRA does it to its base, after `change`."""
    import torch

    from karui.adapters.quantized_linear import NOT_QUANTIZED
    from karui.kernels.quantize import quantize

    if base is None or base.format == "none":
        return
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}" and not name.endswith(NOT_QUANTIZED):
                module.weight.copy_(quantize(change(name, module.weight), base, name=f"{name}.weight").dequantize())


def held_out_samples(recipe: Recipe, source: Path, tokens: int = LOSS_TOKENS) -> list[Any]:
    """The first held-out samples of the run, `tokens` tokens or a little more in all; none where the run has none."""
    from karui.catalogue import load_tokenizer
    from karui.trainers.data import load_samples

    found: list[Any] = []
    for sample in load_samples(recipe.data, load_tokenizer(source), "eval"):
        if sum(len(s.ids) for s in found) >= tokens:
            break
        found.append(sample)
    return found


def held_out_sequences(recipe: Recipe, source: Path) -> list[list[int]]:
    """Token ids of `held_out_samples`, `KL_TOKENS` at most; the parity probe where the run has none."""
    from karui.catalogue import load_tokenizer

    found: list[list[int]] = []
    for sample in held_out_samples(recipe, source, KL_TOKENS):
        room = KL_TOKENS - sum(map(len, found))
        if room >= 2:
            found.append(sample.ids.tolist()[:room])
    return found or [list(load_tokenizer(source)(PROBE, add_special_tokens=False)["input_ids"])]


def logprobs_of(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """[tokens, vocabulary] fp32 of every sequence."""
    import torch

    from karui.trainers.sparse import FirstOfEquals

    with torch.inference_mode(), FirstOfEquals():
        return [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1) for ids in sequences]


def kl_per_token(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(wanted, found))
    return total / sum(len(p) for p in wanted)
