// The GPU that kernels/csrc/cuda/device.cuh names, on a CPU: every thread of a block is a fiber.
//
// Lanes meet at every warp instruction, threads at every block barrier; between those, warps run in random order. What
// goes wrong on a GPU only now and then goes wrong here: an asynchronous copy fills its place with NaN when it is
// issued and moves its bytes at the last moment allowed, shared memory starts as NaN, lanes of a warp that meet at
// different instructions and barriers that not all threads reach are errors, and conflicts of banks are counted.
#pragma once

#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <ucontext.h>

#define DEVICE inline
#define SHARED_CODE constexpr
#define KERNEL(threads, blocks) void
#define GRID_CONSTANT

namespace blendkv::emulated {

constexpr std::size_t kStack = 1 << 18;
constexpr int kError = 719;  // what CUDA calls a failed launch

struct Copy {
  unsigned char* to;
  const void* from;
  bool valid;
};

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
  ucontext_t start{};
  jmp_buf at{};
  std::unique_ptr<char[]> stack{new char[kStack]};
  int index = 0;
  bool started = false;
  State state = State::kReady;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

using Together = void (*)(void* const*);

struct Warp {
  Together what = nullptr;
  void* slot[32] = {};
  int count = 0;
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned char> memory;
  std::mt19937 random{1};
  std::function<void()> body;
  jmp_buf scheduler{};
  Fiber* now = nullptr;
  int threads = 0, at_barrier = 0;
  unsigned x = 0, y = 0;
  long long conflicts = 0, matrices = 0;
  std::string failure;
};

inline Machine& machine() {
  static Machine one;
  return one;
}

[[gnu::noinline]] inline void leave() {
  Machine& m = machine();
  if (_setjmp(m.now->at) == 0) _longjmp(m.scheduler, 1);
}

[[noreturn]] inline void fail(const char* why) {
  Machine& m = machine();
  m.failure = why;
  _longjmp(m.scheduler, 1);
}

inline void enter() {
  Machine& m = machine();
  m.body();
  m.now->groups.push_back(std::move(m.now->open));
  for (const auto& group : m.now->groups) {
    if (!group.empty()) m.failure = "a thread ended with copies under way";
  }
  m.now->state = State::kDone;
  _longjmp(m.scheduler, 1);
}

[[gnu::noinline]] inline void resume(Fiber& fiber) {
  Machine& m = machine();
  m.now = &fiber;
  if (_setjmp(m.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = kStack;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, enter, 0);
  setcontext(&fiber.start);
}

// The last of 32 lanes to arrive does the work for all.
inline void together(Together what, void* mine) {
  Machine& m = machine();
  const int warp = m.now->index / 32;
  Warp& w = m.warps[static_cast<std::size_t>(warp)];
  if (w.count > 0 && w.what != what) fail("lanes of a warp are at different instructions");
  w.what = what;
  w.slot[m.now->index % 32] = mine;
  if (++w.count < 32) {
    m.now->state = State::kAtWarp;
    leave();
    return;
  }
  w.count = 0;
  what(w.slot);
  for (int lane = 0; lane < 32; ++lane) m.fibers[static_cast<std::size_t>(warp * 32 + lane)]->state = State::kReady;
}

inline void run_block() {
  Machine& m = machine();
  std::fill(m.memory.begin(), m.memory.end(), static_cast<unsigned char>(0xff));
  m.warps.assign(static_cast<std::size_t>(m.threads / 32), Warp{});
  m.at_barrier = 0;
  for (int i = 0; i < m.threads; ++i) {
    if (static_cast<int>(m.fibers.size()) <= i) m.fibers.push_back(std::make_unique<Fiber>());
    Fiber& f = *m.fibers[static_cast<std::size_t>(i)];
    f.index = i;
    f.started = false;
    f.state = State::kReady;
    f.groups.clear();
    f.open.clear();
  }
  const auto warps = static_cast<unsigned>(m.threads / 32);
  for (;;) {
    bool any = false, all_done = true;
    const unsigned first = m.random() % warps;
    for (unsigned w = 0; w < warps && !any; ++w) {  // one warp, as far as it gets
      const unsigned warp = (first + w) % warps;
      const unsigned turn = m.random() % 32;
      for (unsigned l = 0; l < 32; ++l) {
        Fiber& f = *m.fibers[warp * 32 + (l + turn) % 32];
        all_done = all_done && f.state == State::kDone;
        if (f.state != State::kReady) continue;
        any = true;
        resume(f);
        if (!m.failure.empty()) return;
      }
    }
    if (any) continue;
    if (all_done) return;
    m.failure = "threads wait at a barrier that others never reach";
    return;
  }
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float widen_half(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  float x;
  if (exponent == 31) {
    x = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    x = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    x = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return (h & 0x8000) ? -x : x;
}

inline uint16_t narrow_half(float x) {  // to nearest, ties to even: the current rounding mode of nearbyint
  const uint32_t sign = (to_bits(x) >> 16) & 0x8000;
  const float a = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint16_t>(sign | 0x7e00);
  if (a >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (a < 6.103515625e-05f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(a * 16777216.0f)));
  int exponent;
  const float fraction = std::frexp(a, &exponent);  // 0.5 to 1
  const auto mantissa = static_cast<uint32_t>(std::nearbyint(fraction * 2048.0f));  // 1024 to 2048
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 13) << 10) + mantissa));
}

