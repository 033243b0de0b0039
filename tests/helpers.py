"""The formats once more, from the words of the design alone: NumPy for numbers, permutes for bytes.

Nothing here calls the package, so that a test which compares the two compares two derivations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

PAGE_SIZES = (32, 64, 128)
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 224, 256)
# (format, operand): every tile layout that a page can have.
LAYOUTS = tuple((name, operand) for name in ("int8", "mxfp4", "fp4_g32") for operand in "kv")
RECIPES = {"int8": ("int8", "int8"), "mxfp4": ("mxfp4",) * 2, "fp4_g32": ("fp4_g32",) * 2, "k8v4": ("int8", "mxfp4")}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
# Token held by each row of a group of 16 in an int8 K tile.
K_TOKENS = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """For modules that import it: on a busy machine, threads that share tiny tensors took 6x as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Rows(NamedTuple):
    """Quantized rows as torch tensors; leading dimensions as in the input."""

    codes: torch.Tensor  # uint8 [..., bytes of the packed codes]
    scales: torch.Tensor  # uint8 [..., scales, bytes of one scale], little endian
    values: torch.Tensor  # float32 [..., D]: what codes and scales stand for

    @property
    def bytes(self) -> torch.Tensor:
        return torch.cat((self.codes, self.scales.flatten(-2)), dim=-1)


def e2m1_code(y: np.ndarray) -> np.ndarray:
    """4-bit code of each y: between two midpoints there is one code, and a midpoint belongs to the even one."""
    magnitude = sum((abs(y) > m).astype(np.uint8) for m in (0.25, 1.25, 2.5, 5.0))
    magnitude += sum((abs(y) >= m).astype(np.uint8) for m in (0.75, 1.75, 3.5))
    return magnitude | np.signbit(y).astype(np.uint8) << 3


def quantize(name: str, x: torch.Tensor) -> Rows:
    """Quantizes rows of float32 by the rules of the design."""
    groups = x.numpy().reshape(*x.shape[:-1], *((1, x.shape[-1]) if name == "int8" else (x.shape[-1] // 32, 32)))
    amax = abs(groups).max(-1)
    finite = np.isfinite(amax)
    amax = np.where(finite, amax, np.float32(0))
    if name == "mxfp4":
        mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2**exponent, and 7.5 = 0.9375 * 2**3
        power = np.clip(exponent - 3 + (mantissa > 0.9375), -66, 40)
        unit = np.where(finite, np.ldexp(np.float32(1), power), np.float32("nan"))
        scales = np.select([~finite, amax == 0], [255, 127], 127 + power).astype(np.uint8)
    else:
        unit = np.where(finite, amax / np.float32(127 if name == "int8" else 6), np.float32("nan"))
        scales = unit
    live = (amax > 0) & (unit > 0)
    y = np.where(live[..., None], groups, np.float32(0)) / np.where(live, unit, np.float32(1))[..., None]
    if name == "int8":
        q = np.clip(np.rint(y), -127, 127)
        codes = q.astype(np.int8).view(np.uint8).reshape(x.shape)
    else:
        nibbles = e2m1_code(y)
        q = np.where(nibbles < 8, E2M1[nibbles & 7], -E2M1[nibbles & 7])
        nibbles = nibbles.reshape(x.shape)
        codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    with np.errstate(over="ignore"):  # 127 * (FLT_MAX / 127) may round to infinity; no bf16 or fp16 row gets there
        values = (q * unit[..., None]).reshape(x.shape)
    scales = np.ascontiguousarray(scales[..., None]).view(np.uint8)
    return Rows(torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(values))


def row_nbytes(name: str, dim: int) -> tuple[int, int, int]:
    """Bytes of one row's codes, its number of scales, bytes of one scale."""
    return {"int8": (dim, 1, 4), "mxfp4": (dim // 2, dim // 32, 1), "fp4_g32": (dim // 2, dim // 32, 4)}[name]


def padding_nbytes(name: str, dim: int, page_size: int) -> int:
    """Bytes from the end of a head block's scales to the next multiple of 128."""
    codes, scales, width = row_nbytes(name, dim)
    return -(page_size * (codes + scales * width)) % 128


def head_block(
    name: str, operand: str, codes: torch.Tensor, scales: torch.Tensor, padding: torch.Tensor
) -> torch.Tensor:
    """``[..., bytes]`` of head blocks; ``codes [..., P, bytes]``, ``scales [..., P, scales, width]``."""
    if (name, operand) == ("int8", "v"):
        tile = codes.unflatten(-2, (-1, 16)).transpose(-1, -2)  # [P/16][D][16]
    else:
        if name == "int8":
            codes = codes.unflatten(-2, (-1, 16))[..., K_TOKENS, :].flatten(-3, -2)
        tile = codes.unflatten(-1, (-1, 16)).transpose(-2, -3)  # [bytes/16][P][16]
    return torch.cat((tile.flatten(-3), scales.transpose(-2, -3).flatten(-3), padding), dim=-1)
