// CUDA graphs, by way of the driver. The library's work is queued on an ordinary CUDA stream, so
// that capturing it needs nothing of the library; and the driver is opened at run time, so that a
// program is built without CUDA and runs without a GPU.
#pragma once

#include <unsloth.h>

#include <cstddef>
#include <functional>

namespace llm {

// The functions of libcuda that graphs need. While it lives, the first device's primary context,
// which is also the library's, is current on the thread that made it.
class CudaDriver {
 public:
  CudaDriver();
  ~CudaDriver();
  CudaDriver(const CudaDriver &) = delete;
  CudaDriver &operator=(const CudaDriver &) = delete;

 private:
  friend class CudaGraph;

  template <typename Function>
  void resolve(Function *function, const char *name);
  void check(int result, const char *call) const;

  void *library_ = nullptr;
  int device_ = 0;
  int (*init_)(unsigned flags) = nullptr;
  int (*device_get_)(int *device, int ordinal) = nullptr;
  int (*error_name_)(int error, const char **name) = nullptr;
  int (*context_retain_)(void **context, int device) = nullptr;
  int (*context_release_)(int device) = nullptr;
  int (*context_push_)(void *context) = nullptr;
  int (*context_pop_)(void **context) = nullptr;
  int (*begin_capture_)(void *stream, int mode) = nullptr;
  int (*end_capture_)(void *stream, void **graph) = nullptr;
  int (*instantiate_)(void **executable, void *graph, unsigned long long flags) = nullptr;
  int (*launch_)(void *executable, void *stream) = nullptr;
  int (*destroy_executable_)(void *executable) = nullptr;
  int (*destroy_graph_)(void *graph) = nullptr;
};

// What a function queues on a stream, to be queued again as one.
class CudaGraph {
 public:
  // Calls `queue`, whose work is recorded and does not run.
  CudaGraph(const CudaDriver &driver, unsloth_stream stream, const std::function<void()> &queue);
  ~CudaGraph();
  CudaGraph(const CudaGraph &) = delete;
  CudaGraph &operator=(const CudaGraph &) = delete;

  void launch(unsloth_stream stream) const;

 private:
  const CudaDriver *driver_;
  void *executable_ = nullptr;
};

}  // namespace llm
