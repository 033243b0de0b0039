"""One mistake each in the attention kernels: where, and in which module the ordinary tests must notice it."""

from __future__ import annotations

from dataclasses import dataclass

from machines import Config, Machine

from sglang_quantkv.kernels.targets import Target

INT8, MXFP4, FP4 = (Config(recipe, 128, 64) for recipe in ("int8", "mxfp4", "fp4_g32"))
MMA, MFMA, MMAC = (Machine("cpu", Target(f"emulated_{name}")) for name in ("mma", "mfma", "mmac"))

DECODE, EXTEND, PLAN = "src/decode.h", "src/extend.h", "src/decode_plan.h"
ATTEND, RING = "include/quantkv/attend.h", "include/quantkv/ring.h"
ON_MMA, ON_WAVE64 = "include/quantkv/fragments_mma.h", "include/quantkv/fragments_wave64.h"


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str  # occurs once in the file
    new: str
    config: Config
    machine: Machine
    phase: str = "decode"

    def __str__(self) -> str:
        return f"{self.name} ({self.phase} {self.config} {self.machine})".replace(" ", "_")


SIDE_INDEX = "kQueriesOnRows ? quarter() + 4 * r : 4 * quarter() + r"
OTHER_SIDE_INDEX = "kQueriesOnRows ? 4 * quarter() + r : quarter() + 4 * r"
MMA_V_LOAD = "ldmatrix(a, v.atom(32 * block + 16 * (lane >> 4), 16 * f + (lane & 15)));"
WAVE64_V_LOAD = "const Bytes16 atom = load16(v.atom(16 * quarter(), 16 * f + index16()));"
V_SCALE = "load_scale<V>(v.scale(F::token(kBlock * block + i), 0))"
K_SCALES = "{load_scale<K>(k.scale(token(2 * step), 0)), load_scale<K>(k.scale(token(2 * step + 1), 0))}"
SWAPPED_K_SCALES = "{load_scale<K>(k.scale(token(2 * step + 1), 0)), load_scale<K>(k.scale(token(2 * step), 0))}"
SEEN_BY_ALL = "position >= from && position + kTileTokens <= to;"
NOT_BEFORE, NOT_AFTER = "position >= from;", "position + kTileTokens <= to;"
RELEASE = "    Scope::sync();\n    copy(released_, source);"
ARRIVED = "    Scope::sync();\n    load(source);\n    return slot;"
SLOT_FREE = "    Scope::sync();\n    for (int i = 0; i < kPages; i++)\n      if (tile_.page[i])"
HIDDEN = "p[slot][kBlock * block + i] > 0 ? weighted[i] : 0.0f"
LIVE = "return p > 0 ? p * 0x1p127f * scale : 0.0f;"

