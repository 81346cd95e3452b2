// What the operators of torch_*.cpp share: checks of arguments, and the launch on torch's current stream. Only torch's
// stable ABI is used, so that one binary serves several torch versions.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>

// Weak, because a torch without CUDA does not have it: there the library loads, and its checks can be tested.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                     void** stream);

namespace mla::torch_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kHeadDim = 512, kMaxHeads = 128;

// std::invalid_argument becomes ValueError in Python.
template <typename... Words>
void require(bool condition, const Words&... words) {
  if (condition) return;
  std::ostringstream message;
  (message << ... << words);
  throw std::invalid_argument(message.str());
}

// Words of errors, which are put together only if there is one. `described`: where dtype or strides may be wrong too.
struct Shape {
  const Tensor& x;
};
struct Described {
  const Tensor& x;
};
inline Shape shape(const Tensor& x) { return {x}; }
inline Described described(const Tensor& x) { return {x}; }

inline std::ostream& operator<<(std::ostream& out, const Shape& of) {
  out << "[";
  for (int64_t i = 0; i < of.x.dim(); ++i) out << (i ? ", " : "") << of.x.size(i);
  return out << "]";
}
inline std::ostream& operator<<(std::ostream& out, const Described& of) {
  out << shape(of.x) << " " << torch::headeronly::toString(of.x.scalar_type()) << " of strides [";
  for (int64_t i = 0; i < of.x.dim(); ++i) out << (i ? ", " : "") << of.x.stride(i);
  return out << "]";
}

inline void require_heads(int64_t heads) {
  require(1 <= heads && heads <= kMaxHeads, "q must have 1 to 128 heads, got ", heads, ".");
}

inline void require_device(const char* name, const Tensor& x, const Tensor& q) {
  require(x.device() == q.device(), name, " must be on the device of q.");
}

inline void require_ints(const char* name, const Tensor& x, int64_t length) {
  require(x.dim() == 1 && x.size(0) == length && x.is_contiguous() && x.scalar_type() == ScalarType::Int, name,
          " must be [", length, "] int32, contiguous, got ", described(x), ".");
}

// Makes a GPU current while it lives, whatever other copies of the CUDA runtime have made current.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_));
    if (before_ != device) check(cudaSetDevice(device));
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  static void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("mla_kernels: CUDA error: ") + cudaGetErrorString(error));
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Calls `launch` with the current stream of the GPU that x, the argument `name`, is on.
template <typename Launch>
void on_current_stream(const Tensor& x, const Launch& launch, const char* name = "q") {
  require(x.is_cuda() && aoti_torch_get_current_cuda_stream, name, " must be on a CUDA GPU.");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  OnDevice guard(x.get_device_index());
  OnDevice::check(launch(static_cast<cudaStream_t>(stream)));
}

}  // namespace mla::torch_ops
