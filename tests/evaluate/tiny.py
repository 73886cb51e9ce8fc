"""A byte-level tokenizer with a chat template, and a tiny random llama behind an engine, made in milliseconds."""

from __future__ import annotations

from typing import Any

import torch

from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.factory import Speculator
from tests.speculative.conftest import tiny_config, tiny_weights

TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}")


def tokenizer(chat: bool = True) -> Any:
    """One token per byte (ids 2 .. 257 in the byte alphabet's order), <s> = 0, </s> = 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>",
                                   chat_template=TEMPLATE if chat else None, clean_up_tokenization_spaces=False)


def engine(speculation: str | None = None, chat: bool = True, **options: Any) -> Engine:
    """258 tokens, a context of 256 unless told otherwise."""
    config = tiny_config(258)
    speculate = None
    if speculation is not None:
        spec = SpeculationConfig.parse(speculation)
        speculate = Speculation(spec, Speculator(spec, config).new)
    return Engine(TorchRunner(config, tiny_weights(config)), tokenizer(chat), eos_token_ids=[1], speculation=speculate,
                  **{"max_context": 256, "memory": "8MiB", **options})


def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
