// Fibers and the scheduler of the host emulation.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace quantkv::emulation {

constexpr size_t kStackBytes = 256 * 1024;
constexpr uint8_t kPattern = 0xA5;  // what memory holds that nobody wrote yet

enum Scope { kWaveScope, kBlock };
using Collective = void (*)(void* const* lanes, int count);

// Switches stacks: saves the callee-saved registers of this one and returns on the other.
#if defined(__x86_64__)
extern "C" void quantkv_switch_stack(void** save, void* to);
asm(R"(
.text
.weak quantkv_switch_stack
.type quantkv_switch_stack, @function
quantkv_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size quantkv_switch_stack, .-quantkv_switch_stack
)");
struct Context {
  void* top = nullptr;
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    auto** p = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
    *--p = nullptr;  // where entry would return to; also leaves the stack as after a call
    *--p = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--p = nullptr;
    top = p;
  }
  static void swap(Context& from, Context& to) { quantkv_switch_stack(&from.top, to.top); }
};
#else
struct Context {
  ucontext_t state;
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }
  static void swap(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
};
#endif

struct Fiber {
  enum State { kReady, kWaiting, kDone };
  Context context;
  std::unique_ptr<char[]> stack;
  State state = kReady;
  Scope scope = kWaveScope;
  Collective operation = nullptr;
  void* data = nullptr;
};

struct SharedMemory {
  std::vector<uint8_t> bytes;
  uint8_t* data = nullptr;
  void reset(int size) {
    bytes.assign(size + 256, kPattern);
    data = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 127) & ~uintptr_t{127});
  }
};

struct Machine {
  std::vector<Fiber> fibers;
  Context scheduler;
  SharedMemory shared;
  int threads = 0, wave = 0, current = 0, block_x = 0, block_y = 0;
  const std::function<void()>* kernel = nullptr;
  std::string error;
};
inline Machine& machine() {
  static Machine m;
  return m;
}

inline void yield() {
  Machine& m = machine();
  Context::swap(m.fibers[m.current].context, m.scheduler);
}
// Posts this lane's data and returns when `operation` has run over all lanes of the scope.
inline void collective(Scope scope, Collective operation, void* data) {
  Fiber& f = machine().fibers[machine().current];
  f.state = Fiber::kWaiting;
  f.scope = scope;
  f.operation = operation;
  f.data = data;
  yield();
}
inline void fiber_entry() {
  Machine& m = machine();
  (*m.kernel)();
  m.fibers[m.current].state = Fiber::kDone;
  for (;;) yield();
}

// Runs the collective of fibers [first, first + count) if all wait for the same one; true if it ran.
inline bool run_collective(Machine& m, int first, int count, Scope scope) {
  void* data[1024];
  for (int i = 0; i < count; i++) {
    const Fiber& f = m.fibers[first + i];
    if (f.state != Fiber::kWaiting || f.scope != scope) return false;
    data[i] = f.data;
  }
  for (int i = 1; i < count; i++)
    if (m.fibers[first + i].operation != m.fibers[first].operation) {
      m.error = "lanes of one wave met at different collectives";
      return false;
    }
  m.fibers[first].operation(data, count);
  for (int i = 0; i < count; i++) m.fibers[first + i].state = Fiber::kReady;
  return true;
}

inline void run_block(Machine& m, const std::string& order, unsigned seed) {
  std::vector<int> sequence(m.threads);
  for (int i = 0; i < m.threads; i++) {
    sequence[i] = order == "reverse" ? m.threads - 1 - i : i;
    Fiber& f = m.fibers[i];
    if (!f.stack) f.stack.reset(new char[kStackBytes]);
    f.context.prepare(f.stack.get(), kStackBytes, fiber_entry);
    f.state = Fiber::kReady;
  }
  std::mt19937 random(seed);
  while (m.error.empty()) {
    if (order == "random") std::shuffle(sequence.begin(), sequence.end(), random);
    // At random some waves stand still for a while, so that others get ahead of them as far as barriers allow.
    const uint32_t held = order == "random" ? random() : 0;
    bool moved = false;
    for (int i : sequence)
      if (m.fibers[i].state == Fiber::kReady) {
        moved = true;
        if (held >> i / m.wave % 32 & 1) continue;
        m.current = i;
        Context::swap(m.scheduler, m.fibers[i].context);
      }
    int done = 0;
    for (const Fiber& f : m.fibers) done += f.state == Fiber::kDone;
    if (done == m.threads) return;
    for (int w = 0; w < m.threads; w += m.wave) moved |= run_collective(m, w, m.wave, kWaveScope);
    moved |= run_collective(m, 0, m.threads, kBlock);
    if (!moved && m.error.empty()) m.error = "deadlock: a wave or block is split over a collective, a barrier or an exit";
  }
}

inline const char* run(int blocks_x, int blocks_y, int threads, int wave, int shared_bytes,
                       const std::function<void()>& kernel) {
  Machine& m = machine();
  if (threads % wave || threads > 1024) return "a block holds whole waves, up to 1024 threads";
  const char* order = getenv("QUANTKV_EMULATED_ORDER");
  m.fibers.resize(threads);
  m.threads = threads;
  m.wave = wave;
  m.kernel = &kernel;
  m.error.clear();
  for (m.block_y = 0; m.block_y < blocks_y && m.error.empty(); m.block_y++)
    for (m.block_x = 0; m.block_x < blocks_x && m.error.empty(); m.block_x++) {
      m.shared.reset(shared_bytes);
      run_block(m, order ? order : "forward", 1 + m.block_y * blocks_x + m.block_x);
      if (!m.error.empty()) m.error += " (block " + std::to_string(m.block_x) + ", " + std::to_string(m.block_y) + ")";
    }
  m.fibers.clear();  // every module has a machine of its own, and their stacks add up
  return m.error.empty() ? nullptr : m.error.c_str();
}

}  // namespace quantkv::emulation
