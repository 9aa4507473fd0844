// A libcuda.so.1 whose device is this machine: it compiles kernels for the host at their first
// launch (compile.py) and runs them there (machine.h). Streams do their work at once; a stream that
// is captured keeps it for the graph.
//
// A kernel that does what is undefined ends the program. So does writing behind an allocation.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "machine.h"

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotFound = 500,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
};

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr unsigned char kUnwritten = 0xff, kBehind = 0xa5;

uint64_t setting(const char *name, uint64_t otherwise) {
  const char *value = getenv(name);
  return value == nullptr ? otherwise : strtoull(value, nullptr, 0);
}

const uint64_t memory_size = setting("EMULATOR_MEMORY", uint64_t(4) << 30);
const uint64_t multiprocessors = setting("EMULATOR_MULTIPROCESSORS", 4);
const uint64_t seed = setting("EMULATOR_SEED", 1);
const bool hopper = setting("EMULATOR_ARCH", 80) == 90;
// What a block may have.
int most_shared() { return (hopper ? 227 : 163) << 10; }
const bool trace = setting("EMULATOR_TRACE", 0) != 0;
const bool early_copies = setting("EMULATOR_EARLY_COPIES", 0) != 0;

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

struct Graph {
  std::vector<std::function<int()>> work;
};

struct Stream {
  // It waits for the legacy stream, as that waits for it.
  bool blocking;
  Graph *capture = nullptr;
};

struct Event {
  std::chrono::steady_clock::time_point time;
  Graph *capture = nullptr;
};

struct Function {
  std::string name;
  const machine::Entry *entry = nullptr;
};

struct Module {
  std::map<std::string, Function> functions;
};

struct Pool {
  size_t used = 0, held = 0;
};

struct Allocation {
  void *pages;
  size_t mapped, size;
  Pool *pool;
};

std::set<Stream *> streams;
std::map<uint64_t, Allocation> allocations;
uint64_t allocated = 0;
// Of streams that the legacy stream may not wait for.
int captures = 0;
// Of the thread: how many captures it began, and whether it lets itself do what they forbid.
thread_local int own_captures = 0;
thread_local unsigned capture_mode = 0;
thread_local std::vector<void *> contexts;
int context;
thread_local const char *running = "";

bool forbidden() { return own_captures > 0 && capture_mode != 2; }

// Unless the stream is captured, at once; beside what other threads queue, for which a kernel may
// wait.
template <class Work>
int queue(Stream *stream, Work work) {
  {
    Lock lock(mutex);
    // The three streams that are always there cannot be captured.
    if (uintptr_t(stream) <= 2) {
      if (stream == nullptr && captures > 0) return kCaptureImplicit;
    } else if (stream->capture != nullptr) {
      stream->capture->work.push_back(std::move(work));
      return kSuccess;
    }
  }
  return work();
}

int allocate(uint64_t *address, size_t size, Pool *pool) {
  Lock lock(mutex);
  if (forbidden()) return kCaptureUnsupported;
  if (size == 0) return kInvalidValue;
  const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (size > memory_size || allocated + rounded > memory_size) return kOutOfMemory;
  const size_t bytes = (rounded + kPage - 1) / kPage * kPage;
  void *pages =
      mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return kOutOfMemory;
  // The page behind is not there, and in front of it is the end.
  mprotect(static_cast<char *>(pages) + bytes, kPage, PROT_NONE);
  char *begin = static_cast<char *>(pages) + bytes - rounded;
  memset(begin, kUnwritten, size);
  memset(begin + size, kBehind, rounded - size);
  allocations[uint64_t(begin)] = {pages, bytes + kPage, size, pool};
  allocated += rounded;
  if (pool != nullptr) pool->held = std::max(pool->held, pool->used += size);
  *address = uint64_t(begin);
  return kSuccess;
}

int release(uint64_t address) {
  Lock lock(mutex);
  if (forbidden()) return kCaptureUnsupported;
  const auto found = allocations.find(address);
  if (found == allocations.end()) return kInvalidValue;
  const Allocation &allocation = found->second;
  const size_t rounded = (allocation.size + kAlignment - 1) / kAlignment * kAlignment;
  const auto *bytes = reinterpret_cast<const unsigned char *>(address);
  for (size_t i = allocation.size; i < rounded; i++) {
    if (bytes[i] != kBehind) {
      fprintf(stderr, "emulator: something wrote %zu bytes behind an allocation of %zu\n",
              i - allocation.size, allocation.size);
      abort();
    }
  }
  allocated -= rounded;
  if (allocation.pool != nullptr) allocation.pool->used -= allocation.size;
  munmap(allocation.pages, allocation.mapped);
  allocations.erase(found);
  return kSuccess;
}

