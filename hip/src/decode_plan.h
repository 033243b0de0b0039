// How decode's work is cut: once per forward pass, for all layers that share a window.
//
// A segment is a (request, KV head, block of query rows); its work is the ring slots of its tokens that some row sees.
// Segments one after another make a list of positions, which is cut into one contiguous range per worker (a wave),
// equal within one position. A worker leaves a partial result for every segment it touches, at place
// worker + segment: both grow along the list, so no two partials share a place.
#pragma once
#include "quantkv/arch.h"

namespace quantkv {

// All arrays live in one int32 workspace, whose size DecodeLayout.plan_ints in kernels/decode.py computes.
struct DecodePlan {
  int* start;           // [requests + 1] position at which a request begins
  int* first_slot;      // [requests] ring slots before this one are behind every row's window
  int* slots;           // [requests] ring slots of each of its segments
  int* worker_start;    // [workers + 1] position at which a worker's range begins
  int* worker_request;  // [workers] and the request that holds it
  int* partials;        // [segments, 2] place of a segment's first partial, and how many there are
  int requests;
  int segments_per_request;
  int workers;

  QUANTKV_HOST_DEVICE static DecodePlan in(int* workspace, int requests, int segments_per_request, int workers) {
    DecodePlan p;
    p.start = workspace;
    p.first_slot = p.start + requests + 1;
    p.slots = p.first_slot + requests;
    p.worker_start = p.slots + requests;
    p.worker_request = p.worker_start + workers + 1;
    p.partials = p.worker_request + workers;
    p.requests = requests;
    p.segments_per_request = segments_per_request;
    p.workers = workers;
    return p;
  }

  QUANTKV_DEVICE int positions() const { return start[requests]; }
  // Workers that have work: the first so many, each at least one position, so that no partial is missing in between.
  QUANTKV_DEVICE int busy() const { return min_of(workers, positions()); }
  QUANTKV_DEVICE int cut(int worker) const {
    return worker < busy() ? static_cast<int>(int64_t{positions()} * worker / busy()) : positions();
  }
  QUANTKV_DEVICE int worker_at(int position) const {
    return static_cast<int>(((int64_t{position} + 1) * busy() - 1) / positions());
  }
  // The request that holds a position, looked for from an earlier request on.
  QUANTKV_DEVICE int request_at(int position, int from) const {
    while (position >= start[from + 1]) from++;
    return from;
  }
};

struct PlanParams {
  DecodePlan plan;
  const int* seq_lens;  // [requests]
  int q_len;
  int window_left;
  int slot_tokens;
};

constexpr int kPlanThreads = 256;

// One block.
QUANTKV_KERNEL(kPlanThreads, 1) plan_kernel(PlanParams p) {
  const DecodePlan& plan = p.plan;
  const int thread = thread_index();
  int* totals = reinterpret_cast<int*>(shared_memory());
  // Each thread sums a run of requests, then adds what lies before its run.
  const int run = (plan.requests + kPlanThreads - 1) / kPlanThreads;
  const int first = min_of(thread * run, plan.requests), last = min_of(first + run, plan.requests);
  int total = 0;
  for (int b = first; b < last; b++) {
    const int length = p.seq_lens[b];
    const int unseen = p.window_left < 0 ? 0 : max_of(0, length - p.q_len - p.window_left);
    plan.first_slot[b] = unseen / p.slot_tokens;
    plan.slots[b] = (length + p.slot_tokens - 1) / p.slot_tokens - plan.first_slot[b];
    total += plan.slots[b] * plan.segments_per_request;
  }
  totals[thread] = total;
  sync_block();
  int before = 0;
  for (int i = 0; i < thread; i++) before += totals[i];
  for (int b = first; b < last; b++) {
    plan.start[b] = before;
    before += plan.slots[b] * plan.segments_per_request;
  }
  if (thread == kPlanThreads - 1) plan.start[plan.requests] = before;
  sync_block();
  if (thread == 0) plan.worker_start[plan.workers] = plan.positions();
  for (int w = thread; w < plan.workers; w += kPlanThreads) {
    const int position = plan.cut(w);
    int low = 0, high = plan.requests - 1;  // the last request that starts at or before the position and is not empty
    while (low < high) {
      const int middle = (low + high) / 2;
      if (plan.start[middle + 1] > position)
        high = middle;
      else
        low = middle + 1;
    }
    plan.worker_start[w] = position;
    plan.worker_request[w] = low;
  }
  const int segments = plan.requests * plan.segments_per_request;
  for (int s = thread; s < segments; s += kPlanThreads) {
    const int b = s / plan.segments_per_request, count = plan.slots[b];
    const int begin = plan.start[b] + s % plan.segments_per_request * count;
    const int worker = count ? plan.worker_at(begin) : 0;
    plan.partials[2 * s] = worker + s;
    plan.partials[2 * s + 1] = count ? plan.worker_at(begin + count - 1) - worker + 1 : 0;
  }
}

}  // namespace quantkv
