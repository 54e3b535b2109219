// What relu and leaky_relu ask of their 16-bit outputs. The text of hopper_words.h comes before this one. Macros:
// IS_BF16, ACT, ACT_<NAME>.

// The two numbers of a word that are positive, each as 16 bits. NaN is for relu, which keeps it.
__device__ __forceinline__ u32 positive(u32 word) {
  u32 out;
#if IS_BF16
  if (ACT == ACT_RELU)
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
  else
    asm("set.gt.u32.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
#else
  if (ACT == ACT_RELU)
    asm("set.gtu.u32.f16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
  else
    asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(out) : "r"(word), "r"(0u));
#endif
  return out;
}
