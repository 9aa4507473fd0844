// An NCCL between emulated GPUs: ranks are threads of one process, which meet in every call. The
// last one to come does the work of all, since what a stream was given before has run when a call
// is made.
//
// Sums are in f32, in the order of ranks, and rounded once. Sends and receipts are not there.
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum { kSuccess = 0, kInvalidArgument = 4 };
enum Type { kInt8 = 0, kInt32 = 2, kInt64 = 4, kF16 = 6, kF32 = 7, kBf16 = 9 };
enum Op { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

size_t size_of(int type) {
  switch (type) {
    case kInt8:
      return 1;
    case kF16:
    case kBf16:
      return 2;
    case kInt64:
      return 8;
    default:
      return 4;
  }
}

float load(int type, const char *at) {
  if (type == kF32) return *reinterpret_cast<const float *>(at);
  if (type == kF16) return static_cast<float>(*reinterpret_cast<const _Float16 *>(at));
  const uint32_t bits = uint32_t(*reinterpret_cast<const uint16_t *>(at)) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void store(int type, float value, char *at) {
  if (type == kF32) {
    *reinterpret_cast<float *>(at) = value;
  } else if (type == kF16) {
    *reinterpret_cast<_Float16 *>(at) = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const bool nan = value != value;
    *reinterpret_cast<uint16_t *>(at) =
        static_cast<uint16_t>(nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

struct Call {
  std::string name;
  const char *x;
  char *out;
  size_t count;
  int type, op, root;
};

struct Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0, joined = 0, arrived = 0;
  uint64_t turn = 0;
  int status = kSuccess;
  std::vector<Call> calls;
};

// What a rank gets for memory that it registers: where each rank has its memory of that call.
struct Window {
  std::vector<char *> memory;
};

struct Rank {
  std::shared_ptr<Meeting> meeting;
  int rank;
};

std::mutex all_mutex;
std::map<std::string, std::weak_ptr<Meeting>> all;
uint64_t next_id = 1;

// Elements of every rank's `x` from `first` on, reduced.
void reduce(const std::vector<Call> &calls, size_t first, size_t count, std::vector<char> *to) {
  const Call &call = calls[0];
  const size_t size = size_of(call.type);
  to->resize(count * size);
  for (size_t i = 0; i < count; i++) {
    float sum = 0;
    for (size_t rank = 0; rank < calls.size(); rank++) {
      const float next = load(call.type, calls[rank].x + (first + i) * size);
      if (rank == 0)
        sum = next;
      else if (call.op == kMax)
        sum = next > sum ? next : sum;
      else if (call.op == kMin)
        sum = next < sum ? next : sum;
      else if (call.op == kProd)
        sum *= next;
      else
        sum += next;
    }
    if (call.op == kAvg) sum /= static_cast<float>(calls.size());
    store(call.type, sum, to->data() + i * size);
  }
}

int run(const std::vector<Call> &calls) {
  const Call &first = calls[0];
  for (const Call &call : calls) {
    if (call.name != first.name || call.count != first.count || call.type != first.type ||
        call.op != first.op || call.root != first.root) {
      return kInvalidArgument;
    }
  }
  const size_t bytes = first.count * size_of(first.type), ranks = calls.size();
  const bool floats = first.type == kF16 || first.type == kF32 || first.type == kBf16;
  std::vector<char> result;
  if (first.name == "gather") {
    for (const Call &call : calls) result.insert(result.end(), call.x, call.x + bytes);
    for (const Call &call : calls) memcpy(call.out, result.data(), result.size());
  } else if (first.name == "exchange") {
    std::vector<std::vector<char>> parts(ranks);
    for (size_t to = 0; to < ranks; to++) {
      for (const Call &call : calls) {
        parts[to].insert(parts[to].end(), call.x + to * bytes, call.x + (to + 1) * bytes);
      }
    }
    for (size_t to = 0; to < ranks; to++) memcpy(calls[to].out, parts[to].data(), ranks * bytes);
  } else if (first.name == "broadcast") {
    const char *x = calls[static_cast<size_t>(first.root)].x;
    result.assign(x, x + bytes);
    for (const Call &call : calls) memcpy(call.out, result.data(), bytes);
  } else if (first.name == "window") {
    for (const Call &call : calls) {
      auto *const window = new Window;
      for (const Call &other : calls) window->memory.push_back(const_cast<char *>(other.x));
      *reinterpret_cast<Window **>(call.out) = window;
    }
  } else if (!floats) {
    return kInvalidArgument;
  } else if (first.name == "scatter") {
    reduce(calls, 0, first.count * ranks, &result);
    for (size_t i = 0; i < ranks; i++) memcpy(calls[i].out, result.data() + i * bytes, bytes);
  } else {
    reduce(calls, 0, first.count, &result);
    for (size_t i = 0; i < ranks; i++) {
      const bool gets = first.root < 0 || i == static_cast<size_t>(first.root);
      if (gets) memcpy(calls[i].out, result.data(), bytes);
    }
  }
  return kSuccess;
}

int meet(void *comm, Call call) {
  Rank *own = static_cast<Rank *>(comm);
  Meeting &meeting = *own->meeting;
  std::unique_lock<std::mutex> lock(meeting.mutex);
  const uint64_t turn = meeting.turn;
  meeting.calls[static_cast<size_t>(own->rank)] = std::move(call);
  if (++meeting.arrived == meeting.size) {
    meeting.status = run(meeting.calls);
    meeting.arrived = 0;
    meeting.turn++;
    meeting.changed.notify_all();
  } else {
    meeting.changed.wait(lock, [&] { return meeting.turn != turn; });
  }
  return meeting.status;
}

Call call(const char *name, const void *x, void *out, size_t count, int type, int op, int root) {
  return {name, static_cast<const char *>(x), static_cast<char *>(out), count, type, op, root};
}

}  // namespace

struct Id {
  char bytes[128];
};

EXPORT int ncclGetVersion(int *version) { return *version = 22903, kSuccess; }
EXPORT const char *ncclGetErrorString(int) { return "ranks of the emulator call what differs"; }
EXPORT int ncclGroupStart() { return kSuccess; }
EXPORT int ncclGroupEnd() { return kSuccess; }

EXPORT int ncclGetUniqueId(Id *id) {
  const std::lock_guard<std::mutex> lock(all_mutex);
  memset(id->bytes, 0, sizeof id->bytes);
  memcpy(id->bytes, &next_id, sizeof next_id);
  next_id++;
  return kSuccess;
}

EXPORT int ncclCommInitRank(void **comm, int size, Id id, int rank) {
  std::shared_ptr<Meeting> meeting;
  {
    const std::lock_guard<std::mutex> lock(all_mutex);
    std::weak_ptr<Meeting> &known = all[std::string(id.bytes, sizeof id.bytes)];
    meeting = known.lock();
    if (!meeting) known = meeting = std::make_shared<Meeting>();
  }
  std::unique_lock<std::mutex> lock(meeting->mutex);
  meeting->size = size;
  meeting->calls.resize(static_cast<size_t>(size));
  meeting->joined++;
  meeting->changed.notify_all();
  meeting->changed.wait(lock, [&] { return meeting->joined == size; });
  *comm = new Rank{meeting, rank};
  return kSuccess;
}

EXPORT int ncclCommDestroy(void *comm) {
  delete static_cast<Rank *>(comm);
  return kSuccess;
}

EXPORT int ncclCommCount(void *comm, int *count) {
  return *count = static_cast<Rank *>(comm)->meeting->size, kSuccess;
}

EXPORT int ncclCommUserRank(void *comm, int *rank) {
  return *rank = static_cast<Rank *>(comm)->rank, kSuccess;
}

EXPORT int ncclCommCuDevice(void *, int *device) { return *device = 0, kSuccess; }

EXPORT int ncclAllReduce(const void *x, void *out, size_t count, int type, int op, void *comm,
                         void *) {
  return meet(comm, call("reduce", x, out, count, type, op, -1));
}

EXPORT int ncclReduce(const void *x, void *out, size_t count, int type, int op, int root,
                      void *comm, void *) {
  return meet(comm, call("reduce", x, out, count, type, op, root));
}

EXPORT int ncclBroadcast(const void *x, void *out, size_t count, int type, int root, void *comm,
                         void *) {
  return meet(comm, call("broadcast", x, out, count, type, kSum, root));
}

EXPORT int ncclAllGather(const void *x, void *out, size_t count, int type, void *comm, void *) {
  return meet(comm, call("gather", x, out, count, type, kSum, -1));
}

EXPORT int ncclAlltoAll(const void *x, void *out, size_t count, int type, void *comm, void *) {
  return meet(comm, call("exchange", x, out, count, type, kSum, -1));
}

EXPORT int ncclReduceScatter(const void *x, void *out, size_t count, int type, int op, void *comm,
                             void *) {
  return meet(comm, call("scatter", x, out, count, type, op, -1));
}

EXPORT int ncclMemAlloc(void **memory, size_t size) {
  return *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096), kSuccess;
}

EXPORT int ncclMemFree(void *memory) { return free(memory), kSuccess; }

EXPORT int ncclCommWindowRegister(void *comm, void *memory, size_t size, void **window, int) {
  return meet(comm, call("window", memory, window, size, kInt8, kSum, -1));
}

EXPORT int ncclCommWindowDeregister(void *, void *window) {
  return delete static_cast<Window *>(window), kSuccess;
}

EXPORT int ncclGetPeerDevicePointer(void *window, size_t offset, int peer, void **pointer) {
  return *pointer = static_cast<Window *>(window)->memory[size_t(peer)] + offset, kSuccess;
}
