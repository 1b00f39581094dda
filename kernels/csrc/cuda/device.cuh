// What the kernels use of the GPU, one function per instruction: nothing else in this folder holds PTX.
//
// The kernels are written against these names alone. Compiled with BLENDKV_EMULATED by a C++ compiler, they come from
// tests/kernels/simt/emulated.hpp instead, which runs the same kernels on the CPU, thread by thread: where there is no
// GPU, that is how the kernels' results are tested.
#pragma once

#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace blendkv {

using i64 = long long;

enum class Type : i64 { kBf16 = 0, kF16 = 1, kF32 = 2 };

constexpr int kWarp = 32;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

struct Grid {
  unsigned x, y;
};

struct alignas(16) Chunk {  // what one load or store moves
  uint32_t word[4];
};

struct alignas(8) HalfChunk {
  uint32_t word[2];
};

}  // namespace blendkv

#ifdef BLENDKV_EMULATED
#include "emulated.hpp"
#else

#define DEVICE __device__ __forceinline__
#define SHARED_CODE __host__ __device__ constexpr
#define KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define GRID_CONSTANT __grid_constant__

namespace blendkv {

DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DEVICE unsigned block_x() { return blockIdx.x; }
DEVICE unsigned block_y() { return blockIdx.y; }

DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char blendkv_shared[];
  return blendkv_shared;
}

// Address of shared memory as ldmatrix and cp.async take it.
DEVICE uint32_t shared_address() { return static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory())); }

DEVICE void block_sync() { __syncthreads(); }
DEVICE void warp_sync() { __syncwarp(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float shuffle_from(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// D += A B for a 16 x 16 tile A and a 16 x 8 tile B of 16-bit floats.
template <Type T>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (T == Type::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit values; lane 8 i + j gives the address of row j of matrix i.
DEVICE void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

DEVICE void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 16 bytes from device to shared memory, zeros where not valid.
DEVICE void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(valid ? 16 : 0)
               : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `Pending` of this thread's newest groups are under way.
template <int Pending>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_fast(float x) { return __log2f(x); }
DEVICE float divide_fast(float a, float b) { return __fdividef(a, b); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float bits_as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t float_as_bits(float x) { return __float_as_uint(x); }

// Two floats as 16-bit ones, the first in the low half.
template <Type T>
DEVICE uint32_t pack(float low, float high) {
  uint32_t both;
  if constexpr (T == Type::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  }
  return both;
}

DEVICE float widen_f16(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

template <typename X>
DEVICE X load_once(const X* from) {  // through the read-only path
  return __ldg(from);
}

template <>
DEVICE Chunk load_once<Chunk>(const Chunk* from) {
  const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
  return {{x.x, x.y, x.z, x.w}};
}

template <>
DEVICE HalfChunk load_once<HalfChunk>(const HalfChunk* from) {
  const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
  return {{x.x, x.y}};
}

// Start a kernel; returns the CUDA error. No waiting.
template <typename Args>
int launch(void (*kernel)(const Args), Grid grid, int threads, int shared, void* stream, const Args& args) {
  if (shared > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return static_cast<int>(status);
  }
  kernel<<<dim3(grid.x, grid.y), threads, static_cast<size_t>(shared), static_cast<cudaStream_t>(stream)>>>(args);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace blendkv

#endif