inline uint16_t narrow_bfloat(float x) {
  const uint32_t bits = to_bits(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace blendkv::emulated

namespace blendkv {

inline int thread_index() { return emulated::machine().now->index; }
inline unsigned block_x() { return emulated::machine().x; }
inline unsigned block_y() { return emulated::machine().y; }
inline unsigned char* shared_memory() { return emulated::machine().memory.data(); }
inline uint32_t shared_address() { return 0; }

inline void block_sync() {
  emulated::Machine& m = emulated::machine();
  if (++m.at_barrier < m.threads) {
    m.now->state = emulated::State::kAtBlock;
    emulated::leave();
    return;
  }
  m.at_barrier = 0;
  for (int i = 0; i < m.threads; ++i) m.fibers[static_cast<std::size_t>(i)]->state = emulated::State::kReady;
}

inline void warp_sync() {
  emulated::together([](void* const*) {}, nullptr);
}

struct ShuffleCall {
  float x;
  int from;
};

inline float shuffle_from(float x, int lane) {
  ShuffleCall call{x, lane};
  emulated::together(
      [](void* const* slot) {
        float old[32];
        for (int i = 0; i < 32; ++i) old[i] = static_cast<ShuffleCall*>(slot[i])->x;
        for (int i = 0; i < 32; ++i) {
          auto* c = static_cast<ShuffleCall*>(slot[i]);
          if (c->from < 0 || c->from > 31) emulated::fail("a shuffle reads a lane that is none");
          c->x = old[c->from];
        }
      },
      &call);
  return call.x;
}

inline float shuffle_xor(float x, int mask) { return shuffle_from(x, thread_index() % 32 ^ mask); }

template <Type T>
inline float widen_bits(uint32_t half) {
  const auto bits = static_cast<uint16_t>(half);
  return T == Type::kBf16 ? emulated::from_bits(static_cast<uint32_t>(bits) << 16) : emulated::widen_half(bits);
}

struct MmaCall {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

// The fragments as the PTX manual draws them for m16n8k16: with g = lane / 4 and t = lane % 4, a lane holds rows g and
// g + 8 of A and D, columns 2 t and 2 t + 1 of D, the same of A in each half of k, and of B column g.
template <Type T>
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaCall call{d, a, {b0, b1}};
  emulated::together(
      [](void* const* slot) {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; ++lane) {
          const auto* c = static_cast<MmaCall*>(slot[lane]);
          const int g = lane / 4, t = lane % 4;
          for (int r = 0; r < 4; ++r) {
            for (int e = 0; e < 2; ++e) {
              const uint32_t half = e ? c->a[r] >> 16 : c->a[r] & 0xffff;
              left[g + 8 * (r % 2)][2 * t + e + 8 * (r / 2)] = widen_bits<T>(half);
            }
          }
          for (int r = 0; r < 2; ++r) {
            for (int e = 0; e < 2; ++e) {
              const uint32_t half = e ? c->b[r] >> 16 : c->b[r] & 0xffff;
              right[2 * t + e + 8 * r][g] = widen_bits<T>(half);
            }
          }
        }
        float sum[16][8] = {};
        for (int k = 0; k < 16; ++k) {
          for (int i = 0; i < 16; ++i) {
            for (int j = 0; j < 8; ++j) sum[i][j] += left[i][k] * right[k][j];
          }
        }
        for (int lane = 0; lane < 32; ++lane) {
          auto* c = static_cast<MmaCall*>(slot[lane]);
          for (int r = 0; r < 4; ++r) c->d[r] += sum[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2];
        }
      },
      &call);
}

struct MatrixCall {
  uint32_t* r;
  uint32_t address;
};

template <bool Transposed>
inline void load_matrices(void* const* slot) {
  emulated::Machine& m = emulated::machine();
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t value[8][8];
    unsigned banks = 0;
    for (int row = 0; row < 8; ++row) {
      const uint32_t address = static_cast<MatrixCall*>(slot[8 * matrix + row])->address;
      if (address % 16 != 0 || address + 16 > m.memory.size()) emulated::fail("ldmatrix reads a wrong address");
      std::memcpy(value[row], m.memory.data() + address, 16);
      banks |= 1u << (address / 16 % 8);
    }
    ++m.matrices;
    if (banks != 0xffu) ++m.conflicts;
    for (int lane = 0; lane < 32; ++lane) {
      const int i = lane / 4, j = 2 * (lane % 4);
      const uint32_t low = Transposed ? value[j][i] : value[i][j];
      const uint32_t high = Transposed ? value[j + 1][i] : value[i][j + 1];
      static_cast<MatrixCall*>(slot[lane])->r[matrix] = low | (high << 16);
    }
  }
}

inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  MatrixCall call{r, address};
  emulated::together(load_matrices<false>, &call);
}

inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  MatrixCall call{r, address};
  emulated::together(load_matrices<true>, &call);
}

inline void copy_async(uint32_t to, const void* from, bool valid) {
  emulated::Machine& m = emulated::machine();
  if (to % 16 != 0 || to + 16 > m.memory.size()) emulated::fail("cp.async writes to a wrong address");
  if (valid && reinterpret_cast<uintptr_t>(from) % 16 != 0) emulated::fail("cp.async reads a wrong address");
  std::memset(m.memory.data() + to, 0xff, 16);
  m.now->open.push_back({m.memory.data() + to, from, valid});
}

inline void copy_commit() {
  emulated::Fiber& f = *emulated::machine().now;
  f.groups.push_back(std::move(f.open));
  f.open.clear();
}

template <int Pending>
inline void copy_wait() {
  emulated::Fiber& f = *emulated::machine().now;
  while (f.groups.size() > Pending) {
    for (const emulated::Copy& c : f.groups.front()) {
      if (c.valid) {
        std::memcpy(c.to, c.from, 16);
      } else {
        std::memset(c.to, 0, 16);
      }
    }
    f.groups.pop_front();
  }
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline float divide_fast(float a, float b) { return a / b; }
inline float infinity() { return std::numeric_limits<float>::infinity(); }
inline float bits_as_float(uint32_t bits) { return emulated::from_bits(bits); }
inline uint32_t float_as_bits(float x) { return emulated::to_bits(x); }

template <Type T>
inline uint32_t pack(float low, float high) {
  const auto narrow = T == Type::kBf16 ? emulated::narrow_bfloat : emulated::narrow_half;
  return static_cast<uint32_t>(narrow(low)) | (static_cast<uint32_t>(narrow(high)) << 16);
}

inline float widen_f16(uint16_t bits) { return emulated::widen_half(bits); }

template <typename X>
inline X load_once(const X* from) {
  return *from;
}

template <typename Args>
int launch(void (*kernel)(const Args), Grid grid, int threads, int shared, void*, const Args& args) {
  emulated::Machine& m = emulated::machine();
  m.failure.clear();
  m.threads = threads;
  m.memory.resize(static_cast<std::size_t>(shared));
  m.body = [&] { kernel(args); };
  for (m.y = 0; m.y < grid.y; ++m.y) {
    for (m.x = 0; m.x < grid.x; ++m.x) {
      emulated::run_block();
      if (!m.failure.empty()) return emulated::kError;
    }
  }
  return 0;
}

}  // namespace blendkv
