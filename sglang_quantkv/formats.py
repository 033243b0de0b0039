"""Every cache format, byte by byte: the one source of truth, in pure Python.

Words used throughout the project:

* slot: one token's place in the pool. page: ``P`` consecutive slots.
* format: how a row of ``D`` numbers of one token and one KV head becomes codes and scales.
* recipe: a format for K and a format for V; what ``--kv-cache-dtype`` names.
* payload: the packed codes. record: all bytes of one page of one layer of K (or of V).
* head block: the part of a record that belongs to one KV head: its payload tile, then its scales.
* atom: 16 consecutive bytes of a payload tile, the unit in which kernels load it.

A record is its ``Hkv`` head blocks in order. Every head block starts on a 128-byte boundary, because
an H200 loads blocks that are 64 bytes off 27-29% slower; no recipe needs padding at D = 128 or 256.

Nothing else in the project computes a byte count or an offset of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from sglang_quantkv.errors import UnsupportedConfig

PAGE_SIZES = (32, 64, 128)
DEFAULT_PAGE_SIZE = 64
HEAD_DIMS = tuple(range(32, 257, 32))
ATOM_BYTES = 16
HEAD_BLOCK_ALIGNMENT = 128

INT8_MAX = 127

# Magnitudes of the 4-bit floats; a code's low three bits are the index, bit 3 is the sign.
# e2m1: OCP Microscaling Formats (MX) v1.0, section 5.3.3. e3m0: powers of two, for comparison only.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E3M0_MAGNITUDES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)

# OCP MX v1.0, section 5.4: E8M0 scales. Byte b stands for 2**(b - 127), byte 255 for NaN.
E8M0_BIAS = 127
E8M0_NAN = 255
E8M0_ZERO_BLOCK = 127  # what an all-zero block carries, so that no kernel meets 0 * inf
# A scale is the smallest power of two s with amax <= E8M0_LIMIT * s. 6 would clip nothing, 8 is OCP's
# floor rule; 7.5 lost the least perplexity on SmolLM2-135M (+21.2% against +32.0 and +26.2%).
E8M0_LIMIT = 7.5
# Scales are clamped to 2**-66 .. 2**40, so that kernels may add two of them as float exponents.
E8M0_MIN = E8M0_BIAS - 66
E8M0_MAX = E8M0_BIAS + 40

SCALE_NBYTES = {"float32": 4, "e8m0": 1, None: 0}


class Operand(str, Enum):
    """Which of the two cached tensors a record holds."""

    K = "k"
    V = "v"


@dataclass(frozen=True)
class Format:
    """Codes and scales for one row: the ``D`` elements of one token and one KV head.

    Attributes:
        name: as in the recipe names.
        element: what a code is: "int8", "e2m1", or one of the comparison elements. int8 and int4 are
            symmetric; 4-bit codes are packed low nibble first.
        code_bits: bits per code.
        group: elements along D that share a scale; None for one scale per row.
        scale_dtype: "float32", "e8m0", or None where nothing is scaled.
    """

    name: str
    element: str
    code_bits: int
    group: int | None
    scale_dtype: str | None

    def code_nbytes(self, head_dim: int) -> int:
        """Bytes of the packed codes of one row."""
        return head_dim * self.code_bits // 8

    def num_scales(self, head_dim: int) -> int:
        """Scales of one row."""
        return 1 if self.group is None else head_dim // self.group

    def scale_nbytes(self, head_dim: int) -> int:
        """Bytes of the scales of one row."""
        return self.num_scales(head_dim) * SCALE_NBYTES[self.scale_dtype]

    def row_nbytes(self, head_dim: int) -> int:
        """Bytes of one row, codes and scales, without any padding."""
        return self.code_nbytes(head_dim) + self.scale_nbytes(head_dim)


INT8 = Format("int8", "int8", code_bits=8, group=None, scale_dtype="float32")
MXFP4 = Format("mxfp4", "e2m1", code_bits=4, group=32, scale_dtype="e8m0")
FP4_G32 = Format("fp4_g32", "e2m1", code_bits=4, group=32, scale_dtype="float32")
# Formats that others cache in, so that accuracy can be compared; no records exist for them.
COMPARISON_FORMATS = (
    Format("fp8_e4m3", "e4m3", code_bits=8, group=None, scale_dtype=None),
    Format("int4_g32", "int4", code_bits=4, group=32, scale_dtype="float32"),
    Format("e3m0_g32", "e3m0", code_bits=4, group=32, scale_dtype="float32"),
)


def int8_k_row(token: int) -> int:
    """Row of the int8 K tile that holds token ``token`` of its page.

    Inside each 16 tokens the rows hold tokens 0,1,4,5,8,9,12,13,2,3,6,7,10,11,14,15: with that order
    the score accumulators of ``wgmma`` and ``mma.sync`` become the operand of PV by packing bytes
    alone. On every other architecture it is only an address.
    """
    u = token % 16
    return token - u + 8 * (u >> 1 & 1) + 2 * (u >> 2) + (u & 1)


@dataclass(frozen=True)
class HeadBlock:
    """Bytes of one page of one KV head of K (or of V): the payload tile, then the scales.

    ================  =====================  ===============================================
    format            payload tile           scales
    ================  =====================  ===============================================
    int8 K            ``[D/16][P][16]``      ``[P]`` float32; rows in the order of int8_k_row
    int8 V            ``[P/16][D][16]``      ``[P]`` float32; an atom is 16 tokens of one dim
    mxfp4 K and V     ``[D/32][P][16]``      ``[D/32][P]`` bytes; an atom is one MX block
    fp4_g32 K and V   ``[D/32][P][16]``      ``[D/32][P]`` float32
    ================  =====================  ===============================================

    K atoms run along dims, which QK contracts; int8 V atoms run along tokens, which PV contracts.

    Raises:
        UnsupportedConfig: for a page size or head dim that no record exists for.
    """

    format: Format
    operand: Operand
    head_dim: int
    page_size: int

    def __post_init__(self):
        assert self.format not in COMPARISON_FORMATS, f"{self.format.name} has no records"
        check_page_size(self.page_size)
        check_head_dim(self.head_dim)

    @property
    def is_token_atom(self) -> bool:
        """Whether an atom runs along tokens (int8 V) rather than along dims."""
        return self.format == INT8 and self.operand == Operand.V

    @cached_property
    def payload_nbytes(self) -> int:
        return self.page_size * self.format.code_nbytes(self.head_dim)

    @cached_property
    def nbytes(self) -> int:
        """Distance from one head block to the next: payload, scales, and padding to 128 bytes."""
        used = self.page_size * self.format.row_nbytes(self.head_dim)
        return -(-used // HEAD_BLOCK_ALIGNMENT) * HEAD_BLOCK_ALIGNMENT

    @cached_property
    def nbytes_per_token(self) -> int:
        """What one slot adds to the pool for this head; padding is a whole number of bytes per token,
        since 128 is a multiple of every page size."""
        return self.nbytes // self.page_size

    def code_offset(self, token: int, byte: int) -> int:
        """Offset in the block of byte ``byte`` of the packed codes of the page's token ``token``."""
        if self.is_token_atom:
            return (token // 16 * self.head_dim + byte) * ATOM_BYTES + token % 16
        row = int8_k_row(token) if self.format == INT8 else token
        return (byte // ATOM_BYTES * self.page_size + row) * ATOM_BYTES + byte % ATOM_BYTES

    def scale_offset(self, token: int, index: int) -> int:
        """Offset in the block of the first byte of scale ``index`` of the page's token ``token``."""
        return self.payload_nbytes + (index * self.page_size + token) * SCALE_NBYTES[self.format.scale_dtype]

    def row_offsets(self, token: int) -> list[int]:
        """Offsets of every byte of a token's row: its codes in order, then its scales in order."""
        width = SCALE_NBYTES[self.format.scale_dtype]
        codes = [self.code_offset(token, b) for b in range(self.format.code_nbytes(self.head_dim))]
        scales = [
            self.scale_offset(token, i) + b for i in range(self.format.num_scales(self.head_dim)) for b in range(width)
        ]
        return codes + scales


@dataclass(frozen=True)
class Recipe:
    """A format for K and one for V, as ``--kv-cache-dtype`` names it."""

    name: str
    k: Format
    v: Format

    def block(self, operand: Operand, head_dim: int, page_size: int) -> HeadBlock:
        operand = Operand(operand)
        return HeadBlock(self.k if operand == Operand.K else self.v, operand, head_dim, page_size)

    def nbytes_per_token(
        self, kv_heads: int, head_dim: int, v_head_dim: int | None = None, page_size: int = DEFAULT_PAGE_SIZE
    ) -> int:
        """Bytes that one token takes in one layer: K and V, payload, scales and any padding."""
        k = self.block(Operand.K, head_dim, page_size)
        v = self.block(Operand.V, v_head_dim or head_dim, page_size)
        return kv_heads * (k.nbytes_per_token + v.nbytes_per_token)


RECIPES = {
    r.name: r
    for r in (
        Recipe("int8", INT8, INT8),
        Recipe("mxfp4", MXFP4, MXFP4),
        Recipe("fp4_g32", FP4_G32, FP4_G32),
        Recipe("k8v4", INT8, MXFP4),
    )
}
# The prefixed names never clash with one that SGLang takes later (it reserves "mxfp4").
NAME_PREFIX = "quantkv_"
DTYPE_NAMES = tuple(RECIPES) + tuple(NAME_PREFIX + name for name in RECIPES)


def is_recipe(name: str | None) -> bool:
    """Whether a ``--kv-cache-dtype`` value is one of ours."""
    return name in DTYPE_NAMES


def find_recipe(name: str) -> Recipe:
    """The recipe a ``--kv-cache-dtype`` value names.

    Raises:
        UnsupportedConfig: when it names none.
    """
    if not is_recipe(name):
        raise UnsupportedConfig(f"--kv-cache-dtype {name!r} is not a recipe", ", ".join(RECIPES), "Choose one of these")
    return RECIPES[name.removeprefix(NAME_PREFIX)]


def check_page_size(page_size: int) -> None:
    """Raises:
    UnsupportedConfig: unless records exist for this page size.
    """
    if page_size not in PAGE_SIZES:
        raise UnsupportedConfig(
            f"--page-size {page_size} has no record layout",
            f"--page-size {', '.join(map(str, PAGE_SIZES))}",
            f"Use --page-size {DEFAULT_PAGE_SIZE}, the default, or leave the flag out",
        )


def check_head_dim(head_dim: int) -> None:
    """Raises:
    UnsupportedConfig: unless records exist for this head dim.
    """
    if head_dim not in HEAD_DIMS:
        raise UnsupportedConfig(
            f"head_dim {head_dim} does not divide into blocks of 32 elements, or is larger than {HEAD_DIMS[-1]}",
            f"head_dim {', '.join(map(str, HEAD_DIMS))}",
            "Serve this model with --kv-cache-dtype auto or fp8_e4m3",
        )
