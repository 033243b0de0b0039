// Stores new tokens in one launch: [norm of Q and K] + [rotary] + largest magnitude + quantize + paged write of K and
// V, and of Q and K what attention asks for. reference.store says what must come out, byte for byte.
//
// A lane holds 8 elements of a row (one token, one head), so every reduction stays inside a wave. A block works on a
// few heads of one of Q, K, V and on the tokens of one window of 16.
//
// An atom of int8 V is 16 tokens of one dim. So that one thread can write it whole, a block of V takes whole runs:
// tokens whose slots follow one another inside an atom. It takes the runs that start in its window, up to 31 tokens;
// at most the last of them fills an atom, since the next would start past the window.
#pragma once
#include "quantkv/element.h"
#include "quantkv/quantize.h"

namespace quantkv {

constexpr int kStoreWindow = 16;
constexpr int kStoreWaves = 8;
constexpr int kStoreBlocks = 3;  // that a unit should hold at a time

// A tensor [tokens, heads, D] of bf16 or fp16; elements of a row are adjacent.
struct Rows {
  uint16_t* data;  // nullptr: there is none
  int64_t token_stride;
  int64_t head_stride;
  int heads;
  bool aligned;  // every row starts at a multiple of 16 bytes
};

struct StoreParams {
  Rows q;                    // may be absent
  Rows k, v;
  Rows q_out, k_out;         // Q and K after norm and rotary; may be absent, or q and k themselves
  uint8_t* q_codes;          // int8 [tokens, q heads, D], or nullptr
  float* q_scales;           // [tokens, q heads], with q_codes
  uint8_t* k_records;        // [pages, kv heads, K::kBytes]
  uint8_t* v_records;        // [pages, kv heads, V::kBytes]
  const int64_t* slots;      // [tokens]; a token with a negative slot is not written
  const int64_t* positions;  // [tokens], with cos_sin
  const float* cos_sin;      // [positions, rotary_dim]: cosines, then sines; nullptr: no rotary
  const uint16_t* q_weight;  // [D], elements as of the rows, or nullptr: no norm
  const uint16_t* k_weight;  // [D], or nullptr: no norm
  float weight_offset;       // added to the weights
  float eps;
  int tokens;
  int rotary_dim;
  bool interleaved;          // rotary pairs are neighbours (2i, 2i + 1), not (i, i + rotary_dim / 2)
  int tokens_per_pass;       // rows that a block holds at a time: these tokens of
  int heads_per_block;       // these heads
  int q_groups, kv_groups;   // blocks that the heads of Q take, and those of K (and of V)
};

QUANTKV_DEVICE Bytes16 load_row(const Rows& rows, int token, int head, int column) {
  const uint16_t* from = rows.data + token * rows.token_stride + head * rows.head_stride + column;
  if (rows.aligned) return load16(from);
  Bytes16 bytes;
  for (int i = 0; i < 4; i++) bytes.w[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  return bytes;
}

QUANTKV_DEVICE void store_row(const Rows& rows, int token, int head, int column, const Bytes16& bytes) {
  uint16_t* to = rows.data + token * rows.token_stride + head * rows.head_stride + column;
  if (rows.aligned) return store16(to, bytes);
  for (int i = 0; i < 8; i++) to[i] = bytes.w[i / 2] >> i % 2 * 16;
}

QUANTKV_DEVICE void load_floats(const float* from, float (&x)[8]) {
  const Bytes16 lo = load16(from), hi = load16(from + 4);
  for (int i = 0; i < 4; i++) x[i] = as_float(lo.w[i]), x[i + 4] = as_float(hi.w[i]);
}

// The order of the sum is part of the result: 8 neighbours one after another, then pairs of lanes.
template <Element kElement, int kHeadDim>
QUANTKV_DEVICE Bytes16 rms_norm(const Bytes16& row, const uint16_t* weight, float offset, float eps, int column) {
  float x[8], w[8];
  unpack<kElement>(row, x);
  unpack<kElement>(load16(weight + column), w);
  float sum = x[0] * x[0];
  for (int i = 1; i < 8; i++) sum += x[i] * x[i];
  for (int mask = 1; mask < kHeadDim / 8; mask *= 2) sum += shuffle_xor(sum, mask);
  const float factor = divide(1.0f, square_root(divide(sum, static_cast<float>(kHeadDim)) + eps));
  for (int i = 0; i < 8; i++) x[i] = x[i] * factor * (w[i] + offset);
  return pack<kElement>(x);
}

template <Element kElement>
QUANTKV_DEVICE Bytes16 rotate(const Bytes16& row, const StoreParams& p, int token, int column) {
  const int half = p.rotary_dim / 2;
  const bool rotated = column < p.rotary_dim, second = !p.interleaved && column >= half;
  // Lanes that keep their elements still take part in the shuffles.
  const int partner = lane_index() + (p.interleaved || !rotated ? 0 : second ? -half / 8 : half / 8);
  Bytes16 other_row;
  for (int i = 0; i < 4; i++) other_row.w[i] = shuffle(row.w[i], partner);
  if (!rotated) return row;

  float x[8], other[8], cosine[8], sine[8];
  unpack<kElement>(row, x);
  unpack<kElement>(other_row, other);
  const float* cosines = p.cos_sin + p.positions[token] * p.rotary_dim;
  if (p.interleaved) {
    const Bytes16 c = load16(cosines + column / 2), s = load16(cosines + half + column / 2);
    for (int i = 0; i < 8; i++) {
      cosine[i] = as_float(c.w[i / 2]), sine[i] = as_float(s.w[i / 2]);
      other[i] = x[i ^ 1];
    }
  } else {
    load_floats(cosines + column - (second ? half : 0), cosine);
    load_floats(cosines + column + (second ? 0 : half), sine);
  }
  for (int i = 0; i < 8; i++) {
    const bool is_second = p.interleaved ? i % 2 : second;
    const float a = x[i] * cosine[i], b = other[i] * sine[i];
    x[i] = is_second ? a + b : a - b;
  }
  return pack<kElement>(x);
}

template <class Block>
QUANTKV_DEVICE uint8_t* head_block(uint8_t* records, int64_t slot, int head, int heads) {
  return records + (slot / Block::kPageSize * heads + head) * Block::kBytes;
}

QUANTKV_DEVICE void write_words(uint8_t* to, const uint32_t (&words)[2]) { store8(to, {{words[0], words[1]}}); }
QUANTKV_DEVICE void write_words(uint8_t* to, const uint32_t (&words)[1]) { store4(to, words[0]); }

// A lane's codes are 8 or 4 bytes, and the lanes of an atom are neighbours: one store instruction of a wave writes
// whole atoms, as many bytes as if some lanes first gathered 16 each.
template <class Block, int kWords>
QUANTKV_DEVICE void write_codes(uint8_t* block, int token, int column, const uint32_t (&words)[kWords]) {
  write_words(block + Block::code_offset(token, column / 8 * 4 * kWords), words);
}

// The same where every code lies in an atom of its own: neighbouring lanes write neighbouring atoms.
template <class Block>
QUANTKV_DEVICE void write_code_bytes(uint8_t* block, int token, int column, const uint8_t* codes) {
  for (int dim = column / 8; dim < Block::kHeadDim; dim += Block::kHeadDim / 8)
    block[Block::code_offset(token, dim)] = codes[dim];
}

template <class Block>
QUANTKV_DEVICE void write_scale(uint8_t* block, int token, int column, uint32_t scale) {
  constexpr int kColumns = Block::kHeadDim / Block::kScales;
  if (column % kColumns) return;
  uint8_t* to = block + Block::scale_offset(token, column / kColumns);
  if constexpr (Block::kScaleBytes == 1)
    *to = scale;
  else
    store4(to, scale);
}

struct TokenRange {
  int begin, end;
  int atom;  // the tokens from here on fill an atom; end if none do
};

// The runs that start in the window from `first` on; all lanes of the wave call it.
QUANTKV_DEVICE TokenRange find_runs(const StoreParams& p, int first) {
  const int token = first + lane_index();
  bool leads = token >= p.tokens;
  if (!leads && token < first + 2 * kStoreWindow) {
    const int64_t slot = p.slots[token];
    leads = token == 0 || slot % kAtomBytes == 0 || slot != p.slots[token - 1] + 1;
  }
  // Among 16 tokens one leads a run, because a run ends with its atom.
  const auto leaders = static_cast<uint32_t>(ballot(leads));
  const int end = trailing_zeros(leaders & 0xFFFF0000u), last = end - kAtomBytes;
  const bool fills_atom = (leaders >> last & 0xFFFFu) == 1;
  TokenRange range{first + trailing_zeros(leaders), min_of(first + end, p.tokens), 0};
  range.atom = fills_atom ? first + last : range.end;
  return range;
}

// Writes the atom of tokens [token, token + 16) for every dim, from tiles [heads_per_block][16][D]: neighbouring
// threads write neighbouring atoms.
template <class Block>
QUANTKV_DEVICE void write_token_atoms(const StoreParams& p, const uint8_t* tiles, int token, int first_head) {
  constexpr int kHeadDim = Block::kHeadDim;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  const int heads = min_of(p.heads_per_block, p.v.heads - first_head);
  for (int i = thread_index(); i < heads * kHeadDim; i += block_size()) {
    const int head = i / kHeadDim, dim = i % kHeadDim;
    const uint8_t* codes = tiles + head * kAtomBytes * kHeadDim + dim;
    Bytes16 atom{};
    for (int j = 0; j < kAtomBytes; j++) atom.w[j / 4] |= static_cast<uint32_t>(codes[j * kHeadDim]) << j % 4 * 8;
    uint8_t* block = head_block<Block>(p.v_records, slot, first_head + head, p.v.heads);
    store16(block + Block::atom_offset(slot % Block::kPageSize, dim), atom);
  }
}

template <class Config, Element kElement>
QUANTKV_KERNEL(kStoreWaves * kWave, kStoreBlocks)
store_kernel(StoreParams p) {
  using K = typename Config::K;
  using V = typename Config::V;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kPageSize = Config::kPageSize;
  constexpr int kLanes = kHeadDim / 8;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "a row is 8, 16 or 32 lanes");

  // Which tensor and heads: groups of Q, then of K, then of V.
  int group = block_index_y();
  const bool is_q = group < p.q_groups;
  if (!is_q) group -= p.q_groups;
  const bool is_k = !is_q && group < p.kv_groups;
  if (!is_q && !is_k) group -= p.kv_groups;
  const bool is_v = !is_q && !is_k;
  const Rows rows = is_q ? p.q : is_k ? p.k : p.v;
  const Rows out = is_q ? p.q_out : is_k ? p.k_out : Rows{};
  const uint16_t* weight = is_q ? p.q_weight : is_k ? p.k_weight : nullptr;
  const int first_head = group * p.heads_per_block;

  // Which tokens.
  const int first = block_index() * kStoreWindow, last = min_of(first + kStoreWindow, p.tokens);
  TokenRange range{first, last, last};
  if (V::kIsTokenAtom && is_v) range = find_runs(p, first);

  const int row = thread_index() / kLanes, column = thread_index() % kLanes * 8;
  const int head_in_block = row / p.tokens_per_pass, token_in_pass = row % p.tokens_per_pass;
  const bool is_head = first_head + head_in_block < rows.heads;
  const int head = is_head ? first_head + head_in_block : first_head;
  // Codes on their way into token atoms: a row for the lanes that share it, then tiles for the whole block.
  uint8_t* own_row = shared_memory() + row * kHeadDim;
  uint8_t* tiles = shared_memory() + block_size() * 8;
  uint8_t* tile = tiles + head_in_block * kAtomBytes * kHeadDim;
  for (int pass = range.begin; pass < range.end; pass += p.tokens_per_pass) {
    // Rows past the end repeat another one, since all lanes of a wave take part in its collectives.
    const bool is_row = pass + token_in_pass < range.end && is_head;
    const int token = is_row ? pass + token_in_pass : pass;

    Bytes16 packed = load_row(rows, token, head, column);
    if (weight) packed = rms_norm<kElement, kHeadDim>(packed, weight, p.weight_offset, p.eps, column);
    if (p.cos_sin && !is_v) packed = rotate<kElement>(packed, p, token, column);
    if (out.data && is_row) store_row(out, token, head, column, packed);
    float x[8];
    unpack<kElement>(packed, x);

    if (is_q) {
      if (p.q_codes) {
        const auto codes = quantize<Format::kInt8, kHeadDim>(x);
        const int64_t index = static_cast<int64_t>(token) * p.q.heads + head;
        if (is_row) write_words(p.q_codes + index * kHeadDim + column, codes.words);
        if (is_row && column == 0) p.q_scales[index] = as_float(codes.scale);
      }
      continue;
    }
    const int64_t slot = p.slots[token];
    const bool writes = is_row && slot >= 0;
    if (is_k) {
      const auto codes = quantize<K::kFormat, kHeadDim>(x);
      uint8_t* block = head_block<K>(p.k_records, slot, head, rows.heads);
      if (writes) write_codes<K>(block, slot % kPageSize, column, codes.words);
      if (writes) write_scale<K>(block, slot % kPageSize, column, codes.scale);
    } else {
      const auto codes = quantize<V::kFormat, kHeadDim>(x);
      uint8_t* block = head_block<V>(p.v_records, slot, head, rows.heads);
      if (writes) write_scale<V>(block, slot % kPageSize, column, codes.scale);
      if constexpr (V::kIsTokenAtom) {
        const bool is_in_atom = token >= range.atom;
        uint8_t* code_row = is_in_atom ? tile + (token - range.atom) * kHeadDim : own_row;
        if (is_row) write_words(code_row + column, codes.words);
        sync_wave();
        if (writes && !is_in_atom) write_code_bytes<V>(block, slot % kPageSize, column, code_row);
        sync_wave();
      } else if (writes) {
        write_codes<V>(block, slot % kPageSize, column, codes.words);
      }
    }
  }
  if constexpr (V::kIsTokenAtom) {
    if (range.atom == range.end) return;
    sync_block();
    write_token_atoms<V>(p, tiles, range.atom, first_head);
  }
}

#ifndef QUANTKV_DEVICE_ONLY
// Fills in what the launch decides, tokens_per_pass and all after it. nullptr, or what went wrong.
template <class Config>
const char* store(StoreParams p, Element element, Stream stream) {
  if (p.tokens == 0) return nullptr;
  if (p.cos_sin && (p.rotary_dim <= 0 || p.rotary_dim % 16 || p.rotary_dim > Config::kHeadDim))
    return "rotary_dim must be a multiple of 16, up to head_dim";
  // Few tokens: small blocks start sooner, and heads spread over more of them.
  const int waves = p.tokens <= 2 ? p.tokens : kStoreWaves;
  const int threads = waves * kWave, rows = threads * 8 / Config::kHeadDim;
  const int window = p.tokens <= 2 ? p.tokens : kStoreWindow;
  p.tokens_per_pass = window < rows ? window : rows;
  p.heads_per_block = rows / p.tokens_per_pass;
  p.q_groups = ceil_div(p.q.heads, p.heads_per_block);
  p.kv_groups = ceil_div(p.k.heads, p.heads_per_block);
  const int shared_bytes =
      Config::V::kIsTokenAtom ? threads * 8 + p.heads_per_block * kAtomBytes * Config::kHeadDim : 0;
  const auto kernel =
      element == Element::kBf16 ? store_kernel<Config, Element::kBf16> : store_kernel<Config, Element::kFp16>;
  return launch(kernel, dim3(ceil_div(p.tokens, kStoreWindow), p.q_groups + 2 * p.kv_groups), threads, shared_bytes, stream, p);
}
#endif

}  // namespace quantkv

// The kernels of a configuration, for a compile without host code.
#define QUANTKV_INSTANTIATE_STORE(...)                                                                 \
  template QUANTKV_KERNEL(quantkv::kStoreWaves* quantkv::kWave, quantkv::kStoreBlocks)                                     \
      quantkv::store_kernel<__VA_ARGS__, quantkv::Element::kBf16>(quantkv::StoreParams);               \
  template QUANTKV_KERNEL(quantkv::kStoreWaves* quantkv::kWave, quantkv::kStoreBlocks)                                     \
      quantkv::store_kernel<__VA_ARGS__, quantkv::Element::kFp16>(quantkv::StoreParams);
