// Large pages under new memory.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace {

// Asks for them under all whole ones of a result's memory.
inline void large_pages(void* p, size_t bytes) {
  constexpr size_t kPage = size_t(1) << 21;
  const auto from = (reinterpret_cast<uintptr_t>(p) + kPage - 1) / kPage * kPage;
  const auto to = (reinterpret_cast<uintptr_t>(p) + bytes) / kPage * kPage;
#if defined(MADV_HUGEPAGE)
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)from, (void)to;
#endif
}

}  // namespace
