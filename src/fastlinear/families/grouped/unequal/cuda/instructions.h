// The instructions and conversions of the kernels of layers of unequal sizes, and nothing else: tests
// put others in their place, which a CPU can run. Addresses of shared memory are 32 bits wide.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define SHARED_MEMORY extern __shared__ __align__(128) unsigned char memory[]

// The launch behind this one may begin.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch before this one has ended, whose results are seen from here on.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ u32 shared_address(const void* memory) {
  return static_cast<u32>(__cvta_generic_to_shared(memory));
}

// 4 or 16 bytes of global memory to shared memory, of which all but the first `valid` become zeros.
template <int BYTES = 16>
__device__ __forceinline__ void copy_async(u32 to, const void* from, int valid) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most PENDING groups of this thread's copies are under way.
template <int PENDING>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#if KIND != 2
__device__ __forceinline__ float wide(u16 v) {
  float out;
  if (KIND == 1)
    out = __uint_as_float(static_cast<u32>(v) << 16);
  else
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(v));
  return out;
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 out;
  if (KIND == 1)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

__device__ __forceinline__ void store_shared(u32 to, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// v of the next lane; of no meaning in the last.
__device__ __forceinline__ u32 from_next_lane(u32 v) { return __shfl_down_sync(0xffffffffu, v, 1); }

// Four matrices of 8 x 8, whose rows of 16 bytes lanes 0 to 7, 8 to 15, ... point at.
template <bool TURNED>
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 from) {
  if (TURNED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

// c (16, 8) += a (16, 16) b (16, 8).
__device__ __forceinline__ void multiply(float* c, const u32 (&a)[4], u32 b0, u32 b1) {
#define PRODUCT(type)                                                              \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type             \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"       \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#if KIND == 1
  PRODUCT("bf16");
#else
  PRODUCT("f16");
#endif
#undef PRODUCT
}
#endif
