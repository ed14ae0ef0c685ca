// wgmma: recorded when issued, executed at its wait (the latest legal time), when all threads of the warpgroup have come. Operands are read
// from shared memory through the descriptors as the PTX ISA defines them.
#include <algorithm>
#include <cstring>

#include "model.hpp"

namespace mkcpu {

namespace {

constexpr uint32_t kRows = 64, kDepth = 16, kMaxColumns = 256;  // of one instruction: M, K, N
constexpr uint32_t kBlock = 64;                                 // elements of a row of shared memory

struct Operand {
  uint32_t start, leading, stride;
  bool k_major;
};

Operand decode(uint64_t descriptor, uint32_t major) {
  if (descriptor >> 62 != 1)
    scheduler().fail_fiber("wgmma: descriptor 0x%llx does not say 128-byte swizzle", static_cast<unsigned long long>(descriptor));
  if ((descriptor >> 49 & 7) != 0)
    scheduler().fail_fiber("wgmma: descriptor 0x%llx has a base offset", static_cast<unsigned long long>(descriptor));
  return Operand{static_cast<uint32_t>(descriptor & 0x3fff) << 4, static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4,
                 static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4, major == 0};
}

// The shared address of an element before the swizzle, which exchanges 16-byte chunks by the address's row bits.
uint32_t unswizzled(const Operand& o, uint32_t mn, uint32_t k) {
  if (o.k_major) return o.start + mn / 8 * o.stride + mn % 8 * kRowBytes + k * 2;
  return o.start + mn / kBlock * o.leading + k / 8 * o.stride + k % 8 * kRowBytes + mn % kBlock * 2;
}
uint32_t swizzled(uint32_t address) { return address ^ ((address / kRowBytes % 8) << 4); }

struct Float16Table {
  float value[65536];
  Float16Table() {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
      float magnitude;
      if (exponent == 31) {
        magnitude = __builtin_bit_cast(float, 0x7f800000u | fraction << 13);
      } else if (exponent == 0) {
        magnitude = static_cast<float>(fraction) * 0x1p-24f;
      } else {
        magnitude = __builtin_bit_cast(float, (exponent + 112) << 23 | fraction << 13);
      }
      value[bits] = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, magnitude) | sign);
    }
  }
};

float to_float(uint16_t bits, uint32_t element) {
  if (element == 0) return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  static const Float16Table table;
  return table.value[bits];
}

// Eight elements that are contiguous in shared memory: one chunk.
void read_chunk(const Cta& cta, uint32_t address, uint32_t element, float* out, uint32_t out_stride) {
  const uint32_t at = swizzled(address);
  if (at < kSharedBase || at + 16 > kSharedBase + cta.shared_bytes) {
    scheduler().fail_fiber("wgmma: a descriptor leads to shared address 0x%x, outside shared memory (%u bytes)", at, cta.shared_bytes);
  }
  const char* p = cta.shared + (at - kSharedBase);
  const uint16_t owner = cta.dirty_owner[(at - kSharedBase) / kChunkBytes];
  if (owner != 0) {
    scheduler().fail_fiber(
        "missing fence.proxy.async: wgmma reads shared +0x%x, which thread %u has written with an ordinary store and not fenced",
        at - kSharedBase, owner - 1u);
  }
  tsan::read(p, 16);
  uint16_t bits[8];
  memcpy(bits, p, 16);
  for (uint32_t i = 0; i < 8; ++i) out[i * out_stride] = to_float(bits[i], element);
}

// out[mn * mn_stride + k * k_stride]
void read_operand(const Cta& cta, const Operand& o, uint32_t extent, uint32_t element, float* out, uint32_t mn_stride, uint32_t k_stride) {
  if (o.k_major) {
    for (uint32_t mn = 0; mn < extent; ++mn) {
      for (uint32_t k = 0; k < kDepth; k += 8)
        read_chunk(cta, unswizzled(o, mn, k), element, out + mn * mn_stride + k * k_stride, k_stride);
    }
  } else {
    for (uint32_t k = 0; k < kDepth; ++k) {
      for (uint32_t mn = 0; mn < extent; mn += 8)
        read_chunk(cta, unswizzled(o, mn, k), element, out + mn * mn_stride + k * k_stride, mn_stride);
    }
  }
}

// A in registers: word i of thread t holds row 16 * (t / 32) + t % 32 / 4 + 8 * (i % 2), k 8 * (i / 2) + 2 * (t % 4) + {0, 1}.
void read_registers(const uint32_t* const* words, uint32_t element, float* out) {
  for (uint32_t t = 0; t < kWarpgroupThreads; ++t) {
    for (uint32_t i = 0; i < 4; ++i) {
      float* at = out + (t / 32 * 16 + t % 32 / 4 + i % 2 * 8) * kDepth + i / 2 * 8 + t % 4 * 2;
      at[0] = to_float(static_cast<uint16_t>(words[t][i]), element);
      at[1] = to_float(static_cast<uint16_t>(words[t][i] >> 16), element);
    }
  }
}

// c (64 x n) += a (64 x 16) * b (16 x n)
void multiply(float* __restrict c, const float* __restrict a, const float* __restrict b, uint32_t n) {
  for (uint32_t i = 0; i < kRows; ++i, c += n, a += kDepth) {
    for (uint32_t k = 0; k < kDepth; k += 4) {
      const float a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
      const float *b0 = b + k * n, *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
      for (uint32_t j = 0; j < n; ++j) c[j] += (a0 * b0[j] + a1 * b1[j]) + (a2 * b2[j] + a3 * b3[j]);
    }
  }
}

