# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The one decoder of the suite: slots, filled by parts.

    x = inputs(tokens)
    x = x + mixer(norm(x));  x = x + channel(norm(x))        L times, joined by the connections
    logits = head(norm(x))

Letters: B batch, T sequence, D model width, V vocabulary, L layers.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxmodels.layers.convolution import CausalConv
from jaxmodels.layers.embeddings import LMHead, TokenInputs
from jaxmodels.layers.norms import RMSNorm
from jaxmodels.sharding import any_mesh, constrain
from jaxmodels.slots import (
    ChannelConfig,
    ConnectionsConfig,
    HeadConfig,
    InputsConfig,
    MixerConfig,
    NormConfig,
    Taps,
    did_you_mean,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(ConnectionsConfig):
    """The plain residual stream: every block adds to what it read."""


REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "branches": jax.checkpoint_policies.save_only_these_names("mixer_out", "channel_out"),
}
"""What a block keeps for its backward pass: `none` everything (no rematerialisation), `full` only
its input, `dots` also the results of its weight products, `branches` also the outputs of mixer and
channel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder: sizes, the part in each slot, precision."""

    d_model: int
    """Model width D."""
    num_layers: int
    """Blocks L."""
    inputs: InputsConfig
    """What enters: `TokenInputs`."""
    mixer: MixerConfig
    """What mixes along the sequence: `Attention`, `TTTLinear`, `TTTMLP`."""
    channel: ChannelConfig
    """What mixes channels: `SwiGLU`, `GeluMLP`."""
    pre_conv: CausalConv | None = None
    """A short convolution as a residual branch of its own before the mixer: x + conv(norm(x))."""
    connections: ConnectionsConfig = Residual()
    """How layers are joined: `Residual`."""
    norm: NormConfig = RMSNorm()
    """The norm of the blocks and of the final output: `RMSNorm`, `LayerNorm`."""
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """`pre`: x + f(norm(x)); `post`: norm(x + f(x)); `sandwich`: x + norm(f(norm(x)))."""
    head: HeadConfig = LMHead()
    """What is predicted: `LMHead`."""
    dtype: str = "bfloat16"
    """Compute dtype of activations and weight products."""
    param_dtype: str = "float32"
    """Dtype of the parameters."""
    remat: Literal["none", "full", "dots", "branches"] = "none"
    """What a block keeps for its backward pass; the rest is recomputed."""
    scan_layers: bool = True
    """Run the layers with lax.scan (compiles once) or unrolled (compiles L times, may run
    faster)."""

    _SLOTS: ClassVar = {
        "inputs": InputsConfig,
        "mixer": MixerConfig,
        "channel": ChannelConfig,
        "connections": ConnectionsConfig,
        "norm": NormConfig,
        "head": HeadConfig,
    }

    def __post_init__(self):
        for field in ("d_model", "num_layers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        for slot, kind in self._SLOTS.items():
            part = getattr(self, slot)
            if not isinstance(part, kind):
                belongs = getattr(part, "slot", "")
                hint = f": that is a part for the slot {belongs!r}" if belongs else ""
                fits = ", ".join(sorted(_parts(kind)))
                raise ValueError(f"{slot}={type(part).__name__}{hint}; {slot} takes one of: {fits}")
        if self.pre_conv is not None and not isinstance(self.pre_conv, CausalConv):
            raise ValueError(f"pre_conv={type(self.pre_conv).__name__}: a CausalConv, or None")
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"remat={self.remat!r}{did_you_mean(self.remat, REMAT_POLICIES)}")
        if self.norm_placement not in ("pre", "post", "sandwich"):
            raise ValueError(f"norm_placement={self.norm_placement!r}: one of pre, post, sandwich")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16", "float64"):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: one of float32, bfloat16, float16, float64"
                )
        for slot in self._SLOTS:
            getattr(self, slot).check(self)

    @property
    def vocab_size(self) -> int:
        """Token ids that the inputs know. Raises ValueError for inputs that are not tokens."""
        if not isinstance(self.inputs, TokenInputs):
            raise ValueError(f"inputs={type(self.inputs).__name__} has no vocabulary")
        return self.inputs.vocab_size

    @property
    def block_taps(self) -> tuple[str, ...]:
        """Names of the intermediates of a block; their values carry a leading layer axis."""
        pre = () if self.pre_conv is None else ("pre_conv_out",)
        names = ("mixer_in", "mixer_out", "channel_in", "channel_out", "block_out")
        return pre + names + self.mixer.taps + self.channel.taps

    @property
    def taps(self) -> tuple[str, ...]:
        """Names of all intermediates that `apply(..., taps=...)` can return."""
        return ("embedding", *self.block_taps, "hidden")

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward FLOPs per token, a multiply-add counted as 2; a training step costs 3 times that.

        Counts the matrix products (and the inner products of attention and TTT), not norms or
        element-wise work.
        """
        block = self.mixer.flops_per_token(self.d_model, sequence_length)
        block += self.channel.flops_per_token(self.d_model)
        if self.pre_conv is not None:
            block += 2 * self.d_model * self.pre_conv.width
        return self.num_layers * block + self.head.flops_per_token(self)


def _parts(kind) -> list[str]:
    """Names of the classes that fill a slot."""
    if below := kind.__subclasses__():
        return [name for part in below for name in _parts(part)]
    return [kind.__name__]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState:
    """Decode state of a block; of all blocks, with a leading layer axis on every leaf."""

    mixer: Any
    pre_conv: jax.Array | None
    """(B, W - 1, D), the last inputs of the convolution before the mixer, if there is one."""


class Block(nnx.Module):
    """One layer: x (B, T, D) -> (x (B, T, D), `BlockState`)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        build: dict[str, Any] = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        norm = lambda: config.norm.build(config.d_model, param_dtype=config.param_dtype)
        conv = config.pre_conv
        self.pre_conv_norm = None if conv is None else norm()
        self.pre_conv = (
            None
            if conv is None
            else conv.build(config.d_model, param_dtype=config.param_dtype, rngs=rngs)
        )
        self.mixer_norm = norm()
        self.mixer = config.mixer.build(config.d_model, **build)
        self.channel_norm = norm()
        self.channel = config.channel.build(config.d_model, **build)
        self.mixer_out_norm = norm() if config.norm_placement == "sandwich" else None
        self.channel_out_norm = norm() if config.norm_placement == "sandwich" else None

    def init_state(self, batch_size: int, max_length: int) -> BlockState:
        """State before the first token."""
        return BlockState(
            mixer=self.mixer.init_state(batch_size, max_length),
            pre_conv=None
            if self.pre_conv is None
            else self.pre_conv.init_state(batch_size, self.config.dtype),
        )

    def __call__(
        self,
        x,
        *,
        state=None,
        positions=None,
        segment_ids=None,
        valid=None,
        inner_lr_scale=None,
        tap,
    ):
        conv_state, mixer_state = (None, None) if state is None else (state.pre_conv, state.mixer)
        options = {"state": mixer_state, "valid": valid}
        if self.config.mixer.takes_positions:
            options["positions"] = positions
        if self.config.mixer.takes_segments:
            options["segment_ids"] = segment_ids
        if self.config.mixer.takes_inner_lr:
            options["inner_lr_scale"] = inner_lr_scale
        placement = self.config.norm_placement

        if self.pre_conv is not None:
            y, conv_state = self.pre_conv(
                self.pre_conv_norm(x), state=conv_state, segment_ids=segment_ids, valid=valid
            )
            y = tap("pre_conv_out", y)
            x = constrain(x + y.astype(x.dtype), "batch", "sequence", None)

        def branch(x, name, norm, part, out_norm):
            h = tap(f"{name}_in", x if placement == "post" else norm(x))
            y = part(h)
            y = checkpoint_name(y, f"{name}_out")
            y = tap(f"{name}_out", y if out_norm is None else out_norm(y))
            x = constrain(x + y.astype(x.dtype), "batch", "sequence", None)
            return norm(x) if placement == "post" else x

        def mix(h):
            nonlocal mixer_state
            y, mixer_state = self.mixer(h, tap=tap, **options)
            return y

        x = branch(x, "mixer", self.mixer_norm, mix, self.mixer_out_norm)
        channel = lambda h: self.channel(h, tap=tap)
        x = branch(x, "channel", self.channel_norm, channel, self.channel_out_norm)
        if state is not None:
            state = BlockState(mixer=mixer_state, pre_conv=conv_state)
        return tap("block_out", x), state


