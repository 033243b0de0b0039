// The matrix units' instructions on the host, from tables of their register maps: lane and register -> element.
//
// The tables are written apart from the fragment headers, which the kernels use: a mistake in one of the two shows.
// mma.sync: PTX ISA, "Matrix fragments for mma.m16n8k32 / m16n8k16". MFMA: AMD matrix instruction calculator.
// MMAC: public gfx928/gfx936 sources agree on it; no such hardware has confirmed it here.
#pragma once

namespace quantkv {

inline float bf16_value(uint32_t half) {
  const uint32_t bits = half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// What every lane posts to a matrix step.
struct MatrixStep {
  const void* a;
  const void* b;
  void* d;
};

// D[m][n] += sum over k of A[m][k] * B[k][n]; Map says where a lane's i-th element of each operand belongs.
template <class Map>
void run_matrix(void* const* lanes, int count) {
  using Element = typename Map::Element;
  using Sum = typename Map::Sum;
  static Element a[Map::kM][Map::kK], b[Map::kK][Map::kN];
  static Sum d[Map::kM][Map::kN];
  int row, col;
  for (int l = 0; l < count; l++) {
    const auto* step = static_cast<const MatrixStep*>(lanes[l]);
    for (int i = 0; i < Map::kM * Map::kK / count; i++) {
      Map::a(l, i, row, col);
      a[row][col] = static_cast<const Element*>(step->a)[i];
    }
    for (int i = 0; i < Map::kN * Map::kK / count; i++) {
      Map::b(l, i, row, col);
      b[row][col] = static_cast<const Element*>(step->b)[i];
    }
    for (int i = 0; i < Map::kM * Map::kN / count; i++) {
      Map::d(l, i, row, col);
      d[row][col] = static_cast<const Sum*>(step->d)[i];
    }
  }
  for (int m = 0; m < Map::kM; m++)
    for (int n = 0; n < Map::kN; n++)
      for (int k = 0; k < Map::kK; k++) d[m][n] += Map::product(a[m][k], b[k][n]);
  for (int l = 0; l < count; l++)
    for (int i = 0; i < Map::kM * Map::kN / count; i++) {
      Map::d(l, i, row, col);
      static_cast<Sum*>(static_cast<const MatrixStep*>(lanes[l])->d)[i] = d[row][col];
    }
}

struct Int8Elements {
  using Element = int8_t;
  using Sum = int;
  static int product(int8_t x, int8_t y) { return x * y; }
};
struct Bf16Elements {
  using Element = uint16_t;
  using Sum = float;
  static float product(uint16_t x, uint16_t y) { return bf16_value(x) * bf16_value(y); }
};

#if QUANTKV_MAP == QUANTKV_MAP_MMA

// kRun elements of contraction lie in one register: 4 int8 or 2 bf16.
template <class Elements, int kRun>
struct MmaMap : Elements {
  static constexpr int kM = 16, kN = 8, kK = 8 * kRun;
  static void a(int l, int i, int& row, int& k) {
    const int reg = i / kRun;
    row = l / 4 + 8 * (reg & 1);
    k = l % 4 * kRun + i % kRun + 4 * kRun * (reg >> 1);
  }
  static void b(int l, int i, int& k, int& col) {
    col = l / 4;
    k = l % 4 * kRun + i % kRun + 4 * kRun * (i / kRun);
  }
  static void d(int l, int i, int& row, int& col) {
    row = l / 4 + 8 * (i >> 1);
    col = l % 4 * 2 + (i & 1);
  }
};
QUANTKV_DEVICE void mma_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4]) {
  int sum[4] = {c[0], c[1], c[2], c[3]};
  MatrixStep step{a, b, sum};
  emulation::collective(emulation::kWaveScope, run_matrix<MmaMap<Int8Elements, 4>>, &step);
  memcpy(d, sum, sizeof sum);
}
QUANTKV_DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MatrixStep step{a, b, d};
  emulation::collective(emulation::kWaveScope, run_matrix<MmaMap<Bf16Elements, 2>>, &step);
}

// PTX prmt: bits 0..2 of a selector nibble choose a byte of {b, a}, bit 3 replicates its sign instead.
QUANTKV_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t nibble = selector >> 4 * i & 15;
    uint32_t byte = both >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    d |= byte << 8 * i;
  }
  return d;
}
QUANTKV_DEVICE uint32_t in_vector_register(uint32_t value) { return value; }

