// The library's functions, and which instruction set they run with.
#include <cstdlib>
#include <cstring>

#include "args.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);

#define BLENDKV_DECLARE(isa)             \
  namespace isa {                        \
  void attention(const AttentionArgs&);  \
  void mass(const MassArgs&);            \
  void scatter(const ScatterArgs&);      \
  void deviation(const DeviationArgs&);  \
  void encode(const EncodeArgs&);        \
  }

namespace blendkv {

BLENDKV_DECLARE(baseline)
#if defined(__x86_64__)
BLENDKV_DECLARE(avx2)
BLENDKV_DECLARE(avx512)
BLENDKV_DECLARE(avx512bf16)
#endif

namespace {

struct Set {
  const char* name;
  bool (*works)();
  void (*attention)(const AttentionArgs&);
  void (*mass)(const MassArgs&);
  void (*scatter)(const ScatterArgs&);
  void (*deviation)(const DeviationArgs&);
  void (*encode)(const EncodeArgs&);
};

#define BLENDKV_SET(isa, works) \
  {#isa, [] { return bool(works); }, isa::attention, isa::mass, isa::scatter, isa::deviation, isa::encode}

const Set sets[] = {
#if defined(__x86_64__)
    BLENDKV_SET(avx512bf16, __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")),
    BLENDKV_SET(avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")),
    BLENDKV_SET(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")),
#endif
    BLENDKV_SET(baseline, true),
};

const Set* best() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // this runs while the library is loaded, perhaps before the compiler's own initialisation
#endif
  const Set* set = sets;
  while (!set->works()) ++set;
  return set;
}

const Set* chosen = best();

struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;
  ~Buffer() { free(memory); }
};
thread_local Buffer buffers[4];

struct Run {
  int64_t next, items;
  Body body;
  void* context;
};

void take(void* data) {
  Run& run = *static_cast<Run*>(data);
  for (;;) {
    int64_t item = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED);
    if (item >= run.items) break;
    run.body(run.context, item);
  }
#if defined(__x86_64__)
  _mm_sfence();  // what went past the caches (stream, vec.h) is seen before the item is known to be done
#endif
}

}  // namespace

void parallel_items(int64_t items, int64_t threads, Body body, void* context) {
  Run run{0, items, body, context};
  if (threads > items) threads = items;
  if (threads > 1) GOMP_parallel(take, &run, unsigned(threads), 0);
  else take(&run);
}

void* scratch(int slot, size_t bytes) {
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    free(buffer.memory);
    buffer.bytes = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    buffer.memory = aligned_alloc(4096, buffer.bytes);
    if (!buffer.memory) abort();
  }
  return buffer.memory;
}

}  // namespace blendkv

#define BLENDKV_EXPORT extern "C" __attribute__((visibility("default")))

BLENDKV_EXPORT const char* blendkv_cpu_isa() { return blendkv::chosen->name; }

// Use the named instruction set: 0, or 1 where this CPU or this library does not have it.
BLENDKV_EXPORT int blendkv_cpu_select(const char* name) {
  for (const blendkv::Set& set : blendkv::sets)
    if (!strcmp(set.name, name) && set.works()) {
      blendkv::chosen = &set;
      return 0;
    }
  return 1;
}

#define BLENDKV_OP(op, Args)                               \
  BLENDKV_EXPORT void blendkv_cpu_##op(const void* args) { \
    blendkv::chosen->op(*static_cast<const blendkv::Args*>(args)); \
  }

BLENDKV_OP(attention, AttentionArgs)
BLENDKV_OP(mass, MassArgs)
BLENDKV_OP(scatter, ScatterArgs)
BLENDKV_OP(deviation, DeviationArgs)
BLENDKV_OP(encode, EncodeArgs)
