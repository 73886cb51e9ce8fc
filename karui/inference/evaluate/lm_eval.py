"""EleutherAI's lm-evaluation-harness over the engine: extra `karui[eval]`.

    from karui.inference.evaluate.lm_eval import KaruiLM
    lm_eval.simple_evaluate(model=KaruiLM(Engine.load("bundle")), tasks=["hellaswag"])

`KaruiLM` is made when it is first asked for, so that importing this module does not import lm-eval. What it does is in
`EngineRequests`, which needs nothing but an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.requests import Delta, Request, SamplingParams


class EngineRequests:
    """The three request kinds of the harness. A request is anything with `args`.

    Args:
        engine: a loaded engine with a tokenizer.
        batch: requests handed to the engine at once.
        max_gen_toks: limit of `generate_until` where the task gives none.
    """

    def __init__(self, engine: Any, batch: int = 32, max_gen_toks: int = 256) -> None:
        if engine.tokenizer is None:
            raise KaruiError("the evaluation harness works on texts; load an engine with a tokenizer.")
        self.engine, self.tokenizer, self.batch, self.max_gen_toks = engine, engine.tokenizer, batch, max_gen_toks
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        self.prefix_token = eos if bos is None else bos
        if self.prefix_token is None:
            raise KaruiError("the evaluation harness scores first tokens behind a BOS or EOS token; this tokenizer has neither.")

    def encode(self, text: str) -> list[int]:
        """Without special tokens, as the harness's own models do by default."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, cut where the continuation begins in their joint tokenization; trailing spaces go to the latter."""
        if not context:
            return [self.prefix_token], self.encode(continuation)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole, head = self.encode(context + continuation), self.encode(context)
        return head, whole[len(head):]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(summed log-probability of the continuation, whether greedy decoding would say it) for (context, continuation)."""
        return self.loglikelihood_tokens([self.encode_pair(*r.args) for r in requests])

    def loglikelihood_tokens(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """As `loglikelihood`, of token ids. A context that is too long loses its beginning."""
        results: list[tuple[float, bool]] = []
        for at in range(0, len(pairs), self.batch):
            part = [(context[-(self.engine.max_context - len(continuation)):], continuation)
                    for context, continuation in pairs[at:at + self.batch]]
            scores = self.engine.score([context + continuation for context, continuation in part])
            sums = [float(s[len(s) - len(c):].double().sum()) if c else 0.0 for s, (_, c) in zip(scores, part, strict=True)]
            results += zip(sums, self._greedy(part), strict=True)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Summed log-probability of whole texts; the first token is predicted from the prefix token, long texts by windows."""
        results = []
        for request in requests:
            pairs = list(self.windows(self.encode(request.args[0])))
            scores = self.engine.score([context + target for context, target in pairs])
            results.append(sum(float(s[len(s) - len(t):].double().sum()) for s, (_, t) in zip(scores, pairs, strict=True)))
        return results

    def windows(self, tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """(context, target) pairs that predict every token once, each window as long as the context allows."""
        size = self.engine.max_context - 1
        for at in range(0, len(tokens), size):
            target = tokens[at:at + size]
            if at == 0:
                yield [self.prefix_token], target
            else:       # the last, shorter window is filled up with earlier tokens as context
                yield tokens[max(0, at + len(target) - size - 1):at], target

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continuations of (context, options); options as the harness gives them: until, max_gen_toks, temperature, ..."""
        listed = []
        for request in requests:
            context, options = request.args[0], dict(request.args[1])
            until = options.pop("until", None) or []
            limit = int(options.pop("max_gen_toks", self.max_gen_toks))
            temperature = float(options.pop("temperature", 0.0) or 0.0)
            if options.pop("do_sample", None) is False:
                temperature = 0.0
            known = {k: options.pop(k) for k in ("top_p", "top_k", "min_p", "repetition_penalty") if k in options}
            if options:
                raise UnsupportedError(f"generate_until: the option {sorted(options)[0]!r} is not supported.")
            if limit >= self.engine.max_context:
                raise KaruiError(f"generate_until: {limit} new tokens leave no room for a prompt in a context of "
                                 f"{self.engine.max_context}.")
            prompt = self.encode(context)[-(self.engine.max_context - limit):] or [self.prefix_token]
            params = SamplingParams(max_tokens=limit, temperature=temperature, seed=0,
                                    stop=tuple([until] if isinstance(until, str) else (u for u in until if u)), **known)
            listed.append(Request(prompt=prompt, params=params))
        return [output.text for output in self.engine.generate(listed)]

    def _greedy(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Decode greedily only until the first token that differs."""
        requests = [_follow(context, continuation) for context, continuation in pairs if continuation]
        outputs = iter(self.engine.generate(requests))
        return [not continuation or next(outputs).token_ids == continuation for _, continuation in pairs]


def _follow(context: list[int], continuation: list[int]) -> Request:
    said: list[int] = []

    def same(delta: Delta) -> bool:
        said.extend(delta.token_ids)
        return said == continuation[:len(said)]

    return Request(prompt=context, params=SamplingParams(max_tokens=len(continuation), ignore_eos=True), on_delta=same)


def __getattr__(name: str) -> Any:
    if name != "KaruiLM":
        raise AttributeError(name)
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UnsupportedError("the evaluation harness is not installed; install it with: pip install 'karui[eval]'") from None
    return type("KaruiLM", (EngineRequests, LM), {
        "__doc__": EngineRequests.__doc__, "__init__": _init_with(LM),
        "tokenizer_name": property(lambda self: self.tokenizer.name_or_path),
        "apply_chat_template": lambda self, history, add_generation_prompt=True: self.tokenizer.apply_chat_template(
            history, tokenize=False, add_generation_prompt=add_generation_prompt)})


def _init_with(base: Any) -> Any:
    def __init__(self: Any, engine: Any, batch: int = 32, max_gen_toks: int = 256) -> None:
        base.__init__(self)
        EngineRequests.__init__(self, engine, batch, max_gen_toks)
    return __init__