// The allocation in which an address lies.
const Allocation *allocation_of(uint64_t address) {
  auto after = allocations.upper_bound(address);
  if (after == allocations.begin()) return nullptr;
  --after;
  return address < after->first + after->second.size ? &after->second : nullptr;
}

const machine::Entry *load(Function &function) {
  Lock lock(mutex);
  if (function.entry != nullptr) return function.entry;
  FILE *compiler = popen((std::string(COMPILE " ") + function.name).c_str(), "r");
  char path[4096] = "";
  if (compiler != nullptr && fgets(path, sizeof(path), compiler) != nullptr) {
    path[strcspn(path, "\n")] = 0;
  }
  if (compiler != nullptr) pclose(compiler);
  void *library = path[0] == 0 ? nullptr : dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fprintf(stderr, "emulator: %s cannot be run: %s\n", function.name.c_str(),
            path[0] == 0 ? "see above" : dlerror());
    abort();
  }
  function.entry = static_cast<const machine::Entry *>(dlsym(library, "emulator_entry"));
  return function.entry;
}

// Of a parameter, aligned as any may ask for.
struct alignas(128) Part {
  char bytes[128];
};

struct Call {
  Function *function;
  machine::Dim grid, block;
  size_t shared_bytes;
  unsigned cluster;  // blocks of one, along the grid
  std::vector<std::vector<Part>> params;

  int operator()() {
    const machine::Entry *entry = load(*function);
    std::vector<void *> pointers;
    for (auto &param : params) pointers.push_back(param.data());
    machine::Launch launch{
        function->name.c_str(), grid,    block, shared_bytes, pointers.data(), seed,
        early_copies,           cluster, {0}};
    const auto run = [&] {
      running = launch.kernel;
      entry->run(launch);
      running = "";
    };
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    std::vector<std::thread> workers;
    for (unsigned i = 1; i < std::min<uint64_t>(blocks, std::thread::hardware_concurrency()); i++) {
      workers.emplace_back(run);
    }
    const auto began = std::chrono::steady_clock::now();
    run();
    for (std::thread &worker : workers) worker.join();
    if (trace) {
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - began;
      fprintf(stderr, "%s: %u x %u x %u blocks of %u threads, %.1f ms\n", launch.kernel, grid.x,
              grid.y, grid.z, block.count(), took.count());
    }
    return kSuccess;
  }
};

// Says which kernel read or wrote an address at which nothing is.
void on_fault(int signal, siginfo_t *info, void *) {
  char line[512];
  const int length =
      snprintf(line, sizeof(line), "emulator: %s touched %p, where nothing is\n",
               running[0] != 0 ? running : "a thread outside kernels", info->si_addr);
  if (write(2, line, length) != length) _exit(1);
  ::signal(signal, SIG_DFL);
  raise(signal);
}

__attribute__((constructor)) void watch() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_RESETHAND;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define NOTHING(name) \
  EXPORT int name() { return kSuccess; }

NOTHING(cuInit)
NOTHING(cuCtxEnablePeerAccess)
NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncLoad)
NOTHING(cuMemPoolSetAccess)
NOTHING(cuMemPoolSetAttribute)

