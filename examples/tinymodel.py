"""Makes a tiny random language model in Hugging Face's layout, with a tokenizer, from nothing but a seed.

    python -m examples.tinymodel DIRECTORY --family qwen2 --tied --seed 7

Needs no network. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

__all__ = ["make_tiny_model", "make_tokenizer"]

Family = Literal["llama", "qwen2"]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
SENTENCES = (
    "the tide turns and nothing flows",
    "count: 0 1 2 3 4 5 6 7 8 9",
    "what is 12 + 34 ? answer: 46",
    "what is 7 - 5 ? answer: 2",
    "what is 3 * 4 ? answer: 12",
    "sort: 3 1 2 answer: 1 2 3",
    "copy: 9 8 7 answer: 9 8 7",
)


def make_tokenizer(vocab_size: int = 256) -> PreTrainedTokenizerFast:
    """Train a small byte-pair tokenizer in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_tiny_model(
    directory: Path,
    *,
    family: Family = "llama",
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    vocab_size: int = 256,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write config.json, model.safetensors and the tokenizer to `directory` (made if needed); return it.

    `initializer_range` is large on purpose: with the usual 0.02 a random model's greedy output hardly depends
    on its weights. The process's random state is left as it was.
    """
    tokenizer = make_tokenizer(vocab_size)
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (
            LlamaForCausalLM(LlamaConfig(**common))
            if family == "llama"
            else Qwen2ForCausalLM(Qwen2Config(**common))
        )
    directory.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="make a tiny random model directory")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", choices=("llama", "qwen2"), default="llama")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_tiny_model(arguments.directory, family=arguments.family, tied=arguments.tied, seed=arguments.seed)


if __name__ == "__main__":
    main()
