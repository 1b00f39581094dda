#include "mass.cuh"

EXPORT int blendkv_cuda_mass_bf16(const blendkv::MassArgs* args, void* stream) {
  return blendkv::launch_mass_by_width<blendkv::Type::kBf16>(*args, stream);
}

EXPORT int blendkv_cuda_mass_f16(const blendkv::MassArgs* args, void* stream) {
  return blendkv::launch_mass_by_width<blendkv::Type::kF16>(*args, stream);
}
