# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The jaxmodels authors
"""The released TTT checkpoints: files `streaming_train_state` or `streaming_params` of the official
JAX code.

Such a file is a row of msgpack records (key, bytes): the path of one array in the train state, and
the array as flax serializes it, in bfloat16 by default. Keys are `params/params/model/...` for the
parameters (without the two `params` in `streaming_params`), `opt_state/...` for the two moments of
Adam, and `step`.

Nothing here unpickles. The `metadata.pkl` and `dataset.pkl` beside a released checkpoint are not
read, because reading a pickle runs the code in it: the config comes from a preset or a JSON file.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
from flax.serialization import msgpack_restore, msgpack_serialize

Key = tuple[str, ...]

MAX_RECORD = 2**31 - 1
"""Most bytes of one record; what is read at a time never exceeds it."""
READ_BYTES = 2**20
PARAMS = ("params", "params")


def read_records(path: str | os.PathLike, *, optimizer: bool = False) -> Iterator[tuple[Key, Any]]:
    """The records of a file one by one: (key, array), the arrays in the dtype of the file.

    Args:
      path: the file.
      optimizer: also those that are no parameters, `opt_state/...` and `step` (an int); without,
        they are skipped unread.

    Raises:
      ValueError: naming the record and the byte where the file is damaged, truncated or of another
        kind, or a key comes twice.
    """
    path = pathlib.Path(path)
    size, seen = path.stat().st_size, set()
    with path.open("rb") as file:
        longest = min(MAX_RECORD, max(size, 1))
        unpacker = msgpack.Unpacker(
            file, max_buffer_size=longest, read_size=min(READ_BYTES, longest)
        )
        number, start = 0, 0

        def wrong(why):
            return ValueError(f"{path}: record {number}, at byte {start} of {size}: {why}")

        while start < size:
            try:
                if unpacker.read_array_header() != 2:
                    raise wrong("not a pair of key and array")
                key = unpacker.unpack()
                if not (isinstance(key, list) and key and all(isinstance(x, str) for x in key)):
                    raise wrong("its key is not a list of names")
                key = tuple(key)
                wanted = optimizer or key[0] not in ("opt_state", "step")
                value = unpacker.unpack() if wanted else unpacker.skip()
            except msgpack.OutOfData:
                raise wrong("the file ends inside it; it was not copied to its end") from None
            except msgpack.BufferFull:
                raise wrong(f"it is longer than {MAX_RECORD} bytes, or damaged") from None
            except (msgpack.UnpackException, ValueError) as error:
                if str(error).startswith(str(path)):
                    raise
                reason = str(error) or type(error).__name__
                raise wrong(f"not a checkpoint stream, or damaged ({reason})") from None
            if key in seen:
                raise wrong(f"{'/'.join(key)} comes a second time")
            seen.add(key)
            if wanted:
                yield key, _restore(value, key, wrong)
            number, start = number + 1, unpacker.tell()


def _restore(value, key, wrong):
    name = "/".join(key)
    if not isinstance(value, bytes):
        raise wrong(f"{name} holds a {type(value).__name__} instead of the bytes of an array")
    try:
        value = msgpack_restore(value)
    except Exception as error:  # whatever flax makes of damaged bytes
        raise wrong(f"the array {name} is damaged ({error})") from None
    if not isinstance(value, (np.ndarray, np.generic, int, float)):
        raise wrong(f"{name} holds a {type(value).__name__} instead of an array")
    return value


def read_params(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The parameters of a file by dotted Flax name, for `from_official`. Raises as `read_records`,
    and where there are none."""
    params = {}
    for key, value in read_records(path):
        name = ".".join(key[2:] if key[:2] == PARAMS else key)
        if not isinstance(value, np.ndarray):
            raise ValueError(f"{path}: {'/'.join(key)} is a single number, not a parameter")
        params[name] = value
    if not params:
        raise ValueError(f"{path} holds no parameters")
    return params


def write_params(path: str | os.PathLike, weights: Mapping[str, np.ndarray]) -> None:
    """Writes tensors by dotted Flax name (`to_official(..., layout="flax")`) in the dtype they
    have, as the official code would; it loads them as `trainstate_params::FILE`.

    An existing file is replaced only once the new one is complete.
    """
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    packer = msgpack.Packer()
    with part.open("wb") as file:
        for key in sorted(tuple(name.split(".")) for name in weights):
            value = msgpack_serialize(np.ascontiguousarray(weights[".".join(key)]))
            file.write(packer.pack((PARAMS + key, value)))
    part.replace(path)
