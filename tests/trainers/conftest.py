"""A tiny random llama with a character tokenizer, rows to train on, and recipes over them."""

import json

import pytest
import torch

from karui.configs.recipe import Recipe


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A llama of two layers, GQA, tied head, float32, with a byte-level tokenizer and a chat template, as a model folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|start|>", "<|end|>"]
    vocabulary = {t: i for i, t in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>",
                                   additional_special_tokens=["<|start|>"])
    fast.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
        "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.08)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(24):
            answer = f"the sum is {i + i * i}" + "!" * (i % 5)
            file.write(json.dumps({"prompt": f"what is {i} plus {i * i}", "completion": answer}) + "\n")
    return path


@pytest.fixture
def make_recipe(tiny_folder, rows_file, tmp_path, own_cache):
    """Recipe over the tiny model; keyword arguments are sections to merge."""
    def make(**sections):
        values = {
            "name": "tiny",
            "model": {"name": str(tiny_folder)},
            "data": {"train": str(rows_file), "holdout": 4, "max_length": 128},
            "prepare": [{"method": "lora", "rank": 4, "alpha": 8}],
            "optim": {"lr": 1e-3, "batch": 4, "steps": 6, "micro_tokens": 128},
            "run": {"output": str(tmp_path / "run"), "seed": 3, "threads": 1},
            "track": {"to": "none"},
        }
        for key, section in sections.items():
            values[key] = {**values[key], **section} if isinstance(section, dict) and key in values else section
        return Recipe.build(values)

    return make


@pytest.fixture(autouse=True)
def _fresh_accelerate_state():
    """accelerate keeps its state in singletons; a run must not inherit the last one's."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
