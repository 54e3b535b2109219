// Numbers of a matrix: those that lie in memory, or worked out from two or three that do. planes_split.cu
// and planes.cu both read them; a pass of its own to write them would cost more.
//
// Macros from the host, beside activations/cuda.h's: FORM_PLAIN to FORM_GATE_GRADIENT, as Form of
// planes_split.py numbers them.

// FORM_PLAIN: x. FORM_GRADIENT: x act'(saved), with what the activation saves. FORM_GATED: x act(saved).
// FORM_GATE_GRADIENT: x other act'(saved). Of the last two `saved` is what comes before the activation.
__device__ __forceinline__ float derived(int form, float x, float saved, float other) {
  if (ACT == ACT_NONE && form == FORM_GRADIENT) return x;
  if (form == FORM_GRADIENT) return graded(x, saved);
  if (form == FORM_GATED) return x * act(saved);
  if (form == FORM_GATE_GRADIENT) return graded_before(x * other, saved);
  return x;
}
