// Threads and scratch memory. Compiled code calls libgomp's entry point itself, without OpenMP pragmas: the pool of
// threads is then the one that torch has already started, whichever compiler this is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blendkv {

using Body = void (*)(void* context, int64_t item);

// Run items 0 .. items - 1 on at most `threads` threads, each taking the next one that is left.
void parallel_items(int64_t items, int64_t threads, Body body, void* context);

// Memory of the calling thread, aligned to 64 bytes, kept for its next call. Slots do not overlap.
void* scratch(int slot, size_t bytes);
enum Slot { STATE, TILES, SHARED, PARTIAL };

template <class F> inline void parallel(int64_t items, int64_t threads, F& each) {
  parallel_items(items, threads, [](void* context, int64_t item) { (*static_cast<F*>(context))(item); }, &each);
}

}  // namespace blendkv