// The accumulator fragment: thread t holds rows 16 * (t / 32) + t % 32 / 4 and 8 more, columns 8 * j + 2 * (t % 4) + {0, 1}.
template <bool Load>
void move_accumulator(float* c, float* const* d, uint32_t n) {
  for (uint32_t t = 0; t < kWarpgroupThreads; ++t) {
    float* row = c + (t / 32 * 16 + t % 32 / 4) * n + t % 4 * 2;
    float* e = d[t];
    for (uint32_t j = 0; j < n / 8; ++j, e += 4, row += 8) {
      if constexpr (Load) {
        row[0] = e[0], row[1] = e[1], row[8 * n] = e[2], row[8 * n + 1] = e[3];
      } else {
        e[0] = row[0], e[1] = row[1], e[2] = row[8 * n], e[3] = row[8 * n + 1];
      }
    }
  }
}

void execute(const Cta& cta, Warpgroup& group, uint64_t below) {
  Scheduler& s = scheduler();
  tsan::AsyncContext context;
  tsan::acquire(&group.issued_sync);
  s.scratch.resize(kRows * kMaxColumns + kRows * kDepth + kDepth * kMaxColumns);
  float *c = s.scratch.data(), *a = c + kRows * kMaxColumns, *b = a + kRows * kDepth;
  const Wgmma* loaded = nullptr;  // whose accumulator c is
  Wgmma last;
  while (group.first < below) {
    Wgmma op = group.ops.front();
    if (loaded != nullptr && (op.n != last.n || memcmp(op.d, last.d, sizeof(op.d)) != 0)) {
      move_accumulator<false>(c, last.d, last.n);
      loaded = nullptr;
    }
    if (!op.accumulate) {
      std::fill(c, c + kRows * op.n, 0.0f);
    } else if (loaded == nullptr) {
      move_accumulator<true>(c, op.d, op.n);
    }
    if (op.a_in_registers) {
      read_registers(op.a_words, op.element, a);
    } else {
      read_operand(cta, decode(op.a, op.a_major), kRows, op.element, a, kDepth, 1);
    }
    read_operand(cta, decode(op.b, op.b_major), op.n, op.element, b, 1, op.n);
    multiply(c, a, b, op.n);
    last = op;
    loaded = &last;
    group.ops.pop_front();
    ++group.first;
  }
  if (loaded != nullptr) move_accumulator<false>(c, last.d, last.n);
  tsan::release(&group.done_sync);
}

Warpgroup& warpgroup_of(const Fiber& fiber) { return fiber.cta->warpgroups[fiber.thread / kWarpgroupThreads]; }

}  // namespace
}  // namespace mkcpu

using namespace mkcpu;

void mkc_wgmma_fence() { self().wgmma_fenced = true; }

void mkc_wgmma(float* d, uint32_t n, uint32_t element, uint32_t a_major, uint32_t b_major, uint64_t a, const uint32_t* a_words, uint64_t b,
               bool accumulate) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  Warpgroup& group = warpgroup_of(fiber);
  if (!fiber.wgmma_fenced) s.fail_fiber("wgmma before the first wgmma_fence");
  const uint64_t number = fiber.wgmma_issued++;
  Wgmma op{n, element, a_major, b_major, a, b, accumulate, a_words != nullptr, 0, {}, {}};
  if (number == group.first + group.ops.size()) group.ops.push_back(op);
  Wgmma& shared = group.ops[number - group.first];
  if (!shared.same_operands(op))
    s.fail_fiber("wgmma: the threads of the warpgroup gave different operands (instruction %llu)", static_cast<unsigned long long>(number));
  shared.d[fiber.thread % kWarpgroupThreads] = d;
  shared.a_words[fiber.thread % kWarpgroupThreads] = a_words;
  ++shared.threads;
}

void mkc_wgmma_commit() {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  Warpgroup& group = warpgroup_of(fiber);
  const uint64_t number = fiber.wgmma_committed++;
  if (number == group.group_ends.size()) group.group_ends.push_back(fiber.wgmma_issued);
  if (group.group_ends[number] != fiber.wgmma_issued)
    s.fail_fiber("wgmma_commit: the threads of the warpgroup committed different instructions");
  tsan::release(&group.issued_sync);
}

void mkc_wgmma_wait(uint32_t pending) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  Warpgroup& group = warpgroup_of(fiber);
  if (group.meeting != 0 && group.pending != pending) s.fail_fiber("wgmma_wait: the threads of the warpgroup wait for different groups");
  group.pending = pending;
  if (++group.meeting < kWarpgroupThreads) {
    group.waiting.push_back(&fiber);
    s.park(Waiting{Wait::kWarpgroup, 0, pending, kNever});
  } else {
    group.meeting = 0;
    const uint64_t committed = group.group_ends.size();
    const Cta& cta = *fiber.cta;
    const uint32_t first = fiber.thread / kWarpgroupThreads * kWarpgroupThreads;
    for (uint32_t t = first; t < first + kWarpgroupThreads; ++t) {
      if (cta.fibers[t].wgmma_committed != committed || cta.fibers[t].wgmma_issued != fiber.wgmma_issued) {
        s.fail_fiber("wgmma_wait: the threads of the warpgroup have issued different instructions");
      }
    }
    if (committed > pending) execute(cta, group, group.group_ends[committed - pending - 1]);
    s.wake(group.waiting);
    s.maybe_yield();
  }
  tsan::acquire(&group.done_sync);
}
