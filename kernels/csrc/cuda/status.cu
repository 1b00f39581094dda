// What a launcher's return value means; and, of the emulated GPU, what it counted.
#include "device.cuh"

#ifdef BLENDKV_EMULATED
EXPORT const char* blendkv_cuda_error(int) { return blendkv::emulated::machine().failure.c_str(); }
EXPORT int blendkv_cuda_use(int) { return 0; }
EXPORT long long blendkv_emulated_matrices() { return blendkv::emulated::machine().matrices; }
EXPORT long long blendkv_emulated_conflicts() { return blendkv::emulated::machine().conflicts; }
#else
// This library has a CUDA runtime of its own, which must be told the device that torch made current.
EXPORT int blendkv_cuda_use(int device) { return static_cast<int>(cudaSetDevice(device)); }
EXPORT const char* blendkv_cuda_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
#endif
