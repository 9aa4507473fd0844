// libcuda for machines without a GPU: it takes every call, computes nothing, and counts. What a
// call of the library asks of the driver can so be told anywhere.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

driver_calls driver;

// The driver's functions are called through pointers of their true types; arguments that a body has
// no use for are left out.
#define COUNTED(name, counter) \
  int name(void);              \
  int name(void) {             \
    driver.counter++;          \
    driver.last = #name;       \
    return 0;                  \
  }
#define FREE(name) \
  int name(void);  \
  int name(void) { return 0; }
// Gives a handle, which nothing looks into.
#define MAKER(name)         \
  int name(void **result);  \
  int name(void **result) { \
    static int made;        \
    driver.others++;        \
    driver.last = #name;    \
    *result = &made;        \
    return 0;               \
  }
// Gives a number.
#define ASKED(name, type, value) \
  int name(type *result);        \
  int name(type *result) {       \
    driver.others++;             \
    driver.last = #name;         \
    *result = (type)(value);     \
    return 0;                    \
  }

void driver_step(char what, const void *stream, const void *event) {
  driver.steps[driver.num_steps++ % DRIVER_STEPS] = (driver_stage){what, stream, event};
}

static int launched(const char *name, const void *stream) {
  driver.launches++;
  driver.last = name;
  if (driver.launches == driver.failing_launch) return 719;
  driver_step('L', stream, NULL);
  return 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void *stream, void **parameters, void **extra);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   void *stream, void **parameters, void **extra) {
  (void)function, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y;
  (void)block_z, (void)shared_bytes, (void)parameters, (void)extra;
  return launched("cuLaunchKernel", stream);
}

// The beginning of a CUlaunchConfig.
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
} launch_config;

int cuLaunchKernelEx(const launch_config *config);
int cuLaunchKernelEx(const launch_config *config) {
  return launched("cuLaunchKernelEx", config->stream);
}

// Gives events that are told apart.
int cuEventCreate(void **event);
int cuEventCreate(void **event) {
  static char made[256];
  static size_t count;
  driver.others++;
  driver.last = "cuEventCreate";
  *event = &made[count++ % sizeof made];
  return 0;
}

int cuEventRecord(void *event, void *stream);
int cuEventRecord(void *event, void *stream) {
  driver.others++;
  driver.last = "cuEventRecord";
  driver_step('R', stream, event);
  return 0;
}

int cuStreamWaitEvent(void *stream, void *event);
int cuStreamWaitEvent(void *stream, void *event) {
  driver.others++;
  driver.last = "cuStreamWaitEvent";
  driver_step('W', stream, event);
  return 0;
}

// Of a thread, and of no moment to it.
FREE(cuCtxPushCurrent_v2)
FREE(cuCtxPopCurrent_v2)
FREE(cuThreadExchangeStreamCaptureMode)

int cuCtxGetCurrent(void **context);
int cuCtxGetCurrent(void **context) {
  *context = NULL;
  return 0;
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size) {
  (void)from;
  driver.copies++;
  driver.last = "cuMemcpyDtoHAsync_v2";
  if (driver.said != NULL && size == sizeof *driver.said) memcpy(to, driver.said, size);
  return 0;
}

COUNTED(cuTensorMapEncodeTiled, tensor_maps)
COUNTED(cuMemcpyHtoDAsync_v2, copies)
COUNTED(cuMemcpyDtoDAsync_v2, copies)
COUNTED(cuMemcpyPeerAsync, copies)
COUNTED(cuMemsetD8Async, copies)

MAKER(cuDevicePrimaryCtxRetain)
MAKER(cuModuleGetFunction)
MAKER(cuStreamCreate)
MAKER(cuStreamCreateWithPriority)
MAKER(cuMemPoolCreate)

ASKED(cuDriverGetVersion, int, 13000)
ASKED(cuDeviceGetCount, int, 1)
ASKED(cuDeviceGet, int, 0)
ASKED(cuFuncGetAttribute, int, 32)
ASKED(cuOccupancyMaxActiveBlocksPerMultiprocessor, int, 2)

