"""Bytes of a model's weights, computed from its shape."""

from dataclasses import dataclass

from scripts.planner.model import Model, dtype_bytes


@dataclass(frozen=True)
class Weights:
    """All sizes in bytes, as the engine holds them on the card."""

    embeddings: int
    linears: int
    rest: int

    @property
    def total(self) -> int:
        return self.embeddings + self.linears + self.rest


def compute_weights(model: Model) -> Weights:
    """Embedding and head stay in the model's dtype whatever the linear layers are quantized to."""
    size = dtype_bytes(model.dtype)
    embeddings = model.padded_vocab * model.hidden * size * (1 if model.tied else 2)
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    matrices = [(model.hidden, query), (model.hidden, key), (model.hidden, key), (query, model.hidden)]
    router = 0
    if model.experts is None:
        matrices += [(model.hidden, model.intermediate)] * 2 + [(model.intermediate, model.hidden)]
    else:
        one = [(model.hidden, model.experts.width)] * 2 + [(model.experts.width, model.hidden)]
        matrices += one * model.experts.count
        router = model.hidden * model.experts.count
    linear = sum(_linear(model, inputs, outputs) for inputs, outputs in matrices)
    vectors = model.hidden * model.norms_per_layer + router
    vectors += (query + 2 * key if model.qkv_bias else 0) + (model.hidden if model.out_bias else 0)
    vectors += 2 * model.head_dim if model.qk_norm else 0
    rest = (vectors * model.layers + model.hidden) * size
    return Weights(embeddings, linear * model.layers, rest)


def _linear(model: Model, inputs: int, outputs: int) -> int:
    if model.quant is None:
        return inputs * outputs * dtype_bytes(model.dtype)
    return model.quant.linear_bytes(inputs, outputs)
