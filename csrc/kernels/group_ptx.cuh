// Instructions for products of 16-bit matrices: copies of 16 bytes into shared memory that run
// beside the threads, fragments into and out of it, and the tensor cores of sm_90a.
#pragma once
#include "async.cuh"
#include "elements.cuh"

constexpr int kPieceBytes = 16;

// Zeros instead where `there` is false; `from` is not read then.
__device__ __forceinline__ void copy_piece(Shared to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? kPieceBytes : 0)
               : "memory");
}
// All of this thread's pieces are there.
__device__ __forceinline__ void wait_for_pieces() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// The barrier is told once this thread's pieces are there: one of the arrivals it counts.
__device__ __forceinline__ void arrive_with_pieces(Shared barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four 8 x 8 matrices whose lines, 16 bytes, lie where lanes 0 to 7, 8 to 15, ... point; lane l
// gets elements 2 (l % 4) and the next of line l / 4 of each, or with kTurned of column l / 4.
template <bool kTurned>
__device__ __forceinline__ void load_fragments(unsigned (&to)[4], Shared line) {
  if constexpr (kTurned) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(line)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(line)
                 : "memory");
  }
}
// The other way, not turned.
__device__ __forceinline__ void store_fragments(Shared line, const unsigned (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// sums[16, 8] = a[16, 16] b[16, 8] + sums, by a warp: of a as `load_fragments` has its 8 x 8
// matrices, rows 8 to 15 and then columns 8 to 15 after the first; of b turned ones, rows 8 to 15
// last. A lane has elements 2 (lane % 4) and the next of the sums' rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void multiply_fragments(float (&sums)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1, BFloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_fragments(float (&sums)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1, Float16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

constexpr int kGroupThreads = 128;
constexpr int kGroupCols = 128;

// A matrix in shared memory, in lines of 128 bytes whose 16-byte pieces lie in an order of their
// own (piece p of line i at p ^ i % 8), from a multiple of 1024 bytes on. `beside`: bytes from one
// block of lines to the one that continues them.
__device__ __forceinline__ unsigned long long described(Shared at, int beside) {
  constexpr unsigned long long kEightLines = 1024 >> 4, kOrder = 1;
  return (at & 0x3ffff) >> 4 | static_cast<unsigned long long>(beside >> 4) << 16 |
         kEightLines << 32 | kOrder << 62;
}

// What text there is in an instruction is no template's argument: the sums as operands 0 to 63, and
// the product of elements of a type.
#define GROUP_SUMS                                                                                \
  "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
      "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
      "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]),             \
      "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]),             \
      "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]),             \
      "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]),             \
      "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), "+f"(sums[36]),             \
      "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),             \
      "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]),             \
      "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]),             \
      "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]),             \
      "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), "+f"(sums[60]), "+f"(sums[61]),             \
      "+f"(sums[62]), "+f"(sums[63])
#define MULTIPLY_GROUP(type)                                                               \
  asm volatile(                                                                            \
      "{\n.reg .pred more;\nsetp.ne.b32 more, %70, 0;\n"                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                         \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"            \
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"   \
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"   \
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "{%64, %65, %66, %67}, %68, more, 1, 1, %69;\n}"                                     \
      : GROUP_SUMS                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTurned), "r"(more))

// sums[64, 128] = a[64, 16] b[16, 128], added to what the sums are with `more`. Warp w of the group
// has rows 16 w and on: of a as fragments, rows 8 to 15 and then columns 8 to 15 after the first
// 8 x 8; of the sums a lane has, from 4 j on, elements 8 j + 2 (lane % 4) and the next of rows
// lane / 4 and lane / 4 + 8. Lines of b run along the contraction, or with kTurned along columns.
template <int kTurned>
__device__ __forceinline__ void multiply_group(float (&sums)[64], const unsigned (&a)[4],
                                               unsigned long long b, int more, BFloat16) {
  MULTIPLY_GROUP("bf16");
}
template <int kTurned>
__device__ __forceinline__ void multiply_group(float (&sums)[64], const unsigned (&a)[4],
                                               unsigned long long b, int more, Float16) {
  MULTIPLY_GROUP("f16");
}
#undef MULTIPLY_GROUP

// Before the first product of a run, and where the registers of its operands have changed.
__device__ __forceinline__ void group_begins() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// All products are done.
__device__ __forceinline__ void group_ends(float (&sums)[64]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : GROUP_SUMS : : "memory");
}
#undef GROUP_SUMS
