// What is behind wgmma in ptx.cuh, for that header only: CUTLASS's atoms, one function for each shape, type and layout. Half: float16, not bfloat16;
// MnA, MnB: of A and B not K is contiguous in shared memory.
#pragma once
#include <cute/arch/mma_sm90_gmma.hpp>

namespace ptx::detail {
namespace gmma = cute::SM90::GMMA;
constexpr gmma::Major major(bool is_mn) { return is_mn ? gmma::Major::MN : gmma::Major::K; }
// clang-format off
template <uint32_t N, bool Half, bool MnA, bool MnB> struct Atom;
#define MK_ATOM(n)                                                                                                                          \
  template <bool A, bool B> struct Atom<n, false, A, B> { using Type = gmma::MMA_64x##n##x16_F32BF16BF16_SS<major(A), major(B)>; }; \
  template <bool A, bool B> struct Atom<n, true, A, B> { using Type = gmma::MMA_64x##n##x16_F32F16F16_SS<major(A), major(B)>; };
MK_ATOM(64) MK_ATOM(128) MK_ATOM(192) MK_ATOM(256)
#undef MK_ATOM
template <uint32_t N, bool Half, bool MnB> struct RegisterAtom;  // A in registers
#define MK_ATOM(n)                                                                                                                          \
  template <bool B> struct RegisterAtom<n, false, B> { using Type = gmma::MMA_64x##n##x16_F32BF16BF16_RS<gmma::Major::K, major(B)>; }; \
  template <bool B> struct RegisterAtom<n, true, B> { using Type = gmma::MMA_64x##n##x16_F32F16F16_RS<gmma::Major::K, major(B)>; };
MK_ATOM(64) MK_ATOM(128)
#undef MK_ATOM
// 0 .. N-1 as a pack. Not <cuda/std/utility>: that header costs NVRTC 1.4 s, everything else here together 0.15 s.
template <uint32_t... I> struct Indices {};
template <uint32_t N, uint32_t... I> struct IndicesTo : IndicesTo<N - 1, N - 1, I...> {};
template <uint32_t... I> struct IndicesTo<0, I...> { using Type = Indices<I...>; };
// clang-format on
template <class Atom, uint32_t First = 0, uint32_t Count, uint32_t... I, class... A>
MK_DEVICE void fma(float (&d)[Count], uint64_t b, bool accumulate, Indices<I...>, A... a) {
  Atom::fma(a..., b, d[First + I]..., accumulate ? gmma::ScaleOut::One : gmma::ScaleOut::Zero);
}

// And the text of wgmma for the heights of tiles of swapped operands, of which a kernel has several: with CUTLASS's atoms, a statement for each
// instruction, NVRTC takes a third longer (docs/speed_log.md, "What NVRTC spends on tiles of any height").
// clang-format off
// Accumulators of 8, 16 ... columns, four for each eight: operands from d[i] on, and their names, behind five other operands.
#define MK_D1(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MK_D2(i) MK_D1(i), MK_D1(i + 4)
#define MK_D3(i) MK_D2(i), MK_D1(i + 8)
#define MK_D4(i) MK_D2(i), MK_D2(i + 8)
#define MK_D5(i) MK_D4(i), MK_D1(i + 16)
#define MK_D6(i) MK_D4(i), MK_D2(i + 16)
#define MK_D7(i) MK_D4(i), MK_D3(i + 16)
#define MK_D8(i) MK_D4(i), MK_D4(i + 16)
#define MK_D9(i) MK_D8(i), MK_D1(i + 32)
#define MK_D10(i) MK_D8(i), MK_D2(i + 32)
#define MK_D11(i) MK_D8(i), MK_D3(i + 32)
#define MK_D12(i) MK_D8(i), MK_D4(i + 32)
#define MK_D13(i) MK_D8(i), MK_D5(i + 32)
#define MK_D14(i) MK_D8(i), MK_D6(i + 32)
#define MK_D15(i) MK_D8(i), MK_D7(i + 32)
#define MK_D16(i) MK_D8(i), MK_D8(i + 32)
#define MK_D17(i) MK_D16(i), MK_D1(i + 64)
#define MK_D18(i) MK_D16(i), MK_D2(i + 64)
#define MK_D19(i) MK_D16(i), MK_D3(i + 64)
#define MK_D20(i) MK_D16(i), MK_D4(i + 64)
#define MK_D21(i) MK_D16(i), MK_D5(i + 64)
#define MK_D22(i) MK_D16(i), MK_D6(i + 64)
#define MK_D23(i) MK_D16(i), MK_D7(i + 64)
#define MK_D24(i) MK_D16(i), MK_D8(i + 64)
#define MK_D25(i) MK_D16(i), MK_D9(i + 64)
#define MK_D26(i) MK_D16(i), MK_D10(i + 64)
#define MK_D27(i) MK_D16(i), MK_D11(i + 64)
#define MK_D28(i) MK_D16(i), MK_D12(i + 64)
#define MK_D29(i) MK_D16(i), MK_D13(i + 64)
#define MK_D30(i) MK_D16(i), MK_D14(i + 64)
#define MK_D31(i) MK_D16(i), MK_D15(i + 64)
#define MK_D32(i) MK_D16(i), MK_D16(i + 64)
#define MK_NAMES1 "%5, %6, %7, %8"
#define MK_NAMES2 MK_NAMES1 ", %9, %10, %11, %12"
#define MK_NAMES3 MK_NAMES2 ", %13, %14, %15, %16"
#define MK_NAMES4 MK_NAMES3 ", %17, %18, %19, %20"
#define MK_NAMES5 MK_NAMES4 ", %21, %22, %23, %24"
#define MK_NAMES6 MK_NAMES5 ", %25, %26, %27, %28"
#define MK_NAMES7 MK_NAMES6 ", %29, %30, %31, %32"
#define MK_NAMES8 MK_NAMES7 ", %33, %34, %35, %36"
#define MK_NAMES9 MK_NAMES8 ", %37, %38, %39, %40"
#define MK_NAMES10 MK_NAMES9 ", %41, %42, %43, %44"
#define MK_NAMES11 MK_NAMES10 ", %45, %46, %47, %48"
#define MK_NAMES12 MK_NAMES11 ", %49, %50, %51, %52"
#define MK_NAMES13 MK_NAMES12 ", %53, %54, %55, %56"
#define MK_NAMES14 MK_NAMES13 ", %57, %58, %59, %60"
#define MK_NAMES15 MK_NAMES14 ", %61, %62, %63, %64"
#define MK_NAMES16 MK_NAMES15 ", %65, %66, %67, %68"
#define MK_NAMES17 MK_NAMES16 ", %69, %70, %71, %72"
#define MK_NAMES18 MK_NAMES17 ", %73, %74, %75, %76"
#define MK_NAMES19 MK_NAMES18 ", %77, %78, %79, %80"
#define MK_NAMES20 MK_NAMES19 ", %81, %82, %83, %84"
#define MK_NAMES21 MK_NAMES20 ", %85, %86, %87, %88"
#define MK_NAMES22 MK_NAMES21 ", %89, %90, %91, %92"
#define MK_NAMES23 MK_NAMES22 ", %93, %94, %95, %96"
#define MK_NAMES24 MK_NAMES23 ", %97, %98, %99, %100"
#define MK_NAMES25 MK_NAMES24 ", %101, %102, %103, %104"
#define MK_NAMES26 MK_NAMES25 ", %105, %106, %107, %108"
#define MK_NAMES27 MK_NAMES26 ", %109, %110, %111, %112"
#define MK_NAMES28 MK_NAMES27 ", %113, %114, %115, %116"
#define MK_NAMES29 MK_NAMES28 ", %117, %118, %119, %120"
#define MK_NAMES30 MK_NAMES29 ", %121, %122, %123, %124"
#define MK_NAMES31 MK_NAMES30 ", %125, %126, %127, %128"
#define MK_NAMES32 MK_NAMES31 ", %129, %130, %131, %132"

// One statement; its operands: the descriptors of A and B, in words; whether the first instruction adds to the accumulators; and these.
struct Descriptors {
  uint32_t a[2], b[2], adds;
};
MK_DEVICE Descriptors descriptors(uint64_t a, uint64_t b, bool adds) {
  return Descriptors{{static_cast<uint32_t>(a), static_cast<uint32_t>(a >> 32)}, {static_cast<uint32_t>(b), static_cast<uint32_t>(b >> 32)}, adds};
}
#define MK_STATEMENT(n, first, text)                                                                                       \
  asm volatile("{\n.reg .pred adds, yes;\n.reg .b64 a, b, high_a, high_b;\n.reg .b32 low, zero;\nmov.b32 zero, 0;\n"        \
               "mov.b64 high_a, {zero, %1};\nmov.b64 high_b, {zero, %3};\n"                                                \
               "setp.ne.b32 adds, %4, 0;\nsetp.eq.b32 yes, %4, %4;\n" text "}"                                             \
               : "+r"(of.a[0]), "+r"(of.a[1]), "+r"(of.b[0]), "+r"(of.b[1]), "+r"(of.adds), MK_D##n(first)::"memory")
// Descriptors so much further on, put together as in C++: with mov.b64 {low, high} ptxas 13.5 forgets that they are the warp's (warp_descriptor), in
// some kernels, and moves four words for each instruction.
#define MK_OPERANDS(by_a, by_b)                                             \
  "add.u32 low, %0, " by_a ";\ncvt.u64.u32 a, low;\nor.b64 a, a, high_a;\n" \
  "add.u32 low, %2, " by_b ";\ncvt.u64.u32 b, low;\nor.b64 b, b, high_b;\n"
#define MK_INSTRUCTION(N, n, type, transposed, by_a, by_b, adds)                                \
  MK_OPERANDS(by_a, by_b) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type       \
                          " {" MK_NAMES##n "}, a, b, " adds ", 1, 1, " transposed ";\n"
// Four instructions, of which each begins 16 columns of K further on than the one before: 32 bytes, or of A 16 rows of 128 bytes; in units of 16.
#define MK_FOUR(N, n, type, transposed, by)                                                                                   \
  "wgmma.fence.sync.aligned;\n" MK_INSTRUCTION(N, n, type, transposed, "0", "0", "adds")                                      \
  MK_INSTRUCTION(N, n, type, transposed, by, "2", "yes") MK_INSTRUCTION(N, n, type, transposed, "2*" by, "2*2", "yes")        \
  MK_INSTRUCTION(N, n, type, transposed, "3*" by, "3*2", "yes")                                                               \
  "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"

template <uint32_t N> struct Instruction;
#define MK_ANY(N, n)                                                                                                       \
  template <> struct Instruction<N> {                                                                                      \
    template <bool Half, bool MnA, bool MnB, uint32_t First, uint32_t Count>                                               \
    MK_DEVICE static void multiply(float (&d)[Count], Descriptors of) {                                                    \
      static_assert(!MnA || !MnB, "what there is text of");                                                                \
      if constexpr (!Half && !MnA && !MnB) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "bf16", "0, 0", "0", "0", "adds")); \
      if constexpr (!Half && MnA) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "bf16", "1, 0", "0", "0", "adds"));          \
      if constexpr (!Half && MnB) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "bf16", "0, 1", "0", "0", "adds"));          \
      if constexpr (Half && !MnA && !MnB) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "f16", "0, 0", "0", "0", "adds"));   \
      if constexpr (Half && MnA) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "f16", "1, 0", "0", "0", "adds"));            \
      if constexpr (Half && MnB) MK_STATEMENT(n, First, MK_INSTRUCTION(N, n, "f16", "0, 1", "0", "0", "adds"));            \
    }                                                                                                                      \
  };
