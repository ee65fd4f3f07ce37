"""The verifiable task: given a digit, count on from it. Rewards are computed, nobody judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from examples.tinymodel import make_tiny_model

__all__ = ["ANSWER_TOKENS", "Task", "make_demo_model"]

ANSWER_TOKENS = 3
VOCABULARY = 64
DIGIT_CREDIT = 0.2  # for a digit that is not the right one: a random model must find something to climb


@dataclass(frozen=True)
class Task:
    """Prompts and rewards in token ids; `digits[d]` is the token of digit d."""

    bos: int
    digits: tuple[int, ...]

    @classmethod
    def of(cls, model_directory: Path) -> Task:
        """Read the token ids from a model directory's tokenizer."""
        tokenizer = AutoTokenizer.from_pretrained(str(model_directory))
        digits = tuple(int(tokenizer.convert_tokens_to_ids(str(d))) for d in range(10))
        if tokenizer.unk_token_id in digits or len(set(digits)) != 10:
            raise ValueError(f"{model_directory}: the tokenizer has no token of its own for each digit")
        return cls(bos=int(tokenizer.bos_token_id), digits=digits)

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """Every prompt's name: the digit to count on from."""
        return tuple(str(d) for d in range(10))

    def prompt_ids(self, name: str) -> list[int]:
        """The tokens of a prompt."""
        return [self.bos, self.digits[int(name)]]

    def wanted(self, name: str) -> list[int]:
        """The tokens of the perfect answer."""
        return [self.digits[(int(name) + 1 + place) % 10] for place in range(ANSWER_TOKENS)]

    def reward(self, name: str, answer: Sequence[int]) -> float:
        """Between 0 and 1: the share of places with the right digit, and a little for any digit."""
        found = 0.0
        for place, token in enumerate(self.wanted(name)):
            if place < len(answer):
                found += 1.0 if answer[place] == token else DIGIT_CREDIT * (answer[place] in self.digits)
        return found / ANSWER_TOKENS


def make_demo_model(directory: Path, seed: int) -> Path:
    """Write the model that the job begins with (float32, so that small updates are not rounded away)."""
    logging.disable_progress_bar()
    return make_tiny_model(
        directory, seed=seed, vocab_size=VOCABULARY, initializer_range=0.08, dtype=torch.float32
    )
