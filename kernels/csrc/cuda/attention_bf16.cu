#include "attention.cuh"

EXPORT int blendkv_cuda_attention_bf16(const blendkv::AttentionArgs* args, void* stream) {
  return blendkv::launch_by_width<blendkv::Type::kBf16>(*args, stream);
}
