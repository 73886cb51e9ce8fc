"""What goes into the engine and what comes out: `SamplingParams`, `Request`, `Delta`, `Completion`, `Output`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from karui.configs.errors import KaruiError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Attributes:
        temperature: 0 is greedy, and so is what is below 1e-6. Logits are divided by it after the penalties.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches p, after top_k.
        min_p: drop tokens less likely than min_p times the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of every token seen, prompt included.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, from logits of generated tokens.
        seed: same seed, same prompt and weights: same tokens, whatever else runs beside; None draws a fresh seed.
        max_tokens: tokens to generate at most; None: as many as context and memory hold.
        stop: texts that end the request; they are not part of the returned text.
        stop_token_ids: further end tokens; returned in token_ids, not in the text.
        logprobs: None for none; n for each token's logprob and its n likeliest alternatives.
        n: independent continuations of the one prompt; continuation i samples with a seed of its own.
        beams: above 1: beam search over this many beams, the n best are returned; deterministic, no sampling.
        length_penalty: beam scores are sum(logprob) / length^length_penalty.
        ignore_eos: go on past the model's own end tokens.
        typical_acceptance: LOSSY: drafts of medusa or eagle3 are accepted by Medusa's rule, which keeps likely tokens instead of
            the distribution. The completion says so in `lossy`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    n: int = 1
    beams: int = 1
    length_penalty: float = 1.0
    ignore_eos: bool = False
    typical_acceptance: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if 0 < self.temperature < 1e-6:  # logits divided by it would not be finite
            object.__setattr__(self, "temperature", 0.0)
        for name, ok, wanted in (
            ("temperature", 0 <= self.temperature <= 1e6, "0 (greedy) or a positive number of at most 1e6"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all) or a count below 2**31"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "within 1e-6 and 1e6"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "within -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "within -2 and 2"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "None or at least 1"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty texts"),
            ("stop_token_ids", all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids), "token ids of at least 0"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 1000, "None or 0 to 1000"),
            ("n", 1 <= self.n <= 256, "1 to 256"),
            ("beams", 1 <= self.beams <= 64, "1 to 64"),
        ):
            if not ok:
                raise KaruiError(f"sampling: {name} is {getattr(self, name)!r}; expected {wanted}.")
        if self.beams > 1 and (self.temperature or self.n > self.beams or self.logprobs is not None or self.penalized):
            raise KaruiError(f"sampling: beam search ({self.beams} beams) is greedy and returns at most as many texts as beams: "
                             "temperature must be 0, n at most beams, and logprobs and penalties unset.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


GREEDY = SamplingParams()


@dataclass(kw_only=True)
class Request:
    """One prompt.

    Attributes:
        prompt: text, or token ids that are used as they are.
        params: sampling and limits.
        priority: lower runs first, like `nice`; among equals the earlier request.
        adapter: name of a loaded adapter, None for the base model.
        cache_salt: prefix-cache entries are shared only among requests of the same salt.
        on_delta: called on the engine's thread with every `Delta`; returning False cancels the request.
        id: unique while the request lives; None makes one.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = GREEDY
    priority: int = 0
    adapter: str | None = None
    cache_salt: str = ""
    on_delta: Callable[[Delta], Any] | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Of one emitted token: `raw` under the model's own distribution (temperature 1, nothing filtered), `processed` under the
    distribution it was drawn from (0.0 when greedy), `top`: the likeliest (token, raw logprob) pairs, best first."""

    token: int
    raw: float
    processed: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """What one step added to one continuation; `finish_reason` is set on the last one. `text` never holds half a character."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass
class Completion:
    """One finished continuation. `stop_reason`: the stop text or token that ended it, None at a limit. `lossy`: drafts were
    accepted by a rule that does not keep the model's distribution."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    score: float | None = None
    lossy: bool = False


@dataclass
class Output:
    """A finished request. Times in seconds from its submission; `ttft_s` is the time to the first token, None without one."""

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        """The first continuation's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first continuation's tokens."""
        return self.completions[0].token_ids