EXPORT int cuDriverGetVersion(int *version) { return *version = 13000, kSuccess; }
EXPORT int cuDeviceGetCount(int *count) { return *count = 1, kSuccess; }
EXPORT int cuDeviceGet(int *device, int ordinal) {
  return *device = 0, ordinal == 0 ? kSuccess : 101;
}
EXPORT int cuDeviceCanAccessPeer(int *can) { return *can = 0, kSuccess; }
EXPORT int cuDeviceGetName(char *name, int size) {
  snprintf(name, size, hopper ? "emulated sm_90a" : "emulated sm_80");
  return kSuccess;
}
EXPORT int cuGetErrorName(int error, const char **name) {
  *name = error == kInvalidValue         ? "CUDA_ERROR_INVALID_VALUE"
          : error == kOutOfMemory        ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kNotFound           ? "CUDA_ERROR_NOT_FOUND"
          : error == kCaptureUnsupported ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
          : error == kCaptureImplicit    ? "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"
                                         : "CUDA_ERROR_UNKNOWN";
  return kSuccess;
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute) {
  enum {
    kMultiprocessors = 16,
    kMemoryClock = 36,
    kBusWidth = 37,
    kMajor = 75,
    kMinor = 76,
    kSharedMemory = 97,
    kPools = 115
  };
  *value = attribute == kMajor             ? (hopper ? 9 : 8)
           : attribute == kMinor           ? 0
           : attribute == kMultiprocessors ? int(multiprocessors)
           : attribute == kMemoryClock     ? 1215000
           : attribute == kBusWidth        ? 5120
           : attribute == kSharedMemory    ? most_shared()
           : attribute == kPools           ? 1
                                           : 0;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(void **made) { return *made = &context, kSuccess; }
EXPORT int cuCtxPushCurrent_v2(void *pushed) { return contexts.push_back(pushed), kSuccess; }
EXPORT int cuCtxPopCurrent_v2(void **popped) {
  if (contexts.empty()) return 201;
  *popped = contexts.back();
  contexts.pop_back();
  return kSuccess;
}
EXPORT int cuCtxGetCurrent(void **current) {
  *current = contexts.empty() ? nullptr : contexts.back();
  return kSuccess;
}
EXPORT int cuCtxSetCurrent(void *current) {
  if (!contexts.empty()) contexts.pop_back();
  if (current != nullptr) contexts.push_back(current);
  return kSuccess;
}
EXPORT int cuCtxSynchronize() {
  Lock lock(mutex);
  return forbidden() ? kCaptureUnsupported : kSuccess;
}

EXPORT int cuModuleLoadData(Module **module, const void *) {
  return *module = new Module, kSuccess;
}
EXPORT int cuModuleUnload(Module *module) { return delete module, kSuccess; }
EXPORT int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  Lock lock(mutex);
  *function = &module->functions[name];
  (*function)->name = name;
  return kSuccess;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute) {
  enum { kMaxThreads = 0, kRegisters = 4 };
  *value = attribute == kMaxThreads ? 1024 : attribute == kRegisters ? 64 : 0;
  return kSuccess;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) {
  return *blocks = 2, kSuccess;
}

namespace {
// `cluster`: how many blocks a cluster has, or 1 to leave that to the kernel.
int launch(Function *function, machine::Dim grid, machine::Dim block, unsigned shared_bytes,
           unsigned cluster, Stream *stream, void **params) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  // What the compute capability takes.
  const bool fits = grid.x > 0 && grid.x <= INT32_MAX && grid.y > 0 && grid.y <= 65535 &&
                    grid.z > 0 && grid.z <= 65535 && threads > 0 && threads <= 1024 &&
                    shared_bytes <= unsigned(most_shared());
  if (!fits) return kInvalidValue;
  const machine::Entry *entry = load(*function);
  if (cluster > 1 && entry->cluster > 1) return kInvalidValue;
  cluster = std::max(cluster, entry->cluster);
  if (cluster > 8 || grid.x % cluster != 0) return kInvalidValue;
  Call call{function, grid, block, shared_bytes, cluster, {}};
  for (size_t i = 0; i < entry->count; i++) {
    std::vector<Part> param((entry->sizes[i] + sizeof(Part) - 1) / sizeof(Part));
    memcpy(param.data(), params[i], entry->sizes[i]);
    call.params.push_back(std::move(param));
  }
  return queue(stream, std::move(call));
}

struct LaunchAttribute {
  int id;
  unsigned value[17];  // the first is padding
};
struct LaunchConfig {
  machine::Dim grid, block;
  unsigned shared_bytes;
  Stream *stream;
  const LaunchAttribute *attributes;
  unsigned count;
};
}  // namespace

