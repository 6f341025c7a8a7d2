# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""What may stand in each slot of the decoder, and how a part is named, built and looked into.

A part is a frozen config dataclass; its type selects the module (`build`). Parts of one slot share
a base class here, so that a part in the wrong slot is refused with the names of those that fit.
Letters: B batch, T sequence, D model width, L layers.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartConfig:
    """A part of the decoder: a frozen dataclass that builds its module."""

    slot: ClassVar[str] = ""
    taps: ClassVar[tuple[str, ...]] = ()
    """Names of the intermediates that the module offers (see `Taps`)."""

    def check(self, decoder: Any) -> None:
        """Raises ValueError where this part does not fit the other fields of the
        `DecoderConfig`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputsConfig(PartConfig):
    """Turns model inputs into (B, T, D)."""

    slot: ClassVar[str] = "inputs"

    def build(
        self, d_model: int, *, dtype: str, param_dtype: str, rngs: nnx.Rngs
    ) -> Callable[[jax.Array], jax.Array]:
        """The module."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(PartConfig):
    """Mixes along the sequence: `y, state = layer(x, state=...)` with x, y (B, T, D)."""

    slot: ClassVar[str] = "mixer"
    takes_positions: ClassVar[bool] = False
    """Whether explicit `positions` mean something to this mixer."""
    takes_inner_lr: ClassVar[bool] = False
    """Whether the mixer has inner learning rates (`inner_lr_scale`)."""

    @property
    def takes_segments(self) -> bool:
        """Whether the mixer keeps the documents of a packed row apart (`segment_ids`)."""
        return False

    def build(self, d_model: int, *, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> Any:
        """The module."""
        raise NotImplementedError

    def flops_per_token(self, d_model: int, sequence_length: int) -> int:
        """Forward FLOPs per token and layer, a multiply-add counted as 2."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelConfig(PartConfig):
    """Mixes channels of one position: (B, T, D) -> (B, T, D)."""

    slot: ClassVar[str] = "channel"

    def build(self, d_model: int, *, dtype: str, param_dtype: str, rngs: nnx.Rngs) -> Any:
        """The module."""
        raise NotImplementedError

    def flops_per_token(self, d_model: int) -> int:
        """Forward FLOPs per token and layer."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig(PartConfig):
    """Normalises the last axis."""

    slot: ClassVar[str] = "norm"

    def build(self, width: int, *, param_dtype: str) -> Callable[[jax.Array], jax.Array]:
        """The module."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionsConfig(PartConfig):
    """How outputs of earlier layers reach later ones."""

    slot: ClassVar[str] = "connections"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(PartConfig):
    """Turns the final (B, T, D) into what the objective reads."""

    slot: ClassVar[str] = "head"

    def build(self, decoder: Any, *, rngs: nnx.Rngs) -> Any:
        """The module that holds the head's own parameters, or None."""
        raise NotImplementedError

    def flops_per_token(self, decoder: Any) -> int:
        """Forward FLOPs per token."""
        raise NotImplementedError


class Taps:
    """Collects named intermediates of one call: `x = tap("mixer_in", x)` keeps x if it was asked
    for.

    Made at the start of a call and returned as an extra result at its end; nothing is stored in
    modules.
    """

    def __init__(self, names: Iterable[str] = ()):
        self.names = frozenset(names)
        self.values: dict[str, jax.Array] = {}

    def __call__(self, name: str, x: jax.Array) -> jax.Array:
        if name in self.names:
            self.values[name] = x
        return x


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    param_dtype: str,
    init: jax.nn.initializers.Initializer | None = None,
) -> nnx.Param:
    """A parameter with one logical axis name per dimension; N(0, 0.02^2) unless `init` says
    otherwise.

    Names, not mesh axes: the program that owns a mesh maps them.
    """
    if len(shape) != len(axes):
        raise ValueError(f"a weight of shape {shape} needs {len(shape)} axis names, got {axes}")
    init = init or jax.nn.initializers.normal(0.02)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(param_dtype)), axes=axes)


def constant(
    value: float, shape: tuple[int, ...], axes: tuple[str | None, ...], param_dtype: str
) -> nnx.Param:
    """A parameter that starts at one value everywhere (norm scales, biases)."""
    return nnx.Param(jnp.full(shape, value, jnp.dtype(param_dtype)), axes=axes)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, else the known words."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