int cuModuleLoadData(void **module);
int cuModuleLoadData(void **module) {
  static int made;
  driver.loads++;
  driver.others++;
  driver.last = "cuModuleLoadData";
  *module = &made;
  return 0;
}

int cuModuleUnload(void);
int cuModuleUnload(void) {
  driver.unloads++;
  driver.others++;
  driver.last = "cuModuleUnload";
  return 0;
}

int cuCtxSynchronize(void);
int cuCtxSynchronize(void) {
  driver.waits++;
  driver.others++;
  driver.last = "cuCtxSynchronize";
  return 0;
}

ASKED(cuEventElapsedTime, float, 0.5)

int cuStreamIsCapturing(void *stream, int *status);
int cuStreamIsCapturing(void *stream, int *status) {
  (void)stream;
  *status = 0;
  return 0;
}

int cuDeviceGetName(char *name, int size);
int cuDeviceGetName(char *name, int size) {
  strncpy(name, "a device that is none", (size_t)size);
  return 0;
}

// A Hopper of 132 multiprocessors.
int cuDeviceGetAttribute(int *value, int attribute);
int cuDeviceGetAttribute(int *value, int attribute) {
  enum {
    MULTIPROCESSORS = 16,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    SHARED_MEMORY = 97,
    POOLS = 115
  };
  *value = attribute == CAPABILITY_MAJOR  ? 9
           : attribute == MULTIPROCESSORS ? 132
           : attribute == SHARED_MEMORY   ? 227 << 10
           : attribute == POOLS           ? 1
                                          : 0;
  return 0;
}

int cuGetErrorName(int error, const char **name);
int cuGetErrorName(int error, const char **name) {
  (void)error;
  *name = "CUDA_ERROR_OF_NONE";
  return 0;
}

int cuMemGetInfo_v2(size_t *available, size_t *total);
int cuMemGetInfo_v2(size_t *available, size_t *total) {
  *available = *total = (size_t)1 << 36;
  return 0;
}

// Addresses that nothing is at.
static int allocate(uint64_t *address, size_t size) {
  static uint64_t next = (uint64_t)1 << 44;
  driver.others++;
  *address = next;
  next += (size + 511) / 512 * 512;
  return 0;
}

int cuMemAlloc_v2(uint64_t *address, size_t size);
int cuMemAlloc_v2(uint64_t *address, size_t size) { return allocate(address, size); }
int cuMemAllocFromPoolAsync(uint64_t *address, size_t size);
int cuMemAllocFromPoolAsync(uint64_t *address, size_t size) { return allocate(address, size); }

// The host writes there.
int cuMemHostAlloc(void **address, size_t size);
int cuMemHostAlloc(void **address, size_t size) {
  driver.others++;
  *address = calloc(1, size);
  return *address == NULL ? 2 : 0;
}
int cuMemFreeHost(void *address);
int cuMemFreeHost(void *address) {
  driver.others++;
  free(address);
  return 0;
}

COUNTED(cuDevicePrimaryCtxRelease_v2, others)
COUNTED(cuDeviceCanAccessPeer, others)
COUNTED(cuCtxEnablePeerAccess, others)
COUNTED(cuFuncSetAttribute, others)
COUNTED(cuMemFree_v2, others)
COUNTED(cuMemPoolDestroy, others)
COUNTED(cuMemPoolTrimTo, others)
COUNTED(cuMemPoolGetAttribute, others)
COUNTED(cuMemPoolSetAttribute, others)
COUNTED(cuMemPoolSetAccess, others)
COUNTED(cuMemFreeAsync, others)
COUNTED(cuPointerGetAttributes, others)
COUNTED(cuStreamDestroy_v2, others)
COUNTED(cuStreamSynchronize, others)
COUNTED(cuEventDestroy_v2, others)
COUNTED(cuEventSynchronize, others)
COUNTED(cuEventQuery, others)
COUNTED(cuInit, others)
COUNTED(cuFuncLoad, others)