MK_ANY(32, 4) MK_ANY(40, 5) MK_ANY(48, 6) MK_ANY(56, 7) MK_ANY(72, 9) MK_ANY(80, 10) MK_ANY(88, 11) MK_ANY(96, 12) MK_ANY(112, 14) MK_ANY(144, 18)
MK_ANY(160, 20) MK_ANY(176, 22) MK_ANY(208, 26) MK_ANY(224, 28) MK_ANY(240, 30)

template <uint32_t N> struct Step;
#define MK_STEP(N, n)                                                                                                      \
  template <> struct Step<N> {                                                                                             \
    template <bool Half, bool MnA, uint32_t Count>                                                                         \
    MK_DEVICE static void multiply(float (&d)[Count], Descriptors of) {                                                    \
      if constexpr (!Half && !MnA) MK_STATEMENT(n, 0, MK_FOUR(N, n, "bf16", "0, 0", "2"));                                 \
      if constexpr (!Half && MnA) MK_STATEMENT(n, 0, MK_FOUR(N, n, "bf16", "1, 0", "128"));                                \
      if constexpr (Half && !MnA) MK_STATEMENT(n, 0, MK_FOUR(N, n, "f16", "0, 0", "2"));                                   \
      if constexpr (Half && MnA) MK_STATEMENT(n, 0, MK_FOUR(N, n, "f16", "1, 0", "128"));                                  \
    }                                                                                                                      \
  };
MK_STEP(16, 2) MK_STEP(32, 4) MK_STEP(48, 6) MK_STEP(64, 8) MK_STEP(72, 9) MK_STEP(80, 10) MK_STEP(88, 11) MK_STEP(96, 12) MK_STEP(104, 13)
MK_STEP(112, 14) MK_STEP(120, 15) MK_STEP(128, 16) MK_STEP(136, 17) MK_STEP(144, 18) MK_STEP(152, 19) MK_STEP(160, 20) MK_STEP(168, 21)
MK_STEP(176, 22) MK_STEP(184, 23) MK_STEP(192, 24) MK_STEP(200, 25) MK_STEP(208, 26) MK_STEP(216, 27) MK_STEP(224, 28) MK_STEP(232, 29)
MK_STEP(240, 30) MK_STEP(248, 31) MK_STEP(256, 32)
// clang-format on
}  // namespace ptx::detail
