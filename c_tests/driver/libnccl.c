// libnccl for machines without a GPU: it takes every call, moves nothing, and writes down what it
// was asked. Functions that a version lacks are not found through `nccl_symbol`.
#include "nccl.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

nccl_state nccl = {.version = 22803, .size = 4, .rank = 1};

static int made_here, made_elsewhere;
void *const nccl_foreign = &made_elsewhere;

typedef struct {
  char bytes[128];
} unique_id;

enum { INVALID_ARGUMENT = 4 };

// Whether the function is told to fail; once.
static int failing(const char *name) {
  if (nccl.fails == NULL || strcmp(nccl.fails, name) != 0 || nccl.spared-- > 0) return 0;
  nccl.fails = NULL;
  return nccl.status;
}

static int known(const void *comm) { return comm == &made_here || comm == &made_elsewhere; }

static int moved(const char *name, const void *x, void *out, size_t count, int dtype, int op,
                 int peer, const void *comm, void *stream) {
  nccl_call *call = &nccl.calls[nccl.num_calls % NCCL_CALLS];
  const int status = failing(name);
  if (status != 0) return status;
  if (!known(comm)) return INVALID_ARGUMENT;
  *call = (nccl_call){name, x, out, count, dtype, op, peer, stream, nccl.depth};
  nccl.num_calls++;
  if (nccl.told != NULL) nccl.told('N', stream, NULL);
  return 0;
}

int ncclGetVersion(int *version);
int ncclGetVersion(int *version) {
  *version = nccl.version;
  return failing("ncclGetVersion");
}

const char *ncclGetErrorString(int status);
const char *ncclGetErrorString(int status) {
  return status == 1   ? "unhandled cuda error"
         : status == 2 ? "unhandled system error"
         : status == 6 ? "remote process exited or there was a network error"
                       : "invalid argument";
}

const char *ncclGetLastError(void *comm);
const char *ncclGetLastError(void *comm) {
  (void)comm;
  return "the words of the library";
}

int ncclGetUniqueId(unique_id *id);
int ncclGetUniqueId(unique_id *id) {
  memset(id->bytes, 0x5a, sizeof id->bytes);
  return failing("ncclGetUniqueId");
}

int ncclCommInitRank(void **comm, int size, unique_id id, int rank);
int ncclCommInitRank(void **comm, int size, unique_id id, int rank) {
  const int status = failing("ncclCommInitRank");
  if (status != 0) return status;
  *comm = &made_here;
  nccl.made++;
  nccl.made_size = size;
  nccl.made_rank = rank;
  memcpy(nccl.made_id, id.bytes, sizeof nccl.made_id);
  return 0;
}

// What a program may set of it, as NCCL 2.28 lays it out.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share, traffic_class;
  const char *comm_name;
  int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer, centric_sched;
} config;

int ncclCommInitRankConfig(void **comm, int size, unique_id id, int rank, config *with);
int ncclCommInitRankConfig(void **comm, int size, unique_id id, int rank, config *with) {
  const int status = failing("ncclCommInitRankConfig");
  if (status != 0) return status;
  if (with->size != sizeof *with || with->magic != 0xcafebeef || with->version != 22800 ||
      with->blocking != INT_MIN || with->centric_sched != INT_MIN || with->net_name != NULL) {
    return INVALID_ARGUMENT;
  }
  nccl.policy = with->cta_policy;
  return ncclCommInitRank(comm, size, id, rank);
}

int ncclCommDestroy(void *comm);
int ncclCommDestroy(void *comm) {
  nccl.destroyed++;
  return known(comm) ? 0 : INVALID_ARGUMENT;
}

int ncclCommAbort(void *comm);
int ncclCommAbort(void *comm) {
  nccl.aborted++;
  return known(comm) ? failing("ncclCommAbort") : INVALID_ARGUMENT;
}

int ncclCommGetAsyncError(void *comm, int *status);
int ncclCommGetAsyncError(void *comm, int *status) {
  *status = nccl.async_status;
  return known(comm) ? 0 : INVALID_ARGUMENT;
}

