"""From the body of /generate to requests, and from finished requests to its answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from .scheduler import Request

__all__ = ["BadRequest", "answer", "parse_requests"]


class BadRequest(Exception):
    """A body that the server refuses with a 400."""


def parse_requests(
    body: dict[str, Any],
    tokenizer: Tokenizer,
    eos: int | None,
    on_done: Callable[[Request], None],
) -> tuple[bool, list[Request]]:
    """The requests of one body, and whether it asks for a single answer (no list, n = 1)."""
    prompts, batched = _prompts(body, tokenizer)
    params = body.get("sampling_params") or {}
    many = params if isinstance(params, list) else [params] * len(prompts)
    if len(many) != len(prompts):
        raise BadRequest("sampling_params must be one object, or one for each prompt")
    requests = []
    for prompt, one in zip(prompts, many, strict=True):
        for copy in range(int(one.get("n", 1))):
            requests.append(_request(prompt, one, copy, eos, on_done))
    if isinstance(body.get("rid"), str) and len(requests) == 1:
        requests[0].rid = body["rid"]
    return not batched and len(requests) == 1, requests


def _prompts(body: dict[str, Any], tokenizer: Tokenizer) -> tuple[list[list[int]], bool]:
    ids, text = body.get("input_ids"), body.get("text")
    if ids:
        return (ids, True) if isinstance(ids[0], list) else ([ids], False)
    if text:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        return [tokenizer.encode(item).ids for item in texts], batched
    raise BadRequest("Either text, input_ids or input_embeds should be provided.")


def _request(
    prompt: list[int],
    params: dict[str, Any],
    copy: int,
    eos: int | None,
    on_done: Callable[[Request], None],
) -> Request:
    generator = torch.Generator()
    seed = params.get("sampling_seed", params.get("seed"))
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(int(seed) + copy)
    stops = frozenset(params.get("stop_token_ids") or ())
    if eos is not None and not params.get("ignore_eos"):
        stops |= {eos}
    return Request(
        prompt=list(prompt),
        max_new_tokens=int(params.get("max_new_tokens", 128)),
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        stop_ids=stops,
        generator=generator,
        on_done=on_done,
    )


def answer(request: Request, tokenizer: Tokenizer, with_logprobs: bool) -> dict[str, Any]:
    """The object that /generate returns for one finished request."""
    cached = request.cached or 0
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.output),
        "cached_tokens": cached,
        "num_retractions": request.retractions,
        "weight_version": request.spans[-1]["version"] if request.spans else None,
        "weight_versions": request.spans,
        "e2e_latency": time.perf_counter() - request.started,
    }
    if with_logprobs:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(request.logprobs, request.output, strict=True)
        ]
    return {
        "text": tokenizer.decode(request.output),
        "output_ids": request.output,
        "meta_info": meta,
    }
