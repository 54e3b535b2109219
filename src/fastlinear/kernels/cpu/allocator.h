// Memory of large results on a CPU, kept at hand for the next ones.
//
// malloc maps such blocks anew for every result and gives them back with it, so that each pays for
// its pages again: the system's zeroes, and in a virtual machine often the host's.
#pragma once

#include "large_pages.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace fastpath {

class CpuAllocator final : public c10::Allocator {
 public:
  static constexpr size_t kLeast = size_t(1) << 25;  // bytes; malloc keeps smaller blocks, once asked

  static CpuAllocator& instance() {
    static auto* it = new CpuAllocator;  // outlives every tensor
    return *it;
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kLeast) return c10::GetCPUAllocator()->allocate(bytes);
    const size_t whole = (bytes + kPage - 1) / kPage * kPage;
    Block block = taken(whole);
    if (block.p == nullptr) block = mapped(whole);
    if (block.p == nullptr && release() > 0) block = mapped(whole);
    if (block.p == nullptr) return c10::GetCPUAllocator()->allocate(bytes);  // it says what failed
    c10::profiledCPUMemoryReporter().New(block.p, block.bytes);
    return {block.p, new Block(block), drop, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

  // Keeps at most so many idle bytes from now on.
  void keep_at_most(size_t bytes) {
    const std::lock_guard<std::timed_mutex> one(mutex_);
    most_idle_ = bytes;
  }

  // Gives all that is idle back to the system; how many bytes.
  size_t release() {
    // no longer: in a forked process a thread that is not there may hold it
    const std::unique_lock<std::timed_mutex> one(mutex_, std::chrono::seconds(1));
    if (!one.owns_lock()) return 0;
    const size_t before = idle_bytes_;
    while (!idle_.empty()) give_back_oldest();
    return before;
  }

 private:
  static constexpr size_t kPage = size_t(1) << 21;

  static constexpr size_t kLong = 64;  // results that have come and gone

  struct Block {
    void* p = nullptr;
    size_t bytes = 0;
    size_t since = 0;  // how many had gone when it did
    bool lent = false;  // to the system, should it run short
  };

  static void drop(void* context) {
    const Block block = *static_cast<Block*>(context);
    delete static_cast<Block*>(context);
    c10::profiledCPUMemoryReporter().Delete(block.p);
    instance().keep(block);
  }

  // An idle block that is not much larger, or none. Another thread's turn is not waited for: a
  // forked process would wait for ever.
  Block taken(size_t bytes) {
    const std::unique_lock<std::timed_mutex> one(mutex_, std::try_to_lock);
    if (!one.owns_lock()) return {};
    const auto better = [](const Block& a, const Block& b) {
      return a.bytes != b.bytes ? a.bytes < b.bytes : a.p < b.p;  // each result its own, call by call
    };
    auto best = idle_.end();
    for (auto i = idle_.begin(); i != idle_.end(); ++i)
      if (i->bytes >= bytes && i->bytes - bytes <= bytes / 8 &&
          (best == idle_.end() || better(*i, *best)))
        best = i;
    if (best == idle_.end()) return {};
    const Block found = *best;
    idle_.erase(best);
    idle_bytes_ -= found.bytes;
    return found;
  }

  void keep(Block block) {
    {
      const std::unique_lock<std::timed_mutex> one(mutex_, std::try_to_lock);
      if (one.owns_lock() && block.bytes <= most_idle_) {
#if defined(MADV_FREE)
        for (auto& b : idle_)  // at every turn it would cost a tenth of a pass
          if (!b.lent && gone_ - b.since > kLong) {
            madvise(b.p, b.bytes, MADV_FREE);
            b.lent = true;
          }
#endif
        idle_.push_back({block.p, block.bytes, gone_++});
        idle_bytes_ += block.bytes;
        while (idle_bytes_ > most_idle_) give_back_oldest();
        return;
      }
    }
    munmap(block.p, block.bytes);
  }

  void give_back_oldest() {
    munmap(idle_.front().p, idle_.front().bytes);
    idle_bytes_ -= idle_.front().bytes;
    idle_.pop_front();
  }

  // Whole large pages, which begin where such pages do.
  static Block mapped(size_t bytes) {
    void* p = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return {};
    const auto from = reinterpret_cast<uintptr_t>(p);
    const auto first = (from + kPage - 1) / kPage * kPage;
    if (first > from) munmap(p, first - from);
    const auto rest = from + kPage - first;
    if (rest > 0) munmap(reinterpret_cast<void*>(first + bytes), rest);
    large_pages(reinterpret_cast<void*>(first), bytes);
    return {reinterpret_cast<void*>(first), bytes};
  }

  std::timed_mutex mutex_;
  std::deque<Block> idle_;
  size_t idle_bytes_ = 0, most_idle_ = 0, gone_ = 0;
};

// Has malloc keep so many bytes of smaller blocks at hand. By itself glibc maps what is larger than any
// mapped block that has gone before, and gives the end of its heap back beyond twice that: where three
// results of 1 MiB go together, and none was larger, all their pages are new at every step.
inline void let_malloc_keep(size_t bytes) {
#if defined(__GLIBC__)
  for (const char* name : {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"})
    if (std::getenv(name) != nullptr) return;  // somebody has decided
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(CpuAllocator::kLeast));  // the most that it takes
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(std::min(bytes, size_t(1) << 30)));
#else
  (void)bytes;
#endif
}

// Gives back what malloc keeps.
inline void have_malloc_give_back() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

// A new dense tensor on the CPU.
inline at::Tensor new_on_cpu(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < CpuAllocator::kLeast) return at::Tensor(at::detail::empty_cpu(sizes, dtype));
  const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
  return at::Tensor(
      at::detail::empty_generic(sizes, &CpuAllocator::instance(), cpu, dtype, std::nullopt));
}

}  // namespace fastpath
