// A digest of a matrix's bytes where they lie: whether a weight is still what was made of it.
//
//   fastlinear_weight_hash    three 64-bit numbers from rows of bytes, a fixed distance apart
//
// The bytes are cut into blocks of 4 KB, a row's last one shorter and filled up with zeros to whole
// 256 bytes. Of the 64-bit words w of a block:
//
//   sum   = Σ w                          mod 2^64; a change within one word always changes it
//   nh_s  = Σ lo(w + k_si) * hi(w + k_si)   mod 2^64; halves are added each mod 2^32;
//                                 s = 0, 1: two sets of keys k, one key for each position i
//   poly_s = the halves of all nh_s in order as the digits of a number at base r_s, mod 2^61 - 1
//
// The keys and bases are random. Two different blocks then share nh_s with a probability of at most
// 2^-32 (NH of Black, Halevi, Krawczyk, Krovetz, Rogaway, 1999), and sequences of L different
// digits share poly_s with at most L / (2^61 - 1); the sets are independent, so that up to 2^30
// bytes a change goes unseen with a probability of about 2^-64, whatever it is.
//
// Pieces of 64 KB are hashed in parallel and joined in order: the digest does not depend on the
// number of threads. That number is given: OpenMP's own is a fact of the calling thread.

#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 4096;  // bytes: one NH sum a set; both sets' keys stay in L1
constexpr int64_t kWords = kBlock / 8;
constexpr int64_t kFill = 256;
constexpr int64_t kPiece = 16 * kBlock;
constexpr int64_t kAlone = 2 * kPiece;  // bytes below which one thread is faster than waking more
constexpr uint64_t kPrime = (uint64_t(1) << 61) - 1;

// In a forked process OpenMP still counts on the threads of the parent, and the thread that forked
// would wait for them for ever. It computes alone.
uint64_t forking_thread = 0;
bool forked() { return forking_thread && forking_thread == uint64_t(pthread_self()); }
[[maybe_unused]] const int fork_noticed =
    pthread_atfork(nullptr, nullptr, [] { forking_thread = uint64_t(pthread_self()); });

// What the keys' memory holds: keys of set 0, keys of set 1, r_0, r_1.
struct Keys {
  uint64_t k[2][kWords];
  uint64_t r[2];
};

struct Digest {
  uint64_t sum = 0, poly[2] = {0, 0};
};

// Vectors of 64-bit words whose halves are 32-bit numbers.
#if defined(__AVX512F__)
using V = __m512i;
inline V zero() { return _mm512_setzero_si512(); }
inline V load(const char* p) { return _mm512_loadu_si512(p); }
inline V add64(V a, V b) { return _mm512_add_epi64(a, b); }
inline V halves_product(V w, V k) {
  const V v = _mm512_add_epi32(w, k);
  return _mm512_mul_epu32(v, _mm512_srli_epi64(v, 32));
}
#elif defined(__AVX2__)
using V = __m256i;
inline V zero() { return _mm256_setzero_si256(); }
inline V load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const V*>(p)); }
inline V add64(V a, V b) { return _mm256_add_epi64(a, b); }
inline V halves_product(V w, V k) {
  const V v = _mm256_add_epi32(w, k);
  return _mm256_mul_epu32(v, _mm256_srli_epi64(v, 32));
}
#else
using V = uint64_t;
inline V zero() { return 0; }
inline V load(const char* p) {
  V v;
  std::memcpy(&v, p, 8);
  return v;
}
inline V add64(V a, V b) { return a + b; }
inline V halves_product(V w, V k) {
  const uint32_t lo = uint32_t(w) + uint32_t(k), hi = uint32_t(w >> 32) + uint32_t(k >> 32);
  return uint64_t(lo) * hi;
}
#endif
constexpr int64_t kVector = sizeof(V);
constexpr int64_t kStep = 4 * kVector;  // four sums of each kind: additions do not wait
static_assert(kFill % kStep == 0 && kBlock % kFill == 0);

inline uint64_t total(const V (&v)[4]) {
  uint64_t words[4 * kVector / 8], sum = 0;
  std::memcpy(words, v, sizeof words);
  for (uint64_t w : words) sum += w;
  return sum;
}

