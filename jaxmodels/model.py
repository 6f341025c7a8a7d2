# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The functional door: a model as plain functions on a nested dict of arrays."""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx

from jaxmodels.decoder import Decoder, DecoderConfig

Params = dict[str, Any]
"""A nested dict of arrays; block parameters carry a leading layer axis."""


@functools.lru_cache(maxsize=64)
def _abstract(config: DecoderConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))


def _map_variables(fn, tree):
    return nnx.to_pure_dict(
        jax.tree.map(fn, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """Plain functions of a `DecoderConfig`; hashable, so it can be a static argument of jax.jit."""

    config: DecoderConfig

    def init(self, key: jax.Array) -> Params:
        """Random parameters. The same key gives the same values on every mesh."""
        return self.params(Decoder(self.config, rngs=nnx.Rngs(params=key)))

    def apply(self, params: Params, tokens: jax.Array, **options: Any) -> Any:
        """`Decoder.__call__` on a dict of parameters: out[, state][, taps]."""
        return self.module(params)(tokens, **options)

    def init_state(self, params: Params, batch_size: int, max_length: int) -> Any:
        """`Decoder.init_state`. Takes the parameters because a TTT layer's initial state is one of
        them."""
        return self.module(params).init_state(batch_size, max_length)

    def apart(self, tree: Any) -> list[Any]:
        """`params` or a state with one entry per layer instead of stacks: `layers` and `state` of a
        decode loop, `apply(params, tokens, layers=..., state=...)`."""
        stack = tree["blocks"] if isinstance(tree, dict) else tree
        layer = lambda i: jax.tree.map(lambda x: x[i], stack)
        return [layer(i) for i in range(self.config.num_layers)]

    def unembedding(self, params: Params) -> jax.Array:
        """The output matrix (D, V)."""
        return self.module(params).unembedding()

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """hidden (B, T, D) from `apply(..., output="hidden")` -> logits (B, T, V) float32."""
        return self.module(params).logits(hidden)

    def module(self, params: Params) -> Decoder:
        """The same parameters as a module."""
        return nnx.merge(_abstract(self.config)[0], params)

    @staticmethod
    def params(module: Decoder) -> Params:
        """The parameters of a module as a nested dict."""
        return nnx.to_pure_dict(nnx.split(module)[1])

    @property
    def param_shapes(self) -> Params:
        """The tree of parameters as jax.ShapeDtypeStruct; touches no device."""
        return _map_variables(
            lambda v: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype),
            _abstract(self.config)[1],
        )

    @property
    def param_axes(self) -> Params:
        """The tree of parameters as tuples of logical axis names, one per dimension."""

        def axes(variable):
            names = variable.get_metadata()["axes"]
            return ("layers",) * (len(variable.get_value().shape) - len(names)) + names

        return _map_variables(axes, _abstract(self.config)[1])

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.param_shapes))

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward FLOPs per token, a multiply-add counted as 2; a training step costs 3 times as
        much."""
        return self.config.flops_per_token(sequence_length)


def build(config: DecoderConfig) -> Model:
    """The functional door to the decoder that `config` describes."""
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"build takes a DecoderConfig, got {type(config).__name__}")
    return Model(config)
