"""The scripted engine's "model": a hash, so that a deterministic request has one right answer, alone or in a list."""

import json
import os
import re
import zlib
from typing import Any

MAX_MODEL_LEN = 8192
POISON = "POISON"  # a prompt the engine refuses, failing the whole list it stands in
_WORDS = re.compile(r"\w+|[^\w\s]")


def is_probe(document: dict[str, Any]) -> bool:
    """Whether this is the gateway's own request for one token."""
    return document.get("prompt") == "Hi" and document.get("max_tokens") == 1


def refusal(document: dict[str, Any]) -> dict[str, Any] | None:
    """The error object of a request this model can't serve."""
    prompts = asked(document)
    if not prompts or not all(isinstance(prompt, str | list) for prompt in prompts):
        return _bad_request("there is no prompt of a known form", "prompt")
    if any(prompt in ("", []) or (isinstance(prompt, str) and POISON in prompt) for prompt in prompts):
        return _bad_request("a prompt of this list can't be served", "prompt")
    longest = max((len(tokenize(prompt)) for prompt in prompts), default=0)
    if longest + (document.get("max_tokens") or 1) > MAX_MODEL_LEN:
        return _bad_request(f"This model's maximum context length is {MAX_MODEL_LEN} tokens.", "input_tokens")
    return None


def _bad_request(message: str, param: str) -> dict[str, Any]:
    return {"message": message, "type": "BadRequestError", "param": param, "code": 400}


def prompts_of(value: Any) -> list[Any]:
    """The list of prompts in any of the API's spellings; a chat is one prompt."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [json.dumps(value, ensure_ascii=False)]
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return value if isinstance(value, list) else []


def asked(document: dict[str, Any]) -> list[Any]:
    """The prompts of a request to any route; where one embeds a chat, its input counts for nothing."""
    return prompts_of(next((document[name] for name in ("prompt", "messages", "input") if document.get(name)), None))


def tokenize(prompt: Any) -> list[int]:
    """A beginning-of-text token and one a word or sign; ids stay as they are."""
    if isinstance(prompt, list):
        return prompt
    return [1] + [zlib.crc32(word.encode()) % 50_000 for word in _WORDS.findall(prompt)]


def fingerprint(tokens: list[int], salt: Any) -> int:
    """What this model "computes"."""
    return zlib.crc32(repr((tokens, salt)).encode())


# What changes the answer; everything else (user, stream, …) does not.
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "logit_bias", "stop", "min_p")


def generate(document: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices (prompt-major with n) and usage. Deterministic at temperature 0 or with a seed, else random."""
    prompts = asked(document)
    n = int(document.get("n") or 1)  # 2.0 is a whole number to vLLM, too
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    most = next(filter(None, map(document.get, names)), 16)
    random = document.get("temperature") != 0 and document.get("seed") is None
    sampling = [document.get(name) for name in _SAMPLING]
    choices: list[dict[str, Any]] = []
    prompt_tokens = generation_tokens = 0
    for prompt in prompts:
        ids = tokenize(prompt)
        prompt_tokens += len(ids)
        for copy in range(n):
            salt = (sampling, copy, os.urandom(8) if random else b"")
            tokens: list[int] = []
            finish = "length"
            while len(tokens) < most:
                token = fingerprint(ids, (salt, len(tokens)))
                tokens.append(token % 50_000)
                if token % 29 == 0 and not document.get("ignore_eos"):
                    finish = "stop"
                    break
            generation_tokens += len(tokens)
            logprobs = None
            if document.get("logprobs") is not None:
                logprobs = {
                    "token_logprobs": [-(token % 700) / 300 for token in tokens],
                    "tokens": [f" w{t}" for t in tokens],
                }
            wants_ids = document.get("return_token_ids")
            choices.append(
                {
                    "index": len(choices),
                    "text": "".join(f" w{token}" for token in tokens),
                    "logprobs": logprobs,
                    "finish_reason": finish,
                    "stop_reason": None,
                    "token_ids": tokens if wants_ids else None,
                    "prompt_token_ids": ids if wants_ids else None,
                }
            )
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation_tokens,
        "total_tokens": prompt_tokens + generation_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    return choices, usage