// a * r + digit mod 2^61 - 1; a and r below it, digit below 2^32.
inline uint64_t advance(uint64_t a, uint64_t r, uint64_t digit) {
  const unsigned __int128 t = static_cast<unsigned __int128>(a) * r + digit;
  const uint64_t s = (uint64_t(t) & kPrime) + uint64_t(t >> 61);
  return s >= kPrime ? s - kPrime : s;
}

// bytes: a multiple of kFill, at most kBlock.
inline void block(const char* p, int64_t bytes, const Keys& keys, Digest& d) {
  V sum[4], nh[2][4];
  for (int u = 0; u < 4; ++u) sum[u] = nh[0][u] = nh[1][u] = zero();
  const char* k0 = reinterpret_cast<const char*>(keys.k[0]);
  const char* k1 = reinterpret_cast<const char*>(keys.k[1]);
  for (int64_t i = 0; i < bytes; i += kStep) {
    for (int u = 0; u < 4; ++u) {
      const int64_t at = i + u * kVector;
      const V w = load(p + at);
      sum[u] = add64(sum[u], w);
      nh[0][u] = add64(nh[0][u], halves_product(w, load(k0 + at)));
      nh[1][u] = add64(nh[1][u], halves_product(w, load(k1 + at)));
    }
  }
  d.sum += total(sum);
  for (int s = 0; s < 2; ++s) {
    const uint64_t h = total(nh[s]), r = keys.r[s];
    d.poly[s] = advance(advance(d.poly[s], r, h >> 32), r, h & 0xffffffffu);
  }
}

Digest piece(const char* p, int64_t bytes, const Keys& keys) {
  Digest d;
  for (; bytes >= kBlock; p += kBlock, bytes -= kBlock) block(p, kBlock, keys, d);
  if (bytes) {
    const int64_t whole = (bytes + kFill - 1) / kFill * kFill;
    alignas(64) char rest[kBlock];
    std::memcpy(rest, p, bytes);
    std::memset(rest + bytes, 0, whole - bytes);
    block(rest, whole, keys, d);
  }
  return d;
}

uint64_t multiply(uint64_t a, uint64_t b) { return advance(a, b, 0); }

// r to the number of digits of a piece.
uint64_t power(uint64_t r, int64_t bytes) {
  uint64_t result = 1;
  for (int64_t i = 2 * ((bytes + kBlock - 1) / kBlock); i > 0; --i) result = multiply(result, r);
  return result;
}

}  // namespace

// For a library loaded after the fork: the thread that the process began with.
extern "C" void fastlinear_forked(uint64_t thread) { forking_thread = thread; }

extern "C" int64_t fastlinear_weight_hash_keys_size() { return sizeof(Keys); }

// `rows` rows of `row_bytes` > 0 bytes, `stride` bytes apart. keys: random bytes, as many as
// fastlinear_weight_hash_keys_size says. out: sum, poly_0, poly_1.
extern "C" void fastlinear_weight_hash(const char* data, int64_t rows, int64_t row_bytes,
                                       int64_t stride, const void* random, uint64_t* out,
                                       int threads) {
  Keys keys;
  std::memcpy(&keys, random, sizeof keys);
  for (uint64_t& r : keys.r) r %= kPrime;
  const int64_t of_row = (row_bytes + kPiece - 1) / kPiece, pieces = rows * of_row;
  const int64_t last = row_bytes - (of_row - 1) * kPiece;
  std::vector<Digest> parts(pieces);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * row_bytes > kAlone && !forked())
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t row = i / of_row, at = i % of_row;
    const char* start = data + row * stride + at * kPiece;
    parts[i] = piece(start, at + 1 < of_row ? kPiece : last, keys);
  }
  Digest all;
  uint64_t whole_power[2], last_power[2];
  for (int s = 0; s < 2; ++s) {
    whole_power[s] = power(keys.r[s], kPiece);
    last_power[s] = power(keys.r[s], last);
  }
  for (int64_t i = 0; i < pieces; ++i) {
    all.sum += parts[i].sum;
    for (int s = 0; s < 2; ++s) {
      const uint64_t r = i % of_row + 1 < of_row ? whole_power[s] : last_power[s];
      const uint64_t joined = multiply(all.poly[s], r) + parts[i].poly[s];
      all.poly[s] = joined >= kPrime ? joined - kPrime : joined;
    }
  }
  out[0] = all.sum;
  out[1] = all.poly[0];
  out[2] = all.poly[1];
}