#define TOLD(name, value)                    \
  int name(void *comm, int *result);         \
  int name(void *comm, int *result) {        \
    *result = value;                         \
    return known(comm) ? failing(#name) : 4; \
  }
TOLD(ncclCommCount, nccl.size)
TOLD(ncclCommUserRank, nccl.rank)
TOLD(ncclCommCuDevice, nccl.device)

int ncclGroupStart(void);
int ncclGroupStart(void) {
  const int status = failing("ncclGroupStart");
  if (status != 0) return status;
  nccl.groups++;
  nccl.depth++;
  return 0;
}

int ncclGroupEnd(void);
int ncclGroupEnd(void) {
  nccl.depth--;
  return failing("ncclGroupEnd");
}

int ncclAllReduce(const void *x, void *out, size_t count, int dtype, int op, void *comm,
                  void *stream);
int ncclAllReduce(const void *x, void *out, size_t count, int dtype, int op, void *comm,
                  void *stream) {
  return moved("ncclAllReduce", x, out, count, dtype, op, -1, comm, stream);
}

int ncclReduce(const void *x, void *out, size_t count, int dtype, int op, int root, void *comm,
               void *stream);
int ncclReduce(const void *x, void *out, size_t count, int dtype, int op, int root, void *comm,
               void *stream) {
  return moved("ncclReduce", x, out, count, dtype, op, root, comm, stream);
}

int ncclBroadcast(const void *x, void *out, size_t count, int dtype, int root, void *comm,
                  void *stream);
int ncclBroadcast(const void *x, void *out, size_t count, int dtype, int root, void *comm,
                  void *stream) {
  return moved("ncclBroadcast", x, out, count, dtype, -1, root, comm, stream);
}

int ncclAllGather(const void *x, void *out, size_t count, int dtype, void *comm, void *stream);
int ncclAllGather(const void *x, void *out, size_t count, int dtype, void *comm, void *stream) {
  return moved("ncclAllGather", x, out, count, dtype, -1, -1, comm, stream);
}

int ncclAlltoAll(const void *x, void *out, size_t count, int dtype, void *comm, void *stream);
int ncclAlltoAll(const void *x, void *out, size_t count, int dtype, void *comm, void *stream) {
  return moved("ncclAlltoAll", x, out, count, dtype, -1, -1, comm, stream);
}

int ncclReduceScatter(const void *x, void *out, size_t count, int dtype, int op, void *comm,
                      void *stream);
int ncclReduceScatter(const void *x, void *out, size_t count, int dtype, int op, void *comm,
                      void *stream) {
  return moved("ncclReduceScatter", x, out, count, dtype, op, -1, comm, stream);
}

int ncclSend(const void *x, size_t count, int dtype, int to, void *comm, void *stream);
int ncclSend(const void *x, size_t count, int dtype, int to, void *comm, void *stream) {
  return moved("ncclSend", x, NULL, count, dtype, -1, to, comm, stream);
}

int ncclRecv(void *out, size_t count, int dtype, int from, void *comm, void *stream);
int ncclRecv(void *out, size_t count, int dtype, int from, void *comm, void *stream) {
  return moved("ncclRecv", NULL, out, count, dtype, -1, from, comm, stream);
}

int ncclMemAlloc(void **memory, size_t size);
int ncclMemAlloc(void **memory, size_t size) {
  const int status = failing("ncclMemAlloc");
  if (status != 0) return status;
  *memory = aligned_alloc(4096, size);
  nccl.memories++;
  return 0;
}

int ncclMemFree(void *memory);
int ncclMemFree(void *memory) {
  free(memory);
  nccl.memories--;
  return failing("ncclMemFree");
}

int ncclCommWindowRegister(void *comm, void *memory, size_t size, void **window, int flags);
int ncclCommWindowRegister(void *comm, void *memory, size_t size, void **window, int flags) {
  const int status = failing("ncclCommWindowRegister");
  if (status != 0) return status;
  if (!known(comm) || flags != 1) return INVALID_ARGUMENT;
  *window = memory;
  nccl.registered = size;
  nccl.windows++;
  return 0;
}

int ncclCommWindowDeregister(void *comm, void *window);
int ncclCommWindowDeregister(void *comm, void *window) {
  if (!known(comm) || window == NULL) return INVALID_ARGUMENT;
  nccl.windows--;
  return failing("ncclCommWindowDeregister");
}

int ncclGetPeerDevicePointer(void *window, size_t offset, int peer, void **pointer);
int ncclGetPeerDevicePointer(void *window, size_t offset, int peer, void **pointer) {
  const int status = failing("ncclGetPeerDevicePointer");
  if (status != 0) return status;
  // A rank that is elsewhere has no address here.
  *pointer = peer == nccl.unreached ? NULL : (char *)window + offset;
  return 0;
}

void *nccl_symbol(void *user, const char *name) {
  // ISO C has no conversion of a function's address to an object's.
  typedef void (*function)(void);
#define OF(name) {#name, (function)name, 0}
#define SINCE(name, version)       \
  {                                \
    #name, (function)name, version \
  }
  static const struct {
    const char *name;
    function address;
    int since;
  } symbols[] = {
      OF(ncclGetVersion),
      OF(ncclGetErrorString),
      OF(ncclGetUniqueId),
      OF(ncclCommInitRank),
      OF(ncclCommDestroy),
      OF(ncclCommCount),
      OF(ncclCommUserRank),
      OF(ncclCommCuDevice),
      OF(ncclAllReduce),
      OF(ncclReduce),
      OF(ncclBroadcast),
      OF(ncclAllGather),
      OF(ncclReduceScatter),
      OF(ncclGroupStart),
      OF(ncclGroupEnd),
      SINCE(ncclCommAbort, 2400),
      SINCE(ncclSend, 2700),
      SINCE(ncclCommGetAsyncError, 2400),
      SINCE(ncclRecv, 2700),
      SINCE(ncclGetLastError, 21300),
      SINCE(ncclMemAlloc, 21900),
      SINCE(ncclMemFree, 21900),
      SINCE(ncclCommWindowRegister, 22700),
      SINCE(ncclCommWindowDeregister, 22700),
      SINCE(ncclCommInitRankConfig, 21400),
      SINCE(ncclAlltoAll, 22800),
      SINCE(ncclGetPeerDevicePointer, 22900),
  };
  if (user != &nccl) return NULL;
  for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
    void *address = NULL;
    if (strcmp(symbols[i].name, name) != 0) continue;
    if (nccl.version < symbols[i].since) return NULL;
    memcpy(&address, &symbols[i].address, sizeof address);
    return address;
  }
  return NULL;
}
