"""A plain Llama / Qwen2 forward pass for one sequence, with an explicit KV cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

__all__ = ["KV", "LoadDied", "LoadRefused", "TinyLlama"]

KV = list[tuple[torch.Tensor, torch.Tensor]]


class LoadRefused(Exception):
    """The image cannot be read at all; the old weights are kept."""


class LoadDied(Exception):
    """The image broke the load in its middle: the real server does not survive this."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one model, from its config.json."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    eps: float
    theta: float
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """Read the sizes out of a Hugging Face config."""
        heads = config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return cls(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            hidden=config["hidden_size"],
            vocab=config["vocab_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            tied=bool(config.get("tie_word_embeddings")),
        )


class TinyLlama:
    """Weights by their Hugging Face names, and the forward pass over them in their own dtype."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.shape = Shape.of(self.config)
        self.weights: dict[str, torch.Tensor] = {}
        for name, tensor in _tensors(directory):
            self.weights[name] = tensor

    def load(self, directory: Path, *, only_part: bool = False) -> None:
        """Copy an image over the weights as the real server does: what is not in both is passed over.

        Raises `LoadRefused` when there is nothing to read and `LoadDied` on wrong shapes or broken files.
        """
        if not directory.is_dir() or not list(directory.glob("*.safetensors")):
            raise LoadRefused(f"Failed to get weights iterator: no weights in {directory}")
        try:
            loaded = list(_tensors(directory))
        except Exception as error:  # whatever safetensors calls a broken file
            raise LoadDied(str(error)) from error
        for name, tensor in loaded[: len(loaded) // 2] if only_part else loaded:
            current = self.weights.get(name)
            if current is None:
                continue
            if current.shape != tensor.shape:
                raise LoadDied(f"shape of {name}")
            current.copy_(tensor)

    @torch.inference_mode()
    def forward(self, tokens: list[int], past: KV | None) -> tuple[torch.Tensor, KV]:
        """Logits after the last of `tokens` (float32, [vocab]) and the grown cache; `past` is not changed."""
        shape, w = self.shape, self.weights
        start = past[0][0].shape[1] if past else 0
        x = embedding(torch.tensor(tokens), w["model.embed_tokens.weight"])
        cos, sin = self._rotation(start, len(tokens), x.dtype)
        grown: KV = []
        for i in range(shape.layers):
            p = f"model.layers.{i}."
            h = self._norm(x, p + "input_layernorm.weight")
            q = _rotate(self._heads(h, p + "self_attn.q_proj", shape.heads), cos, sin)
            k = _rotate(self._heads(h, p + "self_attn.k_proj", shape.kv_heads), cos, sin)
            v = self._heads(h, p + "self_attn.v_proj", shape.kv_heads)
            if past:
                k, v = torch.cat([past[i][0], k], 1), torch.cat([past[i][1], v], 1)
            grown.append((k, v))
            x = x + linear(self._attend(q, k, v), w[p + "self_attn.o_proj.weight"])
            h = self._norm(x, p + "post_attention_layernorm.weight")
            gate = silu(linear(h, w[p + "mlp.gate_proj.weight"])) * linear(h, w[p + "mlp.up_proj.weight"])
            x = x + linear(gate, w[p + "mlp.down_proj.weight"])
        last = self._norm(x[-1:], "model.norm.weight")
        head = w["model.embed_tokens.weight"] if shape.tied else w["lm_head.weight"]
        return linear(last, head)[0].float(), grown

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.shape.eps)
        return scaled.to(x.dtype) * self.weights[name]

    def _heads(self, x: torch.Tensor, name: str, heads: int) -> torch.Tensor:
        out = linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))
        return out.view(len(x), heads, self.shape.head_dim).transpose(0, 1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        new, total = q.shape[1], k.shape[1]
        mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        out = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return out.transpose(0, 1).reshape(new, -1)

    def _rotation(self, start: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        dim = self.shape.head_dim
        frequencies = self.shape.theta ** (-torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(start, start + count).float(), frequencies)
        doubled = torch.cat([angles, angles], -1)
        return doubled.cos().to(dtype), doubled.sin().to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _tensors(directory: Path) -> list[tuple[str, torch.Tensor]]:
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(name, file.get_tensor(name).clone()) for name in file.keys()]  # noqa: SIM118  not a dict
    return found