struct LoadMatrix {
  const uint8_t* row;  // the 16-byte row of which this lane gives the address
  uint32_t* r;
};
template <bool kTransposed>
void run_ldmatrix(void* const* lanes, int) {
  for (int l = 0; l < 32; l++)
    for (int matrix = 0; matrix < 4; matrix++) {
      uint16_t half[2];
      for (int i = 0; i < 2; i++) {
        const int row = kTransposed ? l % 4 * 2 + i : l / 4, col = kTransposed ? l / 4 : l % 4 * 2 + i;
        memcpy(&half[i], static_cast<const LoadMatrix*>(lanes[8 * matrix + row])->row + 2 * col, 2);
      }
      static_cast<LoadMatrix*>(lanes[l])->r[matrix] = half[0] | uint32_t{half[1]} << 16;
    }
}
QUANTKV_DEVICE void ldmatrix(uint32_t (&r)[4], const uint8_t* row) {
  LoadMatrix load{row, r};
  emulation::collective(emulation::kWaveScope, run_ldmatrix<false>, &load);
}
QUANTKV_DEVICE void ldmatrix_transposed(uint32_t (&r)[4], const uint8_t* row) {
  LoadMatrix load{row, r};
  emulation::collective(emulation::kWaveScope, run_ldmatrix<true>, &load);
}
struct MoveMatrix {
  uint16_t in[2], out[2];
};
inline void run_movmatrix(void* const* lanes, int) {
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 2; i++) {
      const int row = l % 4 * 2 + i, col = l / 4;
      static_cast<MoveMatrix*>(lanes[l])->out[i] = static_cast<const MoveMatrix*>(lanes[row * 4 + col / 2])->in[col % 2];
    }
}
QUANTKV_DEVICE uint32_t movmatrix(uint32_t x) {
  MoveMatrix m{{uint16_t(x), uint16_t(x >> 16)}, {}};
  emulation::collective(emulation::kWaveScope, run_movmatrix, &m);
  return m.out[0] | uint32_t{m.out[1]} << 16;
}

// ---- asynchronous copies: the data arrives when somebody waits, and until then the target holds the pattern -----

using Barrier = uint64_t;
struct PendingCopy {
  uint8_t* to;
  const uint8_t* from;
  int bytes;
};
struct BarrierState {
  int completed = 0;  // phases
  int expected = -1;  // bytes of the phase that is under way
  std::vector<PendingCopy> copies;
};
inline std::vector<BarrierState>& barrier_states() {
  static std::vector<BarrierState> states;
  return states;
}
inline void reset_barriers() { barrier_states().clear(); }
QUANTKV_DEVICE void barrier_init(Barrier* barrier, int) {
  *barrier = barrier_states().size();
  barrier_states().emplace_back();
}
QUANTKV_DEVICE void barrier_init_done() {}
QUANTKV_DEVICE void copy_begin(Barrier* barrier, int bytes, int rank) {
  if (rank == 0) barrier_states()[*barrier].expected = bytes;
}
QUANTKV_DEVICE void copy_piece(Barrier* barrier, uint8_t* to, const uint8_t* from, int bytes, int rank, int) {
  if (rank != 0) return;
  memset(to, emulation::kPattern, bytes);
  barrier_states()[*barrier].copies.push_back({to, from, bytes});
}
QUANTKV_DEVICE void copy_end(Barrier*) {}
// Waits until the phase of this parity is complete, as mbarrier.try_wait.parity does.
QUANTKV_DEVICE void barrier_wait(Barrier* barrier, int parity) {
  for (int tries = 0;; tries++) {
    if (tries == 1000000) emulation::machine().error = "a barrier is waited for that nothing completes";
    BarrierState& state = barrier_states()[*barrier];
    if ((state.completed & 1) != parity) return;
    if (state.expected >= 0) {
      int arrived = 0;
      for (const PendingCopy& c : state.copies) {
        memcpy(c.to, c.from, c.bytes);
        arrived += c.bytes;
      }
      if (arrived != state.expected) emulation::machine().error = "a barrier expects other bytes than were copied";
      state.copies.clear();
      state.expected = -1;
      state.completed++;
      return;
    }
    emulation::yield();
  }
}

#else  // 64 lanes

inline void reset_barriers() {}

// kRun elements of contraction belong to each quarter of the wave.
template <class Elements, int kRun>
struct Wave64Map : Elements {
  static constexpr int kM = 16, kN = 16, kK = 4 * kRun;
  static void a(int l, int i, int& row, int& k) {
    row = l % 16;
    k = kRun * (l / 16) + i;
  }
  static void b(int l, int i, int& k, int& col) {
    col = l % 16;
    k = kRun * (l / 16) + i;
  }
  static void d(int l, int i, int& row, int& col) {
#if QUANTKV_MAP == QUANTKV_MAP_MMAC
    row = l % 16;
    col = l / 16 + 4 * i;
#else
    row = 4 * (l / 16) + i;
    col = l % 16;
#endif
  }
};
QUANTKV_DEVICE void matrix_s8(int (&d)[4], const uint32_t* a, const uint32_t* b) {
  MatrixStep step{a, b, d};
  emulation::collective(emulation::kWaveScope, run_matrix<Wave64Map<Int8Elements, 8>>, &step);
}
QUANTKV_DEVICE void matrix_s8_wide(int (&d)[4], const uint32_t* a, const uint32_t* b) {
  MatrixStep step{a, b, d};
  emulation::collective(emulation::kWaveScope, run_matrix<Wave64Map<Int8Elements, 16>>, &step);
}
QUANTKV_DEVICE void matrix_bf16(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[2]) {
  MatrixStep step{a, b, d};
  emulation::collective(emulation::kWaveScope, run_matrix<Wave64Map<Bf16Elements, 4>>, &step);
}
// v_perm_b32 with selectors 0..7 only.
QUANTKV_DEVICE uint32_t select_bytes(uint32_t lo, uint32_t hi, uint32_t selector) {
  const uint64_t both = uint64_t{hi} << 32 | lo;
  uint32_t d = 0;
  for (int i = 0; i < 4; i++) d |= uint32_t(both >> 8 * (selector >> 8 * i & 7) & 255) << 8 * i;
  return d;
}

#endif

}  // namespace quantkv