class Decoder(nnx.Module):
    """The module door: a pytree that goes into jax.jit, jax.grad and jax.lax.scan as it is.

    Parameters of the blocks are stacked on a leading axis of length L.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        build: dict[str, Any] = dict(dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs)
        self.inputs: Any = config.inputs.build(config.d_model, **build)
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = jax.vmap(lambda key: Block(config, rngs=nnx.Rngs(params=key)))(keys)
        self.final_norm = config.norm.build(config.d_model, param_dtype=config.param_dtype)
        self.head = config.head.build(config, rngs=rngs)

    def init_state(self, batch_size: int, max_length: int) -> Any:
        """Decode state before the first token: the `BlockState` of all layers, stacked.

        `max_length` bounds caches that grow with the sequence; a TTT state does not depend on it.
        The state starts from the parameters, because the initial state of a TTT layer is learned.
        """
        graphdef, weights = nnx.split(self.blocks)
        of_one = lambda weights: nnx.merge(graphdef, weights).init_state(batch_size, max_length)
        return jax.vmap(of_one)(weights)

    @any_mesh(lambda batch: P(batch))
    def _plain(self, tokens, **options):
        return self._forward(tokens, **options)[0]

    @any_mesh(lambda batch: (P(batch), P(None, batch)))
    def _with_state(self, tokens, **options):
        return self._forward(tokens, **options)[:2]

    @any_mesh(lambda batch: (P(batch), P(batch)))
    def _apart(self, tokens, **options):
        return self._forward(tokens, **options)[:2]

    def __call__(
        self,
        tokens: jax.Array,
        *,
        state: Any = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
        inner_lr_scale: jax.Array | None = None,
        layers: list[Any] | None = None,
        taps: tuple[str, ...] = (),
        output: Literal["logits", "hidden"] = "logits",
    ) -> Any:
        """Reads tokens and predicts the next at every position.

        Args:
          tokens: (B, T) int.
          state: from `init_state` or an earlier call; the tokens continue each sequence where it
            stands.
          positions: (B, T) int for mixers with positions of their own (attention); None counts on.
          segment_ids: (B, T) int for packed rows, 0 for padding, for mixers that can keep documents
            apart.
          valid: (B, T) bool: the other tokens (padding, on either side) are skipped as if they were
            not there. Outputs at them mean nothing.
          inner_lr_scale: () float, multiplies the inner learning rates of TTT layers (their
            warm-up in training).
          layers: the blocks taken apart by `Model.apart`, with a state that is apart too: a decode
            loop that does so once does not cut every weight out of its stack at every token.
          taps: names of intermediates to return (`config.taps`).
          output: "logits" (B, T, V) float32, or "hidden" (B, T, D) after the final norm.

        Returns:
          out, then state if one was given, then a dict of taps if any were asked for. Values of
          block taps have shape (L, B, T, ...).

        Raises:
          ValueError: for an unknown tap, or an argument that the mixer cannot honour.
        """
        config = self.config
        if unknown := [name for name in taps if name not in config.taps]:
            raise ValueError(f"unknown tap {unknown[0]!r}{did_you_mean(unknown[0], config.taps)}")
        mixer = type(config.mixer).__name__
        if positions is not None and not config.mixer.takes_positions:
            raise ValueError(
                f"{mixer} takes its positions from the sequence itself; leave positions out"
            )
        if segment_ids is not None and not config.mixer.takes_segments:
            how = (
                "set its max_documents"
                if hasattr(config.mixer, "max_documents")
                else "Attention can"
            )
            raise ValueError(
                f"{mixer} does not keep the documents of a packed row apart (segment_ids): {how}, "
                "or use rows of running text"
            )
        if inner_lr_scale is not None and not config.mixer.takes_inner_lr:
            raise ValueError(f"{mixer} has no inner learning rates; leave inner_lr_scale out")
        if layers is not None and (taps or not isinstance(state, list)):
            raise ValueError("layers need a state that is apart too (Model.apart), and no taps")
        options = dict(
            state=state,
            positions=positions,
            segment_ids=segment_ids,
            valid=valid,
            inner_lr_scale=inner_lr_scale,
            layers=layers,
            output=output,
        )
        if taps:
            call = any_mesh(lambda batch: P())(type(self)._forward)
            out, state_out, values = call(self, tokens, taps=tuple(taps), **options)
            return (out, values) if state is None else (out, state_out, values)
        if state is None:
            return self._plain(tokens, **options)
        if layers is not None:
            return self._apart(tokens, **options)
        return self._with_state(tokens, **options)

    def _forward(self, tokens, *, state, output, layers, taps=(), **shared):
        config = self.config
        tap = Taps(taps)
        if shared["valid"] is not None:
            tokens = jnp.where(shared["valid"], tokens, 0)  # whatever marks padding is not an id
        x = tap("embedding", self.inputs(tokens))
        graphdef, weights = nnx.split(self.blocks)

        def body(x, layer):
            weights, state = layer
            block_tap = Taps(taps)
            x, state = nnx.merge(graphdef, weights)(x, state=state, tap=block_tap, **shared)
            return x, (state, block_tap.values)

        if config.remat != "none":
            body = jax.checkpoint(
                body, policy=REMAT_POLICIES[config.remat], prevent_cse=not config.scan_layers
            )
        if layers is not None:
            states = []
            for i, weights in enumerate(layers):
                x, (new, _) = body(x, (weights, state[i]))
                states.append(new)
            state, values = states, {}
        elif config.scan_layers:
            x, (state, values) = jax.lax.scan(body, x, (weights, state))
        else:
            results = []
            for layer in range(config.num_layers):
                x, result = body(x, jax.tree.map(lambda a: a[layer], (weights, state)))  # noqa: B023
                results.append(result)
            state, values = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        hidden = tap("hidden", self.final_norm(x))
        out = hidden if output == "hidden" else self.logits(hidden)
        return out, state, tap.values | values

    def unembedding(self) -> jax.Array:
        """The output matrix (D, V); the embedding transposed where they are tied."""
        return self.inputs.embedding[...].T if self.head is None else self.head.w[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden (B, T, D) after the final norm -> (B, T, V) float32."""
        w = self.unembedding().astype(hidden.dtype)
        out = jnp.einsum("btd,dv->btv", hidden, w, preferred_element_type=jnp.float32)
        return constrain(out, "batch", "sequence", "vocab")
