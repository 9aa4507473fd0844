#include "cuda_graph.h"

#include <dlfcn.h>

#include <string>

#include "error.h"

namespace llm {
namespace {

constexpr int kThreadLocalCapture = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

}  // namespace

CudaDriver::CudaDriver() {
  library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library_ == nullptr) throw Error(std::string("CUDA graphs: ") + dlerror());
  resolve(&init_, "cuInit");
  resolve(&device_get_, "cuDeviceGet");
  resolve(&error_name_, "cuGetErrorName");
  resolve(&context_retain_, "cuDevicePrimaryCtxRetain");
  resolve(&context_release_, "cuDevicePrimaryCtxRelease_v2");
  resolve(&context_push_, "cuCtxPushCurrent_v2");
  resolve(&context_pop_, "cuCtxPopCurrent_v2");
  resolve(&begin_capture_, "cuStreamBeginCapture_v2");
  resolve(&end_capture_, "cuStreamEndCapture");
  resolve(&instantiate_, "cuGraphInstantiateWithFlags");
  resolve(&launch_, "cuGraphLaunch");
  resolve(&destroy_executable_, "cuGraphExecDestroy");
  resolve(&destroy_graph_, "cuGraphDestroy");

  void *context = nullptr;
  check(init_(0), "cuInit");
  check(device_get_(&device_, 0), "cuDeviceGet");
  check(context_retain_(&context, device_), "cuDevicePrimaryCtxRetain");
  check(context_push_(context), "cuCtxPushCurrent");
}

// The library stays open: the driver's threads may run on.
CudaDriver::~CudaDriver() {
  void *context = nullptr;
  context_pop_(&context);
  context_release_(device_);
}

template <typename Function>
void CudaDriver::resolve(Function *function, const char *name) {
  *function = reinterpret_cast<Function>(dlsym(library_, name));
  if (*function == nullptr) throw Error(std::string("CUDA graphs: libcuda has no ") + name);
}

void CudaDriver::check(int result, const char *call) const {
  if (result == 0) return;
  const char *name = nullptr;
  if (error_name_(result, &name) != 0 || name == nullptr) name = "an unknown error";
  throw Error(std::string(call) + " failed with " + name);
}

CudaGraph::CudaGraph(const CudaDriver &driver, unsloth_stream stream,
                     const std::function<void()> &queue)
    : driver_(&driver) {
  void *graph = nullptr;
  driver.check(driver.begin_capture_(stream, kThreadLocalCapture), "cuStreamBeginCapture");
  try {
    queue();
  } catch (...) {
    driver.end_capture_(stream, &graph);
    if (graph != nullptr) driver.destroy_graph_(graph);
    throw;
  }
  driver.check(driver.end_capture_(stream, &graph), "cuStreamEndCapture");
  const int result = driver.instantiate_(&executable_, graph, 0);
  driver.destroy_graph_(graph);
  driver.check(result, "cuGraphInstantiate");
}

CudaGraph::~CudaGraph() { driver_->destroy_executable_(executable_); }

void CudaGraph::launch(unsloth_stream stream) const {
  driver_->check(driver_->launch_(executable_, stream), "cuGraphLaunch");
}

}  // namespace llm