EXPORT int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, Stream *stream, void **params, void **extra) {
  if (extra != nullptr) return kInvalidValue;
  const machine::Dim grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  return launch(function, grid, block, shared_bytes, 1, stream, params);
}
// A kernel may start early, but need not: here the one before it has always ended.
EXPORT int cuLaunchKernelEx(const LaunchConfig *config, Function *function, void **params,
                            void **extra) {
  enum { kClusterDimension = 4, kEarly = 6 };
  if (extra != nullptr) return kInvalidValue;
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->count; i++) {
    const LaunchAttribute &attribute = config->attributes[i];
    const unsigned *value = attribute.value + 1;
    if (attribute.id == kClusterDimension) {
      if (value[0] == 0 || value[1] != 1 || value[2] != 1) return kInvalidValue;
      cluster = value[0];
    } else if (attribute.id != kEarly) {
      return kInvalidValue;
    }
  }
  return launch(function, config->grid, config->block, config->shared_bytes, cluster,
                config->stream, params);
}

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t size) {
  return allocate(address, size, nullptr);
}
EXPORT int cuMemFree_v2(uint64_t address) { return address == 0 ? kSuccess : release(address); }
EXPORT int cuMemAllocFromPoolAsync(uint64_t *address, size_t size, Pool *pool) {
  return allocate(address, size, pool);
}
EXPORT int cuMemFreeAsync(uint64_t address) { return release(address); }
EXPORT int cuMemPoolCreate(Pool **pool) { return *pool = new Pool, kSuccess; }
// Its allocations may outlive it.
EXPORT int cuMemPoolDestroy(Pool *pool) {
  Lock lock(mutex);
  for (auto &[address, allocation] : allocations) {
    if (allocation.pool == pool) allocation.pool = nullptr;
  }
  delete pool;
  return kSuccess;
}
EXPORT int cuMemPoolGetAttribute(Pool *pool, int, uint64_t *value) {
  return *value = pool->held, kSuccess;
}
EXPORT int cuMemPoolTrimTo(Pool *pool, size_t keep) {
  Lock lock(mutex);
  pool->held = std::min(pool->held, std::max(pool->used, keep));
  return kSuccess;
}
EXPORT int cuMemGetInfo_v2(size_t *available, size_t *total) {
  Lock lock(mutex);
  *available = memory_size - allocated;
  *total = memory_size;
  return kSuccess;
}
EXPORT int cuMemHostAlloc(void **address, size_t size) {
  *address = aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
  return *address == nullptr ? kOutOfMemory : kSuccess;
}
EXPORT int cuMemFreeHost(void *address) { return free(address), kSuccess; }
EXPORT int cuPointerGetAttributes(unsigned count, const int *attributes, void **values,
                                  uint64_t address) {
  enum { kMemoryType = 2, kDevice = 2 };
  Lock lock(mutex);
  for (unsigned i = 0; i < count; i++) {
    if (attributes[i] != kMemoryType) return kInvalidValue;
    *static_cast<unsigned *>(values[i]) = allocation_of(address) != nullptr ? kDevice : 0;
  }
  return kSuccess;
}

namespace {
int copy(uint64_t to, uint64_t from, size_t size, Stream *stream) {
  return queue(stream, [=] {
    memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    return int(kSuccess);
  });
}
}  // namespace

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, uint64_t from, size_t size, Stream *stream) {
  return copy(to, from, size, stream);
}
EXPORT int cuMemcpyDtoHAsync_v2(uint64_t to, uint64_t from, size_t size, Stream *stream) {
  return copy(to, from, size, stream);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, Stream *stream) {
  return copy(to, from, size, stream);
}
EXPORT int cuMemcpyPeerAsync(uint64_t to, void *, uint64_t from, void *, size_t size,
                             Stream *stream) {
  return copy(to, from, size, stream);
}
EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t size, Stream *stream) {
  return queue(stream, [=] {
    memset(reinterpret_cast<void *>(to), value, size);
    return int(kSuccess);
  });
}

