// Derivatives of activations of 16-bit numbers, and what relu and leaky_relu ask of their outputs. The texts
// of hopper_words.h and hopper_activations.h stand before this one. Macros: IS_BF16, ACT, ACT_<NAME>.

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

// dy * act'(pre) from what was saved: y for relu, leaky_relu, sigmoid and tanh, else pre.
__device__ __forceinline__ float graded(float dy, float saved) {
  if constexpr (ACT == ACT_LEAKY_RELU) return saved > 0.0f ? dy : 0.01f * dy;
  if constexpr (ACT == ACT_SIGMOID) return dy * (saved * (1.0f - saved));
  if constexpr (ACT == ACT_TANH) return dy * fmaf(-saved, saved, 1.0f);
  float grad;
  act_and_grad(saved, dy, grad);
  return grad;
}