BUGS = [
    # Maps of the matrix units.
    Bug("MMAC's accumulator map", ON_WAVE64, SIDE_INDEX, OTHER_SIDE_INDEX, INT8, MFMA),
    Bug("MFMA's accumulator map", ON_WAVE64, SIDE_INDEX, OTHER_SIDE_INDEX, INT8, MMAC),
    Bug("MFMA's accumulator map", ON_WAVE64, SIDE_INDEX, OTHER_SIDE_INDEX, MXFP4, MMAC, "extend"),
    Bug(
        "dims of other lanes",
        ON_MMA,
        "return kInt8V ? 8 * j + group()",
        "return kInt8V ? kDims * group() + j",
        INT8,
        MMA,
    ),
    Bug("half a fragment of V", ON_MMA, MMA_V_LOAD, MMA_V_LOAD + " a[2] = a[0], a[3] = a[1];", INT8, MMA),
    Bug(
        "half a fragment of V",
        ON_WAVE64,
        WAVE64_V_LOAD,
        WAVE64_V_LOAD.removeprefix("const ") + " atom.w[2] = atom.w[0], atom.w[3] = atom.w[1];",
        INT8,
        MFMA,
    ),
    # Scales.
    Bug(
        "V of the other probability block",
        ATTEND,
        "F::accumulate_int8(v, query, block,",
        "F::accumulate_int8(v, query, 1 - block,",
        INT8,
        MMA,
    ),
    Bug(
        "V's scale of the other block",
        ATTEND,
        V_SCALE,
        V_SCALE.replace("kBlock * block", "kBlock * (1 - block)"),
        INT8,
        MMA,
    ),
    Bug(
        "a lane's own maximum scales probabilities",
        ATTEND,
        "          amax = F::max_over_tokens(amax);\n",
        "",
        INT8,
        MFMA,
    ),
    Bug("K's scale of the neighbour", ON_MMA, K_SCALES, SWAPPED_K_SCALES, INT8, MMA, "extend"),
    Bug(
        "V's scale byte of other tokens",
        ON_MMA,
        "load4(v.scale(16 * step + 4 * member(), block))",
        "load4(v.scale(16 * step + 4 * (member() ^ 1), block))",
        MXFP4,
        MMA,
    ),
    Bug("V's scale byte of the neighbour", ON_WAVE64, "0x04010400u) << 7", "0x04000401u) << 7", MXFP4, MFMA),
    # Work and its parts.
    Bug(
        "tokens off by 16 where a worker begins",
        DECODE,
        "+ i) * Shape::Slot::kTokens, seen",
        "+ i) * Shape::Slot::kTokens + (first > 0 ? 16 : 0), seen",
        INT8,
        MMA,
    ),
    Bug(
        "parts cut inside a position",
        PLAN,
        "((int64_t{position} + 1) * busy() - 1) / positions()",
        "int64_t{position} * busy() / positions()",
        INT8,
        MMA,
    ),
    Bug("sums keep the old maximum", ATTEND, "        sum[slot] *= factor;\n", "", INT8, MMA, "extend"),
    Bug(
        "residual queries twice",
        ATTEND,
        "p[slot][i] += F::other_term(p[slot][i]);",
        "p[slot][i] += 2.0f * F::other_term(p[slot][i]);",
        INT8,
        MMA,
    ),
    Bug("residual outputs twice", ATTEND, "o += F::other_term(o);", "o += 2.0f * F::other_term(o);", INT8, MMA),
    Bug(
        "residual outputs left out",
        ATTEND,
        "if constexpr (kTwoTerm && F::kInt8V) o += F::other_term(o);",
        "",
        INT8,
        MFMA,
    ),
    # Masks, poison, rows that are not finite.
    Bug(
        "no mask of the tail",
        ATTEND,
        SEEN_BY_ALL,
        NOT_BEFORE,
        INT8,
        MMA,
    ),
    Bug(
        "no mask before the window",
        ATTEND,
        SEEN_BY_ALL,
        NOT_AFTER,
        INT8,
        MMA,
    ),
    Bug("no causal mask", ATTEND, SEEN_BY_ALL, NOT_BEFORE, INT8, MMA, "extend"),
    Bug(
        "no mask before the window",
        ATTEND,
        SEEN_BY_ALL,
        NOT_AFTER,
        INT8,
        MFMA,
        "extend",
    ),
    Bug(
        "a hidden V scale counts",
        ATTEND,
        HIDDEN,
        "weighted[i]",
        INT8,
        MMA,
    ),
    Bug("a hidden V block counts", ON_MMA, LIVE, "return p * 0x1p127f * scale;", FP4, MMA),
    Bug("a hidden V block counts", ON_WAVE64, LIVE, "return p * 0x1p127f * scale;", MXFP4, MFMA, "extend"),
    Bug(
        "V that is not finite goes unnoticed",
        ATTEND,
        "    mark_non_finite(v, position, masked, mask);\n",
        "",
        MXFP4,
        MMA,
    ),
    # Order. In decode every wave has a ring of its own, and its lanes meet at each matrix step anyway: on the emulation a
    # missing barrier of a wave cannot show.
    Bug("no wait for a copy", RING, "    barrier_wait(&barriers_[slot], parity_);\n", "", INT8, MMA),
    Bug("no barrier before a slot is filled again", RING, RELEASE, "    copy(released_, source);", INT8, MMA, "extend"),
    Bug(
        "no barrier before a slot is read",
        RING,
        ARRIVED,
        ARRIVED.removeprefix("    Scope::sync();\n"),
        INT8,
        MFMA,
        "extend",
    ),
    Bug(
        "no barrier before a slot is filled again",
        RING,
        SLOT_FREE,
        SLOT_FREE.removeprefix("    Scope::sync();\n"),
        INT8,
        MFMA,
        "extend",
    ),
]
