#include "attention.cuh"

EXPORT int blendkv_cuda_attention_f16(const blendkv::AttentionArgs* args, void* stream) {
  return blendkv::launch_by_width<blendkv::Type::kF16>(*args, stream);
}
