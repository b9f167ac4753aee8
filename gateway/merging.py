"""What may share an engine call, how the shared call is put together, and how its answer is taken apart. Pure.

Completions: prompt lists, accounted per client by the token ids that the engine returns. Embeddings: input lists, but
only of token ids, since an engine tells one total for a list and a client's own share of text inputs could only be
guessed (docs/decisions/0003). Chat gains nothing from merging and is never merged.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.errors import UpstreamFailedError
from gateway.exchange import Reply
from gateway.protocol import Envelope, Kind
from gateway.settings import Batching

# fmt: off
# Parameters that a list applies to each of its entries as if it were alone. What is not here goes alone.
MERGEABLE_FIELDS = {
    Kind.COMPLETIONS: frozenset({
        "model", "prompt", "stream", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "stop_token_ids", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "logit_bias",
        "user", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "add_special_tokens", "bad_words", "allowed_token_ids", "return_token_ids",
        "response_format", "structured_outputs",
    }),
    Kind.EMBEDDINGS: frozenset({"model", "input", "encoding_format", "dimensions", "user"}),
}
# fmt: on
LIST_FIELD = {Kind.COMPLETIONS: "prompt", Kind.EMBEDDINGS: "input"}


def mergeable(envelope: Envelope, settings: Batching) -> bool:
    """Whether this request may share a call at all."""
    known = MERGEABLE_FIELDS.get(envelope.kind)
    return (
        known is not None
        and settings.window_ms > 0
        and settings.max_prompts > envelope.size.prompts
        and not envelope.stream
        and envelope.max_tokens is not None
        and envelope.max_tokens <= settings.max_answer_tokens
        and envelope.document.keys() <= known
        and all(entries(envelope))  # an empty prompt fails a whole list: it goes alone and hears of it alone
        and (envelope.kind is Kind.COMPLETIONS or _plain_ids(envelope))
    )


def _plain_ids(envelope: Envelope) -> bool:
    return envelope.size.ids > 0 and envelope.document.get("encoding_format") in (None, "float", "base64")


def group_key(envelope: Envelope, extra: bytes = b"") -> bytes:
    """Equal for requests that may share a call: same route, parameters to the byte, kind of prompt, and `extra`."""
    listed = LIST_FIELD[envelope.kind]
    parameters = {name: value for name, value in envelope.document.items() if name != listed}
    form = b"ids" if envelope.size.ids else b"text"
    route = envelope.kind.value.encode()
    return b"\0".join((route, form, extra, orjson.dumps(parameters, option=orjson.OPT_SORT_KEYS)))


def entries(envelope: Envelope) -> list[Any]:
    """The prompts or inputs of a request as a list, whichever way the client wrote them."""
    value = envelope.document[LIST_FIELD[envelope.kind]]
    return [value] if isinstance(value, str) or isinstance(value[0], int) else list(value)


def merged_body(envelopes: Sequence[Envelope], extra: dict[str, Any]) -> bytes:
    """One request for all of them; `extra` are the gateway's own fields."""
    first = envelopes[0]
    together = [entry for envelope in envelopes for entry in entries(envelope)]
    document = {**first.document, **extra, LIST_FIELD[first.kind]: together}
    if first.kind is Kind.COMPLETIONS:
        document["return_token_ids"] = True
    return orjson.dumps(document)


def demultiplex(body: bytes, envelopes: Sequence[Envelope], ids: Sequence[str]) -> list[Reply] | None:
    """Each client's own answer out of a merged one, `ids` being the requests' ids.

    None where the engine's answer leaves the accounting open; then each has to be asked alone. Raises
    UpstreamFailedError where it is no answer to what was asked.
    """
    try:
        document = orjson.loads(body)
        completions = envelopes[0].kind is Kind.COMPLETIONS
        items = sorted(document["choices" if completions else "data"], key=lambda item: item["index"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise UpstreamFailedError("the engine's answer to a merged call is none") from None
    per_entry = envelopes[0].n if completions else 1
    if len(items) != per_entry * sum(envelope.size.prompts for envelope in envelopes):
        raise UpstreamFailedError("the engine gave another number of answers than were asked for")
    if any(item["index"] != index for index, item in enumerate(items)):  # whose answer is whose, nobody could tell
        raise UpstreamFailedError("the engine numbered its answers in another way than it should")
    shares, start = [], 0
    for envelope in envelopes:
        shares.append(items[start : start + per_entry * envelope.size.prompts])
        start += len(shares[-1])
    split = _completions if completions else _embeddings
    return split(document, envelopes, ids, shares)


Item = dict[str, Any]


def _completions(
    document: dict[str, Any], envelopes: Sequence[Envelope], ids: Sequence[str], shares: Sequence[list[Item]]
) -> list[Reply] | None:
    replies = []
    for envelope, request_id, choices in zip(envelopes, ids, shares, strict=True):
        firsts = choices[
            :: envelope.n
        ]  # choices are prompt-major, and a prompt counts once however many choices it has
        if any(choice.get("prompt_token_ids") is None for choice in firsts):
            return None
        if any(choice.get("token_ids") is None for choice in choices):
            return None
        usage = (
            sum(len(choice["prompt_token_ids"]) for choice in firsts),
            sum(len(choice["token_ids"]) for choice in choices),
        )
        for index, choice in enumerate(choices):
            choice["index"] = index
            if not envelope.document.get("return_token_ids"):
                choice["token_ids"] = choice["prompt_token_ids"] = None
        whole = {**document, "id": f"cmpl-{request_id}", "choices": choices, "usage": _usage(document, *usage)}
        replies.append(Reply(200, orjson.dumps(whole), usage=usage))
    return replies


def _embeddings(
    document: dict[str, Any], envelopes: Sequence[Envelope], ids: Sequence[str], shares: Sequence[list[Item]]
) -> list[Reply] | None:
    if _told_usage(document).get("prompt_tokens") != sum(envelope.size.ids for envelope in envelopes):
        return None  # the engine added tokens of its own
    replies = []
    for envelope, request_id, data in zip(envelopes, ids, shares, strict=True):
        for index, item in enumerate(data):
            item["index"] = index
        tokens = envelope.size.ids
        whole = {**document, "id": f"embd-{request_id}", "data": data, "usage": _usage(document, tokens, 0)}
        replies.append(Reply(200, orjson.dumps(whole), usage=(tokens, 0)))
    return replies


def _told_usage(document: dict[str, Any]) -> dict[str, Any]:
    usage = document.get("usage")
    return usage if isinstance(usage, dict) else {}


def _usage(document: dict[str, Any], prompt_tokens: int, generation_tokens: int) -> dict[str, Any]:
    usage = {
        **_told_usage(document),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generation_tokens,
        "total_tokens": prompt_tokens + generation_tokens,
    }
    if "prompt_tokens_details" in usage:
        usage["prompt_tokens_details"] = None  # the engine's figure is the last prompt's only
    return usage
