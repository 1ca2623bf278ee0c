// kernels.cu - source of kernels.ptx. beat[0] is a time (globaltimer may tick coarsely), beat[1] the cycle counter, which
// differs at every beat. burn has integer, float and shared-memory state that a pause must save and restore; all of it
// feeds the checksum. standin.c has the same three kernels for the emulated GPU.
#define SH_WORDS 1536
__device__ __forceinline__ unsigned long long gtime()
{
	unsigned long long t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}
extern "C" __global__ void burn(unsigned *state, unsigned iters, volatile unsigned long long *beat,
                                volatile unsigned long long *slot, unsigned beat_mask, unsigned slot_mask)
{
	__shared__ unsigned sh[SH_WORDS];
	const unsigned t = blockIdx.x * blockDim.x + threadIdx.x;
	unsigned x = state[t], k = threadIdx.x;
	float f = 1.0f + (float)(x & 1023u) * 0.001f;
	for (unsigned i = threadIdx.x; i < SH_WORDS; i += blockDim.x)
		sh[i] = i * 2654435761u ^ blockIdx.x;
	__syncthreads();
	for (unsigned i = 0; i < iters; i++) {
		x = x * 1664525u + 1013904223u;
		x ^= x >> 13;
		f = fmaf(f, 0.999f, 0.0005f);
		if ((i & 15u) == 0) { // own word only: no race, deterministic
			x += sh[k];
			sh[k] = x;
			k = k + blockDim.x < SH_WORDS ? k + blockDim.x : threadIdx.x;
		}
		if (threadIdx.x == 0 && (i & beat_mask) == 0) {
			if (blockIdx.x == 0) {
				beat[0] = gtime();
				beat[1] = clock64();
			}
			if ((i & slot_mask) == 0) {
				unsigned sm;
				asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
				slot[sm & 511u] = clock64();
			}
		}
	}
	state[t] = x ^ __float_as_uint(f) ^ sh[threadIdx.x];
	if (t == 0) {
		beat[0] = gtime();
		beat[1] = clock64();
	}
}
extern "C" __global__ void fill(unsigned *p, unsigned n, unsigned seed)
{
	for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		p[i] = (i + seed) * 2654435761u;
}
// order-independent sum of a buffer
extern "C" __global__ void sum(const unsigned *p, unsigned n, unsigned long long *out)
{
	unsigned long long a = 0;
	for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
		a += (unsigned long long)p[i] * (2u * (i & 0xffffu) + 1u);
	atomicAdd(out, a);
}
