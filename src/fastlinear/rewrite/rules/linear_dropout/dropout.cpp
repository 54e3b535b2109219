// What dropout multiplies by on the CPU, in float32, with the numbers that bernoulli_ draws.
//
//   fastlinear_noise   noise[i] = uniform_i < keep ? scale : 0, from torch's mt19937; its state moves
//                      on as there
//
// torch draws number after number. Here 624 words are made at a time, in loops that the compiler
// vectorises. Each element takes two words: 53 bits of them are the uniform number. One thread
// draws, as each word follows from words before.

#include <cmath>
#include <cstdint>

namespace {

constexpr int kWords = 624, kFar = 397;
constexpr int64_t kBlock = 4096;  // elements drawn at a time

// As torch's generator writes its state; behind it follow numbers that no uniform draw touches.
struct State {
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next, words[kWords];
};

inline uint32_t twist(uint32_t u, uint32_t v) {
  return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ (-(v & 1u) & 0x9908b0dfu);
}

void renew(uint32_t* s) {
  for (int k = 0; k < kWords - kFar; ++k) s[k] = s[k + kFar] ^ twist(s[k], s[k + 1]);
  for (int k = kWords - kFar; k < kWords - 1; ++k)
    s[k] = s[k + kFar - kWords] ^ twist(s[k], s[k + 1]);
  s[kWords - 1] = s[kFar - 1] ^ twist(s[kWords - 1], s[0]);
}

struct Words {
  uint32_t s[kWords];
  int64_t next, left;

  void take(uint32_t* to, int64_t count) {
    while (count > 0) {
      if (left == 1) {
        renew(s);
        next = 0;
        left = kWords + 1;
      }
      const int64_t n = count < left - 1 ? count : left - 1;
      const uint32_t* from = s + next;
      for (int64_t i = 0; i < n; ++i) {
        uint32_t y = from[i];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        to[i] = y ^ (y >> 18);
      }
      to += n, count -= n, next += n, left -= n;
    }
  }
};

}  // namespace

extern "C" void fastlinear_noise(void* generator, float* noise, int64_t n, double keep,
                                 float scale) {
  State* state = static_cast<State*>(generator);
  Words words;
  for (int k = 0; k < kWords; ++k) words.s[k] = uint32_t(state->words[k]);
  words.next = int64_t(state->next);
  words.left = state->left;
  // u * 2^-53 < keep: an exact comparison of whole numbers
  const uint64_t bound = uint64_t(std::ceil(std::ldexp(keep, 53)));
  uint32_t drawn[2 * kBlock];
  for (int64_t from = 0; from < n; from += kBlock) {
    const int64_t count = n - from < kBlock ? n - from : kBlock;
    words.take(drawn, 2 * count);
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t u = (uint64_t(drawn[2 * i] & 0x1fffffu) << 32) | drawn[2 * i + 1];
      noise[from + i] = u < bound ? scale : 0.0f;
    }
  }
  for (int k = 0; k < kWords; ++k) state->words[k] = words.s[k];
  state->next = uint64_t(words.next);
  state->left = int32_t(words.left);
}