EXPORT int cuStreamCreate(Stream **stream, unsigned flags) {
  Lock lock(mutex);
  *stream = new Stream{(flags & 1) == 0};
  streams.insert(*stream);
  return kSuccess;
}
EXPORT int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
EXPORT int cuStreamDestroy_v2(Stream *stream) {
  Lock lock(mutex);
  streams.erase(stream);
  delete stream;
  return kSuccess;
}
EXPORT int cuStreamSynchronize(Stream *stream) {
  const bool captured = uintptr_t(stream) > 2 && stream->capture != nullptr;
  return captured || forbidden() ? kCaptureUnsupported : kSuccess;
}
EXPORT int cuStreamIsCapturing(Stream *stream, int *status) {
  Lock lock(mutex);
  if (stream == nullptr && captures > 0) return kCaptureImplicit;
  *status = uintptr_t(stream) > 2 && stream->capture != nullptr;
  return kSuccess;
}
EXPORT int cuThreadExchangeStreamCaptureMode(unsigned *mode) {
  return std::swap(*mode, capture_mode), kSuccess;
}
EXPORT int cuStreamBeginCapture_v2(Stream *stream) {
  Lock lock(mutex);
  if (uintptr_t(stream) <= 2 || stream->capture != nullptr) return kInvalidValue;
  stream->capture = new Graph;
  captures += stream->blocking;
  own_captures++;
  return kSuccess;
}
EXPORT int cuStreamEndCapture(Stream *stream, Graph **graph) {
  Lock lock(mutex);
  *graph = stream->capture;
  if (*graph == nullptr) return kInvalidValue;
  for (Stream *other : streams) {
    if (other->capture == *graph) other->capture = nullptr;
  }
  captures -= stream->blocking;
  own_captures--;
  return kSuccess;
}
EXPORT int cuGraphInstantiateWithFlags(Graph **executable, const Graph *graph) {
  return *executable = new Graph(*graph), kSuccess;
}
EXPORT int cuGraphExecDestroy(Graph *graph) { return delete graph, kSuccess; }
EXPORT int cuGraphDestroy(Graph *graph) { return delete graph, kSuccess; }
EXPORT int cuGraphLaunch(Graph *graph, Stream *stream) {
  return queue(stream, [graph] {
    for (auto &work : graph->work) {
      if (const int status = work()) return status;
    }
    return int(kSuccess);
  });
}

EXPORT int cuEventCreate(Event **event) { return *event = new Event, kSuccess; }
EXPORT int cuEventDestroy_v2(Event *event) { return delete event, kSuccess; }
EXPORT int cuEventRecord(Event *event, const Stream *stream) {
  Lock lock(mutex);
  event->time = std::chrono::steady_clock::now();
  event->capture = uintptr_t(stream) > 2 ? stream->capture : nullptr;
  return kSuccess;
}
EXPORT int cuEventSynchronize(const Event *event) {
  return event->capture != nullptr ? kCaptureUnsupported : kSuccess;
}
EXPORT int cuEventQuery(const Event *event) { return cuEventSynchronize(event); }
EXPORT int cuEventElapsedTime(float *milliseconds, const Event *start, const Event *end) {
  *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
  return kSuccess;
}
// A stream that waits for what is captured is captured with it.
EXPORT int cuStreamWaitEvent(Stream *stream, const Event *event) {
  Lock lock(mutex);
  if (uintptr_t(stream) > 2 && event->capture != nullptr) stream->capture = event->capture;
  return kSuccess;
}
// The engine of the emulator reads what is written here: see hopper/common/tma.cuh.
EXPORT int cuTensorMapEncodeTiled(machine::TensorMap *map, int type, unsigned rank, void *pointer,
                                  const uint64_t *sizes, const uint64_t *strides,
                                  const unsigned *counts, const unsigned *steps, int interleave,
                                  int swizzle) {
  enum { kBytes = 0, kSwizzle64 = 2, kSwizzle128 = 3 };
  const unsigned element = type == kBytes ? 1 : 2;
  // The engine of the emulator goes by the width of rows: those of 64 and 128 bytes are swizzled.
  const unsigned width = counts[0] * element;
  const int expected = width == 64 ? kSwizzle64 : width == 128 ? kSwizzle128 : 0;
  if (rank < 3 || rank > 5 || uintptr_t(pointer) % 16 != 0 || interleave != 0 ||
      swizzle != expected || width % 16 != 0) {
    return kInvalidValue;
  }
  *map = {};
  map->pointer = pointer;
  map->rank = rank;
  map->strides[0] = element;
  for (unsigned i = 0; i < rank; i++) {
    if (sizes[i] == 0 || sizes[i] > uint64_t(1) << 32 || counts[i] == 0 || counts[i] > 256 ||
        steps[i] != 1) {
      return kInvalidValue;
    }
    map->sizes[i] = uint32_t(sizes[i] - 1);
    map->counts[i] = uint16_t(counts[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 != 0 || strides[i - 1] >= uint64_t(1) << 40) return kInvalidValue;
    map->strides[i] = strides[i - 1];
  }
  return kSuccess;
}
